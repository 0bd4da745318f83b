"""Token ids in, arrays out: completions with sampler heads, without per-token objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import numpy as np

from vllm_parity_plugin.core_records import Recorded, new_request_id, take
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest, Sampling

PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
"""Where a multimodal model's configuration names the tokens that stand for something else."""


async def sequences(engine: Any, request: RolloutRequest) -> AsyncIterator[tuple[int, Rollout]]:
    """Sample ``n`` completions of every prompt; each as soon as it has ended.

    All sequences run as separate engine requests at once; if one fails, the others are aborted.
    Those that end in the same step are fetched from the engine core together.

    Yields:
        index of the sequence (prompt-major), and a rollout of that one sequence.

    Raises:
        ValueError: vLLM's word on a parameter.
        ParityError: a sequence that the engine did not return in full.
    """
    jobs = [
        (prompt, sample) for prompt in range(len(request.prompts)) for sample in range(request.n)
    ]
    ids = [new_request_id() for _ in jobs]
    ended: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_sample(engine, request, job, request_id, ended, index))
        for index, (job, request_id) in enumerate(zip(jobs, ids, strict=True))
    ]
    left = set(range(len(jobs)))
    try:
        while left:
            batch = [await ended.get()]
            while not ended.empty():
                batch.append(ended.get_nowait())
            for _, output in batch:
                if isinstance(output, Exception):
                    raise output
            left.difference_update(index for index, _ in batch)
            records = await take(engine, [ids[index] for index, _ in batch])
            for index, output in batch:
                sampling = request.sampling_of(jobs[index][0])
                yield index, assemble(output, records[ids[index]], sampling)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if left:
            with suppress(Exception):  # The first error is the one to report.
                await take(engine, [ids[index] for index in left])


async def _sample(
    engine: Any,
    request: RolloutRequest,
    job: tuple[int, int],
    request_id: str,
    ended: asyncio.Queue[tuple[int, Any]],
    index: int,
) -> None:
    """Put one completion, or what went wrong, into ``ended``."""
    prompt, sample = job
    final = None
    try:
        params = sampling_params(request, prompt, sample)
        inputs = {"prompt_token_ids": request.prompts[prompt]}
        async for output in engine.generate(inputs, params, request_id):
            final = output
    except Exception as error:
        await ended.put((index, error))
        return
    await ended.put((index, final or _nothing(prompt)))


def _nothing(prompt: int) -> ParityError:
    return ParityError(
        f"The engine returned nothing for prompt {prompt}.",
        "Its completion is lost.",
        "look at the server's log; send the request again.",
    )


def check(request: RolloutRequest, model_config: Any, head_limit: int) -> None:
    """Refuse what the served model cannot take.

    Args:
        model_config: vLLM's.
        head_limit: most head entries per token that the engine returns.

    Raises:
        ParityError: naming the prompt or the parameter.
    """
    vocab = model_config.get_vocab_size()
    if request.head_size > head_limit:
        raise ParityError(
            f"head_size={request.head_size} is more than this server returns ({head_limit}; its "
            f"vocabulary has {vocab} tokens).",
            "The engine would reject the request.",
            f"ask for at most {head_limit}, or restart the server with VLLM_PARITY_HEAD_SIZE.",
        )
    per_prompt: dict[str, list[Any] | None] = {"seeds": request.seeds}
    if isinstance(request.sampling, list):
        per_prompt["sampling parameters"] = request.sampling
    for name, values in per_prompt.items():
        if values is not None and len(values) != len(request.prompts):
            raise ParityError(
                f"{len(values)} {name} came with {len(request.prompts)} prompts.",
                "Which of them belongs to which prompt is unclear.",
                "send one per prompt, or none.",
            )
    max_len = model_config.max_model_len
    placeholders = _placeholders(model_config.hf_config)
    for index, prompt in enumerate(request.prompts):
        if not prompt or len(prompt) >= max_len or min(prompt) < 0 or max(prompt) >= vocab:
            raise ParityError(
                f"Prompt {index} has {len(prompt)} token ids"
                + (f" in [{min(prompt)}, {max(prompt)}]." if prompt else "."),
                f"The served model takes 1 to {max_len - 1} ids in [0, {vocab - 1}].",
                "shorten the prompt, raise --max-model-len, or use the served model's tokenizer.",
            )
        if found := placeholders.intersection(prompt):
            raise ParityError(
                f"Prompt {index} holds token {min(found)}, which stands for an image, a video or "
                "audio.",
                "Parity rollouts carry token ids only, so the model would read the placeholder's "
                "own embedding.",
                "send text prompts, or use TRL's own vLLM mode with ParityCallback.",
            )


def _placeholders(hf_config: Any) -> set[int]:
    found = (getattr(hf_config, name, None) for name in PLACEHOLDERS)
    return {value for value in found if isinstance(value, int)}


def sampling_params(request: RolloutRequest, prompt: int, sample: int) -> Any:
    """vLLM's parameters of one sequence."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling_of(prompt)
    return SamplingParams(
        **sampling.model_dump(exclude_none=True),
        seed=None if request.seeds is None else request.seeds[prompt] + sample,
        logprobs=request.head_size,
        flat_logprobs=True,
        # Text is made where a stop string has to be found in it, and nowhere else.
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def assemble(output: Any, recorded: Recorded, sampling: Sampling) -> Rollout:
    """One sequence, from vLLM's final output and what the engine core recorded.

    Raises:
        ParityError: the two do not fit.
    """
    completion = output.outputs[0]
    tokens = len(completion.token_ids)
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    # A stop string is found in the front end, when the engine may already be a token further.
    ids, logprobs = recorded.ids[:tokens], recorded.logprobs[:tokens]
    if len(ids) != tokens:
        raise ParityError(
            f"The engine recorded {len(ids)} rows of logprobs for {tokens} tokens.",
            "Tokens would be paired with other tokens' logprobs.",
            "report this with the vLLM version.",
        )
    if not np.array_equal(ids[:, 0], token_ids):
        raise ParityError(
            "The engine's first logprob is not the sampled token's.",
            "Every importance ratio would be that of another token.",
            "report this with the vLLM version.",
        )
    head_ids, head_logprobs = ids[:, 1:].copy(), logprobs[:, 1:].copy()
    # A filter (top-p, top-k, min-p) leaves fewer than K tokens; the rest of the list is filler.
    head_ids[np.isneginf(head_logprobs)] = -1
    return Rollout(
        token_ids=token_ids,
        logprobs=logprobs[:, 0].copy(),
        head_ids=head_ids,
        head_logprobs=head_logprobs,
        sequence_offsets=np.asarray([0, tokens], dtype=np.int64),
        policy_versions=recorded.versions(tokens),
        cached_tokens=np.asarray([output.num_cached_tokens or 0], dtype=np.int32),
        finish_reasons=[str(completion.finish_reason)],
        stop_reasons=[completion.stop_reason],
        sampling=sampling,
    )
