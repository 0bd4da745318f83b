"""What a server's weights are made of: a base and the updates on top of it.

Pure protocol: no torch, no vLLM. A stack is kept for as long as its weights are served, because it
is what a failed update goes back to, and what a changed or lora update builds on.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from vllm_parity_plugin.weights.errors import ConflictError
from vllm_parity_plugin.weights.manifest import LORA_A, read_header
from vllm_parity_plugin.weights.messages import Kind, Manifest

MAX_LAYERS = 16
"""Updates on top of a base before a full one is due: it bounds the files that are kept."""


class Layer(BaseModel):
    """One part of a stack."""

    model_config = ConfigDict(frozen=True)

    version: int
    kind: Literal["checkpoint", "full", "changed", "lora"]
    file: str | None = None
    """Path of the tensors; None for the checkpoint, and for a set that was not kept."""
    size: int = 0
    mtime_ns: int = 0
    """Of the file when it was verified; a worker that sees others refuses it."""
    scaling: float = 1.0

    @property
    def kept(self) -> bool:
        """Whether these tensors can be read again."""
        return self.kind == "checkpoint" or self.file is not None


Stack = tuple[Layer, ...]
CHECKPOINT: Stack = (Layer(version=0, kind="checkpoint"),)
"""What a server starts with."""


def adapter_base(stack: Stack) -> int:
    """Version of the weights under the served adapter, or of the served ones if there is none."""
    return _without_adapter(stack)[-1].version


def _without_adapter(stack: Stack) -> Stack:
    return stack[:-1] if stack[-1].kind == "lora" else stack


def check_base(stack: Stack, update: Manifest) -> None:
    """Check that an update builds on what is served.

    Raises:
        ConflictError: it names another base, or a base that this server did not keep.
    """
    if update.kind == "full":
        return
    below = stack if update.kind == "changed" else _without_adapter(stack)
    served = below[-1].version
    if update.base_version != served:
        what = "serves" if update.kind == "changed" else "holds, under its adapter,"
        raise ConflictError(
            f"The {update.kind} update builds on policy version {update.base_version}; this "
            f"server {what} version {served}.",
            "Its tensors on top of other weights would be a policy that nobody trained.",
            "send a full update.",
        )
    if not all(layer.kept for layer in stack):
        raise ConflictError(
            f"This server keeps no copy of its weights (rollback none), and a {update.kind} "
            "update builds on them.",
            "A fused weight needs all of its parts, changed or not.",
            "send a full update, or start the server with VLLM_PARITY_ROLLBACK=keep.",
        )
    if len(below) >= MAX_LAYERS:
        raise ConflictError(
            f"{len(below) - 1} partial updates lie on top of the last full one.",
            "Each keeps its file, and memory for them is bounded.",
            "send a full update.",
        )


def extend(stack: Stack, layer: Layer) -> Stack:
    """The stack after an update: a full one replaces it, an adapter replaces an adapter."""
    if layer.kind == "full":
        return (layer,)
    return (*(_without_adapter(stack) if layer.kind == "lora" else stack), layer)


def losing_adapter(stack: Stack, kind: Kind) -> list[str]:
    """Served tensors that lose an adapter when an update of ``kind`` comes: the next adapter may
    have other targets, and these must then be loaded again without the old one."""
    top = stack[-1]
    if kind != "lora" or top.kind != "lora" or top.file is None:
        return []
    names = read_header(Path(top.file)).tensors
    return [name.removesuffix(LORA_A) + ".weight" for name in names if name.endswith(LORA_A)]


def group(name: str) -> str:
    """The part of the model that is loaded together with a tensor.

    ``model.layers.3.self_attn.q_proj.weight`` belongs to ``model.layers.3``: no fused weight
    reaches over a decoder layer. Tensors outside numbered layers stand alone.
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return name


def together(changed: Iterable[str], names: Iterable[str]) -> set[str]:
    """All of ``names`` that must be loaded again when ``changed`` are."""
    groups = {group(name) for name in changed}
    return {name for name in names if group(name) in groups}
