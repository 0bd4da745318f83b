"""Every TRL and Transformers difference, as named facts, and the private names we rely on.

Nothing here imports TRL: versions come from the installed distribution's metadata.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

from packaging.version import Version

from vllm_parity_plugin.errors import ParityError

MIN_TRL = Version("1.16.0")
"""First release with the fused LM head on the model's forward (``add_fused_lm_head``)."""
MAX_TRL = Version("1.17")
"""Releases from here on have not been read."""


def check_trl_version() -> None:
    """Refuse to run without a TRL whose trainer was read.

    Raises:
        ParityError: TRL is not installed, or its trainer differs from the one written for.
    """
    try:
        found = Version(Version(version("trl")).base_version)
    except PackageNotFoundError:
        raise ParityError(
            "TRL is not installed in this environment.",
            "ParityCallback and ParityGRPOTrainer extend TRL's GRPOTrainer; the vLLM plugin "
            "alone does not need it.",
            "pip install 'vllm-parity[trl]' in the trainer's environment.",
        ) from None
    if not MIN_TRL <= found < MAX_TRL:
        raise ParityError(
            f"TRL {found} is installed, and vllm-parity was written for {MIN_TRL} up to, but "
            f"not including, {MAX_TRL}.",
            "GRPOTrainer's internals differ between releases; a hook that misses would leave the "
            "run unprotected without an error.",
            f"pip install 'trl>={MIN_TRL},<{MAX_TRL}'.",
        )


def calling_trainer() -> Any:
    """The ``GRPOTrainer`` that is running the current callback.

    Transformers hands callbacks the model but not the trainer, and a callback given to the
    constructor cannot be bound to it earlier. Every callback runs below a method of its trainer,
    so its frame is on the stack.

    Raises:
        ParityError: no GRPOTrainer calls us.
    """
    from trl import GRPOTrainer

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, GRPOTrainer):
            return candidate
        frame = frame.f_back
    raise ParityError(
        "ParityCallback was called by something that is not a GRPOTrainer.",
        "It reads sampler logprobs and the loss of that trainer.",
        "pass it to GRPOTrainer(callbacks=[ParityCallback()]) or a subclass.",
    )


def log_metrics(trainer: Any, values: dict[str, float]) -> None:
    """Add values to what the trainer logs next (averaged over the steps in between).

    ``GRPOTrainer._metrics`` is what TRL's own metrics go through; values put there reach the
    progress output, ``state.log_history`` and every ``report_to`` integration. ``on_log`` is too
    late for all three.
    """
    mode = "train" if trainer.model.training else "eval"
    for name, value in values.items():
        trainer._metrics[mode][name].append(value)


def replace_metrics(trainer: Any, values: dict[str, float]) -> None:
    """Put values in the place of what TRL logged last under the same names."""
    mode = "train" if trainer.model.training else "eval"
    for name, value in values.items():
        trainer._metrics[mode][name][-1] = value
