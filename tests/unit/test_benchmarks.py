"""The benchmarks' own arithmetic and checks; what they measure is not tested here.

Properties:
- every benchmark explains its options;
- statistics give the numbers of their docstrings; a spike does not make memory look unsteady, a
  leak does;
- the soak's check finds a lost token, another finish reason, a version that falls, and one that
  was not served;
- the soak's cycle of updates covers every kind and transport, and keeps partial updates few;
- the default model of `weight_update.py` has the size that it says.
"""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest, Sampling
from vllm_parity_plugin.weights.stack import CHECKPOINT, MAX_LAYERS, Layer, extend

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a benchmark as it finds itself when it is run."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for name in ("prefix_caching", "shared", "soak", "stock_engine", "weight_update"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("weight_update.py", ["--gb", "--rounds", "--transport", "--rollback"]),
        ("token_logprobs.py", ["--device", "--rounds", "--quick", "--write"]),
        ("step_overhead.py", ["--rounds", "--head-size", "--tokens", "--write"]),
        ("soak.py", ["--minutes", "--interval"]),
        ("prefix_caching.py", ["--rounds", "--prompts", "--completion", "--write"]),
    ],
)
def test_help(script: str, options: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert all(option in run.stdout for option in options)


def test_replace_table(load: Any, tmp_path: Path) -> None:
    """A table that would land nowhere is an error, and leaves the page alone."""
    shared, page = load("shared"), tmp_path / "page.md"
    page.write_text("a\n<!-- noise: begin -->\nold\n<!-- noise: end -->\nb\n")
    shared.replace_table(page, "noise", "new")
    made = "a\n<!-- noise: begin -->\n\nnew\n\n<!-- noise: end -->\nb\n"
    assert page.read_text() == made
    with pytest.raises(ValueError, match="int8: begin"):
        shared.replace_table(page, "int8", "new")
    assert page.read_text() == made


def test_rotated(load: Any) -> None:
    shared = load("shared")
    assert shared.rotated(["a", "b", "c"], 1) == ["b", "c", "a"]
    first = [shared.rotated(["a", "b", "c"], turn)[0] for turn in range(6)]
    assert first == ["a", "b", "c"] * 2
    assert shared.rotated([], 3) == []


def test_medians(load: Any) -> None:
    rows = [{"a": 1.0, "b": ""}, {"a": 3.0, "b": 5.0}, {"a": 100.0}]
    assert load("shared").medians(rows, ["a", "b", "c"]) == {"a": 3.0, "b": 5.0}


def test_prefix_caching_ratios_are_taken_within_a_round(load: Any) -> None:
    """The docstring's numbers; the cached share is that of the server that caches."""
    rows = [
        {"completion": 16, "server": name, "seconds": seconds, "cached": cached, "prompt": 200}
        for name, seconds, cached in (
            ("off", 4.0, 0),
            ("versioned", 3.0, 128),
            ("off", 4.0, 0),
            ("versioned", 5.0, 112),
        )
    ]
    expected = ("16 tokens", "4.00", "4.00", "1.00", "0.75 to 1.25", "60%")
    assert load("prefix_caching").summary(rows) == [expected]


def test_fresh_prompts(load: Any) -> None:
    """Both servers get the same ones, and no two share their first block."""
    fresh = load("prefix_caching").fresh
    assert fresh(1, 3, 200) == fresh(1, 3, 200)
    firsts = {tuple(prompt[:128]) for seed in (0, 1) for prompt in fresh(seed, 3, 200)}
    assert len(firsts) == 6


def test_slope(load: Any) -> None:
    slope = load("shared").slope
    assert slope([0, 1, 2], [1, 3, 5]) == pytest.approx(2.0)
    assert slope([1], [5]) == slope([2, 2], [1, 9]) == 0.0


def test_flatness(load: Any) -> None:
    flatness = load("shared").flatness
    rising = [1000.0 + index for index in range(100)]
    assert flatness(rising) == pytest.approx(1094.5 / 1004.5 - 1)
    spike = [1000.0] * 100
    spike[50:54] = [5000.0] * 4
    assert flatness(spike) == 0.0
    assert flatness([1000.0]) == flatness([]) == 0.0


def test_csv_and_markdown(load: Any, tmp_path: Path) -> None:
    shared = load("shared")
    path = shared.write_csv(tmp_path / "new" / "rows.csv", [{"a": 1}, {"a": 2, "b": 3}])
    with open(path) as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "3"}]
    assert shared.markdown(["x", "y"], [["1", "2"]]) == "| x | y |\n| --- | --- |\n| 1 | 2 |"


