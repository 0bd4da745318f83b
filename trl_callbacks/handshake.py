"""The check of server against trainer before step 1: unsafe pairs refuse, odd pairs warn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_parity_plugin import __version__
from vllm_parity_plugin.compat import MIN_VLLM
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.wire import Status

NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "min_tokens": 0,
    "structured_outputs": None,
    "logits_processors": None,
}
"""Sampling parameters that change the sampler's distribution in a way no trainer applies."""


@dataclass(frozen=True)
class TrainerFacts:
    """What matters of a trainer, as plain values.

    Attributes:
        temperature, top_p, top_k, min_p, repetition_penalty: the trainer's own.
        overrides: TRL's ``generation_kwargs``, which the sampler gets instead.
        dtype: of the trainer's parameters.
        vocab_size: rows of the trainer's lm_head.
        head_size: sampler head entries wanted per token; 0 for none.
        support: the loss uses the support form, which truncated sampling needs.
        moe: the model routes tokens to experts.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    dtype: str
    vocab_size: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    head_size: int = 0
    support: bool = False
    moe: bool = False


def check_sampling(facts: TrainerFacts) -> None:
    """Refuse sampling whose logprobs the trainer cannot reproduce. Needs no server.

    Raises:
        ParityError: names the parameter, its value and the fix.
    """
    asked = facts.overrides.get("temperature", facts.temperature)
    if asked != facts.temperature:
        raise ParityError(
            f"Requests are sampled at temperature {asked} (generation_kwargs) while the trainer "
            f"divides its logits by {facts.temperature}.",
            "Every logprob difference would be that of the two temperatures, from step one.",
            "set temperature in GRPOConfig and leave it out of generation_kwargs.",
        )
    if not facts.temperature > 0:
        raise ParityError(
            f"The trainer's temperature is {facts.temperature}.",
            "Greedy sampling has no distribution to take a policy gradient of.",
            "set temperature above 0 (1.0 is usual).",
        )
    for name, neutral in NEUTRAL.items():
        value = facts.overrides.get(name, getattr(facts, name, neutral))
        if value not in (neutral, None):
            raise ParityError(
                f"Rollouts are sampled with {name}={value!r}.",
                "The sampler's logprobs include it and the trainer's do not, so their difference "
                "is not a mismatch of weights, and no correction of it is right.",
                f"remove {name} (neutral value {neutral!r}) from GRPOConfig or generation_kwargs.",
            )
    _check_truncation(facts)


def _check_truncation(facts: TrainerFacts) -> None:
    top_p = facts.overrides.get("top_p", facts.top_p)
    top_k = facts.overrides.get("top_k", facts.top_k)
    min_p = facts.overrides.get("min_p", facts.min_p)
    truncating = [
        f"{name}={value}"
        for name, value, on in (
            ("top_p", top_p, top_p < 1.0),
            ("top_k", top_k, top_k not in (0, -1)),
            ("min_p", min_p, bool(min_p)),
        )
        if on
    ]
    if truncating and not facts.support:
        raise ParityError(
            f"Rollouts are truncated ({', '.join(truncating)}).",
            "The sampler's logprobs are renormalised over the tokens it kept, the trainer's are "
            "over the whole vocabulary: every ratio is off by the kept mass.",
            "set top_p=1.0, top_k=0, min_p=None; or use ParityGRPOTrainer with "
            "score_centering_support=True and a top_k no larger than score_centering_top_k.",
        )
    if facts.support and facts.head_size and not 0 < top_k <= facts.head_size:
        raise ParityError(
            f"score_centering_support=True with top_k={top_k} and a head of {facts.head_size}.",
            "The support form needs every token the sampler kept, and top_p and min_p alone bound "
            "no count.",
            f"set top_k between 1 and {facts.head_size}.",
        )


def check_pair(status: Status, facts: TrainerFacts) -> list[str]:
    """Compare what a server attests with what a trainer does.

    Returns:
        Warnings: pairs that are odd but not wrong.

    Raises:
        ParityError: a pair whose logprobs cannot agree.
    """
    for worker in status.workers:
        where = f"Worker {worker.rank} of the server"
        if _older(worker.vllm_version):
            raise ParityError(
                f"{where} runs vLLM {worker.vllm_version}.",
                f"Before {MIN_VLLM} an fp32 lm_head is accepted and ignored.",
                f"upgrade the server's environment to vLLM {MIN_VLLM} or newer.",
            )
        if worker.logprobs_mode != "processed_logprobs":
            raise ParityError(
                f"{where} returns {worker.logprobs_mode}.",
                "They are taken before temperature and filters, the trainer's after.",
                "restart the server in mode enforce (the default), or with --logprobs-mode "
                "processed_logprobs.",
            )
        if worker.head and worker.head.dtype != "float32":
            raise ParityError(
                f"{where} runs its lm_head in {worker.head.dtype}; the trainer's runs in float32.",
                "An fp32 head on one side only leaves the mismatch of a bf16 one.",
                "restart the server in mode enforce (the default), or with --hf-overrides "
                """'{"head_dtype": "float32"}'.""",
            )
        if worker.prefix_caching == "on":
            raise ParityError(
                f"{where} caches prefixes, and not by policy.",
                "A cached prefix outlives the weight update it was computed before.",
                "restart the server in mode enforce (the default; VLLM_PARITY_PREFIX_CACHING="
                "versioned keeps a cache), or with --no-enable-prefix-caching.",
            )
    return _check_model(status, facts) + _oddities(status, facts)


def _check_model(status: Status, facts: TrainerFacts) -> list[str]:
    served = status.workers[0]
    if facts.vocab_size != served.vocab_size:
        raise ParityError(
            f"The trainer's lm_head has {facts.vocab_size} rows, the served model {status.model} "
            f"a vocabulary of {served.vocab_size}.",
            "They are different models.",
            "serve the model that is trained.",
        )
    if facts.head_size > served.vocab_size:
        raise ParityError(
            f"score_centering_top_k={facts.head_size} is more than the vocabulary has "
            f"({served.vocab_size} tokens).",
            "The server would reject every rollout.",
            f"set score_centering_top_k to at most {served.vocab_size}.",
        )
    if facts.head_size > status.head_size:
        raise ParityError(
            f"The trainer wants {facts.head_size} head logprobs per token, the server returns at "
            f"most {status.head_size}.",
            "The server would reject every rollout.",
            f"restart it with VLLM_PARITY_HEAD_SIZE={facts.head_size}, or lower "
            "score_centering_top_k.",
        )
    if status.state == "unhealthy":
        return [
            "The server's last weight update failed and it holds no complete policy; the first "
            "update of this run replaces it."
        ]
    return []


def _oddities(status: Status, facts: TrainerFacts) -> list[str]:
    served = status.workers[0]
    warnings = []
    if served.plugin_version != __version__:
        warnings.append(
            f"The server runs vllm-parity {served.plugin_version}, the trainer {__version__}; "
            "install the same version on both."
        )
    if facts.dtype == "float16" or (facts.dtype != "float32" and facts.dtype != served.dtype):
        warnings.append(
            f"The trainer's weights are {facts.dtype}, the server computes in {served.dtype}; "
            f"serve with --dtype {facts.dtype} or train with float32 or {served.dtype} weights."
        )
    if served.async_scheduling:
        warnings.append("The server schedules asynchronously; pass --no-async-scheduling.")
    if served.speculative:
        warnings.append(
            "The server decodes speculatively, which not every logprob reflects; remove "
            "--speculative-config."
        )
    if served.kv_cache_dtype not in {"auto", "bfloat16", "float16", "float32"}:
        warnings.append(
            f"The server's KV cache is {served.kv_cache_dtype}, a different policy from the "
            "trainer's; pass --kv-cache-dtype bfloat16."
        )
    if facts.moe:
        warnings.append(
            "The model routes tokens to experts and routes are not replayed in the trainer: a "
            "small difference flips an expert, so parity is not claimed for it."
        )
    return warnings


def _older(found: str) -> bool:
    try:
        return Version(found) < MIN_VLLM
    except InvalidVersion:
        return False
