"""What the engine core knows and does not say: whether the weights are in memory."""

from __future__ import annotations

from typing import Any

from vllm_parity_plugin.compat import call_every_core


def parity_asleep(self: Any) -> list[str]:
    """``EngineCore.parity_asleep``: what the executor put to sleep: ``weights``, ``kv_cache``.

    ``EngineCore.is_sleeping`` (read in 0.31) is also true while generation is only paused.
    """
    return sorted(self.model_executor.sleeping_tags)


async def asleep(engine: Any) -> bool:
    """Whether any engine core's executor sleeps, so that its weights are gone or elsewhere."""
    return any(await call_every_core(engine, "parity_asleep"))
