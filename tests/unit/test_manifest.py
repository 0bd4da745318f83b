"""What an update must carry, and the check of what arrived.

Properties:
- exactly the expected tensors pass, in the served dtype or float32;
- each way of being wrong is refused by name, and a long list is counted;
- a file is read from its header only, and one that is not complete is refused;
- a value that is not finite is found, by tensor.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_parity_plugin.weights.manifest import (
    SHOWN,
    ManifestError,
    TensorSpec,
    compare,
    read_manifest,
)
from vllm_parity_plugin.weights.values import check_values

EXPECTED = {
    "a": TensorSpec(dtype="BF16", shape=(4, 3)),
    "b": TensorSpec(dtype="BF16", shape=(4,)),
    "scale": TensorSpec(dtype="F32", shape=()),
}


def refusal(arrived: dict[str, TensorSpec]) -> str:
    with pytest.raises(ManifestError) as caught:
        compare(arrived, EXPECTED)
    return str(caught.value)


def changed(name: str, dtype: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
    return EXPECTED | {name: TensorSpec(dtype=dtype, shape=shape)}


def test_what_fits_passes() -> None:
    """W13: the served dtype, or float32 in its place."""
    compare(EXPECTED, EXPECTED)
    compare(changed("a", "F32", (4, 3)), EXPECTED)


@given(
    st.sets(st.sampled_from(sorted(EXPECTED))), st.sets(st.sampled_from(["x", "lm_head.weight"]))
)
def test_names_must_match_exactly(missing: set[str], unknown: set[str]) -> None:
    """W12: any missing or unknown name is refused, and all are named."""
    arrived = {name: spec for name, spec in EXPECTED.items() if name not in missing}
    arrived |= {name: TensorSpec(dtype="BF16", shape=(1,)) for name in unknown}
    if not missing and not unknown:
        compare(arrived, EXPECTED)
        return
    message = refusal(arrived)
    assert all(name in message for name in missing | unknown)
    assert ("a tied lm_head is not sent" in message) == ("lm_head.weight" in unknown)


@pytest.mark.parametrize("shape", [(3, 4), (4, 2), (12,), (0, 3), (), (1, 4, 3)])
def test_w13_wrong_shapes(shape: tuple[int, ...]) -> None:
    """W13: transposed, short, flat, empty, scalar, batched: refused with both shapes."""
    message = refusal(changed("a", "BF16", shape))
    assert f"a is {list(shape)}, served [4, 3]" in message


@pytest.mark.parametrize("dtype", ["F16", "F64", "I8", "F8_E4M3"])
def test_w13_wrong_dtypes(dtype: str) -> None:
    """W13: a dtype that would be rounded a second time is refused with both names."""
    assert f"a is {dtype}, served BF16" in refusal(changed("a", dtype, (4, 3)))
    assert "scale is BF16, served F32" in refusal(changed("scale", "BF16", ()))


def test_long_lists_are_counted() -> None:
    names = {f"x{i}": TensorSpec(dtype="BF16", shape=(1,)) for i in range(SHOWN + 3)}
    message = refusal(EXPECTED | names)
    assert f"{SHOWN + 3} unknown tensor(s)" in message
    assert "and 3 more" in message


def test_files(tmp_path: Path) -> None:
    """The header of a complete file is its manifest; half a file and no file are refused."""
    path = tmp_path / "update.safetensors"
    tensors = {"a": torch.ones(4, 3, dtype=torch.bfloat16), "b": torch.ones(4).bfloat16()}
    save_file(tensors | {"scale": torch.tensor(1.0)}, path)
    assert read_manifest(path) == EXPECTED
    complete = path.read_bytes()
    for wrong in (complete[:-1], complete[:10], complete + b"x", b"", b"PK\x03\x04" * 50):
        path.write_bytes(wrong)
        with pytest.raises(ManifestError, match=r"update\.safetensors is not a complete"):
            read_manifest(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_l8_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """L8: one bad value among good ones is found and its tensor named; integers pass."""
    path = tmp_path / "update.safetensors"
    good = {"a": torch.ones(4, 3).bfloat16(), "count": torch.arange(3), "b": torch.ones(2)}
    save_file(good, path)
    check_values(path)
    good["a"][2, 1] = value
    save_file(good, path)
    with pytest.raises(ManifestError, match=r"^a holds 1 value"):
        check_values(path)
