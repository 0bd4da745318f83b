"""Rollouts that outlive a connection, with a sampler that the test controls.

Properties:
- every listener gets every sequence, those before it came too, in the order in which they ended;
  an error reaches all of them;
- without a key the sampling ends with its listener; with one it goes on for the grace period, and
  its answer is kept for a while, within a limit of bytes;
- a repeated request follows the first; where that is impossible it is refused, and never sampled
  again; a request that failed, or that never began here, may be sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_wire import rollout
from vllm_parity_plugin.errors import NotRepeatable
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest
from vllm_parity_plugin.server import jobs as jobs_module
from vllm_parity_plugin.server.jobs import Job, Jobs

REQUEST = RolloutRequest(prompts=[[5], [6]])
SERVER = "this-server"


class Sampler:
    """Gives out a sequence whenever the test says so."""

    def __init__(self) -> None:
        self.begun, self.closed = 0, 0
        self._orders: asyncio.Queue[Any] = asyncio.Queue()

    async def work(self) -> AsyncIterator[tuple[int, Rollout]]:
        self.begun += 1
        try:
            while (order := await self._orders.get()) is not None:
                if isinstance(order, Exception):
                    raise order
                yield order, rollout([order + 1])
        finally:
            self.closed += 1

    async def give(self, *orders: Any) -> None:
        for order in orders:
            self._orders.put_nowait(order)
        await asyncio.sleep(0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list that a test can change."""
    now = [100.0]
    # In this module only: the event loop needs the real one.
    monkeypatch.setattr(jobs_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def registry(**more: Any) -> Jobs:
    return Jobs(SERVER, **{"alone": True, "grace": 10.0} | more)


async def lengths(job: Job) -> list[int]:
    """Sequences in the order of the request; their lengths tell them apart."""
    return [len(part.token_ids) for part in await job.all()]


def test_every_listener_gets_everything() -> None:
    async def test() -> None:
        sampler = Sampler()
        job = Job(sampler.work())
        early = asyncio.create_task(lengths(job))
        await sampler.give(1)
        order = [index async for index, _ in _take(job, 1)]
        await sampler.give(0, None)
        assert order == [1]
        assert await early == await lengths(job) == [1, 2]
        assert [index async for index, _ in job.follow()] == [1, 0]
        assert (sampler.begun, sampler.closed) == (1, 1)

    run(test())


async def _take(job: Job, count: int) -> AsyncIterator[tuple[int, Rollout]]:
    async for item in job.follow():
        yield item
        count -= 1
        if not count:
            return


def test_an_error_reaches_all_and_frees_the_key(clock: list[float]) -> None:
    async def test() -> None:
        jobs, sampler = registry(), Sampler()
        job = jobs.open(REQUEST, sampler.work, "key", None)
        listener = asyncio.create_task(job.all())
        await sampler.give(0, ValueError("top_p"))
        for waiting in (listener, job.all()):
            with pytest.raises(ValueError, match="top_p"):
                await waiting
        await jobs.reap()
        assert jobs.open(REQUEST, sampler.work, "key", SERVER) is not job

    run(test())


def test_without_a_key_the_sampling_ends_with_its_listener() -> None:
    async def test() -> None:
        jobs, sampler = registry(), Sampler()
        job = jobs.open(REQUEST, sampler.work, None, None)
        jobs.join(job)
        await sampler.give(0)
        await jobs.leave(job)
        assert sampler.closed == 1

    run(test())


@pytest.mark.parametrize("back", [True, False])
def test_with_a_key_it_goes_on_for_a_while(clock: list[float], back: bool) -> None:
    """Who comes back in time follows the same sampling; afterwards it is gone, and refused."""

    async def test() -> None:
        jobs, sampler = registry(), Sampler()
        job = jobs.open(REQUEST, sampler.work, "key", None)
        jobs.join(job)
        await sampler.give(0)
        await jobs.leave(job)
        clock[0] += 9
        await jobs.reap()
        assert not job.ended
        if back:
            assert jobs.open(REQUEST, sampler.work, "key", SERVER) is job
            jobs.join(job)
        clock[0] += 9
        await jobs.reap()
        assert job.ended is not back
        if back:
            await sampler.give(1, None)
            assert await lengths(job) == [1, 2]
        else:
            with pytest.raises(NotRepeatable, match="no longer kept"):
                jobs.open(REQUEST, sampler.work, "key", SERVER)
        assert sampler.begun == 1

    run(test())


def test_answers_are_kept_within_limits(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By age, and by bytes with the oldest out first; one that is being sent stays."""

    async def test() -> None:
        jobs, sampler = registry(), Sampler()
        found = []
        for key in "abc":
            found.append(jobs.open(REQUEST, sampler.work, key, None))
            await asyncio.sleep(0.01)
            await sampler.give(7, None)
        jobs.join(found[0])
        assert {job.bytes for job in found} == {8 * 3 * 8}
        monkeypatch.setattr(jobs_module, "KEEP_BYTES", 8 * 3 * 8)
        await jobs.reap()
        assert jobs.open(REQUEST, sampler.work, "a", None) is found[0]
        assert jobs.open(REQUEST, sampler.work, "c", None) is found[2]
        with pytest.raises(NotRepeatable):
            jobs.open(REQUEST, sampler.work, "b", None)
        clock[0] += jobs_module.KEEP_SECONDS + 1
        await jobs.reap()
        with pytest.raises(NotRepeatable):
            jobs.open(REQUEST, sampler.work, "c", None)

    run(test())


@pytest.mark.parametrize(
    ("alone", "retry", "reason"),
    [
        (True, None, None),
        (True, SERVER, None),
        (True, "an-older-one", "restarted"),
        (False, None, None),
        (False, SERVER, "Another API-server process"),
    ],
)
def test_a_key_that_is_new_here(alone: bool, retry: str | None, reason: str | None) -> None:
    """A first attempt is sampled; a repeated one only if it cannot have been sampled before."""

    async def test() -> None:
        jobs, sampler = registry(alone=alone), Sampler()
        if reason is None:
            job = jobs.open(REQUEST, sampler.work, "key", retry)
            await sampler.give(None)
            assert await lengths(job) == []
        else:
            with pytest.raises(NotRepeatable, match=reason):
                jobs.open(REQUEST, sampler.work, "key", retry)
            assert sampler.begun == 0

    run(test())


def test_a_key_belongs_to_one_request() -> None:
    """Whether the answer is streamed may change from one attempt to the next."""

    async def test() -> None:
        jobs, sampler = registry(), Sampler()
        job = jobs.open(REQUEST, sampler.work, "key", None)
        streamed = REQUEST.model_copy(update={"stream": True})
        assert jobs.open(streamed, sampler.work, "key", SERVER) is job
        with pytest.raises(NotRepeatable, match="belongs to another request"):
            jobs.open(RolloutRequest(prompts=[[5]]), sampler.work, "key", SERVER)
        await job.cancel()

    run(test())


def test_keys_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "REMEMBERED", 2)

    async def test() -> None:
        jobs, sampler = registry(), Sampler()
        for key in "abc":
            await jobs.open(REQUEST, sampler.work, key, None).cancel()
        assert list(jobs._begun) == ["b", "c"]

    run(test())
