"""Writes a policy as one safetensors file: each tensor is rounded once, straight into it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from mmap import mmap
from pathlib import Path

import torch

from vllm_parity_plugin.weights.errors import ManifestError, OutOfSpace
from vllm_parity_plugin.weights.manifest import TensorEntry, TensorSpec, compare
from vllm_parity_plugin.weights.verify import TORCH_DTYPE, checksum

ALIGNMENT = 8
"""Of the data section, so that every tensor can be viewed in its dtype where it lies."""


def layout(specs: Mapping[str, TensorSpec]) -> dict[str, TensorEntry]:
    """Byte ranges for tensors one after the other, the widest dtypes first (as safetensors does,
    so that each is aligned)."""
    place, entries = 0, {}
    for name, spec in sorted(specs.items(), key=lambda item: (-_width(item[1]), item[0])):
        entries[name] = TensorEntry(
            dtype=spec.dtype, shape=spec.shape, data_offsets=(place, place + spec.nbytes)
        )
        place += spec.nbytes
    return entries


def _width(spec: TensorSpec) -> int:
    dtype = TORCH_DTYPE.get(spec.dtype)
    if dtype is None:
        raise ManifestError(
            f"The served model has a tensor of dtype {spec.dtype}.",
            "It cannot be written here.",
            f"serve one of {', '.join(TORCH_DTYPE)}.",
        )
    return dtype.itemsize


def header_bytes(entries: Mapping[str, TensorEntry]) -> bytes:
    """The safetensors header of that data section (format: huggingface/safetensors README)."""
    fields = {"dtype", "shape", "data_offsets"}
    text = json.dumps({n: entry.model_dump(include=fields) for n, entry in entries.items()})
    body = text.encode()
    body += b" " * (-len(body) % ALIGNMENT)
    return len(body).to_bytes(8, "little") + body


def allocate(path: Path, header: bytes, size: int) -> None:
    """A new file of ``size`` bytes, readable by this user only, that begins with ``header``.

    Raises:
        OutOfSpace: the directory has no room; no file is left.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        os.pwrite(file, header, 0)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        raise OutOfSpace(
            f"{path.parent} has no room for {size} bytes ({error.strerror}).",
            "The update could not be staged, so nothing was touched.",
            "free space there (in Docker, --shm-size), start the server with VLLM_PARITY_WEIGHTS_DIR on a larger disk, or "
            "with VLLM_PARITY_ROLLBACK=none, which keeps one set less.",
        ) from None
    finally:
        os.close(file)


def write_policy(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], specs: Mapping[str, TensorSpec]
) -> dict[str, TensorEntry]:
    """Write tensors to a new file and describe them.

    Args:
        tensors: (name, full tensor) pairs, on any device, taken one at a time: a gathered tensor
            may be freed as soon as the next one is asked for. Each is rounded once to its dtype
            in ``specs``.
        specs: what must come, by name.

    Returns:
        the manifest's entries, with byte ranges and checksums.

    Raises:
        ManifestError: a tensor missing, unknown, sent twice or misshapen. No file is left.
        OutOfSpace: no room for the file.
    """
    entries = layout(specs)
    header = header_bytes(entries)
    allocate(path, header, len(header) + sum(spec.nbytes for spec in specs.values()))
    try:
        return _fill(path, len(header), tensors, entries)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _fill(
    path: Path,
    start: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    entries: dict[str, TensorEntry],
) -> dict[str, TensorEntry]:
    arrived: dict[str, TensorSpec] = {}
    done: dict[str, TensorEntry] = {}
    with open(path, "r+b") as file:
        mapped = mmap(file.fileno(), 0)
    whole = memoryview(mapped)
    for name, tensor in tensors:
        if name in arrived:
            raise ManifestError(
                f"The trainer sends {name!r} twice.",
                "One of the two would be dropped.",
                "report this with the model and the parallelism in use.",
            )
        dtype = entries[name].dtype if name in entries else "F32"
        arrived[name] = TensorSpec(dtype=dtype, shape=tuple(tensor.shape))
        compare({name: arrived[name]}, entries, partial=True)
        begin, end = entries[name].data_offsets or (0, 0)
        with whole[start + begin : start + end] as data:
            if len(data):
                target = torch.frombuffer(data, dtype=TORCH_DTYPE[dtype])
                target.view(tensor.shape).copy_(tensor.detach())
                del target
            done[name] = entries[name].model_copy(update={"checksum": checksum(data)})
    compare(arrived, entries)
    # In the file's order, which is the order of an upload's bytes.
    return {name: done[name] for name in entries}
