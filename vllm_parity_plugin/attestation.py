"""What a worker process really runs, measured where it can be."""

from __future__ import annotations

import platform
from typing import Any

import torch

from vllm_parity_plugin import __version__
from vllm_parity_plugin.compat import vllm_version
from vllm_parity_plugin.core_prefix import prefix_caching
from vllm_parity_plugin.weights.checkpoint import has_tied_head
from vllm_parity_plugin.weights.holder import holder

PROBE_ROWS = 4
BF16_SHARE = 0.5
"""An fp32 product gives about 0.00002, a bf16 one 1.0."""
PROBED = "_parity_head_probe"
"""Attribute of a loaded model: its head's probe when it was loaded."""


def probe_head(model: torch.nn.Module) -> dict[str, Any] | None:
    """Run the model's own lm_head on four random rows and look at the result.

    Returns:
        ``dtype`` of the logits; ``bf16_share``, the share of logits that bfloat16 can represent
        exactly (1.0 for a bf16 product, about 0 for an fp32 one, whatever dtype holds it);
        ``weight_dtype``. None where this worker holds no head (a middle pipeline stage).
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    processor = next((m for m in model.modules() if isinstance(m, LogitsProcessor)), None)
    head = next((m for m in model.modules() if isinstance(m, ParallelLMHead)), None)
    if processor is None or head is None:
        return None
    weight = head.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_ROWS, head.embedding_dim, generator=generator)
    # `lm_head.weight` can be a prepacked, empty placeholder; the model's own norm is not.
    hidden = hidden.to(device=weight.device, dtype=_model_dtype(model))
    with torch.inference_mode():
        logits = processor._apply_head(head, hidden, None)
    # Padding rows of the vocabulary are zero, which every dtype represents.
    logits = logits[logits != 0]
    representable = logits.float() == logits.to(torch.bfloat16).float()
    return {
        "dtype": str(logits.dtype).removeprefix("torch."),
        "bf16_share": round(float(representable.float().mean()), 4),
        "weight_dtype": str(weight.dtype).removeprefix("torch."),
    }


def computes_in_fp32(head: dict[str, Any]) -> bool:
    """Whether a probe shows an fp32 product: bf16 logits that were cast afterwards do not pass."""
    return bool(head["dtype"] == "float32" and head["bf16_share"] < BF16_SHARE)


def _model_dtype(model: torch.nn.Module) -> torch.dtype:
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.is_floating_point():
            return parameter.dtype
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def attest(worker: Any, probe: bool = True) -> dict[str, Any]:
    """One worker's attestation, as plain values (see ``wire.WorkerStatus``).

    Args:
        probe: run the head now. Otherwise the probe of when it was loaded counts: an engine that
            sleeps has no weights to run.
    """
    config, model = worker.vllm_config, worker.get_model()
    model_config = config.model_config
    runner = type(worker.model_runner)
    return {
        "rank": int(worker.rank),
        "host": platform.node(),
        "plugin_version": __version__,
        "vllm_version": str(vllm_version()),
        "model_runner": f"{runner.__module__}.{runner.__qualname__}",
        "head": probe_head(model) if probe else model.__dict__.get(PROBED),
        "logprobs_mode": str(model_config.logprobs_mode),
        "max_logprobs": int(model_config.max_logprobs),
        "generation_config": str(model_config.generation_config),
        "prefix_caching": prefix_caching(config),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "speculative": config.speculative_config is not None,
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "vocab_size": int(model_config.get_vocab_size()),
        "tied_embeddings": has_tied_head(worker.get_model()),
        "policy_version": holder(worker).version,
        "weights": holder(worker).phase,
    }
