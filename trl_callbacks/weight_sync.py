"""The trainer's side of a weight update: round once into a file, ask, and know the outcome.

The file is shared memory that both sides see where they share a host or a directory; elsewhere its
bytes go over HTTP, and a broken connection goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from vllm_parity_plugin.client import ConnectionLost, ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.errors import UnknownUpload, UpdateInProgress
from vllm_parity_plugin.weights.manifest import LORA_A, LORA_B, TensorSpec, compare_adapter
from vllm_parity_plugin.weights.messages import (
    Kind,
    UploadRequest,
    UploadStatus,
    WeightUpdate,
    WeightUpdateResult,
)
from vllm_parity_plugin.weights.writer import header_bytes, write_policy
from vllm_parity_plugin.wire import INCOMING

Transport = Literal["auto", "file", "http"]
Tensors = Iterable[tuple[str, torch.Tensor]]
T = TypeVar("T")

ATTEMPTS = 5
"""Times that a request is sent whose answer got lost: each is idempotent by version or by byte."""


class WeightSync:
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
        self._expected = info.tensors
        self._model = info.model
        self._adapter_base = info.adapter_base
        self.policy_version = info.policy_version
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

    @property
    def expected(self) -> Mapping[str, TensorSpec]:
        """The served model's tensors."""
        return self._expected

    def push(
        self, tensors: Tensors, kv: Literal["keep", "recompute"] = "keep"
    ) -> WeightUpdateResult:
        """Send one complete policy.

        Args:
            tensors: (name, full tensor) pairs under the served checkpoint's names, taken one at a
                time. Each is rounded once to the served dtype.
            kv: what becomes of the KV cache of requests in flight.

        Raises:
            ManifestError: names or shapes that the served model does not have, or values that are
                not finite; the served policy was not touched.
            ParityError: the server failed; the message tells what it serves.
        """
        result = self._send(tensors, self._expected, "full", kv=kv)
        self._adapter_base = result.policy_version
        return result

    def push_changed(
        self, tensors: Mapping[str, torch.Tensor], kv: Literal["keep", "recompute"] = "keep"
    ) -> WeightUpdateResult:
        """Send only the tensors that changed since the last push.

        Raises:
            as :meth:`push`; ConflictError when the server meanwhile serves something else, or has
            too many partial updates on top of each other: then push all.
        """
        specs = {
            name: self._expected.get(name, TensorSpec(dtype="F32", shape=tuple(tensor.shape)))
            for name, tensor in tensors.items()
        }
        result = self._send(
            tensors.items(), specs, "changed", base_version=self.policy_version, kv=kv
        )
        self._adapter_base = result.policy_version
        return result

    def push_adapter(
        self,
        pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        scaling: float = 1.0,
        kv: Literal["keep", "recompute"] = "keep",
    ) -> WeightUpdateResult:
        """Send a LoRA adapter; the server merges it into the last weights without one.

        Args:
            pairs: {served name without ``.weight``: (A [r, in], B [out, r])}. They travel in
                float32; W_base + scaling * B A is rounded once, on the server.

        Raises:
            as :meth:`push`.
        """
        tensors = {
            base + part: tensor
            for base, pair in pairs.items()
            for part, tensor in zip((LORA_A, LORA_B), pair, strict=True)
        }
        specs = {
            name: TensorSpec(dtype="F32", shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        compare_adapter(specs, self._expected)
        return self._send(
            tensors.items(),
            specs,
            "lora",
            base_version=self._adapter_base,
            scaling=scaling,
            kv=kv,
        )

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
                self._send_bytes(upload, data)
            return self._until_known(
                request.version, lambda: self._client.commit_upload(upload.upload_id)
            )
        except BaseException:
            with contextlib.suppress(ParityError):  # it would hold the server until its timeout
                self._client.drop_upload(upload.upload_id)
            raise

    def _send_bytes(self, upload: UploadStatus, data: memoryview) -> None:
        """Send what is missing, from where the server stands after each broken connection."""
        for attempt in range(ATTEMPTS):
            try:
                if upload.received < upload.total:
                    with data[upload.received :] as rest:
                        self._client.send(upload.upload_id, upload.received, upload.total, rest)
                return
            except ConnectionLost:
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(2.0**attempt / 4)
                upload = self._client.upload_status(upload.upload_id)

    def _until_known(
        self, version: int, ask: Callable[[], WeightUpdateResult]
    ) -> WeightUpdateResult:
        """Ask again until the outcome is known: the server answers a repeated version at once."""
        for attempt in range(ATTEMPTS):
            try:
                return self._patiently(ask)
            except (ConnectionLost, UnknownUpload) as error:
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
                if attempt == ATTEMPTS - 1 or isinstance(error, UnknownUpload):
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
