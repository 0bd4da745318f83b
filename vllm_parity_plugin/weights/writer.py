"""Writes a policy as one safetensors file: each tensor is rounded once, straight into it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash

from vllm_parity_plugin.weights.errors import ManifestError, OutOfSpace
from vllm_parity_plugin.weights.manifest import TensorEntry, TensorSpec, compare
from vllm_parity_plugin.weights.verify import TORCH_DTYPE

ALIGNMENT = 8
"""Of the data section, so that every tensor can be viewed in its dtype where it lies."""
PIECE = 2**22
"""Elements that are rounded, hashed and written at a time, while they are in the cache."""


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
    with new_file(path, size) as file:
        os.posix_fallocate(file, 0, size)
        os.pwrite(file, header, 0)


@contextlib.contextmanager
def new_file(path: Path, size: int) -> Iterator[int]:
    """Descriptor of a new file, readable by this user only, that is to hold ``size`` bytes.

    Raises:
        OutOfSpace: there is no room for what is written to it; no file is left.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield file
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        raise OutOfSpace(
            f"{path.parent} has no room for {size} bytes ({error.strerror}).",
            "The update could not be staged, so nothing was touched.",
            "free space there (in Docker, --shm-size), start the server with "
            "VLLM_PARITY_WEIGHTS_DIR on a larger disk, or with VLLM_PARITY_ROLLBACK=none, which "
            "keeps one set less.",
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
    with open(path, "r+b", buffering=0) as file:
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
            begin, _ = entries[name].data_offsets or (0, 0)
            checksum = _write(file.fileno(), start + begin, tensor, TORCH_DTYPE[dtype])
            done[name] = entries[name].model_copy(update={"checksum": checksum})
            del tensor  # else it lives on while the next one is gathered
    compare(arrived, entries)
    # In the file's order, which is the order of an upload's bytes.
    return {name: done[name] for name in entries}


def _write(file: int, place: int, tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """Round a tensor into the file from ``place`` on.

    Written, not copied into a mapping: the page faults of a new mapping take longer than the bytes.

    Returns:
        its checksum (see :func:`~vllm_parity_plugin.weights.verify.checksum`).
    """
    digest = xxhash.xxh3_128()
    for piece in tensor.detach().reshape(-1).split(PIECE):
        data = memoryview(piece.to("cpu", dtype).view(torch.uint8).numpy())
        digest.update(data)
        while len(data):
            written = os.pwrite(file, data, place)
            place, data = place + written, data[written:]
    return digest.hexdigest()
