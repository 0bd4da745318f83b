"""What the plugin adds to vLLM's workers: confirm the head, attest, take a weight update.

Runs in the engine's worker processes. The functions become methods (see the ledger), so arguments
and results are plain msgpack types: vLLM's RPC carries nothing else safely.
"""

from __future__ import annotations

from typing import Any

from vllm_parity_plugin.attestation import PROBED, attest, computes_in_fp32, probe_head
from vllm_parity_plugin.cpu_seeds import protect_seeded_requests
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.head_order import order_heads
from vllm_parity_plugin.settings import load_settings
from vllm_parity_plugin.weights.checkpoint import expected_tensors, record_checkpoint
from vllm_parity_plugin.weights.holder import holder


def wrapper_load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``WorkerWrapperBase.load_model``: load, then confirm that the head runs in fp32.

    Raises:
        ParityError: the loaded head computes in another dtype although the configuration says
            float32. Configuration is a promise; this is the check.
    """
    settings = load_settings(self.vllm_config.additional_config)
    if settings.mode == "off" or self.vllm_config.model_config.runner_type != "generate":
        return self.worker.load_model(*args, **kwargs)
    record_checkpoint()
    protect_seeded_requests()
    if settings.mode != "observe":
        order_heads()
    result = self.worker.load_model(*args, **kwargs)
    model = self.worker.get_model()
    head = model.__dict__[PROBED] = probe_head(model)
    if settings.mode != "observe" and head is not None and not computes_in_fp32(head):
        raise ParityError(
            f"The loaded lm_head computes in bfloat16 although head_dtype is float32: its logits "
            f"are {head['dtype']}, and bfloat16 represents {head['bf16_share']:.0%} of them "
            "exactly.",
            "Every logit would be rounded, and the trainer's fp32 head would make the mismatch "
            "worse, not better.",
            "this architecture bypasses vLLM's head_dtype; serve it with "
            "VLLM_PARITY_MODE=observe and report it.",
        )
    return result


def parity_attest(self: Any, manifest: bool = False, probe: bool = True) -> dict[str, Any]:
    """``WorkerBase.parity_attest``: what this worker really runs (see ``attestation.attest``).

    Args:
        manifest: also list the tensors that a weight update must carry.
        probe: run the head; not possible while the weights sleep.
    """
    report = attest(self, probe)
    if manifest:
        report["expected"] = expected_tensors(self.get_model())
    return report


def parity_weights(self: Any, action: str, *args: Any) -> dict[str, Any]:
    """``WorkerBase.parity_weights``: one step of a weight transaction (see ``WeightHolder``).

    Args:
        action: ``report``, ``check``, ``apply``, ``commit`` or ``restore``; of an upload by NCCL
            ``receive``, ``received`` or ``stop``.
        args: of that step, as plain msgpack types.

    Returns:
        where this worker stands, with ``error`` set when the step failed.
    """
    step: dict[str, Any] = getattr(holder(self), action)(*args)
    return step
