"""Applies a checked safetensors file to a worker's model through vLLM's layerwise reload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from vllm_parity_plugin.errors import ParityError

VERSION = "_parity_policy_version"
"""Attribute of the worker: version of the policy whose weights it holds; 0 is the checkpoint."""


def policy_version(worker: Any) -> int:
    """Version of the policy that this worker serves (0 before the first update)."""
    return int(getattr(worker, VERSION, 0))


def apply_weights(worker: Any, path: str, version: int) -> dict[str, Any]:
    """Load ``path`` into the worker's model and set its policy version.

    Args:
        worker: the vLLM worker; generation is paused.
        path: a safetensors file whose names and shapes the caller has checked.
        version: policy version that the file holds.

    Returns:
        ``rank`` and the ``policy_version`` now served.

    Raises:
        ParityError: the model was left incomplete. The layers that had not been reached are put
            back, but the policy is a mixture: the caller must keep generation paused.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config):
        try:
            worker.model_runner.reload_weights(weights_iterator=_tensors(path))
        except BaseException:
            # An abandoned session keeps its counters, and the next one would then finish layers
            # early with part of their shards, silently. Closing it restores untouched layers.
            finalize_layerwise_reload(model, worker.vllm_config.model_config)
            raise
        _repack_tied_head(model)
    incomplete = [name for name, p in model.named_parameters() if p.is_meta]
    if incomplete:
        raise ParityError(
            f"After the update {len(incomplete)} parameters hold no data ({incomplete[0]}, ...).",
            "The policy is not complete.",
            "send the full set of tensors again.",
        )
    setattr(worker, VERSION, version)
    return {"rank": int(worker.rank), "policy_version": version}


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs in file order, one mapped tensor at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Rebuild the head's kernel copy, which a reload leaves stale when the head is tied.

    The reload sees a tied weight through the embedding only, so the head's own post-processing
    (CPU: a prepacked GEMM operand) does not run again and would keep serving the old policy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
