"""Loads a stack of weights into a worker's model through vLLM's layerwise reload, and checks that
every layer got all of its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.checkpoint import expected_tensors
from vllm_parity_plugin.weights.manifest import LORA_A, LORA_B
from vllm_parity_plugin.weights.stack import Layer, Stack, group

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
    with set_current_vllm_config(worker.vllm_config), _experts_packed_again(model):
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(stack_tensors(worker, stack, only))
            gaps = _gaps(model)
        finally:
            # An abandoned session keeps its counters, and the next one would then finish layers
            # early with part of their shards, silently. Closing it restores untouched layers.
            finalize_layerwise_reload(model, config)
        _repack_tied_head(model)
    runner.reset_lora_state()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()
    _check_complete(model, gaps, loaded, only, bool(config.quantization))


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
    """W + scaling * B A [out, in], computed in float32 and rounded once to W's dtype: what lies on
    top of an adapter builds on the weights that were served with it."""
    if target + LORA_A not in names:
        return tensor
    b, a = read(target + LORA_B).float(), read(target + LORA_A).float()
    merged = (tensor.float() + scaling * (b @ a)).to(tensor.dtype)
    if not bool(torch.isfinite(merged).all()):
        raise ParityError(
            f"{target} is not finite once the adapter is merged (scaling {scaling}).",
            "Every logprob of the new policy would be NaN.",
            "look at the trainer's loss and gradients.",
        )
    return merged


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
    """Tensors that the server was started with, read from the model directory again.

    Without the second name of a tied head: next to a changed embedding it would be a stale copy.
    """
    from vllm.model_executor.model_loader import get_model_loader

    model = worker.get_model()
    loader: Any = get_model_loader(worker.vllm_config.load_config)
    expected = expected_tensors(model)
    for name, tensor in loader.get_all_weights(worker.vllm_config.model_config, model):
        if expected is None or name in expected:
            yield name, tensor


class Gaps(NamedTuple):
    """What had not arrived when the model's loader was done."""

    partial: dict[str, tuple[int, int]]
    """Layers that got some of their elements: module name -> (arrived, needed)."""
    untouched: set[str]
    """Layers that got none."""


def _gaps(model: torch.nn.Module) -> Gaps:
    """Layers that still wait for elements."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    gaps = Gaps({}, set())
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if not info.can_load() or is_deferred_attention_layer(module):  # complete, or has scales
            continue
        if info.load_numel == 0:
            gaps.untouched.add(name)
        elif info.load_numel < (needed := _needed(module, info)):
            gaps.partial[name] = (info.load_numel, needed)
    return gaps


def _needed(module: torch.nn.Module, info: Any) -> int:
    """Elements that a layer must get: not padding, not buffers that no checkpoint holds."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layer_tensors
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

    computed = SKIP_LOAD_TENSORS | info.kernel_non_persistent_buffers
    computed -= {name for name, _ in info.loaded_weights}
    needed = sum(
        getattr(tensor, "weight_loader_numel", tensor.numel())
        for name, tensor in get_layer_tensors(module).items()
        if name not in computed
    )
    return needed - _padding(module)


def _padding(module: torch.nn.Module) -> int:
    """Elements of a vocabulary layer that no checkpoint holds."""
    shard: Any = getattr(module, "shard_indices", None)
    if shard is None:
        return 0
    rows = shard.num_elements_padded - shard.num_org_elements
    return int(rows * getattr(module, "embedding_dim", 0))


def _check_complete(
    model: torch.nn.Module,
    gaps: Gaps,
    loaded: set[str] | None,
    only: set[str] | None,
    quantized: bool,
) -> None:
    """Raise if the model holds anything but one complete policy.

    Args:
        loaded: parameters that the model's loader says it filled, if it says so.
        only: checkpoint names that were due; None for all.
        quantized: its loader makes parameters of its own, so that names and counts prove nothing.
    """
    problems = [
        f"{name} got {arrived} of {needed} elements"
        for name, (arrived, needed) in ({} if quantized else gaps.partial).items()
    ]
    problems += [f"{name} holds no data" for name, p in model.named_parameters() if p.is_meta]
    if loaded is not None and not quantized:
        # By name alone experts would be missing: their loader reports other names than they have.
        names = [name for name, _ in model.named_parameters()]
        if only is not None:  # whole groups are loaded, whose names a model seldom changes
            due = {group(name) for name in only}
            names = [name for name in names if group(name) in due]
        untouched = [name for name in names if name.rpartition(".")[0] in gaps.untouched]
        # With --enable-lora the layer that holds the weight is wrapped.
        held = {name.replace(".base_layer.", ".") for name in untouched}
        missing = held - {name.replace(".base_layer.", ".") for name in loaded}
        problems += [f"{name} was not loaded" for name in sorted(missing)]
    if problems:
        raise ParityError(
            f"After the update {', '.join(problems[:4])}"
            + (f" and {len(problems) - 4} more." if len(problems) > 4 else "."),
            "vLLM fills what is missing with uninitialised memory and says nothing.",
            "report this with the model: its loader dropped tensors that it loaded at start.",
        )


@contextlib.contextmanager
def _experts_packed_again(model: torch.nn.Module) -> Iterator[None]:
    """Have the CPU's copies of experts made again by a reload inside the block.

    vLLM (read in 0.31) keeps an MoE kernel over a reload, for the sake of captured CUDA graphs, and
    lets only a new one process the weights. On CPU that is the packing that the kernel computes
    with: without it, a reload of the same weights gives other logprobs, and no error.
    """
    from vllm.platforms import current_platform

    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [(m, m.moe_kernel) for m in methods if getattr(m, "moe_kernel", None) is not None]
    if not current_platform.is_cpu():
        kernels = []
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # its layer was not loaded
                method.moe_kernel = kernel


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Rebuild the head's kernel copy, which a reload leaves stale when the head is tied.

    The reload sees a tied weight through the embedding only, so the head's own post-processing
    (CPU: a prepacked GEMM operand) does not run again and would keep serving the old policy. A
    head of its own was processed when it was loaded.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    shared = {layer.weight.data_ptr() for layer in layers if layer not in heads}
    for head in heads:
        if head.weight.numel() and head.weight.data_ptr() in shared:
            head.quant_method.process_weights_after_loading(head)
