"""A policy as one safetensors file.

Properties:
- the safetensors library reads back every bit: mixed dtypes, odd sizes, scalars, empty tensors;
- the manifest describes the file: places without gaps, each tensor aligned, checksums that verify;
- each tensor is rounded once, as ``Tensor.to`` does it, contiguous or not (W13);
- tensors are taken one at a time, and the last one is let go before the next is asked for;
- whatever goes wrong leaves no file, and an existing one is not touched.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vllm_parity_plugin.weights.errors import ManifestError
from vllm_parity_plugin.weights.manifest import TensorSpec, check_against, check_layout, read_header
from vllm_parity_plugin.weights.verify import TORCH_DTYPE, checksum, verify_file
from vllm_parity_plugin.weights.writer import ALIGNMENT, layout, write_policy

Policy = dict[str, torch.Tensor]
SAFETENSORS = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def specs_of(tensors: Policy) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(dtype=SAFETENSORS[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits that the dtype can hold, apart from NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 100
    return (
        values > 0
        if dtype == torch.bool
        else values.to(torch.int32 if seed % 2 else dtype).to(dtype)
    )


def some_policy() -> Policy:
    return {
        "odd": random_tensor(torch.bfloat16, (3, 5), 2),
        "byte": random_tensor(torch.uint8, (7,), 1),
        "scalar": random_tensor(torch.float32, (), 4),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "wide": random_tensor(torch.int64, (3,), 3),
        "half": random_tensor(torch.float16, (1, 1, 1), 6),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "layer.été.weight": random_tensor(torch.bfloat16, (1,), 8),
    }


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from([d for d in TORCH_DTYPE.values() if d.itemsize > 1 or d == torch.uint8])
policies = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter("__metadata__".__ne__),
    st.builds(random_tensor, dtypes, shapes, st.integers(0, 1000)),
    min_size=1,
    max_size=8,
)


def check_file(path: Path, tensors: Policy) -> None:
    """Write ``tensors``, and hold what came of it against the library and the manifest."""
    path.unlink(missing_ok=True)
    specs = specs_of(tensors)
    entries = write_policy(path, tensors.items(), specs)
    read = load_file(path)
    assert {name: (t.dtype, t.shape) for name, t in read.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }
    assert all(bits(read[name]) == bits(tensors[name]) for name in tensors)
    header = read_header(path)
    assert header.data_start % ALIGNMENT == 0
    assert path.stat().st_size == header.data_start + check_layout(entries)
    check_against(entries, header)
    verify_file(path, header, entries)
    for name, entry in entries.items():
        assert entry.data_offsets is not None
        assert entry.data_offsets[0] % tensors[name].dtype.itemsize == 0
        assert entry.checksum == checksum(memoryview(bits(tensors[name])))


def test_the_library_reads_every_bit(tmp_path: Path) -> None:
    """The same tensors as ``save_file`` would give; 0600, because weights are worth something."""
    policy = some_policy()
    check_file(tmp_path / "ours", policy)
    save_file(policy, tmp_path / "theirs")
    assert (tmp_path / "ours").stat().st_mode & 0o777 == 0o600
    ours, theirs = read_header(tmp_path / "ours"), read_header(tmp_path / "theirs")
    assert ours.tensors.keys() == theirs.tensors.keys()


@settings(deadline=None, max_examples=60)
@given(policies)
def test_any_policy(tmp_path_factory: pytest.TempPathFactory, tensors: Policy) -> None:
    check_file(tmp_path_factory.getbasetemp() / "any.safetensors", tensors)


def test_layout_by_hand() -> None:
    """Widest first, then by name: 8 + 4 + 3 * 2 + 1 bytes, however they are given."""
    specs = {
        "u": TensorSpec(dtype="U8", shape=(1,)),
        "b": TensorSpec(dtype="BF16", shape=(3,)),
        "i": TensorSpec(dtype="I64", shape=()),
        "f": TensorSpec(dtype="F32", shape=(1,)),
        "a": TensorSpec(dtype="BF16", shape=(0,)),
    }
    places = {name: entry.data_offsets for name, entry in layout(specs).items()}
    assert list(places.items()) == [
        ("i", (0, 8)),
        ("f", (8, 12)),
        ("a", (12, 12)),
        ("b", (12, 18)),
        ("u", (18, 19)),
    ]


HARD_TO_ROUND = torch.tensor(
    [1.00390625, 1.01171875, 1.003906369, 1e-40, -0.0, 3.3895e38, 65519.0, 1e-8, 2**-133]
)
"""Ties to even both ways, just above a tie, subnormals, and the largest values."""


@pytest.mark.parametrize("trained", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_w13_one_rounding(tmp_path: Path, trained: torch.dtype, served: torch.dtype) -> None:
    """W13: what is written has the bits of ``tensor.to(served)``."""
    values = torch.cat(
        [HARD_TO_ROUND, torch.randn(1000, generator=torch.Generator().manual_seed(0))]
    )
    tensor = values.to(trained)
    write_policy(tmp_path / "f", [("w", tensor)], specs_of({"w": tensor.to(served)}))
    assert bits(load_file(tmp_path / "f")["w"]) == bits(tensor.to(served))


def test_w13_rounding_twice_is_found() -> None:
    """The control of the test above: fp32 -> fp16 -> bf16 has other bits for a value near a tie."""
    near = torch.tensor([1.003906369])
    assert bits(near.half().bfloat16()) != bits(near.bfloat16())


def test_w13_what_lies_elsewhere_in_memory(tmp_path: Path) -> None:
    """W13: transposed, strided, expanded and trained tensors are written as they look."""
    base = torch.randn(6, 4)
    policy = {
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "parameter": torch.nn.Parameter(base),
    }
    write_policy(tmp_path / "f", policy.items(), specs_of(policy))
    read = load_file(tmp_path / "f")
    assert all(torch.equal(read[name], policy[name].detach()) for name in policy)


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A gathered tensor is gone before the next one is gathered."""
    specs = specs_of({name: torch.zeros(8) for name in "abc"})
    alive: list[weakref.ref[torch.Tensor]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            assert not any(ref() is not None for ref in alive)
            tensor = torch.ones(8)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    write_policy(tmp_path / "f", gathered(), specs)
    assert len(alive) == 3


def failing() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(2, 3)
    raise RuntimeError("gathering failed")


A, B = torch.zeros(2, 3), torch.zeros(4)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "missing": (lambda: [("a", A)], ManifestError, r"1 missing tensor\(s\): b"),
    "unknown": (lambda: [("a", A), ("x", A)], ManifestError, r"1 unknown tensor\(s\): x"),
    "twice": (lambda: [("a", A), ("a", A)], ManifestError, "'a' twice"),
    "misshapen": (lambda: [("a", A.T), ("b", B)], ManifestError, r"a is \[3, 2\]"),
    "same size": (lambda: [("a", A.reshape(6)), ("b", B)], ManifestError, r"a is \[6\]"),
    "empty": (lambda: [("a", A[:0]), ("b", B)], ManifestError, r"a is \[0, 3\]"),
    "nothing": (lambda: [], ManifestError, "2 missing"),
    "a failure": (failing, RuntimeError, "gathering failed"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_refusal_leaves_no_file(tmp_path: Path, what: str) -> None:
    """W13: by name, and the directory is as it was."""
    tensors, kind, match = BAD[what]
    with pytest.raises(kind, match=match):
        write_policy(tmp_path / "f", tensors(), specs_of({"a": A, "b": B}))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    specs = {"a": TensorSpec(dtype="F4", shape=(2,))}
    with pytest.raises(ManifestError, match="dtype F4"):
        write_policy(tmp_path / "f", [("a", torch.zeros(2))], specs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", [False, True])
def test_an_existing_file_is_not_touched(tmp_path: Path, link: bool) -> None:
    """Nor is what a link in its place points to."""
    other = tmp_path / "other"
    other.write_bytes(b"x")
    path = tmp_path / "f" if link else other
    if link:
        path.symlink_to(other)
    with pytest.raises(FileExistsError):
        write_policy(path, [("a", A)], specs_of({"a": A}))
    assert other.read_bytes() == b"x" and path.exists()


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from vllm_parity_plugin.weights.errors import OutOfSpace
from vllm_parity_plugin.weights.manifest import TensorSpec
from vllm_parity_plugin.weights.writer import write_policy

path, asked = Path(sys.argv[1]), []
specs = {"a": TensorSpec(dtype="F32", shape=(2048,))}
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    write_policy(path, (asked.append(n) or (n, torch.zeros(2048)) for n in specs), specs)
except OutOfSpace as error:
    assert "no room for 8" in str(error), error
    assert not path.exists() and not asked
    print("refused")
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """Room is reserved before the first tensor is asked for; nothing half-written is left."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "f")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "refused\n", done.stderr
