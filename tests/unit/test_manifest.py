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
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_parity_plugin.weights.errors import ManifestError
from vllm_parity_plugin.weights.manifest import (
    SHOWN,
    TensorEntry,
    TensorSpec,
    check_against,
    compare,
    compare_adapter,
    identity,
    read_header,
)
from vllm_parity_plugin.weights.verify import checksum, verify_file

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
    found = read_header(path).tensors
    assert {n: TensorSpec(dtype=e.dtype, shape=e.shape) for n, e in found.items()} == EXPECTED
    complete = path.read_bytes()
    for wrong in (complete[:-1], complete[:10], complete + b"x", b"", b"PK\x03\x04" * 50):
        path.write_bytes(wrong)
        with pytest.raises(ManifestError, match=r"update\.safetensors is not a complete"):
            read_header(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_l8_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """L8: one bad value among good ones is found and its tensor named; integers pass."""
    path = tmp_path / "update.safetensors"
    good = {"a": torch.ones(4, 3).bfloat16(), "count": torch.arange(3), "b": torch.ones(2)}
    save_file(good, path)
    verify_file(path, read_header(path), None)
    good["a"][2, 1] = value
    save_file(good, path)
    with pytest.raises(ManifestError, match=r"^a holds 1 value"):
        verify_file(path, read_header(path), None)


@pytest.mark.parametrize(("served", "value"), [("BF16", 3.4e38), ("F16", -65520.0)])
def test_l8_values_that_rounding_makes_infinite(tmp_path: Path, served: str, value: float) -> None:
    """L8, W13: a float32 tensor is checked as what it will be in the served dtype."""
    path = tmp_path / "update.safetensors"
    save_file({"a": torch.tensor([1.0, value])}, path)
    verify_file(path, read_header(path), None)
    with pytest.raises(ManifestError, match=r"^a holds 1 value"):
        verify_file(path, read_header(path), None, {"a": TensorSpec(dtype=served, shape=(2,))})
    save_file({"a": torch.tensor([1.0, value * 0.99])}, path)
    verify_file(path, read_header(path), None, {"a": TensorSpec(dtype=served, shape=(2,))})


@settings(deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    size=st.integers(1, 5000),
    bad=st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0]),
    data=st.data(),
)
def test_l8_one_bad_value_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    size: int,
    bad: float,
    data: st.DataObject,
) -> None:
    """L8: whatever the dtype, length and place, exactly the bad values are found."""
    tensor = torch.linspace(-3, 3, size).to(dtype)
    tensor[data.draw(st.integers(0, size - 1))] = bad
    path = tmp_path_factory.mktemp("values") / "update.safetensors"
    save_file({"a": tensor}, path)
    if bad == 0.0:
        verify_file(path, read_header(path), None)
        return
    with pytest.raises(ManifestError, match=r"^a holds 1 value"):
        verify_file(path, read_header(path), None)


def manifest_of(path: Path) -> dict[str, TensorEntry]:
    """What an honest trainer says of a file."""
    header, body = read_header(path), path.read_bytes()
    entries = {}
    for name, entry in header.tensors.items():
        begin, end = (header.data_start + offset for offset in entry.data_offsets or (0, 0))
        sum_ = checksum(memoryview(body)[begin:end])
        entries[name] = entry.model_copy(update={"checksum": sum_})
    return entries


def test_checksums_find_flips_and_swaps(tmp_path: Path) -> None:
    """A flipped bit and two swapped tensors of one shape are found by name; values alone could
    not tell."""
    path = tmp_path / "update.safetensors"
    save_file({"a": torch.ones(4, 3), "b": torch.full((4, 3), 2.0)}, path)
    manifest = manifest_of(path)
    verify_file(path, read_header(path), manifest)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    verify_file(path, read_header(path), None)
    with pytest.raises(ManifestError, match=r"^b has checksum"):
        verify_file(path, read_header(path), manifest)
    save_file({"b": torch.ones(4, 3), "a": torch.full((4, 3), 2.0)}, path)
    with pytest.raises(ManifestError, match=r"^a has checksum"):
        verify_file(path, read_header(path), manifest)


