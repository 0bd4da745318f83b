"""Every way into an engine gives the same distribution: that of the request.

Properties:
- ``LLM`` in its own process and in ours, ``AsyncLLM``, ``/v1/completions`` and
  ``/v1/parity/rollouts`` return the same tokens and logprobs for the same seed (L2), also where
  another logprobs mode was asked for;
- they are the trainer's logprobs at the request's temperature (L1); stock vLLM's are not;
- the model repository's opinion on sampling is not applied, its end-of-sequence ids are (L6).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client import Client, top_logprobs
from tests.models import EOS, SECOND_EOS, Kind
from tests.offline import IN_PROCESS, OWN_PROCESS, run_jobs
from tests.reference import reference
from vllm_parity_plugin.serving import Server

PROMPT = [100, 101, 102, 103, 104]
SAMPLING = {"temperature": 0.7, "max_tokens": 24, "seed": 0, "ignore_eos": True}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
SAME, EQUAL, WRONG = 1e-5, 0.05, 0.15


@pytest.fixture(scope="module")
def offline(
    tiny_model: Callable[[Kind], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Offline engines on the model of ``untied_server``; in-process ones last."""
    args = {"model": str(tiny_model("gc")), "max_model_len": 256}
    generate = {"op": "generate", "prompts": [PROMPT], "sampling": SAMPLING}
    off = args | {"additional_config": {"parity": {"mode": "off"}}}
    raw = args | {"logprobs_mode": "raw_logprobs"}
    jobs = {
        "AsyncLLM": {"kind": "async", "args": raw, "steps": [generate]},
        "LLM": {"kind": "llm", "args": raw, "steps": [generate], "env": OWN_PROCESS},
        "LLM in process": {
            "kind": "llm",
            "args": args,
            "steps": [generate, {"op": "defaults"}],
            "env": IN_PROCESS,
        },
        "stock": {
            "kind": "llm",
            "args": off,
            "steps": [generate, {"op": "defaults"}],
            "env": IN_PROCESS,
        },
    }
    found = run_jobs(list(jobs.values()), tmp_path_factory.mktemp("entry"))
    for result in found:
        assert result["error"] is None, result["error"]
    return dict(zip(jobs, found, strict=True))


def first(result: dict[str, Any]) -> tuple[list[int], np.ndarray]:
    completion = result["steps"][0][0]
    return completion["token_ids"], np.array(completion["logprobs"])


def over_http(server: Server) -> dict[str, tuple[list[int], np.ndarray]]:
    client = Client(server)
    rollout = client.rollout([PROMPT], seeds=[0], temperature=0.7, max_tokens=24, ignore_eos=True)
    (choice,) = client.completions(PROMPT, logprobs=0, **SAMPLING)
    return {
        "rollouts": (rollout.token_ids.tolist(), rollout.logprobs),
        "completions": (choice["token_ids"], np.array(choice["logprobs"]["token_logprobs"])),
    }


def test_l2_every_entry_point_agrees(offline: dict[str, Any], untied_server: Server) -> None:
    """L2: five ways in, same seed: same ids, logprobs equal within 1e-5."""
    found = over_http(untied_server)
    found |= {name: first(offline[name]) for name in ("AsyncLLM", "LLM", "LLM in process")}
    ids, logprobs = found.pop("rollouts")
    assert len(found) == 4
    for name, (other_ids, other_logprobs) in found.items():
        assert other_ids == ids, name
        assert np.abs(other_logprobs - logprobs).max() <= SAME, name


def test_l1_logprobs_are_at_the_sampling_temperature(
    offline: dict[str, Any], tiny_model: Callable[[Kind], Path]
) -> None:
    """L1: T = 0.7: the plugin's logprobs are the trainer's; stock vLLM's are those at T = 1."""
    path = tiny_model("gc")

    def gap(name: str, temperature: float) -> np.ndarray:
        ids, logprobs = first(offline[name])
        return np.abs(logprobs - reference(path, [PROMPT], [ids], temperature=temperature))

    assert gap("LLM", 0.7).max() < EQUAL
    assert gap("stock", 0.7).mean() > WRONG
    assert gap("stock", 1.0).mean() < 0.02


def test_l6_default_sampling_is_neutral(offline: dict[str, Any]) -> None:
    """L6: ``LLM.get_default_sampling_params`` is neutral; stock vLLM takes the repository's."""
    defaults = offline["LLM in process"]["steps"][1]
    assert defaults == NEUTRAL
    stock = offline["stock"]["steps"][1]
    assert (stock["temperature"], stock["top_k"], stock["repetition_penalty"]) == (0.6, 5, 1.3)


def finite_entries(server: Server) -> tuple[list[int], dict[str, Any]]:
    """Finite top-20 entries per position of a request that leaves all sampling out."""
    (choice,) = Client(server).completions(PROMPT, logprobs=20, max_tokens=16, seed=1)
    heads = top_logprobs(choice)
    return [sum(value > -9000 for value in head.values()) for head in heads], choice


def test_l6_a_request_that_leaves_sampling_out(
    untied_server: Server, observe_server: Server, tiny_model: Callable[[Kind], Path]
) -> None:
    """L6: neutral with the plugin; control (mode observe): the repository's top_k = 5."""
    counts, choice = finite_entries(untied_server)
    assert min(counts) >= 20
    expected = reference(tiny_model("gc"), [PROMPT], [choice["token_ids"]])
    assert np.abs(np.array(choice["logprobs"]["token_logprobs"]) - expected).max() < EQUAL
    counts, _ = finite_entries(observe_server)
    assert max(counts) <= 5


@pytest.mark.parametrize(("token", "reason"), [(EOS, "stop"), (SECOND_EOS, "stop"), (3, "length")])
def test_l6_both_end_of_sequence_ids_stop(untied_server: Server, token: int, reason: str) -> None:
    """L6: the repository's two end-of-sequence ids still stop; another token (control) does not."""
    found = Client(untied_server).rollout([PROMPT], max_tokens=5, logit_bias={str(token): 100.0})
    assert found.finish_reasons == [reason]
    assert set(found.token_ids.tolist()) == {token}
    assert len(found.token_ids) == (1 if reason == "stop" else 5)
