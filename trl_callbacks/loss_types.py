"""Which of TRL's losses score centering fits, and what each makes of a token's ratio.

One table for the checks of the configuration, the trainer's loss and the documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trl_callbacks.importance_weights import WEIGHTS
from trl_callbacks.policy_ratio import CappedRatio, ClippedRatio, GatedRatio, PolicyRatio

Averaging = Literal["rows", "local_tokens", "constant", "global_tokens"]


@dataclass(frozen=True)
class LossRule:
    """One of TRL's loss types.

    Attributes:
        ratio: builds the loss's factor of p / p_old from a GRPOConfig; None where it has none
            that is a function of one token.
        averaging: over what TRL averages the tokens' losses.
        refused: why score centering does not fit; empty where it does.
        factor: the factor in words, for the documentation.
    """

    averaging: Averaging
    factor: str
    ratio: Callable[[Any], PolicyRatio] | None = None
    refused: str = ""


def _clipped(config: Any) -> PolicyRatio:
    return ClippedRatio(config.epsilon, _high(config), config.delta)


def _capped(config: Any) -> PolicyRatio:
    return CappedRatio(_high(config))


def _gated(config: Any) -> PolicyRatio:
    return GatedRatio(config.sapo_temperature_pos, config.sapo_temperature_neg)


def _high(config: Any) -> float:
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return float(high)


_CLIP = "r where PPO does not clip, else 0"
LOSSES: dict[str, LossRule] = {
    "grpo": LossRule("rows", _CLIP, _clipped),
    "bnpo": LossRule("local_tokens", _CLIP, _clipped),
    "dr_grpo": LossRule("constant", _CLIP, _clipped),
    "dapo": LossRule("global_tokens", _CLIP, _clipped),
    "cispo": LossRule("global_tokens", "min(r, epsilon_high)", _capped),
    "sapo": LossRule("rows", "4 r s (1 - s), s = sigmoid(tau (r - 1))", _gated),
    "luspo": LossRule(
        "rows",
        "of the whole sequence",
        refused="Its ratio is that of a whole sequence, so the sampler's expected score under it "
        "cannot be enumerated at one prefix",
    ),
    "vespo": LossRule(
        "global_tokens",
        "of the whole sequence",
        refused="Its weight is a function of the whole sequence's ratio, so the sampler's "
        "expected score under it cannot be enumerated at one prefix",
    ),
}
SUPPORTED = tuple(name for name, rule in LOSSES.items() if not rule.refused)
STEPS = ("one", "several")
"""Optimizer steps on one rollout."""


def refusal(loss_type: str, weight: str) -> str:
    """Why score centering does not take this pair; empty where it does.

    The number of optimizer steps on a rollout does not matter: a factor of the ratio that can be
    enumerated on the first step can be on the later ones.
    """
    if weight not in WEIGHTS:
        return "There is no such weight"
    if loss_type not in LOSSES:
        return "It is not a loss that was read"
    return LOSSES[loss_type].refused


def support_table() -> list[tuple[str, ...]]:
    """Rows of loss type, factor, and one cell for each weight and number of steps."""
    rows = []
    for name, rule in LOSSES.items():
        cells = [
            "refused" if refusal(name, weight) else "supported" for weight in WEIGHTS for _ in STEPS
        ]
        rows.append((name, rule.factor, *cells))
    return rows
