"""A vLLM worker that waits without spinning, for a server that shares its cores with a trainer.

vLLM's worker polls shared memory for a second after every message. On few cores that takes time
from the trainer, which computes right then. ``install`` writes this file, as an installed plugin,
to a directory for PYTHONPATH. It imports nothing but vLLM. Results do not depend on it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

MODULE = "parity_benchmark_quiet_worker"
METADATA = f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 0\n"
ENTRY_POINTS = f"[vllm.general_plugins]\n{MODULE} = {MODULE}:register\n"
POLL_MS = 1


def install(directory: Path) -> dict[str, str]:
    """Environment of a server whose worker is quiet."""
    shutil.copyfile(__file__, directory / f"{MODULE}.py")
    info = directory / f"{MODULE}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory), inherited]))}


def register() -> None:
    """Make every reader sleep between looks, also those that exist, once per process."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    original = SpinCondition.wait
    if getattr(original, "quiet", False):
        return

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0.0
        # Not the whole timeout: a notification that came before the poll can be lost.
        original(self, POLL_MS if timeout_ms is None else min(POLL_MS, timeout_ms))

    wait.quiet = True
    SpinCondition.wait = wait
