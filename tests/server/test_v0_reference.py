"""Logprobs of a V1 server against those that a real V0 engine (vLLM 0.8.5) returned.

Properties:
- with the plugin and no other flag, every sampling setting agrees with V0;
- without it (control), every setting that V1 takes logprobs before does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.client import Client, top_logprobs
from tests.models import DATA
from vllm_parity_plugin.serving import Server

REFERENCE = json.loads((DATA / "v0_reference.json").read_text())
# Presence and frequency penalties count output tokens only, so a prefix cannot ask for them.
SETTINGS = [name for name in REFERENCE["cases"] if name != "t1_pres05_freq03"]
AGREES, DIFFERS = 0.008, 0.025
HEAD = 128
# Given in full, so that nothing but the logprobs' meaning differs between the two servers.
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
}

Lookup = Callable[[list[list[int]], dict[str, Any]], list[dict[int, float]]]


def steps(setting: str) -> Iterator[tuple[list[int], int, float]]:
    """(prefix, sampled token, its V0 logprob) of every step that V0 took."""
    case = REFERENCE["cases"][setting]
    for prompt, completion in zip(REFERENCE["prompts"], case["completions"], strict=True):
        ids = completion["token_ids"]
        for position, logprob in enumerate(completion["logprobs"]):
            yield [*prompt, *ids[:position]], ids[position], logprob


def differences(setting: str, lookup: Lookup) -> np.ndarray:
    """|V1 - V0| of the tokens that V0 sampled, [160]."""
    prefixes, tokens, expected = zip(*steps(setting), strict=True)
    sampling = NEUTRAL | REFERENCE["cases"][setting]["sampling_params"]
    heads = lookup(list(prefixes), sampling)
    found = [head[token] for head, token in zip(heads, tokens, strict=True)]
    assert len(found) == 160
    return np.abs(np.array(found) - np.array(expected))


def rollout_heads(server: Server) -> Lookup:
    client = Client(server)

    def lookup(prefixes: list[list[int]], sampling: dict[str, Any]) -> list[dict[int, float]]:
        rollout = client.rollout(prefixes, head_size=HEAD, max_tokens=1, **sampling)
        return [
            dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
            for ids, logprobs in zip(rollout.head_ids, rollout.head_logprobs, strict=True)
        ]

    return lookup


def completion_heads(server: Server) -> Lookup:
    client = Client(server)

    def lookup(prefixes: list[list[int]], sampling: dict[str, Any]) -> list[dict[int, float]]:
        choices = client.completions(prefixes, logprobs=HEAD, max_tokens=1, **sampling)
        return [top_logprobs(choice)[0] for choice in choices]

    return lookup


@pytest.mark.parametrize("setting", SETTINGS)
def test_agrees_with_v0(server: Server, setting: str) -> None:
    """V0: with the plugin the mean difference is what is left of bf16 kernels."""
    found = differences(setting, rollout_heads(server))
    print(f"MEASURED {setting} plugin {found.mean():.4f} max {found.max():.4f}")
    assert found.mean() <= AGREES


@pytest.mark.parametrize("setting", ["t07", "t13", "t07_top_p09", "t1_rep12", "t1_bias"])
def test_stock_logprobs_differ_from_v0(stock_server: Server, setting: str) -> None:
    """V0 control: stock V1 takes logprobs before temperature, filters, penalties and bias."""
    found = differences(setting, completion_heads(stock_server))
    print(f"MEASURED {setting} stock {found.mean():.4f} max {found.max():.4f}")
    assert found.mean() > DIFFERS
