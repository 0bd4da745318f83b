"""The table of rules, without an engine.

Properties:
- every rule turns vLLM's default and the opposite into the wanted value, and leaves that alone;
- a contradiction is explicit and different; strict names all of them and nothing else;
- reports appear exactly for what changes a logprob's meaning;
- a quantised lm_head is recognised in every spelling, an excluded one is not.
"""

from __future__ import annotations

from typing import Any

import pytest

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rules import (
    RULES,
    decide,
    quantized_head,
    refuse_contradictions,
    refuse_unsafe,
    report_unsafe,
    rules_for,
)
from vllm_parity_plugin.settings import ParitySettings

SETTINGS = ParitySettings()
RULE = {rule.setting: rule for rule in RULES}
# setting -> (vLLM's default, the opposite, the wanted value)
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "logprobs_mode": ("raw_logprobs", "raw_logits", "processed_logprobs"),
    "head_dtype": (None, "model", "float32"),
    "enable_prefix_caching": (None, True, False),
    "async_scheduling": (None, True, False),
    "generation_config": ("auto", "/some/directory", "vllm"),
    "max_logprobs": (20, 5, 128),
    "disable_cascade_attn": (False, False, True),
}


def test_the_table_is_complete() -> None:
    """Every rule is tested here, and says why and how."""
    assert set(RULE) == set(VALUES)
    assert all(rule.why and rule.flag.startswith("--") for rule in RULES)


@pytest.mark.parametrize("setting", VALUES)
def test_wanted_values(setting: str) -> None:
    """Default and opposite become the wanted value; the wanted value stays, uncontradicted."""
    default, opposite, wanted = VALUES[setting]
    for asked in (default, opposite):
        assert decide(asked, default, RULE[setting], SETTINGS).enforced == wanted
    assert decide(opposite, default, RULE[setting], SETTINGS).contradicts == (opposite != default)
    assert not decide(default, default, RULE[setting], SETTINGS).contradicts
    kept = decide(wanted, default, RULE[setting], SETTINGS)
    assert not kept.changed and not kept.contradicts


def test_versioned_prefix_caching_turns_one_rule_around() -> None:
    """The cache is wanted on, everything else as before; strict then objects to turning it off."""
    settings = ParitySettings(prefix_caching="versioned")
    rules = rules_for(settings)
    assert rules_for(SETTINGS) == RULES
    (rule,) = set(rules) - set(RULES)
    assert [r.setting for r in rules] == [r.setting for r in RULES]
    decisions = [decide(asked, None, rule, settings) for asked in (None, True, False)]
    assert [decision.enforced for decision in decisions] == [True] * 3
    refuse_contradictions(decisions[:2])
    with pytest.raises(ParityError, match=r"pass --enable-prefix-caching") as caught:
        refuse_contradictions(decisions)
    assert rule.why in str(caught.value).lower()


@pytest.mark.parametrize(
    ("asked", "head_size", "wanted"), [(20, 128, 128), (300, 128, 300), (-1, 128, -1), (20, 4, 20)]
)
def test_l16_the_cap(asked: int, head_size: int, wanted: int) -> None:
    """L16: raised to K, never lowered, and a user's own "no cap" stands."""
    settings = ParitySettings(head_size=head_size)
    assert decide(asked, 20, RULE["max_logprobs"], settings).enforced == wanted


def test_strict_names_every_contradiction() -> None:
    """Two contradictions among three explicit settings: both are named, the third is not."""
    decisions = [
        decide("raw_logits", "raw_logprobs", RULE["logprobs_mode"], SETTINGS),
        decide(True, None, RULE["async_scheduling"], SETTINGS),
        decide("vllm", "auto", RULE["generation_config"], SETTINGS),
        decide(None, None, RULE["enable_prefix_caching"], SETTINGS),
    ]
    with pytest.raises(ParityError) as caught:
        refuse_contradictions(decisions)
    message = str(caught.value)
    assert "logprobs_mode='raw_logits', async_scheduling=True." in message
    assert "--logprobs-mode processed_logprobs, --no-async-scheduling" in message
    assert "generation_config" not in message and "prefix" not in message
    refuse_contradictions(decisions[2:])


def test_reports() -> None:
    """L18: speculation, a quantised KV cache and forced sampling are reported; floats are not."""
    for dtype in ("auto", "bfloat16", "float16", "float32"):
        assert report_unsafe(None, dtype, {}) == []
    reports = report_unsafe("ngram", "fp8", {"top_k": 5})
    names = ["speculative_config", "kv_cache_dtype", "override_generation_config"]
    assert [report.setting for report in reports] == names
    with pytest.raises(ParityError) as caught:
        refuse_unsafe(reports)
    assert all(f"{name}=" in str(caught.value) for name in names)
    refuse_unsafe([])


@pytest.mark.parametrize(
    ("config", "quantised"),
    [
        (None, False),
        ({}, False),
        ({"quant_method": "gptq", "lm_head": True}, True),
        ({"quant_method": "gptq", "lm_head": False}, False),
        ({"config_groups": {"group_0": {"targets": ["Linear"]}}, "ignore": ["lm_head"]}, False),
        ({"config_groups": {"group_0": {"targets": ["re:.*lm_head"]}}}, True),
        ({"config_groups": {"g": {"targets": ["lm_head"]}}, "ignore": ["re:.*lm_head"]}, False),
        ({"config_groups": {"group_0": {"targets": ["Linear"]}}}, False),
    ],
)
def test_quantised_heads(config: Any, quantised: bool) -> None:
    """H3: GPTQ's flag and compressed-tensors' groups; an ignored head is not quantised."""
    assert (quantized_head(config) is not None) == quantised
