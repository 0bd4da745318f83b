"""Importance weights f(r), r = p / q, in log space: the weights that score centering knows.

Source: Marek & Ryabinin, arXiv 2609.20807, Eq. 7-12.

Shapes: N tokens flat (any leading shape), K head. p is the trainer's distribution, q the
sampler's, rho the ratio q / p of what lies outside the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

MAX_LOG_WEIGHT = 80.0
"""Log ratios are clamped to +-80 before exp: e^80 is 5.5e34, finite in float32."""


@runtime_checkable
class Weight(Protocol):
    """An importance weight f(r), r = p / q, in the four forms the loss needs.

    All arguments are logarithms, so that no implementation has to form a ratio that overflows.
    ``log_ratio`` [N] is log p_y - log q_y, ``logp`` and ``logq`` [N, K] are head entries (-inf
    where there is none), ``log_rho`` [N] is the log of the tail ratio q / p outside the head.
    """

    def sample_weight(self, log_ratio: Tensor) -> Tensor:
        """Return f(r) [N]."""

    def head_mass(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Return q f(p / q) [N, K], finite when q underflows."""

    def tail_scale(self, log_rho: Tensor) -> Tensor:
        """Return alpha = rho f(1 / rho) [N]."""

    def clipped(self, log_ratio: Tensor) -> Tensor:
        """Return where f(r) is a bound or zero instead of r [N], bool."""


@dataclass(frozen=True)
class NoWeight:
    """f(r) = 1: no importance weight. q f(p / q) = q and alpha = rho."""

    def sample_weight(self, log_ratio: Tensor) -> Tensor:
        return torch.ones_like(log_ratio)

    def head_mass(self, logp: Tensor, logq: Tensor) -> Tensor:
        return logq.exp()

    def tail_scale(self, log_rho: Tensor) -> Tensor:
        return log_rho.exp()

    def clipped(self, log_ratio: Tensor) -> Tensor:
        return torch.zeros_like(log_ratio, dtype=torch.bool)


@dataclass(frozen=True)
class TruncatedWeight:
    """f(r) = min(r, cap), truncated importance sampling ("tis").

    q f(p / q) = min(p, cap q) and alpha = min(1, cap rho). With cap 2: r = 3 gives 2, r = 0.5
    gives 0.5.
    """

    cap: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 < self.cap < math.inf:
            raise ValueError(
                f"TruncatedWeight cap={self.cap}: the largest weight kept must be finite and "
                "above 0; use 2.0, or weight='is' to truncate nothing"
            )

    def sample_weight(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.clamp(max=math.log(self.cap)).exp()

    def head_mass(self, logp: Tensor, logq: Tensor) -> Tensor:
        return torch.minimum(logp, logq + math.log(self.cap)).exp()

    def tail_scale(self, log_rho: Tensor) -> Tensor:
        return (log_rho + math.log(self.cap)).clamp(max=0.0).exp()

    def clipped(self, log_ratio: Tensor) -> Tensor:
        return log_ratio > math.log(self.cap)


@dataclass(frozen=True)
class MaskedWeight:
    """f(r) = r where low <= r <= high, else 0: masked importance sampling ("mis").

    q f(p / q) = p inside the band, and alpha = 1 while 1 / high <= rho <= 1 / low. With the band
    [0.5, 5]: r = 2 gives 2, r = 6 gives 0.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.low <= 1.0 <= self.high and self.low < self.high):
            raise ValueError(
                f"MaskedWeight low={self.low}, high={self.high}: the band must contain ratio 1 "
                "(on-policy tokens would be dropped) and low must be below high; use 0.5 and 5.0"
            )

    def _inside(self, log_ratio: Tensor) -> Tensor:
        low = math.log(self.low) if self.low > 0.0 else -math.inf
        return (log_ratio >= low) & (log_ratio <= math.log(self.high))

    def sample_weight(self, log_ratio: Tensor) -> Tensor:
        bounded = log_ratio.clamp(max=min(math.log(self.high), MAX_LOG_WEIGHT))
        return torch.where(self._inside(log_ratio), bounded.exp(), 0.0)

    def head_mass(self, logp: Tensor, logq: Tensor) -> Tensor:
        return torch.where(self._inside(logp - logq), logp.exp(), 0.0)

    def tail_scale(self, log_rho: Tensor) -> Tensor:
        return self._inside(-log_rho).to(log_rho.dtype)

    def clipped(self, log_ratio: Tensor) -> Tensor:
        return ~self._inside(log_ratio)


@dataclass(frozen=True)
class FullWeight:
    """f(r) = r, untruncated importance sampling ("is"), up to r = e^80.

    q f(p / q) = p and alpha = 1, so every head coefficient is 0: the gradient is on-policy in
    expectation already.
    """

    def sample_weight(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.clamp(max=MAX_LOG_WEIGHT).exp()

    def head_mass(self, logp: Tensor, logq: Tensor) -> Tensor:
        return logp.exp()

    def tail_scale(self, log_rho: Tensor) -> Tensor:
        return torch.ones_like(log_rho)

    def clipped(self, log_ratio: Tensor) -> Tensor:
        return log_ratio > MAX_LOG_WEIGHT


WEIGHTS: dict[str, type[Any]] = {
    "none": NoWeight,
    "tis": TruncatedWeight,
    "mis": MaskedWeight,
    "is": FullWeight,
}


def resolve_weight(name_or_obj: str | Weight, **params: float) -> Weight:
    """Return the weight object behind a name, or the object itself.

    ``resolve_weight("tis", cap=3.0)`` is ``TruncatedWeight(cap=3.0)``. Parameters beside an
    object are refused: the object has its own.
    """
    if isinstance(name_or_obj, str):
        if name_or_obj not in WEIGHTS:
            names = ", ".join(sorted(WEIGHTS))
            raise ValueError(f"unknown importance weight {name_or_obj!r}; use one of {names}")
        try:
            weight: Weight = WEIGHTS[name_or_obj](**params)
        except TypeError as error:
            raise ValueError(f"importance weight {name_or_obj!r}: {error}") from error
        return weight
    if not isinstance(name_or_obj, Weight):
        raise TypeError(
            f"importance weight of type {type(name_or_obj).__name__}: pass a name or an object "
            "with sample_weight, head_mass, tail_scale and clipped"
        )
    if params:
        raise ValueError(f"parameters {sorted(params)} beside a weight object; set them in it")
    return name_or_obj
