"""What the score-centering loss reports about itself: ratios, head masses, size of the drift."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trl_callbacks.centering_inputs import Tokens
from trl_callbacks.importance_weights import MAX_LOG_WEIGHT, Weight

METRICS = {
    "sampler_head_mass": "sum_H q",
    "trainer_head_mass": "sum_H p, before any renormalisation",
    "rho": "tail ratio (1 - sum_H q) / (1 - sum_H p), floored; 0 in the support form",
    "tail_share": "part of drift_removed that lies outside the head",
    "weight_mean": "raw ratio p_y / q_y (p_old / q where old values are given), before any cap",
    "weight_min": "smallest raw ratio",
    "weight_max": "largest raw ratio",
    "weight_used_mean": "what multiplies log p_y: f times g",
    "weight_used_max": "largest of the same",
    "weight_clipped_share": "tokens whose f is a bound or 0 instead of the ratio",
    "policy_clipped_share": "tokens whose ratio to the old policy is held at a bound",
    "ess": "(sum r)^2 / (n sum r^2) of the raw ratios",
    "floor_hits": "tokens where a tail mass was below its floor",
    "correction_l1": "sum_H |c_v|",
    "drift_removed": "L1 norm of the correction's gradient by the logits",
    "drift_share": "drift_removed over the same norm of the sampled token's own gradient",
    "nan_tokens": "tokens with mask 1 left out because the sampler's values are not usable",
    "tokens": "tokens counted",
}
"""The metrics of a loss: means over valid tokens, but for extremes, ess and counts."""


class Weights(NamedTuple):
    """The constants of the gradient, and the logarithms of the ratios they come from."""

    sample: Tensor
    coefficients: Tensor
    log_importance: Tensor
    clipped: Tensor


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    total = torch.where(valid, values, 0.0).sum()
    return total / valid.sum().clamp(min=1)


def ratio_metrics(weights: Weights, weight: Weight, tok: Tokens) -> dict[str, Tensor]:
    """Raw ratios p_y / q_y beside what was used: a capped number could not show a mismatch."""
    log_ratio = weights.log_importance
    ratio = log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    count = tok.valid.sum()
    logs = torch.where(tok.valid, log_ratio, -math.inf).flatten()
    ess = (2 * logs.logsumexp(0) - (2 * logs).logsumexp(0)).exp() / count
    zero = ratio.new_zeros(1)
    low = torch.where(tok.valid, ratio, math.inf).flatten()
    high = torch.where(tok.valid, ratio, 0.0).flatten()
    low = torch.cat([low, torch.where(count > 0, math.inf, zero)])
    return {
        "weight_mean": _mean(ratio, tok.valid),
        "weight_min": low.amin(),
        "weight_max": torch.cat([high, zero]).amax(),
        "weight_used_mean": _mean(weights.sample, tok.valid),
        "weight_used_max": torch.cat(
            [torch.where(tok.valid, weights.sample, 0.0).flatten(), zero]
        ).amax(),
        "weight_clipped_share": _mean(weight.clipped(log_ratio).to(ratio.dtype), tok.valid),
        "policy_clipped_share": _mean(weights.clipped.to(ratio.dtype), tok.valid),
        "ess": torch.where(count > 0, ess, 0.0),
        "nan_tokens": tok.dropped.sum().to(ratio.dtype),
        "tokens": count.to(ratio.dtype),
    }


def centering_metrics(
    weights: Weights,
    masses: tuple[Tensor, Tensor],
    rho: Tensor,
    floored: Tensor,
    tok: Tokens,
    support: bool,
) -> dict[str, Tensor]:
    """Sizes of the head and of the correction.

    The correction's gradient by the logits is w - p sum(w), where w = q f(p / q) on H and
    alpha p elsewhere. ``drift_removed`` is its L1 norm and ``tail_share`` the part of that norm
    outside H; for f = 1 it is q-hat - p. In terms of c: c_v - p_v sum(c) on H, -p_v sum(c) outside.
    """
    coefficients, dtype = weights.coefficients, weights.coefficients.dtype
    head_p = torch.where(tok.present, tok.now.head, -math.inf).exp()
    total = coefficients.sum(-1)
    tail_p = torch.zeros_like(masses[1]) if support else (1.0 - masses[1]).clamp(min=0.0)
    head_l1 = (coefficients - total.unsqueeze(-1) * head_p).abs().sum(-1)
    tail_l1 = tail_p.to(dtype) * total.abs()
    # By the logits, w log p_y has the gradient w (1_y - p), whose L1 norm is 2 w (1 - p_y).
    plain = _mean(2.0 * weights.sample * -torch.expm1(tok.now.token.clamp(max=0.0)), tok.valid)
    drift, tail = _mean(head_l1 + tail_l1, tok.valid), _mean(tail_l1, tok.valid)
    return {
        "sampler_head_mass": _mean(masses[0], tok.valid).to(dtype),
        "trainer_head_mass": _mean(masses[1], tok.valid).to(dtype),
        "rho": _mean(rho, tok.valid),
        "tail_share": torch.where(drift > 0, tail / drift, 0.0),
        "floor_hits": _mean(floored.to(dtype), tok.valid),
        "correction_l1": _mean(coefficients.abs().sum(-1), tok.valid),
        "drift_removed": drift,
        "drift_share": torch.where(plain > 0, drift / plain, 0.0),
    }
