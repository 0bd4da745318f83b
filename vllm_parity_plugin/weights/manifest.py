"""What a weight update must carry, and the comparison with what arrived.

Pure protocol: no torch, no vLLM. Dtypes are spelt as in safetensors headers (``BF16``, ``F32``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from math import prod
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from vllm_parity_plugin.weights.errors import ManifestError

SAFETENSORS_DTYPE = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Torch's names of dtypes -> safetensors' names."""

ITEM_SIZE = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Bytes of one element, by safetensors' name of the dtype."""

SHOWN = 4
"""How many offending tensors a message names before it counts the rest."""


class TensorSpec(BaseModel):
    """Dtype and shape of one tensor."""

    model_config = ConfigDict(frozen=True)

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in a safetensors file; 0 for a dtype that is not known."""
        return prod(self.shape) * ITEM_SIZE.get(self.dtype, 0)


class TensorEntry(TensorSpec):
    """One tensor of a manifest: where its bytes are and what they must be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_offsets: tuple[int, int] | None = None
    """Byte range [begin, end) in the file's data section, as in a safetensors header."""
    checksum: str | None = None
    """``xxh3_128`` of the bytes, in hexadecimal."""


class Header(BaseModel):
    """The header of a safetensors file."""

    model_config = ConfigDict(frozen=True)

    tensors: dict[str, TensorEntry]
    data_start: int
    """Offset of the data section in the file."""


def read_header(path: Path) -> Header:
    """Names, dtypes, shapes and byte ranges in a safetensors file, from its header only.

    Raises:
        ManifestError: not a safetensors file, a name twice, or a file shorter than its header
            says.
    """
    try:
        # The library checks everything that makes reading safe: size, overlaps, bounds.
        with safe_open(path, framework="numpy"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length), object_pairs_hook=_no_duplicates)
    except SafetensorError as error:
        raise ManifestError(
            f"{path.name} is not a complete safetensors file ({error}).",
            "A truncated update would leave part of the policy undefined.",
            "write the file completely, then rename it into place, then send the request.",
        ) from None
    entries.pop("__metadata__", None)
    return Header(tensors={n: TensorEntry(**e) for n, e in entries.items()}, data_start=8 + length)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
    if twice:
        raise ManifestError(
            f"{_some(twice)} appears twice in the file's header.",
            "One of the two tensors would be dropped.",
            "write each tensor once.",
        )
    return dict(pairs)


def _repeats(names: list[str]) -> bool:
    return len(set(names)) != len(names)


def identity(architecture: str, expected: Mapping[str, TensorSpec]) -> str:
    """What a manifest must name to show that it was made for this model: same architecture, same
    tensors (names, dtypes and shapes), whatever their values."""
    rows = [f"{name} {spec.dtype} {spec.shape}" for name, spec in sorted(expected.items())]
    return xxhash.xxh3_128_hexdigest("\n".join([architecture, *rows]).encode())


def check_against(manifest: Mapping[str, TensorEntry], header: Header) -> None:
    """Check that a file holds what its manifest says: the same tensors at the same places.

    Raises:
        ManifestError: by name; the file is not the one the manifest was made for.
    """
    _check_names(header.tensors.keys(), manifest.keys(), "its manifest lists")
    for name, entry in manifest.items():
        found = header.tensors[name]
        ranges = entry.data_offsets in {None, found.data_offsets}
        if (found.dtype, found.shape) != (entry.dtype, entry.shape) or not ranges:
            raise ManifestError(
                f"{name} is {_described(found)} in the file and {_described(entry)} in the "
                "manifest.",
                "The file is not the one that the manifest was made for.",
                "make the manifest from the tensors that are written.",
            )


def check_layout(tensors: Mapping[str, TensorEntry]) -> int:
    """Bytes of a data section that holds the tensors one after the other, in their order.

    Raises:
        ManifestError: a byte range or checksum is missing, or ranges leave gaps or overlap.
    """
    place = 0
    for name, entry in tensors.items():
        begin, end = entry.data_offsets or (-1, -1)
        if begin != place or end - begin != entry.nbytes or entry.checksum is None:
            raise ManifestError(
                f"{name} has byte range {entry.data_offsets} and checksum {entry.checksum!r}; "
                f"expected [{place}, {place + entry.nbytes}) and a checksum.",
                "An upload is read by these ranges, one tensor after the other without gaps, and "
                "checked by these sums.",
                "give every tensor data_offsets in the order of the manifest, and its xxh3_128.",
            )
        place = end
    return place


def _described(entry: TensorEntry) -> str:
    place = "" if entry.data_offsets is None else f" at bytes {list(entry.data_offsets)}"
    return f"{entry.dtype} {list(entry.shape)}{place}"


