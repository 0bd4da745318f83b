"""Which of the trainer's tensors are sent, under which names, with which values.

A server expects the served checkpoint's names. Wrappers (DDP, FSDP, torch.compile, checkpointing,
PEFT) put path components between them, adapters add tensors that no server has, sharding leaves
pieces in place of tensors, and a tied head is one tensor under two names.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_parity_plugin.errors import ParityError

WRAPPERS = frozenset(
    {
        "module",  # DistributedDataParallel
        "_fsdp_wrapped_module",
        "_orig_mod",  # torch.compile
        "_checkpoint_wrapped_module",
        "base_layer",  # PEFT, around an adapted layer
    }
)
"""Path components that no checkpoint has."""
ADAPTER = "default"
"""The adapter that TRL trains; it keeps a frozen copy of it as ``ref``."""


def served_name(name: str) -> str | None:
    """A parameter's name in the checkpoint; None for one that belongs to an adapter.

    ``_orig_mod.base_model.model.lm_head.modules_to_save.default.weight`` is ``lm_head.weight``.
    ``….q_proj.lora_A.default.weight``, ``….original_module.weight`` and
    ``….modules_to_save.ref.weight`` are None: merged, replaced, and not the policy.
    """
    *path, leaf = name.split(".")
    if any(part == "original_module" or part.startswith("lora_") for part in path):
        return None
    path = [part for part in path if part not in WRAPPERS]
    if "modules_to_save" in path:
        at = path.index("modules_to_save")
        if path[at + 1 : at + 2] != [ADAPTER]:
            return None
        del path[at : at + 2]
    for at in range(len(path) - 1):
        if path[at : at + 2] == ["base_model", "model"]:
            del path[at : at + 2]
            break
    return ".".join([*path, leaf])


def policy_tensors(
    named: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainer's tensors under their served names, each once, each whole.

    Names that the server does not have pass through: the server's list decides, and refuses them.
    Iterates lazily and keeps no tensor, so gathered ones can be freed in between.

    Args:
        named: (name, tensor) pairs with merged adapters, as from TRL's ``_iter_named_params`` or
            :func:`merged_tensors`. One tensor that comes twice under one name is sent once.

    Raises:
        ParityError: two tensors under one name, or one that is not whole on this process.
    """
    sent: dict[str, tuple[str, Any]] = {}
    for raw, tensor in named:
        name = served_name(raw)
        if name is None:
            continue
        _check_whole(raw, tensor)
        # A weak reference, not an address: that of a freed tensor may be another's by now.
        storage = StorageWeakRef(tensor.untyped_storage())
        place = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        first, known = sent.setdefault(name, (raw, place))
        if known is place:
            yield name, tensor
        elif known != place:
            raise ParityError(
                f"Two tensors of the trainer are {name!r} on the server: {first} and {raw}.",
                "One of the two would be dropped.",
                "report this with the model and the wrappers in use; with several PEFT adapters, "
                "keep the trained one only.",
            )


