"""The stability benchmark's own arithmetic; no server and no training here.

Properties:
- rounding by rows, noise and raw advantages give the numbers of their docstrings; noise depends on
  name and seed only, and every method of a seed gets the same;
- a level leaves the trainer's tensors alone and really changes the sampler's;
- a stale sampler is sent a policy only when its interval says so;
- TRL's TIS and MIS, as configured, are the weights that centering composes with;
- statistics and tables give hand-made results; missing seeds, cells and falls do not break them;
- a run is repeated neither after a restart nor under other settings; seeds are interleaved.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("shared", "stability", "stability_report", "stability_trainer", "countdown")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a benchmark's module as it finds itself when it is run."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def rows(solved: list[float], **values: Any) -> list[dict[str, str]]:
    """Rows of one run as a CSV would give them."""
    base = {"experiment": "e", "level": "l", "method": "sc", "seed": "0", "prompts": "4"}
    return [
        {
            **base,
            **values,
            "step": str(step),
            "solved": str(value),
            "logprob_diff": "0.1",
            "own_solved": "0.5" if step == len(solved) else "",
        }
        for step, value in enumerate(solved, start=1)
    ]


def test_help() -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "stability.py"), "--help"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert all(option in run.stdout for option in ("--experiment", "--seeds", "--plot-only"))


def test_rounded(load: Any) -> None:
    rounded = load("stability_trainer").rounded
    row = torch.tensor([[1.27, 0.004], [0.0, 0.0]])
    torch.testing.assert_close(rounded(row, 8), torch.tensor([[1.27, 0.0], [0.0, 0.0]]))
    vector = torch.tensor([0.123, 0.4567])
    assert rounded(vector, 8) is vector and rounded(row, 0) is row
    matrix = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    for bits in (8, 4):
        top = 2 ** (bits - 1) - 1
        step = matrix.abs().amax(-1, keepdim=True) / top
        found = rounded(matrix, bits)
        assert ((found - matrix).abs() <= step / 2 * 1.001).all()
        levels = found / step
        torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)
        torch.testing.assert_close(rounded(found, bits), found)


def test_noise(load: Any) -> None:
    noise = load("stability_trainer").noise
    shape = torch.Size([200, 100])
    found = noise("a", shape, 0.03, 0)
    assert torch.equal(found, noise("a", shape, 0.03, 0))
    assert not torch.equal(found, noise("b", shape, 0.03, 0))
    assert not torch.equal(found, noise("a", shape, 0.03, 1))
    assert found.std().item() == pytest.approx(0.03, rel=0.02)
    assert abs(found.mean().item()) < 0.001


def test_raw_advantages(load: Any) -> None:
    raw = load("stability_trainer").raw_advantages
    solved = torch.tensor([1.0, 0.0])
    assert raw(solved, "raw01").tolist() == [1.0, 0.0]
    assert raw(solved, "raw11").tolist() == [1.0, -1.0]
    with pytest.raises(KeyError):
        raw(solved, "centred")


def test_levels_change_the_sampler_only(load: Any) -> None:
    trainer, levels = load("stability_trainer"), load("stability").EXPERIMENTS
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    before = weight.detach().clone()
    for level in [level for found in levels.values() for level in found.values()]:
        sent = trainer.sampler_policy(level, seed=0)("w", weight)
        differs = bool(level.sigma or level.bits)
        assert torch.equal(weight, before) and torch.equal(sent, before) != differs
        assert sent.data_ptr() != weight.data_ptr() and not sent.requires_grad


def test_noise_is_fixed_while_the_policy_learns(load: Any) -> None:
    trainer = load("stability_trainer")
    policy = trainer.sampler_policy(trainer.Level(sigma=0.1), seed=3)
    first, second = torch.zeros(4, 4), torch.ones(4, 4)
    torch.testing.assert_close(policy("w", second) - second, policy("w", first) - first)


@pytest.mark.parametrize(("interval", "sent"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (0, [0])])
def test_interval(
    load: Any, monkeypatch: pytest.MonkeyPatch, interval: int, sent: list[int]
) -> None:
    trainer = load("stability_trainer")
    found: list[int] = []

    def push(self: Any, tensors: Any, kv: str = "keep") -> int:
        found.append(int(dict(tensors)["w"][0]))
        return found[-1]

    monkeypatch.setattr(trainer.WeightSync, "__init__", lambda self, client: None)
    monkeypatch.setattr(trainer.WeightSync, "push", push)
    sampler = trainer.Sampler(None, trainer.Level(interval=interval), seed=0)
    for step in range(5):
        sampler.push([("w", torch.tensor([float(step)]))])
    assert found == sent
    sampler.push_clean([("w", torch.tensor([99.0]))])
    sampler.restore()
    assert found[len(sent) :] == ([99] if interval == 1 else [99, sent[-1]])


def test_methods_weigh_alike(load: Any) -> None:
    trainer = load("stability_trainer")
    made = {
        name: trainer.configuration(
            trainer.Run("e", "l", name, 0), "http://127.0.0.1:1", 10, 4, Path("unused")
        )
        for name in trainer.METHODS
    }
    tis, mis, plain, grpo = made["tis"], made["mis"], made["plain"], made["grpo"]
    cap, band = made["sc_tis"].weight(), made["sc_mis"].weight()
    assert tis.vllm_importance_sampling_mode == "token_truncate"
    assert tis.vllm_importance_sampling_clip_min is None
    assert tis.vllm_importance_sampling_clip_max == cap.cap == 2.0
    assert mis.vllm_importance_sampling_mode == "token_mask"
    assert mis.vllm_importance_sampling_clip_min == band.low == 0.5
    assert mis.vllm_importance_sampling_clip_max == band.high == 5.0
    assert not plain.vllm_importance_sampling_correction and not plain.score_centering
    assert grpo.vllm_importance_sampling_correction and grpo.scale_rewards == "group"
    assert {config.scale_rewards for name, config in made.items() if name != "grpo"} == {"none"}
    ratio = torch.tensor([0.4, 0.5, 1.0, 2.0, 3.0, 5.0, 6.0]).double()
    torch.testing.assert_close(cap.sample_weight(ratio.log()), ratio.clamp(max=2.0))
    inside = (ratio >= 0.5) & (ratio <= 5.0)
    torch.testing.assert_close(
        made["sc_mis"].weight().sample_weight(ratio.log()), ratio.where(inside, 0.0)
    )


def test_rows_of(load: Any) -> None:
    trainer = load("stability_trainer")
    history = [
        {"reward": 0.25, "grad_norm": 1.0, "parity/ess": 0.123456, "step": 1},
        {"reward": 0.5, "step": 2},
        {"train_runtime": 1.0, "step": 2},
    ]
    found = trainer.rows_of(trainer.Run("e", "l", "sc", 7), history, {2: 0.75})
    assert [row["step"] for row in found] == [1, 2]
    assert found[0]["ess"] == "0.1235" and found[1]["ess"] == "" and found[0]["seed"] == 7
    assert [row["own_solved"] for row in found] == ["", 0.75]


def test_smoothed(load: Any) -> None:
    assert load("stability_report").smoothed([0, 1, 2, 6], 2) == [0, 0.5, 1.5, 4]


def test_fell_at(load: Any) -> None:
    fell_at = load("stability_report").fell_at
    assert fell_at([1, 1, 1, 0, 0], 1, 2) == 5
    assert fell_at([1, 1, 1, 0, 1], 1, 2) is None  # one bad step is not a fall
    assert fell_at([1.0] * 3, 5, 10) is None
    assert fell_at([0.0] * 20, 5, 10) is None


def test_spread(load: Any) -> None:
    report = load("stability_report")
    assert report.spread([0.4, 0.6]) == "0.50 (0.40..0.60)"
    assert report.spread([math.nan]) == "" and math.isnan(report.mean([]))
    assert report.falls([None, None]) == "none"
    assert report.falls([30, None, 14]) == "2 of 3: step 14, 30"


def test_table(load: Any) -> None:
    report = load("stability_report")
    good, bad = [0.5] * 20, [0.5] * 10 + [0.0] * 10
    made = [*rows(good), *rows(bad, seed="1"), *rows(good, method="plain")]
    lines = report.table(made, ["l", "other"], ["plain", "sc", "mis"])
    assert [line[:3] for line in lines] == [["l", "plain", "1"], ["l", "SC", "2"]]
    assert lines[1][3:7] == ["0.50", "0.25 (0.00..0.50)", "1 of 2: step 16", "0.50 (0.50..0.50)"]
    assert all(len(line) == len(report.HEADER) for line in lines)


def test_head_mass(load: Any) -> None:
    masses = load("stability_report").masses
    assert masses([[0.5, 1.0], [math.nan, 0.75]]) == "0.7500, 0.5000"
    assert masses([[math.nan]]) == ""


def test_apart(load: Any) -> None:
    report = load("stability_report")
    results = {"plain": [1.0, 2.0], "sc": [3.0, 4.0], "tis": [2.0, 5.0], "mis": [0.0, 0.5]}
    assert report.apart(results) == (["sc"], ["mis"])
    made = [*rows([0.5] * 20), *rows([0.1] * 20, method="plain")]
    assert report.differences(made, ["l", "absent"], ["plain", "sc"]) == (
        "- l: under the sampler: above: SC | own policy: none"
    )


def test_runs_are_not_repeated(load: Any, tmp_path: Path) -> None:
    stability, report = load("stability"), load("stability_report")
    runs = list(stability.plan(["noise"], [], ["plain", "sc"], 2))
    assert [run.seed for run in runs] == [0] * (len(runs) // 2) + [1] * (len(runs) // 2)
    assert stability.missing(runs, tmp_path, 20, 4) == runs
    first = vars(runs[0])
    report.append(tmp_path, "noise", rows([0.5] * 20, **first))
    report.append(tmp_path, "noise", rows([0.5] * 20, **vars(runs[3])))
    assert stability.missing(runs, tmp_path, 20, 4) == [*runs[1:3], *runs[4:]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stability_noise.csv"]
    for steps, prompts in ((21, 4), (20, 8)):
        with pytest.raises(SystemExit, match="other settings"):
            stability.missing(runs, tmp_path, steps, prompts)


def test_plot(load: Any, tmp_path: Path) -> None:
    report = load("stability_report")
    made = [*rows([0.5] * 20), *rows([0.4] * 20, seed="1"), *rows([0.1] * 20, method="plain")]
    path = report.plot(made, ["l", "absent"], ["plain", "sc"], tmp_path, "noise")
    assert path.stat().st_size > 1000
