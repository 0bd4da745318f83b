"""What a parity server says about itself, and the names of its routes.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from vllm_parity_plugin.weights.messages import Progress

PREFIX = "/v1/parity"
"""All routes live under /v1 so that vLLM's --api-key covers them."""
TOKEN_HEADER = "x-parity-token"
MARKER_FILE = ".vllm-parity"
"""File in the weights directory that holds the server's id, to tell a shared directory."""
INCOMING = "parity-"
"""Prefix of the files that trainers write there; abandoned ones are removed by it."""


PrefixCaching = Literal["off", "versioned", "on"]
"""Of a worker's engine: ``versioned`` is keyed by policy, ``on`` is vLLM's own, which is not."""


class Message(BaseModel):
    """Base of all messages: unknown fields are errors."""

    # NaN as a temperature would reach the sampler, past every comparison.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class HeadStatus(Message):
    """The lm_head of one worker, measured by running it."""

    dtype: str
    bf16_share: float
    weight_dtype: str


class WorkerStatus(Message):
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
    prefix_caching: PrefixCaching
    async_scheduling: bool
    speculative: bool
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    tied_embeddings: bool
    policy_version: int
    weights: Literal["committed", "mixed"]


class Status(Message):
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


__all__ = [
    "INCOMING",
    "MARKER_FILE",
    "PREFIX",
    "TOKEN_HEADER",
    "HeadStatus",
    "Message",
    "PrefixCaching",
    "Status",
    "WorkerStatus",
]
