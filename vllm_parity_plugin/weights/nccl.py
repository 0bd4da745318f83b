"""An upload's bytes by NCCL broadcast: another way to fill the staged file, with the same checks.

Written to the API of vLLM's ``PyNcclCommunicator`` and unit-tested with a stand-in for it. **It has
not run on a GPU yet.** The trainer is rank 0 of a world of two, one worker rank 1. The trainer
broadcasts every tensor of the manifest in the manifest's order, as bytes, in pieces of at most
``PIECE``: sizes (5, 3) and pieces of 4 are the broadcasts [0, 4), [4, 5), [5, 8); a tensor of no
elements is none. Nothing is unpickled: the unique id comes in the request.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.weights.errors import ConflictError, UnknownUpload
from vllm_parity_plugin.weights.served import Served
from vllm_parity_plugin.weights.uploads import Filling, Uploads

TRAINER, WORKER, WORLD = 0, 1, 2
PIECE = 2**26
"""Bytes of one broadcast at most; part of the protocol, because both sides must agree."""
POLL = 0.1
"""Seconds between two questions to the worker."""


def pieces(sizes: Iterable[int], piece: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of the broadcasts for tensors of these sizes, one after the other."""
    start = 0
    for size in sizes:
        end = start + size
        for begin in range(start, end, piece):
            yield begin, min(begin + piece, end)
        start = end


def vllm_communicator(device: torch.device) -> Any:
    """vLLM's communicator class.

    Raises:
        ParityError: there is no CUDA device to use it on.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ParityError(
            f"NCCL was asked for, and this process computes on {device.type}.",
            "NCCL moves bytes between CUDA devices only.",
            "send the weights as a file or over HTTP (WeightSync with transport 'auto').",
        )
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    return PyNcclCommunicator


class Transfer:
    """One side of a transfer, on a thread and a CUDA stream of its own.

    Nothing is raised on the thread's side: see ``error`` when ``done``.

    Args:
        rank: TRAINER or WORKER.
        unique_id: the ncclUniqueId that both sides were given.
        sizes: bytes of each tensor, in the manifest's order.
        device: where the broadcasts happen; NCCL refuses two ranks on one device.
        timeout: seconds that one broadcast may take.
        communicator: vLLM's class, or a stand-in.

    Raises:
        ParityError: there is no CUDA device.
    """

    def __init__(
        self,
        rank: int,
        unique_id: bytes,
        sizes: list[int],
        device: torch.device,
        timeout: float,
        communicator: Any = None,
    ) -> None:
        self._communicator = communicator or vllm_communicator(device)
        self._rank, self._unique_id, self._sizes = rank, unique_id, sizes
        self._device, self._timeout = device, timeout
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parity-nccl", daemon=True)
        self.bytes = 0
        """How many have passed, from the start."""
        self.error: str | None = None
        self.done = False

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def stop(self) -> None:
        """Give up; a thread that waits for a broadcast aborts the communicator.

        One that waits for the other side to connect cannot be told; it ends when NCCL gives up.
        """
        self._stopped.set()

    def join(self, patience: float) -> None:
        """Wait until it ended, for so many seconds."""
        self._thread.join(patience)

    def before(self, begin: int, end: int, part: torch.Tensor) -> None:
        """Prepare the device buffer ``part`` for bytes [begin, end)."""

    def after(self, begin: int, part: torch.Tensor) -> None:
        """Take what the broadcast left in ``part``, bytes from ``begin`` on."""

    def close(self) -> None:
        """Called once, at the end."""

    def _run(self) -> None:
        try:
            with _on(self._device) as stream:
                self._move(stream)
        except Exception as error:
            logger.exception("an NCCL transfer ended at byte %d", self.bytes)
            self.error = str(error) or type(error).__name__
        finally:
            self.close()
            self.done = True

    def _move(self, stream: Any) -> None:
        link = self._communicator.from_unique_id_bytes(
            self._unique_id, rank=self._rank, world_size=WORLD, device=self._device
        )
        try:
            if link.disabled:  # its broadcast would do nothing, without an error
                raise ParityError(
                    "vLLM's NCCL communicator is disabled (VLLM_DISABLE_PYNCCL).",
                    "No byte would move.",
                    "unset it, or send the weights as a file or over HTTP.",
                )
            size = min(PIECE, max(self._sizes, default=0))
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            for begin, end in pieces(self._sizes, PIECE):
                part = buffer[: end - begin]
                self.before(begin, end, part)
                link.broadcast(part, src=TRAINER, stream=stream)
                wait_for(stream, self._stopped, self._timeout)
                self.after(begin, part)
                self.bytes = end
        finally:  # before the buffer is freed: an aborted broadcast may still write to it
            link.destroy()


class Receiver(Transfer):
    """The worker's side: bytes go to their places in an upload's file.

    Args:
        path: the staged file, which exists.
        start: offset of its data section.
    """

    def __init__(
        self,
        unique_id: bytes,
        sizes: list[int],
        device: torch.device,
        timeout: float,
        path: str,
        start: int,
        communicator: Any = None,
    ) -> None:
        super().__init__(WORKER, unique_id, sizes, device, timeout, communicator)
        self._start = start
        self._file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)

    def after(self, begin: int, part: torch.Tensor) -> None:
        """Write them."""
        data, place = part.cpu().numpy().data, self._start + begin
        while len(data):
            written = os.pwrite(self._file, data, place)
            place, data = place + written, data[written:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def wait_for(stream: Any, stopped: threading.Event, timeout: float) -> None:
    """Wait until a CUDA stream is idle (None: it is), without blocking in the driver.

    Raises:
        ParityError: it took longer than ``timeout`` seconds, or ``stopped`` was set.
    """
    deadline = time.monotonic() + timeout
    while not stopped.is_set():
        if stream is None or stream.query():
            return
        if time.monotonic() > deadline:
            raise ParityError(
                f"The other side took no part in a broadcast for {timeout:.0f} s.",
                "It died, or its tensors have other sizes or another order than the manifest.",
                "look at its log, then upload again.",
            )
        time.sleep(0.001)
    raise ParityError(
        "The NCCL transfer was given up.", "Its upload is gone.", "open a new upload."
    )


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[Any]:
    """Work on a new stream of the device; None for a device without streams."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream


