"""The moment in which the weights change: pause, load, commit, resume, or go back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_parity_plugin import compat
from vllm_parity_plugin.core_prefix import prefix_caching
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.recorded import mark_version
from vllm_parity_plugin.weights.errors import ApplyError
from vllm_parity_plugin.weights.messages import Manifest, Outcome
from vllm_parity_plugin.weights.served import Served, first_error, plain
from vllm_parity_plugin.weights.stack import Stack
from vllm_parity_plugin.weights.staging import Staging


@dataclass
class Record:
    """What one update did, for metrics and logs."""

    outcome: Outcome
    version: int
    pause_seconds: float = 0.0
    total_seconds: float = 0.0
    bytes: int = 0
    reason: str = ""


@dataclass
class Update:
    """An update on its way."""

    manifest: Manifest
    record: Record
    started: float = field(default_factory=time.perf_counter)


class Swap:
    """Replaces what an engine serves.

    Args:
        engine: vLLM's ``EngineClient`` (``AsyncLLM``).
        served: its weights.
        staging: where a failure is noted, for all API-server processes.
        rollback: whether the files of a committed stack stay.
    """

    def __init__(
        self, engine: Any, served: Served, staging: Staging, rollback: Literal["keep", "none"]
    ) -> None:
        self._engine = engine
        self._served = served
        self._staging = staging
        self._rollback = rollback

    async def run(
        self, going: Update, old: Stack | None, new: Stack, only: list[str] | None
    ) -> None:
        """Pause, load, commit, resume; on any failure go back, or stay paused."""
        stay_paused = old is not None and await self._engine.is_paused()
        # vLLM's prefix cache (left on in mode observe) is not keyed by policy: new prompts would
        # be served from KV of the old weights. It can only be cleared together with running KV.
        # A versioned one needs no clearing: the commit ends what was cached.
        unkeyed = prefix_caching(self._engine.vllm_config) == "on"
        pause_started = time.perf_counter()
        try:
            pause = self._engine.pause_generation(
                mode="keep", clear_cache=going.manifest.kv == "recompute" or unkeyed
            )
            await compat.unless_dead(self._engine, pause)
            first_error(await self._served.on_workers("apply", plain(new), only), ParityError)
            await self._label(going.manifest.version)
            first_error(
                await self._served.on_workers("commit", self._rollback == "keep"), ParityError
            )
        except BaseException as error:
            logger.exception("weight update %d failed", going.manifest.version)
            await self._go_back(going, old, error)
            if not stay_paused:
                await compat.unless_dead(self._engine, self._engine.resume_generation())
            going.record.outcome = "restored"
            going.record.pause_seconds = time.perf_counter() - pause_started
            raise ApplyError(
                f"Policy version {going.manifest.version} failed while it was loaded ({error}).",
                "The old weights were loaded again and are served.",
                "act on the message, then send the update again.",
            ) from error
        self._staging.failure = None
        if not stay_paused:
            await compat.unless_dead(self._engine, self._engine.resume_generation())
        going.record.pause_seconds = time.perf_counter() - pause_started
        going.record.outcome = "applied"

    async def _label(self, version: int) -> None:
        await mark_version(self._engine, version)
        if compat.has_weight_version():
            label = self._engine.update_weight_version(str(version))
            await compat.unless_dead(self._engine, label)

    async def _go_back(self, going: Update, old: Stack | None, error: BaseException) -> None:
        """Load the weights that were served before.

        Raises:
            ApplyError: there is no way back; generation stays paused.
        """
        why = "this server keeps no copy (rollback none)"
        if old is None:
            why = "no complete policy was loaded before"
        elif self._rollback == "keep":
            try:
                first_error(await self._served.on_workers("restore", plain(old)), ParityError)
                await self._label(old[-1].version)
                return
            except Exception as second:
                logger.exception("going back failed as well")
                why = f"going back failed: {second}"
        version = going.manifest.version
        reason = f"policy version {version} failed while it was loaded: {error}; {why}"
        self._staging.failure = reason
        going.record.outcome = "unhealthy"
        raise ApplyError(
            f"No complete policy is loaded: {reason}.",
            "The model may hold a mixture of two policies, so generation stays paused.",
            "send a complete update; it resumes generation when it succeeds.",
        ) from error
