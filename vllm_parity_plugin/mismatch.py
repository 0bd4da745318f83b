"""How far the trainer's log-probabilities are from the sampler's, for the same sampled tokens.

Shapes: ``[..]`` any shape with one value per token, such as ``[B, T]`` (B rows, T tokens);
K head, the last axis of head tensors.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 80.0
"""Log ratios are clamped to +-80 before exp: ratios stay finite, and read 5.5e34 at the bound."""


@dataclass(frozen=True)
class MismatchMetrics:
    """Differences d = log p - log q and ratios r = p / q; p the trainer, q the sampler."""

    tokens: int
    """Tokens counted."""
    nan_tokens: int
    """Unmasked tokens left out because either side is not finite."""
    mean_abs: float
    """Mean of |d|."""
    p99_abs: float
    """99th percentile of |d|: the smallest value with 99% of the tokens at or below it."""
    max_abs: float
    """Largest |d|."""
    k1: float
    """Mean of -d: estimates KL(q || p), unbiased, may be negative."""
    k3: float
    """Mean of r - 1 - log r: estimates KL(q || p), unbiased, never negative."""
    ratio_mean: float
    """Mean of r, before any clipping; 1 in expectation when both sides agree on the support."""
    ratio_min: float
    """Smallest r, before any clipping."""
    ratio_max: float
    """Largest r, before any clipping."""
    ess: float
    """Effective sample size of the ratios, as a share of the tokens: 1 when all are equal."""
    clipped_share: float
    """Share of tokens with r below or above the given bounds; 0 without bounds."""

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Return the fields as floats, with ``prefix`` before each name."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class HeadGap:
    """Differences between two heads; positions without a finite entry are left out."""

    positions: int
    """Positions counted."""
    mean_abs: float
    """Mean of |log p - log q| over all head entries."""
    max_abs: float
    """Largest |log p - log q|."""
    l1: float
    """Mean over positions of sum_H |p - q|."""
    trainer_mass: float
    """Mean over positions of sum_H p."""
    sampler_mass: float
    """Mean over positions of sum_H q."""


@torch.no_grad()
def mismatch_metrics(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    clip: tuple[float, float] | None = None,
) -> MismatchMetrics:
    """Return the mismatch of two sets of log-probabilities [..], over tokens with mask not 0.

    Claim: all numbers are taken before clipping, in float64, from sampled tokens only, and a
    masked token changes none of them. k1 = E_q[log q - log p], k3 = E_q[r - 1 - log r],
    ess = (sum r)^2 / (n sum r^2), r = p / q; ``clip`` = (low, high) bounds r for
    ``clipped_share`` (0 and inf leave a side open).

    Numbers: differences (0, log 10) with clip (0, 3) give ratio_max 10, clipped_share 0.5,
    ratio_mean 5.5 and ess 121 / 202. Edge case: without tokens everything is 0.
    """
    low, high = (0.0, math.inf) if clip is None else clip
    if not 0.0 <= low <= high:
        raise ValueError(f"clip={clip}: expected (low, high) with 0 <= low <= high")
    _check_same(trainer_logprobs, sampler_logprobs, "trainer_logprobs", "sampler_logprobs")
    asked = torch.ones_like(trainer_logprobs, dtype=torch.bool)
    if mask is not None:
        _check_same(trainer_logprobs, mask, "trainer_logprobs", "mask")
        asked = mask != 0
    valid = asked & trainer_logprobs.isfinite() & sampler_logprobs.isfinite()
    tokens, dropped = int(valid.sum()), int((asked & ~valid).sum())
    if tokens == 0:
        return MismatchMetrics(0, dropped, *([0.0] * 10))
    d = trainer_logprobs[valid].double() - sampler_logprobs[valid].double()
    size = d.abs()
    # kthvalue, not quantile: quantile refuses more than 2^24 values.
    p99 = size.kthvalue(math.ceil(0.99 * tokens)).values
    log_ratio = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    values = torch.stack([
        size.mean(),
        p99,
        size.max(),
        -d.mean(),
        (log_ratio.expm1() - log_ratio).mean(),
        ratio.mean(),
        ratio.min(),
        ratio.max(),
        ratio.sum().square() / (tokens * ratio.square().sum()),
        ((ratio < low) | (ratio > high)).double().mean(),
    ])  # fmt: skip
    return MismatchMetrics(tokens, dropped, *values.tolist())


@torch.no_grad()
def head_gap(trainer_head: Tensor, sampler_head: Tensor, mask: Tensor | None = None) -> HeadGap:
    """Return the gap between two sets of head log-probabilities [.., K] of the same token ids.

    Claim: entries that are not finite on either side (padding, filtered tokens) and positions
    with mask [..] 0 count nowhere. p = (0.6, 0.3) beside q = (0.5, 0.3) gives l1 0.1, trainer
    mass 0.9 and mean_abs log(1.2) / 2 = 0.0912. Edge case: without entries everything is 0.
    """
    _check_same(trainer_head, sampler_head, "trainer_head", "sampler_head")
    present = trainer_head.isfinite() & sampler_head.isfinite()
    if mask is not None:
        _check_same(present.any(-1), mask, "trainer_head without its last axis", "mask")
        present = present & (mask != 0).unsqueeze(-1)
    positions = int(present.any(-1).sum())
    if positions == 0:
        return HeadGap(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    logp = torch.where(present, trainer_head.double(), -math.inf)
    logq = torch.where(present, sampler_head.double(), -math.inf)
    size = (logp[present] - logq[present]).abs()
    p, q = logp.exp(), logq.exp()
    sums = torch.stack([(p - q).abs().sum(), p.sum(), q.sum()]) / positions
    return HeadGap(positions, *torch.stack([size.mean(), size.max(), *sums]).tolist())


def mismatch_by_version(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    versions: Tensor,
    current_version: int,
    mask: Tensor | None = None,
    *,
    clip: tuple[float, float] | None = None,
) -> dict[int, MismatchMetrics]:
    """Return the mismatch by age, ``current_version`` minus the policy version of each token.

    Claim: each unmasked token is in exactly one group. ``versions`` is [..] like the
    log-probabilities; one row of versions (4, 5) with current version 5 gives the keys 0 and 1.
    Edge case: versions at masked positions are ignored; an unmasked token newer than
    ``current_version`` raises, for its age would be negative.
    """
    _check_same(trainer_logprobs, versions, "trainer_logprobs", "versions")
    asked = torch.ones_like(versions, dtype=torch.bool) if mask is None else mask != 0
    _check_same(trainer_logprobs, asked, "trainer_logprobs", "mask")
    found: list[int] = versions[asked].unique().tolist()
    if found and found[-1] > current_version:
        raise ValueError(
            f"tokens of policy version {found[-1]} at current version {current_version}: the "
            "sampler is ahead of the trainer; pass the version of the last weight update"
        )
    return {
        current_version - version: mismatch_metrics(
            trainer_logprobs, sampler_logprobs, asked & (versions == version), clip=clip
        )
        for version in reversed(found)
    }


def _check_same(a: Tensor, b: Tensor, name_a: str, name_b: str) -> None:
    if a.shape != b.shape:
        raise ValueError(
            f"{name_a} {tuple(a.shape)} and {name_b} {tuple(b.shape)} must have one shape: a "
            "broadcast would compare tokens of different rows"
        )
