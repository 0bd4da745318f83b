"""What a loss makes of r = p / p_old when one rollout serves several optimizer steps.

Each object is the factor g(r, sign A) in the gradient of its loss, -A g(r_y) grad log p_y. A
function of one token's ratio can be enumerated, so score centering takes it into the expectation:
sum_v q_v f(p_old_v / q_v) g(p_v / p_old_v) grad log p_v.

Source: the losses of TRL's ``GRPOTrainer._compute_loss``; PPO, arXiv 1707.06347; CISPO,
arXiv 2506.13585; SAPO, arXiv 2511.20347.

Shapes: N tokens flat (any leading shape). A advantage, p the trainer now, p_old at the rollout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from trl_callbacks.importance_weights import MAX_LOG_WEIGHT


@runtime_checkable
class PolicyRatio(Protocol):
    """The factor g of one loss. ``positive`` [N] bool says where A > 0; shapes broadcast."""

    def factor(self, log_ratio: Tensor, positive: Tensor) -> Tensor:
        """Return g(r) from log r [N]."""

    def clipped(self, log_ratio: Tensor, positive: Tensor) -> Tensor:
        """Return where the loss holds a token's ratio at a bound [N], bool."""


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_WEIGHT).exp()


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0.0 else -math.inf


@dataclass(frozen=True)
class ClippedRatio:
    """PPO's clip (losses grpo, bnpo, dr_grpo, dapo, luspo): g = r where not clipped, else 0.

    From -min(min(r, delta) A, clip(r, 1 - low, 1 + high) A): a positive A clips r above
    min(delta, 1 + high), a negative one r below 1 - low and, with a ``delta``, above
    max(delta, 1 + high). With low = high = 0.2: r = 1.3 gives 0 for A > 0 and 1.3 for A < 0.
    """

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None

    def factor(self, log_ratio: Tensor, positive: Tensor) -> Tensor:
        return torch.where(self.clipped(log_ratio, positive), 0.0, _ratio(log_ratio))

    def clipped(self, log_ratio: Tensor, positive: Tensor) -> Tensor:
        top = 1.0 + self.high
        over = log_ratio > math.log(top if self.delta is None else min(top, self.delta))
        under = log_ratio < _log(1.0 - self.low)
        if self.delta is not None:
            under = under | (log_ratio > math.log(max(top, self.delta)))
        return torch.where(positive, over, under)


@dataclass(frozen=True)
class CappedRatio:
    """CISPO's cap: g = min(r, cap), never 0. With cap 5: r = 8 gives 5, r = 0.1 gives 0.1."""

    cap: float

    def factor(self, log_ratio: Tensor, positive: Tensor) -> Tensor:
        return log_ratio.clamp(max=math.log(self.cap)).exp()

    def clipped(self, log_ratio: Tensor, positive: Tensor) -> Tensor:
        return (log_ratio > math.log(self.cap)) & positive


@dataclass(frozen=True)
class GatedRatio:
    """SAPO's soft gate: g = 4 r s(x) (1 - s(x)) with s the sigmoid and x = tau (r - 1).

    ``positive`` and ``negative`` are tau for the two signs of A. r = 1 gives 1; it never clips.
    """

    positive: float = 1.0
    negative: float = 1.05

    def factor(self, log_ratio: Tensor, positive: Tensor) -> Tensor:
        ratio = _ratio(log_ratio)
        tau = torch.where(positive, self.positive, self.negative)
        gate = torch.sigmoid(tau * (ratio - 1.0))
        return 4.0 * ratio * gate * (1.0 - gate)

    def clipped(self, log_ratio: Tensor, positive: Tensor) -> Tensor:
        return torch.zeros_like(log_ratio + positive, dtype=torch.bool)
