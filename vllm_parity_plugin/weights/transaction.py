"""One weight update: validate, pause, apply, set the version, resume.

The order is the point. Everything that can be wrong with what arrived is found before generation
is paused, and generation resumes only when every worker reports the new version.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm_parity_plugin import compat
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.weights.manifest import ManifestError, TensorSpec, compare, read_manifest
from vllm_parity_plugin.weights.staging import Staging
from vllm_parity_plugin.weights.values import check_values
from vllm_parity_plugin.wire import WeightUpdate, WeightUpdateResult


class ApplyError(ParityError):
    """The update failed while it was applied: generation stays paused."""


class WeightUpdates:
    """Applies updates to an engine, one at a time.

    Args:
        engine: vLLM's ``EngineClient`` (``AsyncLLM``).
        staging: where update files are read from.
    """

    def __init__(self, engine: Any, staging: Staging) -> None:
        self._engine = engine
        self._expected: dict[str, TensorSpec] | None = None
        self.staging = staging
        self.updating = False
        self.failure: str | None = None
        self.epoch = 0
        """Grows when an update of this process begins and when it ends: odd while one runs."""
        self.current = 0
        """The served version, as this process last knew it."""

    async def expected(self) -> dict[str, TensorSpec]:
        """The tensors an update must carry, asked from the workers once.

        Raises:
            ManifestError: the model was not loaded from a checkpoint, so nobody knows.
        """
        if self._expected is None:
            reports = await self._engine.collective_rpc("parity_attest", kwargs={"manifest": True})
            record = next((r["expected"] for r in reports if r["expected"]), None)
            if record is None:
                raise ManifestError(
                    "This server did not load its model from a checkpoint.",
                    "The plugin cannot tell whether a weight update is complete.",
                    "start vllm serve with a model directory and the default --load-format.",
                )
            self._expected = {
                name: TensorSpec(dtype=dtype, shape=tuple(shape))
                for name, (dtype, shape) in record.items()
            }
        return self._expected

    async def policy_version(self) -> int:
        """Version that the workers hold.

        Raises:
            ApplyError: they disagree.
        """
        versions = sorted(set(await self._engine.collective_rpc("parity_policy_version")))
        if len(versions) > 1:
            raise ApplyError(
                f"The workers hold different policy versions: {versions}.",
                "They would sample from a mixture.",
                "send a full update with a new version.",
            )
        self.current = int(versions[0])
        return self.current

    async def apply(self, update: WeightUpdate) -> WeightUpdateResult:
        """Run one update.

        Raises:
            UpdateInProgress: another update is running.
            ManifestError: the update does not fit; the served model was not touched.
            ApplyError: loading failed half-way; generation stays paused until a good update.
        """
        started = time.perf_counter()
        with self.staging.lock():
            self.updating = True
            self.epoch += 1
            try:
                return await self._apply_locked(update, started)
            finally:
                self.updating = False
                self.epoch += 1

    async def _apply_locked(self, update: WeightUpdate, started: float) -> WeightUpdateResult:
        served = await self.policy_version() if self.failure is None else -1
        if update.version == served:
            return WeightUpdateResult(
                policy_version=served,
                applied=False,
                tensors=0,
                bytes=0,
                pause_seconds=0.0,
                total_seconds=time.perf_counter() - started,
            )
        if update.version < served:
            raise ManifestError(
                f"Policy version {update.version} is older than the served version {served}.",
                "A late or repeated update would move the sampler backwards.",
                "read policy_version from GET /v1/parity/status and count up from there.",
            )
        path = self.staging.resolve(update.file)
        arrived = read_manifest(path)
        compare(arrived, await self.expected())
        await asyncio.to_thread(check_values, path)

        pause_started = time.perf_counter()
        # vLLM's prefix cache (left on in mode observe) is not keyed by policy: new prompts would
        # be served from KV of the old weights. It can only be cleared together with running KV.
        cached = self._engine.vllm_config.cache_config.enable_prefix_caching
        try:
            await self._engine.pause_generation(
                mode="keep", clear_cache=update.kv == "recompute" or bool(cached)
            )
            await self._engine.collective_rpc(
                "parity_apply_weights", args=(str(path), update.version)
            )
            if compat.has_weight_version():
                await self._engine.update_weight_version(str(update.version))
            reached = await self.policy_version()
            if reached != update.version:
                raise ParityError(
                    f"The workers report version {reached}, not {update.version}.",
                    "The update did not reach them.",
                    "send it again.",
                )
        except BaseException as error:
            self.failure = str(error)
            logger.exception("weight update %d failed; generation stays paused", update.version)
            raise ApplyError(
                f"Policy version {update.version} failed while it was loaded ({error}).",
                "The model may hold a mixture of two policies, so generation stays paused.",
                "send a complete update again; it resumes generation when it succeeds.",
            ) from error
        self.failure = None
        await self._engine.resume_generation()
        return WeightUpdateResult(
            policy_version=update.version,
            applied=True,
            tensors=len(arrived),
            bytes=path.stat().st_size,
            pause_seconds=time.perf_counter() - pause_started,
            total_seconds=time.perf_counter() - started,
        )
