"""What a trainer calls to send a policy, whichever way it travels.

``trl_callbacks.weight_sync.WeightSync`` sends to a server, ``weights.colocated.ColocatedUpdates``
to an engine in the trainer's own process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from vllm_parity_plugin.weights.manifest import LORA_A, LORA_B, TensorSpec, compare_adapter
from vllm_parity_plugin.weights.messages import Kind, WeightUpdateResult

Tensors = Iterable[tuple[str, torch.Tensor]]
Kv = Literal["keep", "recompute"]


class Pusher(ABC):
    """Sends policies, each with the next policy version.

    Args:
        expected: the served model's tensors.
        policy_version: the served one.
        adapter_base: version of the weights that an adapter is merged into.

    Attributes:
        policy_version: version of the last policy that was sent and is served.
    """

    def __init__(
        self, expected: Mapping[str, TensorSpec], policy_version: int, adapter_base: int
    ) -> None:
        self._expected = expected
        self._adapter_base = adapter_base
        self.policy_version = policy_version

    @property
    def expected(self) -> Mapping[str, TensorSpec]:
        """The served model's tensors."""
        return self._expected

    def push(self, tensors: Tensors, kv: Kv = "keep") -> WeightUpdateResult:
        """Send one complete policy.

        Args:
            tensors: (name, full tensor) pairs under the served checkpoint's names, taken one at a
                time. Each is rounded once to the served dtype.
            kv: what becomes of the KV cache of requests in flight.

        Raises:
            ManifestError: names or shapes that the served model does not have, or values that are
                not finite; the served policy was not touched.
            ParityError: the engine failed; the message tells what it serves.
        """
        result = self._send(tensors, self._expected, "full", kv=kv)
        self._adapter_base = result.policy_version
        return result

    def push_changed(
        self, tensors: Mapping[str, torch.Tensor], kv: Kv = "keep"
    ) -> WeightUpdateResult:
        """Send only the tensors that changed since the last push.

        Raises:
            as :meth:`push`; ConflictError when the engine meanwhile serves something else, or has
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
        kv: Kv = "keep",
    ) -> WeightUpdateResult:
        """Send a LoRA adapter; it is merged into the last weights without one.

        Args:
            pairs: {served name without ``.weight``: (A [r, in], B [out, r])}. They travel in
                float32; W_base + scaling * B A is rounded once, where it is loaded.

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

    @abstractmethod
    def _send(
        self, tensors: Tensors, specs: Mapping[str, TensorSpec], kind: Kind, **fields: Any
    ) -> WeightUpdateResult:
        """Send one update as the next version; ``fields`` go into its manifest."""
