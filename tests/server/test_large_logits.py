"""fp32 heads where they matter: a model whose logits sit near +40, so that bf16 rounds to 0.25.

Properties:
- with an fp32 head on both sides, trainer and server agree as well as bf16 bodies can;
- a bf16 head on either side, or on both, does not (controls).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import DATA
from tests.offline import IN_PROCESS, run_jobs
from tests.reference import Head, reference

PROMPTS = json.loads((DATA / "v0_reference.json").read_text())["prompts"]
TEMPERATURE = 0.7
AGREES, DIFFERS = 0.013, 0.018
OBSERVE = {"parity": {"mode": "observe"}}


@pytest.fixture(scope="module")
def rollouts(
    large_logits_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Head, list[dict[str, Any]]]:
    """24 tokens of every prompt from engines with an fp32 head (the plugin's) and a bf16 head."""
    sampling = {"temperature": TEMPERATURE, "max_tokens": 24, "seed": 0, "ignore_eos": True}
    step = {"op": "generate", "prompts": PROMPTS, "sampling": sampling}
    args = {"model": str(large_logits_path), "max_model_len": 256}
    stock = {"logprobs_mode": "processed_logprobs", "additional_config": OBSERVE}
    jobs = [
        {"kind": "llm", "args": args, "steps": [step], "env": IN_PROCESS},
        {"kind": "llm", "args": args | stock, "steps": [step], "env": IN_PROCESS},
    ]
    results = run_jobs(jobs, tmp_path_factory.mktemp("large"))
    for result in results:
        assert result["error"] is None, result["error"]
    return {"float32": results[0]["steps"][0], "bfloat16": results[1]["steps"][0]}


def mismatch(found: list[dict[str, Any]], path: Path, head: Head) -> np.ndarray:
    """|server - trainer| of every sampled token."""
    completions = [completion["token_ids"] for completion in found]
    sampled = np.concatenate([completion["logprobs"] for completion in found])
    expected = reference(path, PROMPTS, completions, temperature=TEMPERATURE, head=head)
    return np.abs(sampled - expected)


def test_both_heads_fp32(rollouts: dict[Head, Any], large_logits_path: Path) -> None:
    """H3, large logits: two fp32 heads leave only what bf16 bodies cause."""
    found = mismatch(rollouts["float32"], large_logits_path, "float32")
    print(f"MEASURED large server fp32 trainer fp32 {found.mean():.4f} max {found.max():.4f}")
    assert found.mean() <= AGREES


@pytest.mark.parametrize(
    ("server", "trainer"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_a_bf16_head_on_either_side(
    rollouts: dict[Head, Any], large_logits_path: Path, server: Head, trainer: Head
) -> None:
    """H3 controls: an fp32 head on one side only buys little, and none buys nothing."""
    found = mismatch(rollouts[server], large_logits_path, trainer)
    print(f"MEASURED large server {server} trainer {trainer} {found.mean():.4f} {found.max():.4f}")
    assert found.mean() > DIFFERS
