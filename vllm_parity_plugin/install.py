"""The patch ledger and its installation, called in every vLLM process."""

from __future__ import annotations

from vllm_parity_plugin.compat import MAX_VLLM, check_vllm_version, untested_vllm, vllm_version
from vllm_parity_plugin.ledger import Patch
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.settings import load_settings


def _create_engine_config(original):  # type: ignore[no-untyped-def]
    from vllm_parity_plugin.engine_args import wrap_create_engine_config

    return wrap_create_engine_config(original)


def _load_endpoint_plugins(original):  # type: ignore[no-untyped-def]
    from vllm_parity_plugin.server.endpoint import wrap_load_endpoint_plugins

    return wrap_load_endpoint_plugins(original)


def _load_model(original):  # type: ignore[no-untyped-def]
    from vllm_parity_plugin.worker import wrapper_load_model

    return wrapper_load_model


def _attest(original):  # type: ignore[no-untyped-def]
    from vllm_parity_plugin.worker import parity_attest

    return parity_attest


def _policy_version(original):  # type: ignore[no-untyped-def]
    from vllm_parity_plugin.worker import parity_policy_version

    return parity_policy_version


def _apply_weights(original):  # type: ignore[no-untyped-def]
    from vllm_parity_plugin.worker import parity_apply_weights

    return parity_apply_weights


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="engine-config",
        module="vllm.engine.arg_utils",
        attribute="EngineArgs.create_engine_config",
        wrap=_create_engine_config,
        why="engine settings that drift are not changed and not checked",
        versions="0.26-0.32",
        upstream="vllm#48390, trl#4159",
        delete_when="vLLM has an RL profile of engine settings",
    ),
    Patch(
        name="endpoint",
        module="vllm.plugins",
        attribute="load_endpoint_plugins",
        wrap=_load_endpoint_plugins,
        why="the /v1/parity routes appear only for users who set VLLM_PLUGINS",
        versions="0.26-0.32",
        upstream="vllm#46565",
        delete_when="endpoint plugins can load without VLLM_PLUGINS",
    ),
    Patch(
        name="load-model",
        module="vllm.v1.worker.worker_base",
        attribute="WorkerWrapperBase.load_model",
        wrap=_load_model,
        why="nobody confirms that the loaded head runs in fp32, or knows what was loaded",
        versions="0.26-0.32 (reached through __getattr__, so adding the method is enough)",
        upstream="vllm#48390",
        delete_when="vLLM reports the dtype that the head really uses",
        adds=True,
    ),
    Patch(
        name="attest",
        module="vllm.v1.worker.worker_base",
        attribute="WorkerBase.parity_attest",
        wrap=_attest,
        why="workers cannot report what they run",
        versions="0.26-0.32",
        upstream="none",
        delete_when="never: this is the plugin's own method",
        adds=True,
    ),
    Patch(
        name="policy-version",
        module="vllm.v1.worker.worker_base",
        attribute="WorkerBase.parity_policy_version",
        wrap=_policy_version,
        why="nobody knows which policy a worker samples from",
        versions="0.26-0.32",
        upstream="none",
        delete_when="never: this is the plugin's own method",
        adds=True,
    ),
    Patch(
        name="apply-weights",
        module="vllm.v1.worker.worker_base",
        attribute="WorkerBase.parity_apply_weights",
        wrap=_apply_weights,
        why="workers cannot take a weight update",
        versions="0.26-0.32",
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
