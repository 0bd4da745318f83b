"""Loads a stack of weights into a worker's model through vLLM's layerwise reload, and checks that
every layer got all of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import safe_open

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.manifest import LORA_A, LORA_B
from vllm_parity_plugin.weights.stack import Layer, Stack

Reader = Callable[[str], torch.Tensor]


def load_stack(worker: Any, stack: Stack, only: set[str] | None = None) -> None:
    """Load ``stack`` into the worker's model; generation is paused.

    Args:
        only: checkpoint names to load, whole fused weights of them; None loads all.

    Raises:
        ParityError: the model was left incomplete, or a layer got only part of its weights: the
            policy is a mixture, and the caller must load another stack before it is used.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model, runner = worker.get_model(), worker.model_runner
    config = worker.vllm_config.model_config
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(stack_tensors(worker, stack, only))
            partial = _partly_loaded(model)
        finally:
            # An abandoned session keeps its counters, and the next one would then finish layers
            # early with part of their shards, silently. Closing it restores untouched layers.
            finalize_layerwise_reload(model, config)
        _repack_tied_head(model)
    runner.reset_lora_state()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()
    _check_complete(model, partial, None if only else loaded, bool(config.quantization))


def stack_tensors(
    worker: Any, stack: Stack, only: set[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs of a stack: the newest value of each, adapters merged in float32."""
    base, upper = stack[0], [(layer, *_open(layer)) for layer in stack[1:]]
    for name, tensor in _checkpoint(worker) if base.kind == "checkpoint" else _file(base):
        if only is not None and name not in only:
            continue
        for layer, names, read in upper:
            if layer.kind == "lora":
                tensor = _merged(tensor, name.removesuffix(".weight"), names, read, layer.scaling)
            elif name in names:
                tensor = read(name)
        yield name, tensor


def _merged(
    tensor: torch.Tensor, target: str, names: set[str], read: Reader, scaling: float
) -> torch.Tensor:
    """W + scaling * B A in float32 [out, in]; vLLM rounds it once to the served dtype."""
    if target + LORA_A not in names:
        return tensor
    b, a = read(target + LORA_B).float(), read(target + LORA_A).float()
    return tensor.float() + scaling * (b @ a)


def _open(layer: Layer) -> tuple[set[str], Reader]:
    file = safe_open(_path(layer), framework="pt")
    return set(file.keys()), file.get_tensor


def _file(layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in file order, one mapped at a time."""
    with safe_open(_path(layer), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _path(layer: Layer) -> str:
    if layer.file is None:
        raise ParityError(
            f"No copy of policy version {layer.version} was kept.",
            "It cannot be loaded again.",
            "send a full update.",
        )
    return layer.file


def _checkpoint(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the server was started with, read from the model directory again."""
    from vllm.model_executor.model_loader import get_model_loader

    loader: Any = get_model_loader(worker.vllm_config.load_config)
    tensors: Iterator[tuple[str, torch.Tensor]] = loader.get_all_weights(
        worker.vllm_config.model_config, worker.get_model()
    )
    return tensors


def _partly_loaded(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Layers that still wait for elements: module name -> (arrived, needed)."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    waiting = {}
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        needed = info.load_numel_total or 0
        if is_deferred_attention_layer(module) or not 0 < info.load_numel < needed:
            continue
        if info.load_numel < needed - _padding(module):
            waiting[name] = (info.load_numel, needed - _padding(module))
    return waiting


def _padding(module: torch.nn.Module) -> int:
    """Elements of a vocabulary layer that no checkpoint holds."""
    shard: Any = getattr(module, "shard_indices", None)
    if shard is None:
        return 0
    rows = shard.num_elements_padded - shard.num_org_elements
    return int(rows * getattr(module, "embedding_dim", 0))


def _check_complete(
    model: torch.nn.Module,
    partial: dict[str, tuple[int, int]],
    loaded: set[str] | None,
    quantized: bool,
) -> None:
    """Raise if the model holds anything but one complete policy.

    Args:
        loaded: parameters that the model's loader says it filled; None when only some were due.
        quantized: its loader makes parameters of its own, so that names and counts prove nothing.
    """
    problems = [
        f"{name} got {arrived} of {needed} elements"
        for name, (arrived, needed) in ({} if quantized else partial).items()
    ]
    problems += [f"{name} holds no data" for name, p in model.named_parameters() if p.is_meta]
    if loaded is not None and not quantized:
        # With --enable-lora the layer that holds the weight is wrapped.
        held = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        missing = held - {name.replace(".base_layer.", ".") for name in loaded}
        problems += [f"{name} was not loaded" for name in sorted(missing)]
    if problems:
        raise ParityError(
            f"After the update {', '.join(problems[:4])}"
            + (f" and {len(problems) - 4} more." if len(problems) > 4 else "."),
            "vLLM fills what is missing with uninitialised memory and says nothing.",
            "report this with the model: its loader dropped tensors that it loaded at start.",
        )


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Rebuild the head's kernel copy, which a reload leaves stale when the head is tied.

    The reload sees a tied weight through the embedding only, so the head's own post-processing
    (CPU: a prepacked GEMM operand) does not run again and would keep serving the old policy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
