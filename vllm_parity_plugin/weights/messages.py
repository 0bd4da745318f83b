"""Messages of the weight routes, shared by server and trainer. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_parity_plugin.weights.manifest import TensorEntry, TensorSpec

MAX_VERSION = 2**31 - 1
"""Rollouts carry versions as int32."""

Kind = Literal["full", "changed", "lora"]
Outcome = Literal["applied", "repeated", "refused", "restored", "unhealthy", "aborted"]

Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Progress(_Message):
    """A weight update that holds the server: only one can."""

    version: int
    phase: Literal["upload", "apply"]
    idle_seconds: float = Field(description="since the trainer last sent something")


class WeightsInfo(_Message):
    """Answer of ``GET /v1/parity/weights``: where an update goes and what it must carry."""

    server_id: str
    directory: str
    model: str = Field(description="identity of the served model; a manifest repeats it")
    policy_version: int
    adapter_base: int = Field(description="base_version that a lora update must name")
    rollback: Literal["keep", "none"]
    upload_timeout: float = Field(description="seconds without bytes after which an upload ends")
    tensors: dict[str, TensorSpec]
    in_progress: Progress | None = None


class Manifest(_Message):
    """What an update is: its version, what it builds on, and every tensor of it."""

    version: int = Field(
        ge=1, le=MAX_VERSION, description="policy version; larger than the served one"
    )
    kind: Kind = Field(
        default="full",
        description=(
            "full: every tensor of the model. changed: some of them, on top of base_version. "
            "lora: adapter pairs NAME.lora_A [r, in] and NAME.lora_B [out, r] for served tensors "
            "NAME.weight, merged into the weights of base_version."
        ),
    )
    base_version: Version | None = Field(
        default=None, description="version that a changed or lora update builds on"
    )
    scaling: float = Field(default=1.0, description="lora: W = W_base + scaling * B A")
    model: str | None = Field(
        default=None, description="the server's model identity; a different one is refused"
    )
    kv: Literal["keep", "recompute"] = Field(
        default="keep",
        description=(
            "keep: requests in flight go on with their KV cache. recompute: they are prefilled "
            "again with the new weights."
        ),
    )
    tensors: dict[str, TensorEntry] | None = Field(
        default=None,
        description=(
            "dtype, shape, byte range and checksum of every tensor; what arrives is compared with "
            "it, so that a flipped bit or a swapped tensor is found. Without it only names, "
            "dtypes, shapes and values are checked."
        ),
    )

    @model_validator(mode="after")
    def _base_belongs_to_partial(self) -> Manifest:
        if (self.kind == "full") != (self.base_version is None):
            raise ValueError(
                f"kind={self.kind!r} with base_version={self.base_version}: a full update names "
                "no base, a changed or lora update must name the one it builds on"
            )
        return self


class WeightUpdate(Manifest):
    """Body of ``POST /v1/parity/weights``: a manifest and the file that holds its tensors."""

    file: str = Field(description="name of a safetensors file in the server's weights directory")


class UploadRequest(Manifest):
    """Body of ``POST /v1/parity/weights/uploads``: the manifest of what will be sent."""

    tensors: dict[str, TensorEntry] = Field(min_length=1)


class UploadStatus(_Message):
    """An upload in progress."""

    upload_id: str
    version: int
    received: int = Field(description="bytes of the data section that have arrived, from its start")
    total: int
    timeout: float = Field(description="seconds without bytes after which the upload is dropped")
    error: str | None = Field(
        default=None, description="why an NCCL transfer ended early; the upload can be filled anew"
    )


class NcclStart(_Message):
    """Body of ``POST /v1/parity/weights/uploads/ID/nccl``."""

    unique_id: str = Field(
        pattern="^[A-Za-z0-9+/]{171}=$",
        description="base64 of the 128 bytes of the ncclUniqueId, of which the trainer is rank 0",
    )


class WeightUpdateResult(_Message):
    """Answer of ``POST /v1/parity/weights`` and of an upload's commit."""

    policy_version: int
    applied: bool = Field(description="false when this version was already served")
    tensors: int
    bytes: int
    pause_seconds: float
    total_seconds: float
