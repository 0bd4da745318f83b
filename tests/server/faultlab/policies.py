"""The weight sets that the laboratory knows, and how each becomes an update.

A policy is named by how it came about: ``("full:2", "changed:0", "lora:1")`` is full set 2 with
some tensors of set 0 of the changed ones, and an adapter. Adapters are exact in float32, so that
merging them here and on the server gives the same bits whatever the order of summation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.models import noisy
from vllm_parity_plugin.weights.manifest import LORA_A, LORA_B, TensorSpec
from vllm_parity_plugin.weights.verify import checksum
from vllm_parity_plugin.weights.writer import header_bytes, layout

Tensors = dict[str, torch.Tensor]
Policy = tuple[str, ...]

SETS = 3
"""Different sets of every kind."""
CHANGED = (
    ("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"),
    ("embed_tokens", "layers.1.input_layernorm"),
    ("layers.1.self_attn.o_proj", "layers.1.mlp.gate_proj", "model.norm"),
)
TARGETS = (
    ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"),
    ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"),
    ("model.layers.1.self_attn.o_proj", "model.layers.1.mlp.up_proj"),
)
SCALING, RANK = 0.5, 2
SAFETENSORS = {torch.bfloat16: "BF16", torch.float32: "F32"}


def kind_of(policy: Policy) -> str:
    """Kind of the update that made it: ``full``, ``changed`` or ``lora``."""
    return policy[-1].partition(":")[0]


def part(name: str, original: Tensors) -> Tensors:
    """The tensors that one part of a policy carries."""
    kind, number = name.split(":")
    index = int(number)
    if kind == "full":
        return noisy(original, seed=100 + index) if index else dict(original)
    if kind == "changed":
        new = noisy(original, seed=200 + index, sd=1.0)
        names = [n for n in new if any(piece in n for piece in CHANGED[index])]
        return {n: new[n] if new[n].ndim == 2 else new[n] * 1.5 for n in names}
    generator = torch.Generator().manual_seed(300 + index)
    pairs: Tensors = {}
    for base in TARGETS[index]:
        rows, columns = original[f"{base}.weight"].shape
        # Small integers over powers of two: every product and sum is exact.
        pairs[base + LORA_A] = torch.randint(-3, 4, (RANK, columns), generator=generator) / 16
        pairs[base + LORA_B] = torch.randint(-3, 4, (rows, RANK), generator=generator) / 16
    return pairs


def tensors_of(policy: Policy, original: Tensors) -> Tensors:
    """All tensors of a policy, rounded once to the served dtype."""
    result: Tensors = {}
    for name in policy:
        new = part(name, original)
        if not name.startswith("lora"):
            result |= new
            continue
        for key in [key for key in new if key.endswith(LORA_A)]:
            target = key.removesuffix(LORA_A) + ".weight"
            delta = SCALING * (new[key.removesuffix(LORA_A) + LORA_B] @ new[key])
            result[target] = (result[target].float() + delta).to(result[target].dtype)
    return result


@dataclass
class Draft:
    """An update that is about to be sent, and may be spoilt first.

    Attributes:
        manifest: fields of the request but its tensors and its file.
        entries: the manifest's tensors.
        header: of the file; for an upload the server makes it from ``entries``.
        data: the bytes of all tensors.
        raw_header: whole header, with its length, instead of ``header``.
    """

    manifest: dict[str, Any]
    entries: dict[str, dict[str, Any]] | None
    header: dict[str, dict[str, Any]]
    data: bytearray
    raw_header: bytes | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Tensors, **manifest: Any) -> Draft:
        """A good update with these tensors."""
        specs = {
            name: TensorSpec(dtype=SAFETENSORS[tensor.dtype], shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        data, entries, header = bytearray(), {}, {}
        for name, entry in layout(specs).items():
            raw = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
            header[name] = entry.model_dump(exclude={"checksum"}, mode="json")
            entries[name] = {**header[name], "checksum": checksum(memoryview(raw))}
            data += raw
        return cls(dict(manifest), entries, header, data)

    def range(self, name: str) -> slice:
        """Where a tensor's bytes are."""
        begin, end = self.header[name]["data_offsets"]
        return slice(begin, end)

    def resum(self) -> None:
        """Make the manifest's checksums those of the bytes again."""
        for name, entry in (self.entries or {}).items():
            if name in self.header:
                entry["checksum"] = checksum(memoryview(bytes(self.data[self.range(name)])))

    def file(self) -> bytes:
        """The whole file."""
        return (self.raw_header or self.header_bytes()) + self.data

    def header_bytes(self) -> bytes:
        """The file's header with its length."""
        from vllm_parity_plugin.weights.manifest import TensorEntry

        return header_bytes({name: TensorEntry(**entry) for name, entry in self.header.items()})

    def body(self) -> dict[str, Any]:
        """JSON of the request, but for the file's name."""
        tensors = {} if self.entries is None else {"tensors": self.entries}
        return {**self.manifest, **tensors}


def choose(rng: random.Random, kind: str) -> tuple[Policy, Policy]:
    """An old policy and a new one that an update of ``kind`` makes of it."""
    first, second = rng.sample(range(SETS), 2)
    old: Policy = (f"full:{first}",)
    if kind == "full":
        return old, (f"full:{second}",)
    return old, (*old, f"{kind}:{rng.randrange(SETS)}")