class Reception:
    """The API server's side: has a worker fill an upload, and notes how far it is.

    The upload's file is locked meanwhile, so that neither a PUT nor a commit comes in between.

    Args:
        server_id: instance of the worker that receives.
    """

    def __init__(self, served: Served, uploads: Uploads, upload_id: str, server_id: str) -> None:
        self._served, self._uploads = served, uploads
        self._upload_id, self._server_id = upload_id, server_id
        self._open = contextlib.ExitStack()
        self._filling: Filling

    async def start(self, unique_id: str) -> None:
        """Have the worker wait for the trainer, which must connect now.

        Raises:
            UnknownUpload: there is no such upload.
            ConflictError: the worker has no CUDA device, cannot open the file, or still receives.
            UpdateInProgress: the upload is being written to, or applied.
        """
        with contextlib.ExitStack() as stack:
            filling = self._filling = stack.enter_context(self._uploads.fill(self._upload_id))
            reports = await self._served.on_first_engine(
                "receive",
                self._server_id,
                unique_id,
                str(filling.path),
                filling.start,
                filling.sizes,
                self._uploads.timeout,
            )
            if (error := next((r["error"] for r in reports if r["error"]), None)) is not None:
                raise ConflictError(
                    f"The worker cannot receive by NCCL: {error}",
                    "No byte would come.",
                    "act on the message, or PUT the bytes: the upload is still open.",
                )
            self._open = stack.pop_all()

    async def follow(self) -> None:
        """Note what arrives until all did, or the worker failed, or the upload is gone."""
        done = False
        with self._open:
            try:
                while not done:
                    await asyncio.sleep(POLL)
                    state = await self._state()
                    self._filling.advance(state["bytes"], state["failure"])
                    done = state["done"]
            except UnknownUpload:  # dropped for its silence, or given up
                pass
            except Exception:
                logger.exception("cannot follow the NCCL transfer of an upload")
            finally:
                if not done:
                    await self._served.on_first_engine("stop")

    async def _state(self) -> dict[str, Any]:
        reports = await self._served.on_first_engine("received")
        return next(report for report in reports if report["instance"] == self._server_id)


def decoded(unique_id: str) -> bytes:
    """The bytes of a request's unique id."""
    return base64.b64decode(unique_id, validate=True)
