"""Applies the rules around ``EngineArgs.create_engine_config`` and asserts on what comes back."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm_parity_plugin import compat
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.rules import (
    RULES,
    UNLIMITED,
    Decision,
    Report,
    decide,
    quantized_head,
    refuse_contradictions,
    refuse_unsafe,
    report_unsafe,
    rules_for,
)
from vllm_parity_plugin.serving import check_model_path
from vllm_parity_plugin.settings import ENV_PREFIX, ParitySettings, load_settings
from vllm_parity_plugin.table import startup_table
from vllm_parity_plugin.weights.staging import remove_private

HEAD_DTYPE = "float32"


@dataclasses.dataclass(frozen=True)
class HeadDtypeOverride:
    """A user's ``hf_overrides`` callable, followed by ours.

    A module-level class because vLLM pickles the configuration into its engine process.
    """

    user: Callable[[Any], Any]
    head_dtype: str = HEAD_DTYPE

    def __call__(self, hf_config: Any) -> Any:
        hf_config = self.user(hf_config)
        hf_config.head_dtype = self.head_dtype
        return hf_config


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """``create_engine_config`` with the rules applied before and verified after."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = load_settings(self.additional_config)
        if settings.mode == "off" or self.runner in {"pooling", "draft"}:
            with _parity_environment_hidden():
                return original(self, *args, **kwargs)
        check_model_path(str(self.model))
        decisions = _decisions(self, settings)
        if settings.mode == "strict":
            refuse_contradictions(decisions)
        before = {field.name: copy.copy(getattr(self, field.name)) for field in _rule_fields(self)}
        if settings.mode != "observe":
            _apply(self, decisions)
        with _parity_environment_hidden():
            config = original(self, *args, **kwargs)
        if config.model_config.runner_type != "generate":
            # "auto" resolved to an embedding or classification model: none of this concerns it.
            for name, value in before.items():
                setattr(self, name, value)
            with _parity_environment_hidden():
                return original(self, *args, **kwargs)
        reports = _reports(self, config)
        if settings.mode != "observe":
            _refuse_quantized_head(config)
            _verify(config, settings)
        if settings.mode == "strict":
            refuse_unsafe(reports)
        _announce(decisions, reports, settings)
        if multiprocessing.parent_process() is None:
            atexit.register(remove_private, os.getpid())
        _warn_of_rust_front_end()
        return config

    return create_engine_config


@contextlib.contextmanager
def _parity_environment_hidden() -> Iterator[None]:
    """Hide our variables while vLLM checks for VLLM_* names that it does not know."""
    names = [name for name in os.environ if name.startswith(ENV_PREFIX)]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _rule_fields(engine_args: Any) -> list[dataclasses.Field[Any]]:
    names = {rule.setting for rule in RULES} | {"hf_overrides"}
    return [field for field in dataclasses.fields(engine_args) if field.name in names]


def _default(engine_args: Any, name: str) -> Any:
    field = next(f for f in dataclasses.fields(engine_args) if f.name == name)
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _decisions(engine_args: Any, settings: ParitySettings) -> list[Decision]:
    """One decision per rule that this vLLM knows.

    Raises:
        ParityError: a setting that a rule needs does not exist in this vLLM.
    """
    decisions = []
    for rule in rules_for(settings):
        if rule.setting == "head_dtype":
            asked = _asked_head_dtype(engine_args.hf_overrides)
            decisions.append(decide(asked, None, rule, settings))
            continue
        if rule.setting == "disable_cascade_attn" and not compat.has_cascade_attention():
            continue
        if not hasattr(engine_args, rule.setting):
            raise ParityError(
                f"This vLLM ({compat.vllm_version()}) has no engine setting {rule.setting!r}.",
                f"The rule cannot be enforced: {rule.why}.",
                "install a supported vLLM, or set VLLM_PARITY_MODE=off to run unprotected.",
            )
        asked = getattr(engine_args, rule.setting)
        decisions.append(decide(asked, _default(engine_args, rule.setting), rule, settings))
    return decisions


