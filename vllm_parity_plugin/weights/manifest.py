"""What a weight update must carry, and the comparison with what arrived.

Pure protocol: no torch, no vLLM. Dtypes are spelt as in safetensors headers (``BF16``, ``F32``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from vllm_parity_plugin.errors import ParityError

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

SHOWN = 4
"""How many offending tensors a message names before it counts the rest."""


class TensorSpec(BaseModel):
    """Dtype and shape of one tensor."""

    model_config = ConfigDict(frozen=True)

    dtype: str
    shape: tuple[int, ...]


class ManifestError(ParityError):
    """A weight update that does not fit the served model. Nothing was touched."""


def read_manifest(path: Path) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes in a safetensors file, read from its header only.

    Raises:
        ManifestError: not a safetensors file, or one that is shorter than its header says.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorSpec(dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ManifestError(
            f"{path.name} is not a complete safetensors file ({error}).",
            "A truncated update would leave part of the policy undefined.",
            "write the file completely, then rename it into place, then send the request.",
        ) from None


def compare(arrived: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    """Check that an update carries exactly the served model's tensors.

    A dtype may be the checkpoint's or float32: vLLM rounds once to the served dtype on load.

    Raises:
        ManifestError: missing, unknown or misshapen tensors, by name.
    """
    missing = sorted(expected.keys() - arrived.keys())
    unknown = sorted(arrived.keys() - expected.keys())
    if missing or unknown:
        raise ManifestError(
            " ".join(
                f"The update has {len(names)} {what} tensor(s): {_some(names)}."
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            ),
            "vLLM would keep old values, or uninitialised memory in a fused weight, for what "
            "is missing, and drop what it does not know.",
            "send exactly the tensors listed by GET /v1/parity/weights, under those names"
            + (
                " (a tied lm_head is not sent: the embedding carries it)."
                if "lm_head.weight" in unknown
                else "."
            ),
        )
    misshapen = [
        f"{name} is {list(arrived[name].shape)}, served {list(expected[name].shape)}"
        for name in sorted(expected)
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
        for name in sorted(expected)
        if arrived[name].dtype not in {expected[name].dtype, "F32"}
    ]
    if wrong_dtype:
        raise ManifestError(
            f"Wrong dtype: {_some(wrong_dtype)}.",
            "A second rounding would give the sampler other weights than the trainer's.",
            "send each tensor in the served dtype, or in float32.",
        )


def _some(items: list[str]) -> str:
    shown = ", ".join(items[:SHOWN])
    return shown if len(items) <= SHOWN else f"{shown} and {len(items) - SHOWN} more"
