"""The patch ledger and its installation, called in every vLLM process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from vllm_parity_plugin.compat import MAX_VLLM, check_vllm_version, untested_vllm, vllm_version
from vllm_parity_plugin.ledger import Patch
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.settings import load_settings


def _wrapper(path: str) -> Callable[[Any], Any]:
    """``module:function`` that turns the original into its replacement, imported when applied."""
    return lambda original: _load(path)(original)


def _method(path: str) -> Callable[[Any], Any]:
    """``module:function`` that becomes a new method, imported when applied."""
    return lambda original: _load(path)


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"vllm_parity_plugin.{module}"), name)
    return function


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="engine-config",
        module="vllm.engine.arg_utils",
        attribute="EngineArgs.create_engine_config",
        wrap=_wrapper("engine_args:wrap_create_engine_config"),
        why="engine settings that drift are not changed and not checked",
        versions="0.28-0.32",
        upstream="vllm#48390, trl#4159",
        delete_when="vLLM has an RL profile of engine settings",
    ),
    Patch(
        name="endpoint",
        module="vllm.plugins",
        attribute="load_endpoint_plugins",
        wrap=_wrapper("server.endpoint:wrap_load_endpoint_plugins"),
        why="the /v1/parity routes appear only for users who set VLLM_PLUGINS",
        versions="0.28-0.32",
        upstream="vllm#46565",
        delete_when="endpoint plugins can load without VLLM_PLUGINS",
    ),
    Patch(
        name="load-model",
        module="vllm.v1.worker.worker_base",
        attribute="WorkerWrapperBase.load_model",
        wrap=_method("worker:wrapper_load_model"),
        why="nobody confirms that the loaded head runs in fp32, or knows what was loaded",
        versions="0.28-0.32 (reached through __getattr__, so adding the method is enough)",
        upstream="vllm#48390",
        delete_when="vLLM reports the dtype that the head really uses",
        adds=True,
    ),
    Patch(
        name="attest",
        module="vllm.v1.worker.worker_base",
        attribute="WorkerBase.parity_attest",
        wrap=_method("worker:parity_attest"),
        why="workers cannot report what they run",
        versions="0.28-0.32",
        upstream="none",
        delete_when="never: this is the plugin's own method",
        adds=True,
    ),
    Patch(
        name="weights",
        module="vllm.v1.worker.worker_base",
        attribute="WorkerBase.parity_weights",
        wrap=_method("worker:parity_weights"),
        why="workers cannot take a weight update, or say which policy they hold",
        versions="0.28-0.32",
        upstream="none",
        delete_when="never: this is the plugin's own method",
        adds=True,
    ),
    Patch(
        name="open-record",
        module="vllm.v1.engine.core",
        attribute="EngineCore.add_request",
        wrap=_wrapper("core_records:wrap_add_request"),
        why="nobody knows which policy sampled the first tokens of a rollout, and a prefix cache "
        "is not keyed by policy",
        versions="0.31",
        upstream="none",
        delete_when="vLLM returns the weight version of every token",
    ),
    Patch(
        name="keep-logprobs",
        module="vllm.v1.core.sched.scheduler",
        attribute="Scheduler.update_from_output",
        wrap=_wrapper("core_records:wrap_update_from_output"),
        why="every row of a head becomes Python objects in the front end",
        versions="0.31",
        upstream="vllm#28171, vllm#28226",
        delete_when="vLLM hands out logprobs as arrays, once per sequence",
    ),
    Patch(
        name="mark-version",
        module="vllm.v1.engine.core",
        attribute="EngineCore.parity_mark_version",
        wrap=_method("core_records:parity_mark_version"),
        why="the engine core does not know at which token of a request the weights changed, and "
        "cached prefixes outlive them",
        versions="0.31",
        upstream="none",
        delete_when="vLLM returns the weight version of every token",
        adds=True,
    ),
    Patch(
        name="take-records",
        module="vllm.v1.engine.core",
        attribute="EngineCore.parity_take",
        wrap=_method("core_records:parity_take"),
        why="rollouts have neither heads nor the policy version of each token",
        versions="0.31",
        upstream="none",
        delete_when="vLLM returns the weight version of every token, and logprobs as arrays",
        adds=True,
    ),
    Patch(
        name="core-asleep",
        module="vllm.v1.engine.core",
        attribute="EngineCore.parity_asleep",
        wrap=_method("core_state:parity_asleep"),
        why="an engine that is only paused says that it sleeps",
        versions="0.31",
        upstream="none",
        delete_when="never: this is the plugin's own method",
        adds=True,
    ),
)


def install() -> list[str]:
    """Apply the ledger in this process; names of the patches that were new.

    Mode ``off`` in the environment installs nothing, so that a user can always get stock vLLM.
    (``--additional-config`` is not known yet here; its ``off`` is honoured when the engine
    configuration is made.)
    """
    if load_settings().mode == "off":
        return []
    check_vllm_version()
    if untested_vllm():
        logger.warning(
            "vLLM %s is newer than the releases vllm-parity was read against (below %s). The "
            "rules are checked at start all the same; compare `vllm-parity check` with the docs.",
            vllm_version(),
            MAX_VLLM,
        )
    return [patch.name for patch in PATCHES if patch.apply()]
