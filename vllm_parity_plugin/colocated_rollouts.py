"""Rollouts of an ``LLM`` in the trainer's process: the request and the arrays of a server's."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from vllm_parity_plugin.core_records import new_request_id
from vllm_parity_plugin.engine_requests import assemble, check, head_limit, sampling_params
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.recorded import take_colocated
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest
from vllm_parity_plugin.settings import load_settings
from vllm_parity_plugin.weights.colocated import sleeping
from vllm_parity_plugin.weights.errors import ConflictError


def colocated_rollout(llm: Any, request: RolloutRequest) -> Rollout:
    """Sample ``n`` completions of every prompt; ``stream`` has no meaning here.

    Args:
        llm: a ``vllm.LLM`` whose processes run the plugin.
        request: as for ``POST /v1/parity/rollouts``. Stop strings need an ``LLM`` with a
            tokenizer.

    Raises:
        ValueError: vLLM's word on a parameter.
        ParityError: what the served model cannot take; no complete policy is loaded; the engine
            sleeps, has other requests, or runs without the plugin. No request is left in it.
    """
    engine = llm.llm_engine
    settings = load_settings(engine.vllm_config.additional_config)
    check(request, engine.model_config, head_limit(engine.model_config, settings.head_size))
    _check_ready(llm)
    jobs = request.sequences
    ids = [new_request_id() for _ in jobs]
    added: list[str] = []
    parts: dict[str, Rollout] = {}
    try:
        for (prompt, sample), request_id in zip(jobs, ids, strict=True):
            inputs = {"prompt_token_ids": request.prompts[prompt]}
            engine.add_request(request_id, inputs, sampling_params(request, prompt, sample))
            added.append(request_id)
        places = {request_id: prompt for (prompt, _), request_id in zip(jobs, ids, strict=True)}
        while engine.has_unfinished_requests():
            ended = [output for output in engine.step() if output.finished]
            if not ended:
                continue
            records = take_colocated(llm, [output.request_id for output in ended])
            for output in ended:
                sampling = request.sampling_of(places[output.request_id])
                parts[output.request_id] = assemble(output, records[output.request_id], sampling)
    except BaseException:
        _forget(llm, [request_id for request_id in added if request_id not in parts])
        raise
    if missing := len(ids) - len(parts):
        raise ParityError(
            f"The engine returned nothing for {missing} of {len(ids)} completions.",
            "They are lost.",
            "look at the engine's log.",
        )
    return Rollout.join([parts[request_id] for request_id in ids], request.sampling_of_sequences)


def _check_ready(llm: Any) -> None:
    """Refuse an engine whose answers would not come, or would be mixed with others'."""
    if tags := sleeping(llm):
        raise ConflictError(
            f"The engine sleeps: {' and '.join(tags)} are not in memory.",
            "It would sample from memory that is gone.",
            "call llm.wake_up(), and push the weights after a sleep of level 2.",
        )
    if llm.llm_engine.has_unfinished_requests():
        raise ConflictError(
            "The engine has unfinished requests.",
            "Their outputs would be lost among those of the rollout.",
            "let generate return, or abort them, and sample then.",
        )


def _forget(llm: Any, request_ids: list[str]) -> None:
    """End what is left, so that the next rollout does not meet it. The first error counts."""
    for request_id in request_ids:
        with suppress(Exception):
            llm.llm_engine.abort_request([request_id])
        with suppress(Exception):
            take_colocated(llm, [request_id])
