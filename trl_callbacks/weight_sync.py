"""The trainer's side of a weight update: round once, write, ask, clean up."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

import torch
from safetensors.torch import save_file

from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.weights.manifest import (
    SAFETENSORS_DTYPE,
    ManifestError,
    TensorSpec,
    compare,
)
from vllm_parity_plugin.wire import WeightUpdate, WeightUpdateResult

TORCH_DTYPE = {name: getattr(torch, torch_name) for torch_name, name in SAFETENSORS_DTYPE.items()}


class WeightSync:
    """Pushes policies to one server, each with the next policy version.

    Args:
        client: the server.

    Raises:
        ParityError: the server's weights directory is not visible from this process.
    """

    def __init__(self, client: ParityClient) -> None:
        self._client = client
        self._directory = client.staging_directory()
        info = client.weights_info()
        self._expected = info.tensors
        self.policy_version = info.policy_version

    def push(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdateResult:
        """Send one complete policy.

        Args:
            tensors: (name, full tensor) pairs under the served checkpoint's names. Each is
                rounded once to the served dtype.

        Raises:
            ManifestError: names or shapes that the served model does not have; nothing is sent.
            ParityError: the server refused or failed.
        """
        rounded: dict[str, torch.Tensor] = {}
        specs: dict[str, TensorSpec] = {}
        for name, tensor in tensors:
            if name in rounded:
                raise ManifestError(
                    f"The trainer sends {name!r} twice.",
                    "One of the two would be dropped.",
                    "report this with the model and the parallelism in use.",
                )
            served = self._expected.get(name)
            dtype = tensor.dtype if served is None else TORCH_DTYPE.get(served.dtype, tensor.dtype)
            # A copy even where nothing changes: with PEFT the caller merges adapters into these
            # tensors and takes them out again when the iteration ends.
            rounded[name] = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
            specs[name] = TensorSpec(
                dtype=SAFETENSORS_DTYPE.get(str(dtype).removeprefix("torch."), str(dtype)),
                shape=tuple(tensor.shape),
            )
        compare(specs, self._expected)
        version = self.policy_version + 1
        path = self._directory / f"policy-{version}-{secrets.token_hex(4)}.safetensors"
        try:
            _write_private(rounded, str(path))
            result = self._client.update_weights(WeightUpdate(version=version, file=path.name))
        finally:
            path.unlink(missing_ok=True)
        self.policy_version = result.policy_version
        return result


def _write_private(tensors: dict[str, torch.Tensor], path: str) -> None:
    # The file exists with mode 0600 before it holds any weight.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    save_file(tensors, path)