def _check_whole(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        local = list(tensor.to_local().shape)
        state = f"a DTensor ({local} of {list(tensor.shape)} on this process)"
    elif tensor.is_meta:
        state = f"on the meta device, without values (shape {list(tensor.shape)})"
    elif tensor.numel() == 0:
        state = f"empty (shape {list(tensor.shape)})"
    else:
        return
    raise ParityError(
        f"{name} is {state}: it was not gathered.",
        "A piece of the tensor, or nothing, would be sent as the whole.",
        "train under an accelerator that knows about the sharding (its FSDP or DeepSpeed plugin), "
        "so that TRL gathers; otherwise send full tensors (DTensor.full_tensor(), "
        "FSDP.summon_full_params, deepspeed.zero.GatheredParameters).",
    )


def check_ties(model: Any, served_names: Container[str]) -> None:
    """Refuse a trainer and a server that disagree about which tensor is the head.

    Asks which parameter the head *is*, not which values it has: before step 1 an untied copy still
    equals the embedding. Needs no gathering.

    Args:
        model: the trained model (a PEFT model is looked into).
        served_names: the names the server expects. A server of a tied model expects no head.

    Raises:
        ParityError: before training, instead of a head that is trained but never served.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None:
        return
    name = _head_name(model, head)
    if model.config.get_text_config().tie_word_embeddings:
        _check_tied(name, head, embedding)
    shared, served = head.weight is embedding.weight, name in served_names
    if shared and served:
        raise ParityError(
            f"The server has a head of its own ({name}); the trainer's is tied to the embedding.",
            "The served head would keep its first values while the embedding learns.",
            "serve the model that is trained, and override tie_word_embeddings on neither side.",
        )
    if not shared and not served:
        raise ParityError(
            f"The trainer has a head of its own ({name}); the server expects no such tensor.",
            "It serves the embedding as its head, and would never see the trained one.",
            "serve the untied model (tie_word_embeddings=false in its config.json).",
        )


def _head_name(model: nn.Module, head: nn.Module) -> str | None:
    paths = (path for path, module in model.named_modules() if module is head)
    return served_name(f"{next(paths, 'lm_head')}.weight")


def _check_tied(name: str | None, head: Any, embedding: Any) -> None:
    if head.weight is not embedding.weight:
        raise ParityError(
            f"The config ties {name} to the embedding (tie_word_embeddings=true), and in the "
            "trainer it is another tensor.",
            "vLLM serves the embedding as the head: what the trainer's head learns would never be "
            "served.",
            "take lm_head out of modules_to_save; or train both with modules_to_save="
            "['embed_tokens', 'lm_head'] and ensure_weight_tying=True; or untie the served model.",
        )
    # An adapter adds to one use of a shared weight only; the weight itself stays shared.
    if hasattr(head, "base_layer") or hasattr(embedding, "base_layer"):
        raise ParityError(
            f"The config ties {name} to the embedding (tie_word_embeddings=true), and an adapter "
            "changes one of the two.",
            "vLLM would use the merged weight as embedding and as head; the trainer uses it as "
            "one of them.",
            "take embed_tokens and lm_head out of target_modules, or untie the served model.",
        )


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of an unsharded PEFT model with its active adapters merged, in float32.

    LoRA: base + scaling * B @ A, computed in float32; whoever sends it rounds it once. Each layer
    is merged on a copy, so the model keeps its bits. ``merge_adapter`` and ``unmerge_adapter`` do
    not: bf16(1.0) + 0.003 is 1.0 and minus 0.003 is 0.99609375. Layers without an adapter are
    the model's own tensors, in their own dtype; a tied pair comes once.

    Raises:
        ParityError: a quantised or sharded layer, or an adapter that cannot be merged.
    """
    yield from _walk(model, "", set())


def _walk(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        seen.update(map(id, module.parameters()))
        merged = _merged_copy(module, prefix)
        yield from ((f"{prefix}{name}", value.data) for name, value in merged.named_parameters())
        return
    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapters
        used = module.modules_to_save[active[0]] if active else module.original_module
        yield from _walk(used, prefix, seen)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield f"{prefix}{name}", parameter.data
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", seen)


@torch.no_grad()
def _merged_copy(layer: Any, prefix: str) -> nn.Module:
    """The base layer of one adapted layer, merged by PEFT itself on a float32 copy."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, parameter in layer.named_parameters():
        _check_whole(f"{prefix}{name}", parameter)
        if not parameter.is_floating_point():
            raise ParityError(
                f"{prefix}{name} is {parameter.dtype}: the base model is quantised.",
                "Merging would round the policy to a few bits, and the server has other tensors.",
                "load the trained model in bfloat16 or float32.",
            )
    merged = copy.deepcopy(layer).float()
    try:
        for part in merged.modules():  # wrappers of several parameters of one module are nested
            if isinstance(part, BaseTunerLayer):
                part.merge()
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        raise ParityError(
            f"PEFT cannot merge the adapter of {prefix.removesuffix('.')} ({error}).",
            "The server holds one weight per layer, so an adapter that is not one cannot be sent.",
            "train with LoRA or another adapter that merges.",
        ) from error
    base: nn.Module = merged.get_base_layer()
    return base
