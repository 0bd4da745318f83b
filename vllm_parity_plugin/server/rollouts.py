"""Token ids in, arrays out: completions with sampler heads, without per-token objects."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np

from vllm_parity_plugin.core_versions import Spans, inactive, new_request_id, versions_of
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.wire import Rollout, RolloutRequest


async def rollout(state: Any, request: RolloutRequest) -> Rollout:
    """Sample ``n`` completions of every prompt.

    All sequences run as separate engine requests at once; if one fails, the others are aborted.

    Raises:
        ParityError: a prompt or a parameter that the served model cannot take.
    """
    _check(state, request)
    jobs = [
        (prompt, sample) for prompt in range(len(request.prompts)) for sample in range(request.n)
    ]
    ids = [new_request_id() for _ in jobs]
    tasks = [
        asyncio.create_task(_sample(state, request, *job, request_id))
        for job, request_id in zip(jobs, ids, strict=True)
    ]
    try:
        outputs = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(Exception):  # The first error is the one to report.
            await versions_of(state.engine, ids)
        raise
    return _assemble(request, outputs, await _spans(state.engine, ids))


async def _spans(engine: Any, ids: list[str]) -> list[Spans]:
    """Policy versions of every completion, in the order of ``ids``."""
    known = await versions_of(engine, ids)
    if missing := [request_id for request_id in ids if request_id not in known]:
        raise inactive(f"{len(missing)} of {len(ids)} requests are unknown to it")
    return [known[request_id] for request_id in ids]


def _check(state: Any, request: RolloutRequest) -> None:
    vocab = state.engine.model_config.get_vocab_size()
    limit = state.head_limit
    if request.head_size > limit:
        raise ParityError(
            f"head_size={request.head_size} is more than this server returns ({limit}; its "
            f"vocabulary has {vocab} tokens).",
            "The engine would reject the request.",
            f"ask for at most {limit}, or restart the server with VLLM_PARITY_HEAD_SIZE.",
        )
    if request.seeds is not None and len(request.seeds) != len(request.prompts):
        raise ParityError(
            f"{len(request.seeds)} seeds came with {len(request.prompts)} prompts.",
            "Which seed belongs to which prompt is unclear.",
            "send one seed per prompt, or none.",
        )
    max_len = state.engine.model_config.max_model_len
    for index, prompt in enumerate(request.prompts):
        if not prompt or len(prompt) >= max_len or min(prompt) < 0 or max(prompt) >= vocab:
            raise ParityError(
                f"Prompt {index} has {len(prompt)} token ids"
                + (f" in [{min(prompt)}, {max(prompt)}]." if prompt else "."),
                f"The served model takes 1 to {max_len - 1} ids in [0, {vocab - 1}].",
                "shorten the prompt, raise --max-model-len, or use the served model's tokenizer.",
            )


async def _sample(
    state: Any, request: RolloutRequest, prompt: int, sample: int, request_id: str
) -> Any:
    """One completion."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    seed = None if request.seeds is None else request.seeds[prompt] + sample
    params = SamplingParams(
        **request.sampling.model_dump(exclude_none=True),
        seed=seed,
        logprobs=request.head_size,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    final = None
    async for output in state.engine.generate(
        {"prompt_token_ids": request.prompts[prompt]}, params, request_id
    ):
        final = output
    if final is None:
        raise ParityError(
            f"The engine returned nothing for prompt {prompt}.",
            "Its completion is lost.",
            "look at the server's log; send the request again.",
        )
    return final.outputs[0]


def token_versions(spans: Spans, tokens: int) -> np.ndarray:
    """[T] int32, the policy version of each of ``tokens`` tokens.

    Spans ``[[0, 4], [3, 5]]`` and 5 tokens give ``[4, 4, 4, 5, 5]``. A span from the last token
    on (the request ended during the update) is empty.
    """
    starts, versions = np.asarray(spans, dtype=np.int32).T
    return versions[np.searchsorted(starts, np.arange(tokens), side="right") - 1]


def _assemble(request: RolloutRequest, outputs: list[Any], spans: list[Spans]) -> Rollout:
    lengths = [len(output.token_ids) for output in outputs]
    width = 1 + request.head_size
    ids, logprobs = zip(*(_arrays(output, width) for output in outputs), strict=True)
    all_ids, all_logprobs = np.concatenate(ids), np.concatenate(logprobs)
    token_ids = np.concatenate([np.asarray(output.token_ids, dtype=np.int32) for output in outputs])
    if not np.array_equal(all_ids[:, 0], token_ids):
        raise ParityError(
            "The engine's first logprob is not the sampled token's.",
            "Every importance ratio would be that of another token.",
            "report this with the vLLM version.",
        )
    head_ids, head_logprobs = all_ids[:, 1:].copy(), all_logprobs[:, 1:].copy()
    # A filter (top-p, top-k, min-p) leaves fewer than K tokens; the rest of the list is filler.
    head_ids[np.isneginf(head_logprobs)] = -1
    return Rollout(
        token_ids=token_ids,
        logprobs=all_logprobs[:, 0].copy(),
        head_ids=head_ids,
        head_logprobs=head_logprobs,
        sequence_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        policy_versions=np.concatenate(list(map(token_versions, spans, lengths))),
        finish_reasons=[str(output.finish_reason) for output in outputs],
        sampling=request.sampling,
    )


def _arrays(output: Any, width: int) -> tuple[np.ndarray, np.ndarray]:
    """[T, 1 + K] ids and logprobs of one completion: the sampled token first, then the head."""
    flat = output.logprobs
    tokens = len(output.token_ids)
    if len(flat.token_ids) != tokens * width:
        raise ParityError(
            f"The engine returned {len(flat.token_ids)} logprobs for {tokens} tokens, not "
            f"{width} per token.",
            "Tokens would be paired with other tokens' logprobs.",
            "report this with the vLLM version.",
        )
    ids = np.asarray(flat.token_ids, dtype=np.int32).reshape(tokens, width)
    return ids, np.asarray(flat.logprobs, dtype=np.float32).reshape(tokens, width)
