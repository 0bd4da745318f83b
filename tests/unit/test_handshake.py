"""The handshake's rules, on attestations made by hand.

Properties: every unsafe pair is refused with what was found and a fix; a healthy pair gives no
warning; what is odd but not wrong warns; sampling that the trainer cannot reproduce is refused
before any server is asked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trl_callbacks.handshake import TrainerFacts, check_pair, check_sampling
from vllm_parity_plugin import __version__
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.wire import HeadStatus, Status, WorkerStatus

FACTS = TrainerFacts(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=None,
    repetition_penalty=1.0,
    dtype="float32",
    vocab_size=512,
    head_size=128,
)


def status(head: dict[str, Any] | None = None, **worker: Any) -> Status:
    values: dict[str, Any] = {
        "rank": 0,
        "host": "here",
        "plugin_version": __version__,
        "vllm_version": "0.31.0",
        "model_runner": "runner",
        "head": HeadStatus(
            **{"dtype": "float32", "bf16_share": 0.0, "weight_dtype": "bfloat16", **(head or {})}
        ),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 128,
        "generation_config": "vllm",
        "prefix_caching": "off",
        "async_scheduling": False,
        "speculative": False,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "vocab_size": 512,
        "tied_embeddings": False,
        "weights": "committed",
        "policy_version": 0,
        **worker,
    }
    return Status(
        server_id="id",
        plugin_version=__version__,
        mode="enforce",
        model="model",
        max_model_len=256,
        head_size=128,
        state="serving",
        policy_version=0,
        workers=[WorkerStatus(**values)],
    )


def test_a_healthy_pair_is_silent() -> None:
    """The plugin's defaults against a default trainer: no error and no warning."""
    check_sampling(FACTS)
    assert check_pair(status(), FACTS) == []
    assert check_pair(status(prefix_caching="versioned"), FACTS) == []


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (status(logprobs_mode="raw_logprobs"), ["raw_logprobs", "--logprobs-mode"]),
        (status(head={"dtype": "bfloat16"}), ["bfloat16", "head_dtype"]),
        (status(prefix_caching="on"), ["caches prefixes", "--no-enable-prefix-caching"]),
        (status(vllm_version="0.24.1"), ["0.24.1", "upgrade"]),
        (status(vocab_size=513), ["513", "serve the model that is trained"]),
    ],
)
def test_unsafe_servers_are_refused(server: Status, words: list[str]) -> None:
    """L1, H6, W1: one paragraph that names the value and the flag."""
    with pytest.raises(ParityError) as caught:
        check_pair(server, FACTS)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"head_size": 600}, ["600", "512", "score_centering_top_k"]),
        ({"head_size": 200}, ["200", "128", "VLLM_PARITY_HEAD_SIZE=200"]),
    ],
)
def test_heads_the_server_cannot_give_are_refused(facts: dict[str, Any], words: list[str]) -> None:
    """L16: more than the vocabulary, or more than the server's cap, before training."""
    with pytest.raises(ParityError) as caught:
        check_pair(status(), replace(FACTS, **facts))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"temperature": 0.0}, ["temperature is 0.0", "above 0"]),
        ({"overrides": {"temperature": 0.7}}, ["0.7", "1.0", "generation_kwargs"]),
        ({"repetition_penalty": 1.1}, ["repetition_penalty=1.1"]),
        ({"overrides": {"logit_bias": {3: 1.0}}}, ["logit_bias"]),
        ({"overrides": {"min_tokens": 4}}, ["min_tokens=4"]),
        ({"top_p": 0.9}, ["top_p=0.9", "score_centering_support"]),
        ({"top_k": 20}, ["top_k=20", "score_centering_support"]),
        ({"min_p": 0.1}, ["min_p=0.1", "score_centering_support"]),
        ({"overrides": {"top_p": 0.5}}, ["top_p=0.5"]),
        ({"support": True, "top_p": 0.9}, ["top_k=0", "between 1 and 128"]),
        ({"support": True, "top_k": 200}, ["top_k=200", "between 1 and 128"]),
    ],
)
def test_sampling_the_trainer_cannot_reproduce_is_refused(
    facts: dict[str, Any], words: list[str]
) -> None:
    """L4, S10: truncation without the support form, penalties, another temperature."""
    with pytest.raises(ParityError) as caught:
        check_sampling(replace(FACTS, **facts))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_support_form_allows_a_truncation_that_the_head_holds() -> None:
    """top_k within the head is what the support form is for."""
    check_sampling(replace(FACTS, support=True, top_k=64, top_p=0.9))


@pytest.mark.parametrize(
    ("server", "facts", "word"),
    [
        (status(plugin_version="9.9.9"), FACTS, "9.9.9"),
        (status(async_scheduling=True), FACTS, "--no-async-scheduling"),
        (status(speculative=True), FACTS, "--speculative-config"),
        (status(kv_cache_dtype="fp8"), FACTS, "fp8"),
        (status(), replace(FACTS, dtype="float16"), "float16"),
        (status(), replace(FACTS, moe=True), "experts"),
    ],
)
def test_odd_pairs_warn(server: Status, facts: TrainerFacts, word: str) -> None:
    """L22 and its like: reported, not refused."""
    warnings = check_pair(server, facts)
    assert len(warnings) == 1
    assert word in warnings[0]
