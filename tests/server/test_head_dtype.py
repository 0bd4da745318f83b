"""The lm_head really runs in fp32, in every engine and after every event.

Properties:
- the logits of real generation are not bf16 numbers with the plugin, and are without it (H3);
- weights stay bf16, tied or not; the effect survives requests and a weight update (H11);
- ``hf_overrides`` of the user, dictionary or callable, are kept and the head is still fp32;
- a head that computes in bf16 although the configuration says fp32 stops the start (H6).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models import Kind
from tests.offline import IN_PROCESS, LONGER_CONTEXT, OWN_PROCESS, run_jobs

BITS = {"op": "logits", "prompts": [[5, 6, 7, 8], [9, 10, 11]]}
ATTEST = {"op": "attest"}
OBSERVE = {"parity": {"mode": "observe"}}


@pytest.fixture(scope="module")
def results(
    tiny_model: Callable[[Kind], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """All engines of this file, in two child processes; those that break vLLM come last in each."""
    untied = tiny_model("untied")
    update = {"op": "apply", "path": str(untied / "model.safetensors"), "version": 1}
    again = {"op": "generate", "prompts": [[5, 6, 7]], "sampling": {"max_tokens": 3}}

    def job(kind: Kind, *steps: dict[str, Any], env: dict[str, str] = IN_PROCESS, **more: Any):
        args = {"model": str(tiny_model(kind)), "max_model_len": 256} | more.pop("args", {})
        return {"kind": "llm", "args": args, "steps": list(steps), "env": env, **more}

    jobs = {
        "callable": job(
            "untied",
            ATTEST,
            {"op": "context"},
            env=OWN_PROCESS,
            callable_overrides=True,
            args={"max_model_len": None},
        ),
        "untied": job("untied", BITS, again, again, again, update, BITS, ATTEST),
        "tied": job("tied", BITS, ATTEST),
        "odd": job("odd", BITS, ATTEST),
        "control": job("untied", BITS, ATTEST, args={"additional_config": OBSERVE}),
        "dict": job(
            "untied", BITS, args={"hf_overrides": {"head_dtype": "model", "bos_token_id": 3}}
        ),
        "broken": job("untied", ATTEST, head="bf16"),
        "cast": job("untied", ATTEST, head="bf16-cast"),
        "cast-observed": job(
            "untied", ATTEST, head="bf16-cast", args={"additional_config": OBSERVE}
        ),
    }
    found = run_jobs(list(jobs.values()), tmp_path_factory.mktemp("head"), at_once=2)
    return dict(zip(jobs, found, strict=True))


def steps(result: dict[str, Any]) -> list[Any]:
    assert result["error"] is None, result["error"]
    return result["steps"]


@pytest.mark.parametrize("kind", ["untied", "tied", "odd"])
def test_h3_logits_are_not_bf16_numbers(results: dict[str, Any], kind: str) -> None:
    """H3, H4: real generation's logits are fp32 numbers; the weights stay bf16."""
    found = steps(results[kind])
    print(f"MEASURED bits {kind} {found[0]} {found[-1][0]['head']}")
    assert found[0]["bf16_share"] < 0.05
    assert found[0]["dtypes"] == ["torch.float32"]
    head = found[-1][0]["head"]
    assert (head["dtype"], head["weight_dtype"]) == ("float32", "bfloat16")
    assert head["bf16_share"] < 0.05


def test_h3_control_logits_are_bf16_numbers(results: dict[str, Any]) -> None:
    """H3 control: in mode observe every logit is a bf16 number, and the attestation says so."""
    bits, (attested,) = steps(results["control"])
    print(f"MEASURED bits control {bits} {attested['head']}")
    assert bits["bf16_share"] == 1.0
    assert attested["head"]["dtype"] == "bfloat16"
    assert attested["head"]["bf16_share"] == 1.0


def test_h11_after_requests_and_an_update(results: dict[str, Any]) -> None:
    """H11: three requests and a weight update later, logits are still fp32 numbers."""
    found = steps(results["untied"])
    assert found[5]["bf16_share"] < 0.05
    assert found[-1][0]["policy_version"] == 1


def test_hf_overrides_dictionary(results: dict[str, Any]) -> None:
    """A user's ``hf_overrides`` that asks for a bf16 head is overruled."""
    assert steps(results["dict"])[0]["bf16_share"] < 0.05


def test_hf_overrides_callable(results: dict[str, Any]) -> None:
    """A user's callable survives pickling into the engine process, with the fp32 head after it."""
    (attested,), context = steps(results["callable"])
    assert context == LONGER_CONTEXT
    assert attested["head"]["dtype"] == "float32"
    assert attested["head"]["bf16_share"] < 0.05


@pytest.mark.parametrize("how", ["broken", "cast"])
def test_h6_a_head_that_computes_in_bf16_is_refused(results: dict[str, Any], how: str) -> None:
    """H6: the effect is measured, so a promise in the configuration does not pass."""
    error = results[how]["error"]
    assert error is not None
    assert error.startswith("ParityError: The loaded lm_head computes in bfloat16")
    assert "VLLM_PARITY_MODE=observe" in error


def test_h6_control_observe_serves_it_and_tells(results: dict[str, Any]) -> None:
    """H6 control: the same head in mode observe starts, and its attestation shows bf16 numbers."""
    ((attested,),) = steps(results["cast-observed"])
    assert attested["head"]["bf16_share"] == 1.0