REQUEST = RolloutRequest(prompts=[[3], [4]], sampling=Sampling(max_tokens=3, ignore_eos=True))


def answer(**changed: Any) -> Rollout:
    """Two sequences of three tokens; an update to policy 5 crossed the second one."""
    good = Rollout(
        token_ids=np.arange(6, dtype=np.int32),
        logprobs=np.zeros(6, dtype=np.float32),
        head_ids=np.zeros((6, 0), dtype=np.int32),
        head_logprobs=np.zeros((6, 0), dtype=np.float32),
        sequence_offsets=np.array([0, 3, 6]),
        policy_versions=np.array([4, 4, 4, 4, 5, 5], dtype=np.int32),
        cached_tokens=np.zeros(2, dtype=np.int32),
        finish_reasons=["length", "length"],
        stop_reasons=[None, None],
        sampling=REQUEST.sampling,
    )
    return replace(good, **changed)


@pytest.mark.parametrize(
    ("changed", "served", "word"),
    [
        ({}, {4, 5}, None),
        ({"sequence_offsets": np.array([0, 2, 6])}, {4, 5}, "asked"),
        ({"sequence_offsets": np.array([0, 6])}, {4, 5}, "asked"),
        ({"finish_reasons": ["length", "stop"]}, {4, 5}, "reasons"),
        ({"finish_reasons": ["abort", "length"]}, {4, 5}, "reasons"),
        ({"policy_versions": np.array([4, 4, 4, 5, 4, 5])}, {4, 5}, "fall"),
        ({}, {5}, "[4] were not served"),
    ],
)
def test_check_rollout(
    load: Any, changed: dict[str, Any], served: set[int], word: str | None
) -> None:
    problems = load("soak").check_rollout(answer(**changed), REQUEST, served)
    assert (not problems) if word is None else any(word in problem for problem in problems)


def test_crossings(load: Any) -> None:
    soak = load("soak")
    assert soak.crossings(answer()) == 1
    assert soak.crossings(answer(policy_versions=np.full(6, 4))) == 0


def test_the_cycle_is_complete_and_bounded(load: Any) -> None:
    soak = load("soak")
    applied = {(kind, way) for kind, way in soak.CYCLE if kind not in soak.REFUSED}
    assert applied == {(k, w) for k in ("full", "changed", "lora") for w in ("file", "http")}
    assert soak.REFUSED.keys() <= {kind for kind, _ in soak.CYCLE}
    stack, longest = CHECKPOINT, 0
    for version, (kind, _) in enumerate(soak.CYCLE * 3, start=1):
        if kind not in soak.REFUSED:
            stack = extend(stack, Layer(version=version, kind=kind, file=f"{version}"))
            longest = max(longest, len(stack))
    # With the new file of the next update, and one more of a refused one.
    assert longest <= MAX_LAYERS and longest + 2 <= soak.FILES


def test_default_size(load: Any) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(load("shared").sized(0.94))
    assert sum(p.numel() for p in model.parameters()) * 2 == pytest.approx(0.952e9, rel=0.001)


def test_resident_memory_of_this_process(load: Any) -> None:
    import os

    found = load("soak").resident(os.getpid())
    assert found["rss_mb"] > 10
    assert found["rss_mb"] == pytest.approx(sum(v for k, v in found.items() if k != "rss_mb"), 0.01)
