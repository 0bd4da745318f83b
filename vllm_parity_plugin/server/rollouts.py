"""Token ids in, arrays out: completions with sampler heads, without per-token objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from vllm_parity_plugin.core_records import new_request_id
from vllm_parity_plugin.engine_requests import assemble, sampling_params
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.recorded import take
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest


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
    jobs = request.sequences
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
