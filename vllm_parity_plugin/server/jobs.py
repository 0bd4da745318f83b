"""Rollouts that outlive a broken connection, so that a retry gets the same ones.

A retry that sampled anew would favour completions that are short or early enough to arrive, and
nobody would see it. So a request with an idempotency key is sampled once; whoever repeats it
follows the same work, and where that is not possible, the repeat is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from vllm_parity_plugin.errors import NotRepeatable
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest

Sequences = AsyncIterator[tuple[int, Rollout]]

KEEP_SECONDS = 30.0
"""How long one that has ended can be fetched again; a client retries within seconds."""
KEEP_BYTES = 2**28
"""Of those, beside the newest one; the oldest go first."""
REMEMBERED = 10_000
"""Keys of requests that were begun here."""


class Job:
    """The sampling of one request, and its sequences so far.

    Args:
        work: what samples; it is closed when the job is cancelled.
        fingerprint: of the request, to tell another one with the same key.
    """

    def __init__(self, work: Sequences, fingerprint: bytes = b"") -> None:
        self.fingerprint = fingerprint
        self.listeners = 0
        self.left_at = time.monotonic()
        """When the last listener left, or the work ended without one."""
        self.bytes = 0
        self.ended = False
        """Whether there is nothing more to come."""
        self._found: list[tuple[int, Rollout]] = []
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run(work))

    async def _run(self, work: Sequences) -> None:
        try:
            async for index, rollout in work:
                self._found.append((index, rollout))
                self.bytes += rollout.head_ids.nbytes + rollout.head_logprobs.nbytes
                self._tell()
        except BaseException as error:
            self._error = error
        finally:
            self.left_at = time.monotonic()
            self.ended = True
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    async def follow(self) -> Sequences:
        """Every sequence, those of the past first, in the order in which they ended.

        Raises:
            BaseException: what ended the sampling early.
        """
        seen = 0
        while True:
            news = self._news
            while seen < len(self._found):
                yield self._found[seen]
                seen += 1
            if self._error is not None:
                raise self._error
            if self.ended:
                return
            await news.wait()

    async def begun(self) -> None:
        """Return when there is a first sequence.

        Raises:
            BaseException: what ended the sampling before.
        """
        async for _ in self.follow():
            return

    async def all(self) -> list[Rollout]:
        """All sequences in the order of the request.

        Raises:
            BaseException: what ended the sampling early.
        """
        found = [item async for item in self.follow()]
        return [rollout for _, rollout in sorted(found, key=lambda item: item[0])]

    async def cancel(self) -> None:
        """End the sampling; the engine's requests are aborted."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Jobs:
    """The rollouts of one API-server process.

    Args:
        server_id: what a retry must name: after a restart the policy is another one.
        alone: no other API-server process takes requests on the same port.
        grace: seconds that a rollout with a key goes on after its caller hung up.
    """

    def __init__(self, server_id: str, alone: bool, grace: float) -> None:
        self._server_id, self._alone, self._grace = server_id, alone, grace
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._begun: OrderedDict[str, None] = OrderedDict()

    def open(
        self,
        request: RolloutRequest,
        start: Callable[[], Sequences],
        key: str | None,
        retry: str | None,
    ) -> Job:
        """The job of a request: a new one, or with a known key the one that runs or has run.

        Raises:
            NotRepeatable: a repeated request whose first answer this process cannot give again.
        """
        if key is None:
            return Job(start())
        # How the answer is sent may change from one attempt to the next; what is asked may not.
        asked = request.model_copy(update={"stream": False}).model_dump_json()
        fingerprint = hashlib.sha256(asked.encode()).digest()
        job = self._jobs.get(key)
        if job is None:
            self._refuse_resampling(key, retry)
            job = self._jobs[key] = Job(start(), fingerprint)
            self._begun[key] = None
            while len(self._begun) > REMEMBERED:
                self._begun.popitem(last=False)
        elif job.fingerprint != fingerprint:
            raise _not_repeatable(
                "This idempotency key belongs to another request", "use a new key per request"
            )
        return job

    def _refuse_resampling(self, key: str, retry: str | None) -> None:
        again = "send the request anew, with a new key, if other completions will do"
        if key in self._begun:
            raise _not_repeatable(
                "The answer to this request is no longer kept (its caller was gone for more than "
                f"{self._grace:g} s, or it was over {KEEP_SECONDS:.0f} s ago)",
                again,
            )
        if retry is None:
            return
        if retry != self._server_id:
            raise _not_repeatable(
                "The server was restarted since this request was first sent",
                "push the policy again and start from the last checkpoint",
            )
        if not self._alone:
            raise _not_repeatable(
                "Another API-server process may have taken this request when it was first sent",
                f"{again}; with --api-server-count 1 a retry finds its answer",
            )

    def join(self, job: Job) -> None:
        """Somebody wants this job's answer."""
        job.listeners += 1

    async def leave(self, job: Job) -> None:
        """And has it, or is gone. A job without a key ends: nobody could come back to it."""
        job.listeners -= 1
        job.left_at = time.monotonic()
        if job not in self._jobs.values():
            await job.cancel()

    async def reap(self) -> None:
        """Cancel what nobody follows any more, and forget old answers."""
        now = time.monotonic()
        newer = 0
        for key, job in reversed(list(self._jobs.items())):
            too_much = job.ended and newer >= KEEP_BYTES
            newer += job.bytes if job.ended else 0
            if job.listeners:
                continue
            limit = KEEP_SECONDS if job.ended else self._grace
            if too_much or now - job.left_at > limit:
                del self._jobs[key]
                await job.cancel()
            elif job.failed:  # nothing was given out: the key may be used again
                del self._jobs[key], self._begun[key]


def _not_repeatable(found: str, fix: str) -> NotRepeatable:
    return NotRepeatable(
        f"{found}.",
        "Sampling again in silence would favour completions that happen to arrive.",
        f"{fix}.",
    )