def compare(
    arrived: Mapping[str, TensorSpec],
    expected: Mapping[str, TensorSpec],
    partial: bool = False,
) -> None:
    """Check that an update carries exactly the served model's tensors, or (partial) some of them.

    A dtype may be the checkpoint's or float32: vLLM rounds once to the served dtype on load.

    Raises:
        ManifestError: missing, unknown or misshapen tensors, by name.
    """
    wanted = arrived.keys() & expected.keys() if partial else expected.keys()
    _check_names(arrived.keys(), wanted, "the served model has")
    if not arrived:
        raise ManifestError(
            "The update holds no tensor.",
            "It would only move the policy version.",
            "send the tensors that changed, or nothing at all.",
        )
    misshapen = [
        f"{name} is {list(arrived[name].shape)}, served {list(expected[name].shape)}"
        for name in sorted(arrived)
        if arrived[name].shape != expected[name].shape
    ]
    if misshapen:
        raise ManifestError(
            f"Wrong shape: {_some(misshapen)}.",
            "The tensor belongs to another model.",
            "train the model that is served, and send full (gathered, unsharded) tensors.",
        )
    wrong_dtype = [
        f"{name} is {arrived[name].dtype}, served {expected[name].dtype}"
        for name in sorted(arrived)
        if arrived[name].dtype not in {expected[name].dtype, "F32"}
    ]
    if wrong_dtype:
        raise ManifestError(
            f"Wrong dtype: {_some(wrong_dtype)}.",
            "A second rounding would give the sampler other weights than the trainer's.",
            "send each tensor in the served dtype, or in float32.",
        )


def _check_names(arrived: Set[str], wanted: Set[str], source: str) -> None:
    missing, unknown = sorted(wanted - arrived), sorted(arrived - wanted)
    if missing or unknown:
        raise ManifestError(
            " ".join(
                f"The update has {len(names)} {what} tensor(s): {_some(names)}."
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            ),
            "vLLM would keep old values, or uninitialised memory in a fused weight, for what "
            "is missing, and drop what it does not know.",
            f"send exactly the tensors that {source} (GET /v1/parity/weights lists them), under "
            "those names"
            + (
                " (a tied lm_head is not sent: the embedding carries it)."
                if "lm_head.weight" in unknown
                else "."
            ),
        )


def changed_names(
    kind: Literal["full", "changed", "lora"],
    arrived: Mapping[str, TensorSpec],
    expected: Mapping[str, TensorSpec],
) -> list[str] | None:
    """Names of the served tensors that an update changes, checked; None for all of them.

    Raises:
        ManifestError: see :func:`compare` and :func:`compare_adapter`.
    """
    if kind == "lora":
        return compare_adapter(arrived, expected)
    compare(arrived, expected, partial=kind == "changed")
    return None if kind == "full" else list(arrived)


LORA_A, LORA_B = ".lora_A", ".lora_B"


def compare_adapter(
    arrived: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]
) -> list[str]:
    """Check adapter pairs against the served tensors they are merged into.

    Returns:
        names of the served tensors that change.

    Raises:
        ManifestError: half a pair, an unknown target, or shapes that do not multiply.
    """
    known = {name for name in arrived if name.endswith((LORA_A, LORA_B))}
    bases = {name.removesuffix(LORA_A).removesuffix(LORA_B) for name in known}
    whole = {base + part for base in bases for part in (LORA_A, LORA_B)}
    _check_names(arrived.keys(), whole, "an adapter has (NAME.lora_A and NAME.lora_B)")
    targets = {base: f"{base}.weight" for base in sorted(bases)}
    unknown = [target for target in targets.values() if target not in expected]
    if unknown or not targets:
        raise ManifestError(
            f"The adapter targets {_some(unknown) or 'nothing'}, which the served model lacks.",
            "It would be dropped silently.",
            "name the pairs after tensors listed by GET /v1/parity/weights.",
        )
    for base, target in targets.items():
        a, b = arrived[base + LORA_A], arrived[base + LORA_B]
        fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
        fits = fits and (b.shape[0], a.shape[1]) == expected[target].shape
        # A higher rank says nothing more, and would let an upload be larger than the model.
        if not fits or not 1 <= a.shape[0] <= min(expected[target].shape):
            raise ManifestError(
                f"Wrong shape: {base} has lora_A {list(a.shape)} and lora_B {list(b.shape)} for "
                f"a served weight {list(expected[target].shape)}.",
                "B A would not be an update of that weight.",
                "send A as [r, in] and B as [out, r], with r at most min(in, out).",
            )
        if {a.dtype, b.dtype} - {"F32", expected[target].dtype}:
            raise ManifestError(
                f"Wrong dtype: {base} has lora_A {a.dtype} and lora_B {b.dtype}.",
                "A second rounding would give the sampler other weights than the trainer's.",
                "send adapters in float32 or in the served dtype.",
            )
    return list(targets.values())


def _some(items: list[str]) -> str:
    shown = ", ".join(items[:SHOWN])
    return shown if len(items) <= SHOWN else f"{shown} and {len(items) - SHOWN} more"
