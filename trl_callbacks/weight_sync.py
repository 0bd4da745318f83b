"""The trainer's side of a weight update: round once into a file, ask, and know the outcome.

The file is shared memory that both sides see where they share a host or a directory; elsewhere its
bytes go over HTTP, and a broken connection goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal, TypeVar

from vllm_parity_plugin.client import ConnectionLost, ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.errors import ConflictError, UnknownUpload, UpdateInProgress
from vllm_parity_plugin.weights.manifest import TensorSpec
from vllm_parity_plugin.weights.messages import (
    Kind,
    UploadRequest,
    UploadStatus,
    WeightUpdate,
    WeightUpdateResult,
)
from vllm_parity_plugin.weights.pusher import Pusher, Tensors
from vllm_parity_plugin.weights.writer import header_bytes, write_policy
from vllm_parity_plugin.wire import INCOMING

Transport = Literal["auto", "file", "http"]
KV = Literal["keep", "recompute"]
T = TypeVar("T")

ATTEMPTS = 5
"""Times that a request is sent whose answer got lost: each is idempotent by version or by byte."""


class WeightSync(Pusher):
    """Pushes policies to one server, each with the next policy version.

    Args:
        client: the server.
        transport: ``file`` writes to the server's directory, ``http`` uploads; ``auto`` takes the
            file where this process sees that directory.
        wait: seconds to wait for another update that holds the server.

    Raises:
        ParityError: ``file`` was asked for and the server's directory is not visible here.
    """

    def __init__(
        self, client: ParityClient, transport: Transport = "auto", wait: float = 60.0
    ) -> None:
        self._client = client
        self._wait = wait
        info = client.weights_info()
        super().__init__(info.tensors, info.policy_version, info.adapter_base)
        self._model = info.model
        directory = client.visible_directory(info)
        if directory is None and transport == "file":
            raise ParityError(
                f"The weights directory of {client.url}, {info.directory}, is not visible here.",
                "Weights were to travel through a file that both sides see.",
                "run the trainer on the server's host, start the server with "
                "VLLM_PARITY_WEIGHTS_DIR set to a directory that both mount, or upload "
                "(transport 'http').",
            )
        self._directory = None if transport == "http" else directory

    @property
    def transport(self) -> str:
        """How weights travel: ``file`` or ``http``."""
        return "http" if self._directory is None else "file"

    def _send(
        self, tensors: Tensors, specs: Mapping[str, TensorSpec], kind: Kind, **fields: Any
    ) -> WeightUpdateResult:
        version = self.policy_version + 1
        name = f"{INCOMING}{version}-{secrets.token_hex(8)}.safetensors"
        with tempfile.TemporaryDirectory(prefix="vllm-parity-") as own:
            path = (self._directory or Path(own)) / name
            entries = write_policy(path, tensors, specs)
            fields |= {
                "version": version,
                "kind": kind,
                "model": self._model,
                "tensors": entries,
            }
            try:
                if self._directory is not None:
                    update = WeightUpdate(file=name, **fields)
                    result = self._until_known(version, lambda: self._client.update_weights(update))
                else:
                    start = len(header_bytes(entries))
                    result = self._upload(UploadRequest(**fields), path, start)
            finally:
                path.unlink(missing_ok=True)
        self.policy_version = result.policy_version
        return result

    def _upload(self, request: UploadRequest, path: Path, start: int) -> WeightUpdateResult:
        upload = self._patiently(lambda: self._client.open_upload(request))
        try:
            with (
                open(path, "rb") as file,
                mmap(file.fileno(), 0, access=ACCESS_READ) as mapped,
                memoryview(mapped) as whole,
                whole[start:] as data,
            ):
                self._send_bytes(request, upload, data)
            return self._until_known(
                request.version, lambda: self._client.commit_upload(upload.upload_id)
            )
        except BaseException:
            with contextlib.suppress(ParityError):  # it would hold the server until its timeout
                self._client.drop_upload(upload.upload_id)
            raise

    def _send_bytes(self, request: UploadRequest, upload: UploadStatus, data: memoryview) -> None:
        """Send what is missing, from where the server stands after each broken connection, until
        that many in a row brought nothing."""
        received, lost, fruitless = upload.received, False, 0
        while received < upload.total:
            try:
                if lost:
                    stands = self._client.upload_status(upload.upload_id).received
                    fruitless = 0 if stands > received else fruitless
                    received, lost = stands, False
                with data[received:] as rest:
                    sent = self._client.send(upload.upload_id, received, upload.total, rest)
                received = sent.received
            except ConnectionLost:
                lost, fruitless = True, fruitless + 1
                if fruitless == ATTEMPTS:
                    raise
                time.sleep(2.0**fruitless / 8)

    def _until_known(
        self, version: int, ask: Callable[[], WeightUpdateResult]
    ) -> WeightUpdateResult:
        """Ask again until the outcome is known: the server answers a repeated version at once."""
        for attempt in range(ATTEMPTS):
            try:
                result = self._patiently(ask)
                if not result.applied and attempt == 0:
                    raise _someone_elses(version)
                return result
            except (ConnectionLost, UnknownUpload) as error:
                gone = isinstance(error, UnknownUpload)
                if gone and attempt == 0:  # no answer of ours got lost: it was dropped
                    raise
                served = self._patiently(self._client.weights_info).policy_version
                if served == version:
                    return WeightUpdateResult(
                        policy_version=version,
                        applied=True,
                        tensors=len(self._expected),
                        bytes=0,
                        pause_seconds=0.0,
                        total_seconds=0.0,
                    )
                if attempt == ATTEMPTS - 1 or gone:
                    raise
                time.sleep(2.0**attempt / 4)
        raise AssertionError("unreachable")

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask while another update holds the server, for ``wait`` seconds."""
        deadline = time.monotonic() + self._wait
        while True:
            try:
                return ask()
            except UpdateInProgress:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.25)


def _someone_elses(version: int) -> ConflictError:
    return ConflictError(
        f"The server already serves a policy version {version}.",
        "Another trainer sent it, so these weights were not loaded.",
        "let one trainer at a time send to a server; make a new WeightSync to go on from what it "
        "serves.",
    )