def test_a_file_that_is_not_its_manifests(tmp_path: Path) -> None:
    """Other names, another dtype, another place: each is refused by name."""
    path = tmp_path / "update.safetensors"
    save_file({"a": torch.ones(4, 3), "b": torch.ones(4, 3)}, path)
    manifest = manifest_of(path)
    check_against(manifest, read_header(path))
    moved = manifest["a"].model_copy(update={"data_offsets": (0, 12)})
    other = {
        "missing tensor": {"a": manifest["a"]},
        "unknown tensor": manifest | {"c": manifest["a"]},
        r"b is F32 \[4, 3\]": manifest | {"b": manifest["b"].model_copy(update={"dtype": "F16"})},
        r"manifest.*$|a is F32": manifest | {"a": moved},
    }
    for message, wrong in other.items():
        swapped = "unknown" if "missing" in message else "missing"
        pattern = message if "tensor" not in message else f"{swapped} tensor"
        with pytest.raises(ManifestError, match=pattern):
            check_against(wrong, read_header(path))


def test_a_name_twice(tmp_path: Path) -> None:
    """A header that lists a name twice is refused: a parser would keep either."""
    path = tmp_path / "update.safetensors"
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    text = ("{" + entry % (0, 4) + "," + entry % (0, 4) + "}").encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(ManifestError, match="a appears twice"):
        read_header(path)


def test_identity_tells_models_apart() -> None:
    """Order does not matter; a name, a shape, a dtype or the architecture does."""
    same = dict(reversed(EXPECTED.items()))
    assert identity("Llama", EXPECTED) == identity("Llama", same)
    other = [
        identity("Qwen3", EXPECTED),
        identity("Llama", EXPECTED | {"c": EXPECTED["a"]}),
        identity("Llama", EXPECTED | {"a": TensorSpec(dtype="BF16", shape=(3, 4))}),
        identity("Llama", EXPECTED | {"a": TensorSpec(dtype="F32", shape=(4, 3))}),
    ]
    assert len({*other, identity("Llama", EXPECTED)}) == 5


def adapter(**changes: TensorSpec) -> dict[str, TensorSpec]:
    pairs = {
        "a.lora_A": TensorSpec(dtype="F32", shape=(2, 3)),
        "a.lora_B": TensorSpec(dtype="F32", shape=(4, 2)),
    }
    return pairs | {name.replace("__", "."): spec for name, spec in changes.items()}


def test_adapters() -> None:
    """A whole pair of fitting shapes names the tensor it changes; all else is refused."""
    served = {"a.weight": EXPECTED["a"], "b.weight": EXPECTED["b"]}
    assert compare_adapter(adapter(), served) == ["a.weight"]
    half = adapter()
    del half["a.lora_B"]
    stranger = {name.replace("a.", "z."): spec for name, spec in adapter().items()}
    wrong = {
        "missing tensor": half,
        "targets z.weight, which the served model lacks": stranger,
        "targets nothing": {},
        "Wrong shape: a has": adapter(a__lora_B=TensorSpec(dtype="F32", shape=(4, 3))),
        "Wrong dtype: a has": adapter(a__lora_B=TensorSpec(dtype="F16", shape=(4, 2))),
        "unknown tensor": adapter(b__weight=EXPECTED["b"]),
    }
    for message, arrived in wrong.items():
        with pytest.raises(ManifestError, match=message):
            compare_adapter(arrived, served)


def test_partial_updates_carry_some_tensors() -> None:
    """Some of the tensors pass when that is what was announced; none, or strangers, do not."""
    compare({"a": EXPECTED["a"]}, EXPECTED, partial=True)
    with pytest.raises(ManifestError, match="holds no tensor"):
        compare({}, EXPECTED, partial=True)
    with pytest.raises(ManifestError, match="unknown"):
        compare({"z": EXPECTED["a"]}, EXPECTED, partial=True)
