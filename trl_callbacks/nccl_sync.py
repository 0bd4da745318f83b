"""Weight updates whose bytes go to the server by NCCL, behind the manifest and commit of HTTP.

Written to the API of vLLM's ``PyNcclCommunicator`` and unit-tested with a stand-in for it. **It has
not run on a GPU yet.** The trainer's process needs vLLM installed, and a GPU other than the
worker's: NCCL refuses two ranks on one device.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from trl_callbacks.weight_sync import WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.messages import UploadRequest, UploadStatus
from vllm_parity_plugin.weights.nccl import TRAINER, Transfer, vllm_communicator

POLL = 0.1
"""Seconds between two questions about the progress."""
PATIENCE = 10.0
"""Seconds in which a transfer that is over lets go of the bytes."""


class NcclWeightSync(WeightSync):
    """Pushes policies to one server by NCCL broadcast.

    Args:
        client: the server.
        device: the trainer's CUDA device; by default the current one.
        wait: seconds to wait for another update that holds the server.
        communicator: vLLM's class, or a stand-in.
        new_unique_id: makes an ncclUniqueId; by default NCCL does.

    Raises:
        ParityError: this process has no CUDA device.
    """

    def __init__(
        self,
        client: ParityClient,
        device: torch.device | None = None,
        wait: float = 60.0,
        communicator: Any = None,
        new_unique_id: Any = None,
    ) -> None:
        if device is None:
            cuda = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else None
        self._device = device or torch.device("cpu")
        self._communicator = communicator or vllm_communicator(self._device)
        self._new_unique_id = new_unique_id or nccl_unique_id
        super().__init__(client, "http", wait)

    @property
    def transport(self) -> str:
        """How weights travel: ``nccl``."""
        return "nccl"

    def _send_bytes(self, request: UploadRequest, upload: UploadStatus, data: memoryview) -> None:
        """Broadcast while the server counts; its word is the one that matters."""
        unique_id = self._new_unique_id()
        sizes = [entry.nbytes for entry in request.tensors.values()]
        sender = Sender(
            unique_id, sizes, self._device, upload.timeout, data, communicator=self._communicator
        )
        self._client.start_nccl(upload.upload_id, unique_id)
        sender.start()
        try:
            while (status := self._client.upload_status(upload.upload_id)).received < upload.total:
                if (error := status.error or sender.error) is not None:
                    raise ParityError(
                        f"The NCCL transfer ended at byte {status.received} of {status.total}: "
                        f"{error}",
                        "The old weights are served on.",
                        "act on the message, or send over HTTP: WeightSync(client, 'http').",
                    )
                time.sleep(POLL)
        except BaseException:
            sender.stop()
            raise
        finally:
            sender.join(PATIENCE)


class Sender(Transfer):
    """The trainer's side of a transfer.

    Args:
        data: the data section of the policy's file.
    """

    def __init__(
        self,
        unique_id: bytes,
        sizes: list[int],
        device: torch.device,
        timeout: float,
        data: memoryview,
        communicator: Any = None,
    ) -> None:
        super().__init__(TRAINER, unique_id, sizes, device, timeout, communicator)
        self._data = data

    def before(self, begin: int, end: int, part: torch.Tensor) -> None:
        """Bring bytes to the device. Copied first: a view would keep the file's mapping open."""
        with self._data[begin:end] as view:
            part.copy_(torch.frombuffer(bytearray(view), dtype=torch.uint8))


def nccl_unique_id() -> bytes:
    """A new ncclUniqueId: the address at which this process waits, and a secret."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)
