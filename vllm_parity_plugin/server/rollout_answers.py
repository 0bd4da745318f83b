"""How a rollout is sent: in one body or one per sequence, in which dtype, compressed or not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import zstandard
from fastapi import HTTPException, Request, Response
from starlette.types import Receive, Scope, Send

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import (
    BODY_TYPE,
    STREAM_TYPE,
    HeadDtype,
    Rollout,
    RolloutRequest,
    error_frame,
    frame,
)
from vllm_parity_plugin.server.jobs import Job, Jobs

FINISH, BLOCK = zstandard.COMPRESSOBJ_FLUSH_FINISH, zstandard.COMPRESSOBJ_FLUSH_BLOCK
LEVEL = 1
"""Of zstd: more than this costs more time than the bytes do on any link worth having."""
T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """What the caller and this server agreed on.

    Attributes:
        media_type: of the answer, without parameters.
        head_dtype: of ``head_logprobs``.
        zstd: whether the answer is compressed.
    """

    media_type: str
    head_dtype: HeadDtype
    zstd: bool

    @classmethod
    def negotiate(cls, accept: str, accept_encoding: str, stream: bool) -> Form:
        """The best form that the caller takes.

        ``Accept: application/vnd.safetensors; head=float16`` gives float16 head logprobs.

        Raises:
            HTTPException: 406, the caller takes nothing that this route can send.
        """
        media_type = STREAM_TYPE if stream else BODY_TYPE
        for offer in accept.lower().split(","):
            name, *parameters = (part.strip() for part in offer.split(";"))
            if name not in {media_type, "application/*", "*/*"}:
                continue
            values = dict(part.partition("=")[::2] for part in parameters)
            head = values.get("head", "float32").strip('"')
            if head in {"float32", "float16"} and _wanted(values.get("q", "1")):
                zstd = any(
                    re.match(r"\s*zstd\s*(;\s*q\s*=\s*(?!0(\.0*)?\s*$)|$)", coding)
                    for coding in accept_encoding.lower().split(",")
                )
                return cls(media_type, cast(HeadDtype, head), zstd)
        raise HTTPException(
            406,
            f"Found Accept: {accept}. This route sends {media_type} with head=float32 or "
            f"head=float16. Fix: send Accept: {media_type}, with `stream` as you want it.",
        )

    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        content = {"content-type": f"{self.media_type}; head={self.head_dtype}"}
        varying = {"vary": "accept, accept-encoding"}
        return content | varying | ({"content-encoding": "zstd"} if self.zstd else {})


def _wanted(quality: str) -> bool:
    try:
        return float(quality) > 0.0
    except ValueError:
        return True


async def answer_whole(
    jobs: Jobs, job: Job, request: RolloutRequest, form: Form, connection: Request
) -> Response:
    """All sequences in one body."""

    def body(parts: list[Rollout]) -> bytes:
        data = Rollout.join(parts, request.sampling_of_sequences).to_bytes(form.head_dtype)
        return zstandard.ZstdCompressor(level=LEVEL).compress(data) if form.zstd else data

    jobs.join(job)
    try:
        parts = await _while_connected(connection, job.all())
    finally:
        await jobs.leave(job)
    # Hundreds of megabytes are copied: other requests go on meanwhile.
    return Response(await asyncio.to_thread(body, parts), headers=form.headers())


async def answer_streamed(jobs: Jobs, job: Job, form: Form, connection: Request) -> Response:
    """Sequence by sequence. What fails before the first one is still an HTTP error."""
    jobs.join(job)
    try:
        await _while_connected(connection, job.begun())
    except BaseException:
        await jobs.leave(job)
        raise
    return _Streamed(jobs, job, form)


class _Streamed(Response):
    """Frames as the sequences end; leaves the job when the caller hangs up, or at the end.

    A caller that does not read holds back nothing but its own frames: ``send`` waits.
    """

    def __init__(self, jobs: Jobs, job: Job, form: Form) -> None:
        super().__init__(headers=form.headers())
        del self.headers["content-length"]
        self._jobs, self._job, self._form = jobs, job, form
        self._compress = zstandard.ZstdCompressor(level=LEVEL).compressobj() if form.zstd else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            sent = await _until(self._frames(send), _hung_up(receive))
            if sent is not None:
                sent.result()
        finally:
            await self._jobs.leave(self._job)

    async def _frames(self, send: Send) -> None:
        async def put(data: bytes, last: bool = False) -> None:
            if self._compress is not None:
                flush = FINISH if last else BLOCK
                data = self._compress.compress(data) + self._compress.flush(flush)
            await send({"type": "http.response.body", "body": data, "more_body": not last})

        try:
            async for index, rollout in self._job.follow():
                await put(frame(rollout.to_bytes(self._form.head_dtype, index)))
        except Exception as error:  # the status is long sent: the stream has to say it
            await put(error_frame(_told(error)))
        await put(frame(b""), last=True)


def _told(error: Exception) -> ParityError:
    if isinstance(error, ParityError):
        return error
    return ParityError(
        f"The server failed while it sampled ({error!r}).",
        "The other completions of this request are lost.",
        "look at the server's log.",
    )


async def _while_connected(connection: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which ends when its caller hangs up: nobody would read it."""
    task = await _until(work, _hung_up(connection.receive))
    if task is None:
        raise HTTPException(400, "The caller hung up.")
    return task.result()


async def _until(work: Coroutine[Any, Any, T], end: Awaitable[None]) -> asyncio.Task[T] | None:
    """``work`` when it is done, or None when the other ended before it and it was cancelled."""
    task, gone = asyncio.create_task(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task if task.done() else None
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
