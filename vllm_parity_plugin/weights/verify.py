"""The checks of an update's bytes, before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from mmap import ACCESS_COPY, mmap
from pathlib import Path

import torch
import xxhash

from vllm_parity_plugin.weights.errors import ManifestError
from vllm_parity_plugin.weights.manifest import (
    SAFETENSORS_DTYPE,
    Header,
    TensorEntry,
    TensorSpec,
)
from vllm_parity_plugin.weights.messages import Manifest
from vllm_parity_plugin.weights.stack import Layer

TORCH_DTYPE = {name: getattr(torch, torch_name) for torch_name, name in SAFETENSORS_DTYPE.items()}
MAX_THREADS = 4
PIECE = 2**18
"""Elements that are copied at a time."""


def checksum(data: memoryview) -> str:
    """Checksum of a tensor's bytes, as manifests carry it: ``xxh3_128`` in hexadecimal.

    It finds accidents (a flipped bit, a torn write, a swapped tensor), not forgery: who may send
    weights may send any weights.
    """
    return xxhash.xxh3_128_hexdigest(data)


def verify_file(
    path: Path,
    header: Header,
    manifest: Mapping[str, TensorEntry] | None,
    served: Mapping[str, TensorSpec] | None = None,
) -> None:
    """Check every tensor of a staged file: its checksum, if the manifest has one, and its values.

    Args:
        served: the dtypes that tensors are rounded to when they are loaded.

    Raises:
        ManifestError: by tensor name: other bytes than the manifest says, or NaN or infinity.
    """
    if path.stat().st_size == header.data_start:  # no bytes at all cannot be mapped
        return
    with (
        open(path, "rb") as file,
        # Private, hence writable as far as torch is concerned; nothing writes to it.
        mmap(file.fileno(), 0, access=ACCESS_COPY) as mapped,
        memoryview(mapped) as whole,
        # Hashing and scanning release the interpreter, so tensors are checked side by side.
        ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool,
    ):

        def check(name: str) -> ManifestError | None:
            entry = header.tensors[name]
            begin, end = entry.data_offsets or (0, 0)
            with whole[header.data_start + begin : header.data_start + end] as data:
                expected = None if manifest is None else manifest[name].checksum
                problem = check_checksum(name, data, expected)
                return problem or check_values(name, entry, data, (served or {}).get(name))

        problems = [problem for problem in pool.map(check, header.tensors) if problem]
    if problems:
        raise problems[0]


def verified_layer(
    path: Path,
    header: Header,
    manifest: Manifest,
    served: Mapping[str, TensorSpec] | None = None,
) -> Layer:
    """The checked file as a layer that workers recognise.

    Raises:
        ManifestError: see :func:`verify_file`.
    """
    before = path.stat()
    verify_file(path, header, manifest.tensors, served)
    return Layer(
        version=manifest.version,
        kind=manifest.kind,
        file=str(path),
        size=before.st_size,
        mtime_ns=before.st_mtime_ns,
        scaling=manifest.scaling,
    )


def check_checksum(name: str, data: memoryview, expected: str | None) -> ManifestError | None:
    """The error of a tensor whose bytes are not those of its manifest, if so."""
    if expected is None:
        return None
    found = checksum(data)
    if found == expected.lower():
        return None
    return ManifestError(
        f"{name} has checksum {found}, its manifest says {expected}.",
        "Its bytes changed on the way, or belong to another tensor.",
        "send it again.",
    )


def check_values(
    name: str, entry: TensorEntry, data: memoryview, served: TensorSpec | None = None
) -> ManifestError | None:
    """The error of a tensor that holds NaN or infinity, or will once it is rounded, if so.

    3.4e38 is a float32, and infinite in bfloat16, whose largest number is 3.39e38.
    """
    dtype = TORCH_DTYPE.get(entry.dtype)
    if dtype is None or not dtype.is_floating_point or not len(data):
        return None
    values = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    rounded = entry.dtype if served is None else served.dtype
    target = TORCH_DTYPE.get(rounded, dtype)
    # In pieces where it copies: copies of a whole embedding would stay in this thread's heap.
    pieces = values.split(PIECE)
    if all(_finite(part, target) for part in (pieces if dtype.itemsize == 1 else [values])):
        return None
    count = sum(int((~torch.isfinite(part.to(target).float())).sum()) for part in pieces)
    return ManifestError(
        f"{name} holds {count} value(s) that are NaN or infinite in {rounded}.",
        "Every logprob of the new policy would be NaN.",
        "look at the trainer's loss and gradients; the served policy was not touched.",
    )


def _finite(values: torch.Tensor, target: torch.dtype) -> bool:
    """Whether [N] values are neither NaN nor infinite once they are rounded to ``target``."""
    if values.dtype.itemsize == 1:  # fp8 has no reductions
        values = values.float()
    # One pass without a copy: NaN wins in both, infinity is an extreme, and so is what becomes it.
    extremes = torch.stack(torch.aminmax(values)).to(target).float()
    return bool(torch.isfinite(extremes).all())
