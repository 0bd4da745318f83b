"""vllm-parity, the part that runs inside the trainer.

Names are loaded on first use, so that the pure modules (``score_centering``,
``token_logprobs``) can be imported without TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_callbacks.callback import ParityCallback
    from trl_callbacks.config import ParityGRPOConfig
    from trl_callbacks.rollout import ParityRollout
    from trl_callbacks.score_centering import score_centering_loss
    from trl_callbacks.trainer import ParityGRPOTrainer

__all__ = [
    "ParityCallback",
    "ParityGRPOConfig",
    "ParityGRPOTrainer",
    "ParityRollout",
    "score_centering_loss",
]

_HOME = {
    "ParityCallback": "callback",
    "ParityGRPOConfig": "config",
    "ParityGRPOTrainer": "trainer",
    "ParityRollout": "rollout",
    "score_centering_loss": "score_centering",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "score_centering_loss":
        from trl_callbacks.compat import check_trl_version

        check_trl_version()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