def _asked_head_dtype(hf_overrides: Any) -> str | None:
    if isinstance(hf_overrides, dict):
        asked = hf_overrides.get("head_dtype")
        return None if asked is None else str(asked).removeprefix("torch.")
    if isinstance(hf_overrides, HeadDtypeOverride):
        return hf_overrides.head_dtype
    return None


def _apply(engine_args: Any, decisions: list[Decision]) -> None:
    for decision in decisions:
        if decision.rule.setting == "head_dtype":
            engine_args.hf_overrides = _with_fp32_head(engine_args.hf_overrides)
        elif decision.changed:
            setattr(engine_args, decision.rule.setting, decision.enforced)


def _with_fp32_head(hf_overrides: Any) -> Any:
    if isinstance(hf_overrides, HeadDtypeOverride):
        return hf_overrides
    if callable(hf_overrides):
        return HeadDtypeOverride(hf_overrides)
    return {**(hf_overrides or {}), "head_dtype": HEAD_DTYPE}


def _reports(engine_args: Any, config: Any) -> list[Report]:
    return report_unsafe(
        config.speculative_config,
        str(config.cache_config.cache_dtype),
        engine_args.override_generation_config,
    )


def _refuse_quantized_head(config: Any) -> None:
    hf_config = config.model_config.hf_config
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    reason = quantized_head(quantization)
    if reason is not None:
        raise ParityError(
            f"The lm_head of {config.model_config.model} is quantised ({reason}).",
            "A quantised head cannot run in fp32: its rounding alone makes rollout logprobs "
            "differ from the trainer's.",
            "serve a checkpoint that leaves lm_head unquantised, or set VLLM_PARITY_MODE=observe "
            "to serve it without the guarantee.",
        )


def observed(config: Any) -> dict[str, Any]:
    """What a resolved ``VllmConfig`` will really run, by rule name."""
    values = {
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "head_dtype": str(config.model_config.head_dtype).removeprefix("torch."),
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "generation_config": config.model_config.generation_config,
        "max_logprobs": config.model_config.max_logprobs,
    }
    if compat.has_cascade_attention():
        values["disable_cascade_attn"] = bool(config.model_config.disable_cascade_attn)
    return values


def _verify(config: Any, settings: ParitySettings) -> None:
    """Assert the rules on the configuration that vLLM will run, not on what was asked.

    Raises:
        ParityError: a rule did not reach the resolved configuration.
    """
    values = observed(config)
    wrong = []
    for rule in rules_for(settings):
        if rule.setting not in values:
            continue
        value = values[rule.setting]
        good = (
            value == UNLIMITED or value >= settings.head_size
            if rule.setting == "max_logprobs"
            else value == rule.wanted(value, settings)
        )
        if not good:
            wrong.append(f"{rule.setting}={value!r}")
    if wrong:
        raise ParityError(
            f"vLLM resolved {', '.join(wrong)} although vllm-parity set the opposite.",
            "Another plugin, platform or option overrides the rule, so rollout logprobs would "
            "not mean what the trainer expects.",
            "remove the option that forces it, or set VLLM_PARITY_MODE=observe to serve without "
            "the guarantee.",
        )


def _warn_of_rust_front_end() -> None:
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in {"", "0"}:
        logger.warning(
            "VLLM_USE_RUST_FRONTEND replaces the Python API server: the engine settings are "
            "enforced, but there are no /v1/parity routes, so no trainer can attest or update "
            "this server. Unset it to get them."
        )


_announced: set[int] = set()


def _announce(decisions: list[Decision], reports: list[Report], settings: ParitySettings) -> None:
    """Print the start-up table once per user-visible process, not in its children."""
    table = startup_table(decisions, reports, settings)
    if multiprocessing.parent_process() is None and hash(table) not in _announced:
        _announced.add(hash(table))
        logger.info("%s", table)
