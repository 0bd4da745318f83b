"""The checks of an update's bytes, before anything is touched."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from mmap import ACCESS_COPY, mmap
from pathlib import Path

import torch
import xxhash

from vllm_parity_plugin.weights.errors import ManifestError
from vllm_parity_plugin.weights.manifest import SAFETENSORS_DTYPE, Header, TensorEntry

TORCH_DTYPE = {name: getattr(torch, torch_name) for torch_name, name in SAFETENSORS_DTYPE.items()}
MAX_THREADS = 4


def checksum(data: memoryview) -> str:
    """Checksum of a tensor's bytes, as manifests carry it: ``xxh3_128`` in hexadecimal.

    It finds accidents (a flipped bit, a torn write, a swapped tensor), not forgery: who may send
    weights may send any weights.
    """
    return xxhash.xxh3_128_hexdigest(data)


def verify_file(path: Path, header: Header, manifest: Mapping[str, TensorEntry] | None) -> None:
    """Check every tensor of a staged file: its checksum, if the manifest has one, and its values.

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
                return check_checksum(name, data, expected) or check_values(name, entry, data)

        problems = [problem for problem in pool.map(check, header.tensors) if problem]
    if problems:
        raise problems[0]


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


def check_values(name: str, entry: TensorEntry, data: memoryview) -> ManifestError | None:
    """The error of a tensor that holds NaN or infinity, if it does."""
    dtype = TORCH_DTYPE.get(entry.dtype)
    if dtype is None or not dtype.is_floating_point or not len(data):
        return None
    tensor = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 1:  # fp8 has no reductions
        tensor = tensor.float()
    # One pass without a copy: NaN wins in both, infinity is an extreme.
    low, high = torch.aminmax(tensor)
    if math.isfinite(float(low)) and math.isfinite(float(high)):
        return None
    count = int((~torch.isfinite(tensor)).sum())
    return ManifestError(
        f"{name} holds {count} value(s) that are NaN or infinite.",
        "Every logprob of the new policy would be NaN.",
        "look at the trainer's loss and gradients; the served policy was not touched.",
    )
