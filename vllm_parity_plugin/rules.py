"""The table of engine settings that make rollout logprobs mean what a trainer expects.

Pure data and pure functions: what vLLM's ``EngineArgs`` asks for goes in, decisions come out.
``engine_args.py`` applies them to a real engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.settings import ParitySettings

UNLIMITED = -1
"""vLLM's value of ``max_logprobs`` for "no cap"."""


@dataclass(frozen=True)
class Rule:
    """One engine setting and the value that parity needs.

    Attributes:
        setting: name of the ``EngineArgs`` field (``head_dtype`` lives in ``hf_overrides``).
        flag: how a user of ``vllm serve`` spells the wanted value.
        wanted: (asked value, settings) -> value to run with.
        why: one line for the start-up table.
    """

    setting: str
    flag: str
    wanted: Callable[[Any, ParitySettings], Any]
    why: str


@dataclass(frozen=True)
class Decision:
    """What happens to one setting: ``asked`` becomes ``enforced``.

    ``explicit`` tells whether the asked value differs from vLLM's default. vLLM does not tell
    "passed" from "default", so an explicitly passed default counts as not explicit.
    """

    rule: Rule
    asked: Any
    enforced: Any
    explicit: bool

    @property
    def changed(self) -> bool:
        return bool(self.asked != self.enforced)

    @property
    def contradicts(self) -> bool:
        """The user asked for something else, and meant it."""
        return self.changed and self.explicit


def _max_logprobs(asked: int, settings: ParitySettings) -> int:
    # A user's own "no cap" stands; the plugin itself never lifts the cap, because an uncapped
    # top-k turns a small request into a huge response (vLLM clamps at the vocabulary only).
    return asked if asked == UNLIMITED else max(asked, settings.head_size)


RULES: tuple[Rule, ...] = (
    Rule(
        "logprobs_mode",
        "--logprobs-mode processed_logprobs",
        lambda asked, settings: "processed_logprobs",
        "raw logprobs are taken before temperature, penalties and filters",
    ),
    Rule(
        "head_dtype",
        """--hf-overrides '{"head_dtype": "float32"}'""",
        lambda asked, settings: "float32",
        "a bf16 lm_head rounds every logit; the trainer's runs in fp32",
    ),
    Rule(
        "enable_prefix_caching",
        "--no-enable-prefix-caching",
        lambda asked, settings: False,
        "cached prefixes outlive a weight update",
    ),
    Rule(
        "async_scheduling",
        "--no-async-scheduling",
        lambda asked, settings: False,
        "overlapped steps see stale token history and shift logprobs",
    ),
    Rule(
        "generation_config",
        "--generation-config vllm",
        lambda asked, settings: "vllm",
        "the model repository must not change sampling silently",
    ),
    Rule(
        "max_logprobs",
        "--max-logprobs 128",
        _max_logprobs,
        "sampler heads need this many top logprobs per token",
    ),
    Rule(
        "disable_cascade_attn",
        "--disable-cascade-attn",
        lambda asked, settings: True,
        "shared-prefix attention gives outliers in groups",
    ),
)

VERSIONED = Rule(
    "enable_prefix_caching",
    "--enable-prefix-caching",
    lambda asked, settings: True,
    "keyed by policy: completions share prefills, updates end them",
)
"""In place of the rule of that name, with the setting ``prefix_caching=versioned``."""


def rules_for(settings: ParitySettings) -> tuple[Rule, ...]:
    """The table that these settings ask for."""
    if settings.prefix_caching == "off":
        return RULES
    return tuple(VERSIONED if rule.setting == VERSIONED.setting else rule for rule in RULES)


@dataclass(frozen=True)
class Report:
    """A setting that the plugin does not change but must not hide."""

    setting: str
    value: Any
    why: str
    fix: str


def decide(asked: Any, default: Any, rule: Rule, settings: ParitySettings) -> Decision:
    """The decision on one setting (pure)."""
    return Decision(rule, asked, rule.wanted(asked, settings), explicit=bool(asked != default))


def refuse_contradictions(decisions: list[Decision]) -> None:
    """Mode ``strict``: an explicit setting that contradicts a rule stops the start.

    Raises:
        ParityError: names every contradiction and the flag that resolves it.
    """
    bad = [decision for decision in decisions if decision.contradicts]
    if bad:
        raise ParityError(
            "Parity mode is strict, but the engine was asked for "
            + ", ".join(f"{d.rule.setting}={d.asked!r}" for d in bad)
            + ".",
            "; ".join(f"{d.rule.setting}: {d.rule.why}" for d in bad).capitalize() + ".",
            "pass "
            + ", ".join(d.rule.flag for d in bad)
            + " (or leave the settings out), or use mode enforce.",
        )


def report_unsafe(
    speculative: Any, kv_cache_dtype: str, sampling_override: dict[str, Any]
) -> list[Report]:
    """Settings that change what a logprob means and that a checkpoint can switch on by itself.

    Args:
        speculative: resolved speculative configuration, or None.
        kv_cache_dtype: resolved KV-cache dtype ("auto" and 16/32-bit floats are harmless).
        sampling_override: ``--override-generation-config``, applied to every request.
    """
    reports = []
    if speculative is not None:
        reports.append(
            Report(
                "speculative_config",
                getattr(speculative, "method", speculative),
                "drafted tokens are accepted under rules that not every logprob reflects",
                "remove --speculative-config (and use a checkpoint without a draft model)",
            )
        )
    if kv_cache_dtype not in {"auto", "bfloat16", "float16", "float32"}:
        reports.append(
            Report(
                "kv_cache_dtype",
                kv_cache_dtype,
                "a quantised KV cache is a different policy from the trainer's",
                "pass --kv-cache-dtype bfloat16",
            )
        )
    if sampling_override:
        reports.append(
            Report(
                "override_generation_config",
                sampling_override,
                "requests that leave these out are sampled with them",
                "set sampling parameters in the request instead",
            )
        )
    return reports


def refuse_unsafe(reports: list[Report]) -> None:
    """Mode ``strict``: what ``enforce`` only reports is refused.

    Raises:
        ParityError: names every reported setting and its fix.
    """
    if reports:
        raise ParityError(
            "Parity mode is strict, but the engine would run with "
            + ", ".join(f"{r.setting}={r.value!r}" for r in reports)
            + ".",
            "; ".join(f"{r.setting}: {r.why}" for r in reports).capitalize() + ".",
            "; ".join(r.fix for r in reports) + ", or use mode enforce, which only reports them.",
        )


def quantized_head(quantization: dict[str, Any] | None) -> str | None:
    """Why a checkpoint's lm_head is quantised, or None.

    Reads the ``quantization_config`` of the checkpoint: GPTQ's and AutoRound's ``lm_head: true``,
    and a compressed-tensors group whose targets name the head and whose ``ignore`` does not.
    """
    if not quantization:
        return None
    if quantization.get("lm_head") is True:
        return f"{quantization.get('quant_method', 'quantization')} config has lm_head=true"
    if any("lm_head" in str(name) for name in quantization.get("ignore") or []):
        return None
    for group_name, group in (quantization.get("config_groups") or {}).items():
        named = [t for t in group.get("targets") or [] if "lm_head" in str(t)]
        if named:
            return f"config group {group_name!r} targets {named[0]!r}"
    return None
