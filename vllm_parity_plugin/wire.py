"""Messages and array framing shared by server and trainer. Imports neither torch nor vLLM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.messages import Progress

PREFIX = "/v1/parity"
"""All routes live under /v1 so that vLLM's --api-key covers them."""
TOKEN_HEADER = "x-parity-token"
MARKER_FILE = ".vllm-parity"
"""File in the weights directory that holds the server's id, to tell a shared directory."""
INCOMING = "parity-"
"""Prefix of the files that trainers write there; abandoned ones are removed by it."""
MAX_SEQUENCES = 2**16
"""Completions of one rollout request: prompts times n."""
INT32 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Seed = Annotated[int, Field(ge=0, le=2**62)]


class _Message(BaseModel):
    # NaN as a temperature would reach the sampler, past every comparison.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class HeadStatus(_Message):
    """The lm_head of one worker, measured by running it."""

    dtype: str
    bf16_share: float
    weight_dtype: str


class WorkerStatus(_Message):
    """What one worker process really runs."""

    rank: int
    host: str
    plugin_version: str
    vllm_version: str
    model_runner: str
    head: HeadStatus | None
    logprobs_mode: str
    max_logprobs: int
    generation_config: str
    prefix_caching: bool
    async_scheduling: bool
    speculative: bool
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    tied_embeddings: bool
    policy_version: int
    weights: Literal["committed", "mixed"]


class Status(_Message):
    """Answer of ``GET /v1/parity/status``."""

    server_id: str
    plugin_version: str
    mode: Literal["enforce", "strict", "observe", "off"]
    model: str
    max_model_len: int
    head_size: int
    state: Literal["serving", "updating", "paused", "unhealthy"]
    failure: str | None = None
    in_progress: Progress | None = None
    policy_version: int
    workers: list[WorkerStatus]

    @property
    def head(self) -> HeadStatus | None:
        """The head of the first worker that has one."""
        return next((worker.head for worker in self.workers if worker.head), None)


class Sampling(_Message):
    """Sampling parameters of a rollout; the names and neutral values are vLLM's."""

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=INT32)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[TokenId, float] | None = None
    max_tokens: int = Field(default=16, ge=1, le=INT32)
    min_tokens: int = Field(default=0, ge=0, le=INT32)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False


class RolloutRequest(_Message):
    """Body of ``POST /v1/parity/rollouts``.

    ``seeds``, when given, has one entry per prompt; completion j of a prompt uses ``seed + j``.
    """

    prompts: list[list[int]] = Field(min_length=1, max_length=MAX_SEQUENCES)
    n: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    head_size: int = Field(default=0, ge=0, le=INT32)
    seeds: list[Seed] | None = None
    sampling: Sampling = Sampling()

    @model_validator(mode="after")
    def _bounded(self) -> RolloutRequest:
        if len(self.prompts) * self.n > MAX_SEQUENCES:
            raise ValueError(
                f"{len(self.prompts)} prompts times n={self.n} are more than {MAX_SEQUENCES} "
                "completions: they would hold the server for very long. Fix: send several requests"
            )
        return self


@dataclass(frozen=True)
class Rollout:
    """Completions as arrays. S sequences (prompt-major), N tokens in all, K head entries.

    Attributes:
        token_ids: [N] int32, the sampled tokens of all sequences, one after the other.
        logprobs: [N] float32, log q of each sampled token under the distribution that drew it.
        head_ids: [N, K] int32, the K most likely tokens at each position; -1 where the support
            is smaller than K. The head never depends on the sampled token.
        head_logprobs: [N, K] float32, their log q; -inf where ``head_ids`` is -1.
        sequence_offsets: [S + 1] int64; sequence i is ``[offsets[i], offsets[i + 1])``.
        policy_versions: [N] int32, version of the policy that sampled each token. It changes
            within a sequence that was in flight during a weight update.
        finish_reasons: S strings, vLLM's: ``stop``, ``length``, ``abort``, ...
        sampling: the parameters the server used.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    head_ids: np.ndarray
    head_logprobs: np.ndarray
    sequence_offsets: np.ndarray
    policy_versions: np.ndarray
    finish_reasons: list[str]
    sampling: Sampling

    ARRAYS = (
        "token_ids",
        "logprobs",
        "head_ids",
        "head_logprobs",
        "sequence_offsets",
        "policy_versions",
    )

    def __len__(self) -> int:
        return len(self.sequence_offsets) - 1

    def span(self, sequence: int) -> slice:
        """Token positions of one sequence in the flat arrays."""
        return slice(int(self.sequence_offsets[sequence]), int(self.sequence_offsets[sequence + 1]))

    def to_bytes(self) -> bytes:
        """One safetensors body; finish reasons and sampling travel as its metadata."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in self.ARRAYS}
        return save_arrays(
            arrays,
            metadata={
                "format": "vllm-parity-rollout-1",
                "finish_reasons": json.dumps(self.finish_reasons),
                "sampling": self.sampling.model_dump_json(),
            },
        )

    @classmethod
    def from_bytes(cls, body: bytes) -> Rollout:
        """Read a body made by :meth:`to_bytes`, checking that the arrays belong together.

        Raises:
            ParityError: not a rollout body, or arrays whose lengths disagree (case L11).
        """
        try:
            arrays = load_arrays(body)
            metadata = _metadata(body)
            rollout = cls(
                **{name: arrays[name] for name in cls.ARRAYS},
                finish_reasons=json.loads(metadata["finish_reasons"]),
                sampling=Sampling.model_validate_json(metadata["sampling"]),
            )
        except (SafetensorError, KeyError, ValueError) as error:
            raise ParityError(
                f"The rollout body cannot be read ({error}).",
                "It is truncated or comes from another version of the plugin.",
                "use the same vllm-parity version on server and trainer.",
            ) from None
        rollout.check()
        return rollout

    def check(self) -> None:
        """Lengths of ids, logprobs, heads and sequences agree.

        Raises:
            ParityError: they do not; a shifted logprob would enter the loss silently.
        """
        tokens = len(self.token_ids)
        lengths = {
            name: len(getattr(self, name))
            for name in ("logprobs", "head_ids", "head_logprobs", "policy_versions")
        }
        ends = int(self.sequence_offsets[-1]) if len(self.sequence_offsets) else -1
        if set(lengths.values()) != {tokens} or ends != tokens:
            raise ParityError(
                f"The rollout has {tokens} token ids but {lengths}, offsets ending at {ends}.",
                "A token would be paired with another token's logprob.",
                "report this: the server's rollout is inconsistent.",
            )
        if len(self.finish_reasons) != len(self):
            raise ParityError(
                f"The rollout has {len(self)} sequences but {len(self.finish_reasons)} finish "
                "reasons.",
                "A truncated sequence could pass for a finished one.",
                "report this: the server's rollout is inconsistent.",
            )


def _metadata(body: bytes) -> dict[str, str]:
    header_length = int.from_bytes(body[:8], "little")
    header: dict[str, Any] = json.loads(body[8 : 8 + header_length])
    return dict(header["__metadata__"])


__all__ = [
    "INCOMING",
    "MARKER_FILE",
    "PREFIX",
    "TOKEN_HEADER",
    "HeadStatus",
    "Rollout",
    "RolloutRequest",
    "Sampling",
    "Status",
    "WorkerStatus",
]
