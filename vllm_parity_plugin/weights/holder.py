"""What one worker holds: the committed weights, and an update that is being applied.

Nothing here raises: vLLM's executor stops reading answers at the first worker that fails, and
would take the others' late answers for those of its next question. Failures are reported as data.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from typing import Any, Literal

import torch

from vllm_parity_plugin.log import logger
from vllm_parity_plugin.weights.errors import ConflictError, ManifestError
from vllm_parity_plugin.weights.nccl import Receiver, decoded
from vllm_parity_plugin.weights.reload import load_stack
from vllm_parity_plugin.weights.stack import CHECKPOINT, Layer, Stack

ATTRIBUTE = "_parity_weights"

Phase = Literal["committed", "mixed"]


class WeightHolder:
    """The weights of one worker process.

    Attributes:
        stack: the committed weights.
        phase: ``mixed`` from the first byte of an update until it is committed or taken back.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._pending: Stack | None = None
        self.stack = CHECKPOINT
        self.phase: Phase = "committed"
        self.instance = uuid.uuid4().hex
        self._receiver: Receiver | None = None

    @property
    def version(self) -> int:
        """Committed policy version."""
        return self.stack[-1].version

    def report(self, error: str | None = None) -> dict[str, Any]:
        """Where this worker stands, as plain msgpack types."""
        return {
            "rank": int(self._worker.rank),
            "host": socket.gethostname(),
            "instance": self.instance,
            "version": self.version,
            "phase": self.phase,
            "stack": [layer.model_dump() for layer in self.stack],
            "error": error,
        }

    def check(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        """Whether this worker can read the verified files of a stack. Touches nothing."""
        return self._attempt(lambda: _check_files(_stack(layers)))

    def apply(self, layers: list[dict[str, Any]], only: list[str] | None) -> dict[str, Any]:
        """Load a stack; it is served only after :meth:`commit`."""

        def load() -> None:
            stack = _stack(layers)
            _check_files(stack)
            self.phase = "mixed"
            load_stack(self._worker, stack, None if only is None else set(only))
            self._pending = stack

        return self._attempt(load)

    def commit(self, kept: bool) -> dict[str, Any]:
        """Make what was applied the committed weights.

        Args:
            kept: whether its files stay, so that it can be loaded again.
        """

        def swap() -> None:
            if self._pending is None:
                raise ValueError("nothing was applied")
            forgotten = {"file": None}
            self.stack = tuple(
                layer if kept else layer.model_copy(update=forgotten) for layer in self._pending
            )
            self._pending, self.phase = None, "committed"

        return self._attempt(swap)

    def restore(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        """Go back to a stack that was committed before; nothing to do when it still is."""
        stack = _stack(layers)

        def load() -> None:
            self._pending, self.phase = None, "mixed"
            _check_files(stack)  # they lay there for as long as they were served
            load_stack(self._worker, stack)
            self.stack, self.phase = stack, "committed"

        held = self.phase == "committed" and self.stack == stack
        return self.report() if held else self._attempt(load)

    def receive(
        self,
        instance: str,
        unique_id: str,
        path: str,
        start: int,
        sizes: list[int],
        timeout: float,
    ) -> dict[str, Any]:
        """Begin to fill an upload's file by NCCL, if this worker is ``instance``."""

        def begin() -> None:
            if self._receiver is not None and not self._receiver.done:
                raise ConflictError(
                    "This worker still waits for the trainer of an earlier NCCL transfer.",
                    "Two at once would mix policies.",
                    "try again later, or send the weights as a file or over HTTP.",
                )
            device = torch.device(self._worker.device)
            receiver = Receiver(decoded(unique_id), sizes, device, timeout, path, start)
            receiver.start()
            self._receiver = receiver

        return self._attempt(begin) if instance == self.instance else self.report()

    def received(self) -> dict[str, Any]:
        """How far that is: ``bytes``, ``done``, and as ``failure`` why it ended early."""
        receiver = self._receiver
        if receiver is None:
            return self.report() | {"bytes": 0, "done": True, "failure": "nothing was started"}
        done = receiver.done  # before the bytes: done means that these are all
        return self.report() | {"bytes": receiver.bytes, "done": done, "failure": receiver.error}

    def stop(self) -> dict[str, Any]:
        """Give it up."""
        if self._receiver is not None:
            self._receiver.stop()
        return self.report()

    def _attempt(self, action: Callable[[], object]) -> dict[str, Any]:
        try:
            action()
        except Exception as error:
            logger.exception("weights of rank %s", self._worker.rank)
            return self.report(str(error) or type(error).__name__)
        return self.report()


def holder(worker: Any) -> WeightHolder:
    """The worker's one holder."""
    found: WeightHolder | None = getattr(worker, ATTRIBUTE, None)
    if found is None:
        found = WeightHolder(worker)
        setattr(worker, ATTRIBUTE, found)
    return found


def _stack(layers: list[dict[str, Any]]) -> Stack:
    return tuple(Layer(**layer) for layer in layers)


def _check_files(stack: Stack) -> None:
    for layer in stack:
        _check_file(layer)


def _check_file(layer: Layer) -> None:
    """The file is there, readable, and the one that was verified."""
    if layer.file is None:
        return
    try:
        found = os.stat(layer.file)
        with open(layer.file, "rb"):
            pass
    except OSError as error:
        raise ManifestError(
            f"A worker on {socket.gethostname()} cannot read the staged weights "
            f"({error.strerror}).",
            "It could not load them.",
            "share the weights directory with every node: VLLM_PARITY_WEIGHTS_DIR.",
        ) from None
    if (found.st_size, found.st_mtime_ns) != (layer.size, layer.mtime_ns):
        raise ManifestError(
            "The staged file changed after it was verified.",
            "What would be loaded is not what was checked.",
            "close the file before sending the request, and never write to it again.",
        )
