"""Attaches the routes to vLLM's API server, through its own endpoint-plugin interface."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Literal

from vllm_parity_plugin import compat
from vllm_parity_plugin.engine_requests import head_limit
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.settings import ParitySettings, load_settings
from vllm_parity_plugin.wire import Status, WorkerStatus

State = Literal["serving", "updating", "paused", "unhealthy"]

NAME = "parity"
GROUP = "vllm.endpoint_plugins"
REAP_SECONDS = 5.0


class ParityEndpoint:
    """vLLM's ``EndpointPlugin`` protocol."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        from vllm_parity_plugin.server.answers import answer_error
        from vllm_parity_plugin.server.gate import ParityGate
        from vllm_parity_plugin.server.routes import router

        app.include_router(router)
        app.add_middleware(ParityGate)
        app.add_exception_handler(ParityError, answer_error)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Check every worker, then make the routes usable.

        Raises:
            ParityError: a worker runs without the plugin, so nothing is guaranteed.
        """
        if engine_client is None:
            return
        settings = load_settings(engine_client.vllm_config.additional_config)
        if settings.mode == "off":
            return
        state.parity = await ServerState.create(engine_client, args, settings)
        logger.info("%s", state.parity.banner)


def build_plugin() -> ParityEndpoint:
    """Factory named by the ``vllm.endpoint_plugins`` entry point."""
    return ParityEndpoint()


class ServerState:
    """What the routes need, one per API-server process."""

    def __init__(
        self, engine: Any, args: Namespace, settings: ParitySettings, worker: dict[str, Any]
    ) -> None:
        from vllm_parity_plugin.server.auth import FailureLimiter
        from vllm_parity_plugin.server.jobs import Jobs
        from vllm_parity_plugin.server.metrics import WeightMetrics
        from vllm_parity_plugin.weights.staging import Staging
        from vllm_parity_plugin.weights.transaction import WeightUpdates

        self.engine = engine
        self.settings = settings
        # The same in every API-server process: state lives in the workers.
        self.server_id = str(worker["instance"])
        self.limiter = FailureLimiter()
        self.api_keys = [key for key in (getattr(args, "api_key", None) or []) if key]
        if os.environ.get("VLLM_API_KEY"):
            self.api_keys.append(os.environ["VLLM_API_KEY"])
        self.updates = WeightUpdates(
            engine,
            Staging(settings.weights_dir, self.server_id),
            settings.rollback,
            settings.upload_timeout,
            WeightMetrics(worker["version"]).observe,
        )
        alone = (getattr(args, "api_server_count", 1) or 1) == 1
        self.jobs = Jobs(self.server_id, alone, settings.rollout_grace)
        self._reaper: asyncio.Task[None] | None = None
        self.banner = ""

    @classmethod
    async def create(cls, engine: Any, args: Namespace, settings: ParitySettings) -> ServerState:
        self = cls(engine, args, settings, await _first_worker(engine))
        status = await self.status()
        head = status.head
        self.banner = (
            f"parity confirmed by {len(status.workers)} worker(s): "
            f"lm_head {head.dtype if head else 'absent'}, {status.workers[0].logprobs_mode}; "
            f"routes under /v1/parity, weight updates from {self.updates.staging.path}"
        )
        self._reaper = asyncio.create_task(self._reap())
        return self

    async def _reap(self) -> None:
        """Drop what dead trainers left, as long as the server lives."""
        shortest = min(self.settings.upload_timeout, self.settings.rollout_grace)
        pause = min(REAP_SECONDS, shortest / 4)
        while True:
            await asyncio.sleep(pause)
            try:
                self.updates.reap()
            except OSError:
                logger.exception("cannot tidy the weights directory")
            await self.jobs.reap()

    async def status(self) -> Status:
        """Ask every worker what it runs.

        Raises:
            ParityError: a worker does not know the question: the plugin is not loaded there.
        """
        updating = self.updates.staging.updating() is not None
        try:
            reports = await compat.rpc_every_worker(self.engine, "parity_attest")
        except Exception as error:
            raise _inactive(error) from error
        workers = [WorkerStatus(**report) for report in reports]
        model_config = self.engine.model_config
        return Status(
            server_id=self.server_id,
            plugin_version=workers[0].plugin_version,
            mode=self.settings.mode,
            model=str(model_config.model),
            max_model_len=int(model_config.max_model_len),
            head_size=self.head_limit,
            state=await self._state(workers, updating),
            failure=self.updates.staging.failure,
            in_progress=self.updates.in_progress(),
            policy_version=min(worker.policy_version for worker in workers),
            workers=workers,
        )

    @property
    def head_limit(self) -> int:
        """Most head entries per token that the engine returns."""
        return head_limit(self.engine.model_config, self.settings.head_size)

    async def _state(self, workers: list[WorkerStatus], updating: bool) -> State:
        if self.updates.staging.failure is not None:
            return "unhealthy"
        if self.updates.staging.updating() is not None:
            return "updating"
        if any(worker.weights == "mixed" for worker in workers):
            # Workers that were asked during another process's update answered half-loaded.
            return "updating" if updating else "unhealthy"
        return "paused" if await self.engine.is_paused() else "serving"


async def _first_worker(engine: Any) -> dict[str, Any]:
    """Report of the first worker of the first engine, which every API-server process sees."""
    try:
        reports = await engine.collective_rpc("parity_weights", args=("report",))
    except Exception as error:
        raise _inactive(error) from error
    first: dict[str, Any] = reports[0]
    return first


def _inactive(error: Exception) -> ParityError:
    return ParityError(
        f"A worker could not attest to what it runs ({error}).",
        "The plugin is not active in that process, so its logprobs are not guaranteed.",
        "install vllm-parity on every node, and include 'parity' in VLLM_PLUGINS if you set it.",
    )


def wrap_load_endpoint_plugins(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_endpoint_plugins`` that always includes ours, once.

    vLLM loads endpoint plugins only when VLLM_PLUGINS names them; installing this package and
    leaving VLLM_PLUGINS unset is the common case. The original is still asked for the others.
    """

    def load_endpoint_plugins(supported_tasks: Any = None) -> list[Any]:
        others = [point for point in entry_points(group=GROUP) if point.name != NAME]
        listed = os.environ.get("VLLM_PLUGINS") is not None
        plugins = list(original(supported_tasks)) if others or listed else []
        ours = build_plugin()
        if not any(plugin.name == NAME for plugin in plugins) and (
            supported_tasks is None or set(ours.required_tasks) & set(supported_tasks)
        ):
            plugins.append(ours)
        return plugins

    return load_endpoint_plugins
