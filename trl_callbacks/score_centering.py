"""Score centering: the off-policy policy gradient without its drift towards the sampler.

Source: Marek & Ryabinin, arXiv 2609.20807, Eq. 3, 6, 7-12 and App. A.

Shapes: B rows, T tokens of a row, N tokens flat, K head, V vocabulary. ``[N]`` stands for any
leading shape, such as ``[B, T]``; heads add one last axis, ``[N, K]``.

Symbols at one prefix: p the trainer's next-token distribution, q the sampler's, y the sampled
token, H the head (the K tokens with most q), f the weight as a function of r = p / q, A the
advantage. Everything that multiplies a log-probability is a constant for the gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trl_callbacks.importance_weights import (
    MAX_LOG_WEIGHT,
    FullWeight,
    MaskedWeight,
    NoWeight,
    TruncatedWeight,
    Weight,
    resolve_weight,
)

__all__ = [
    "METRICS",
    "SUPPORT_TOLERANCE",
    "TAIL_FLOOR",
    "FullWeight",
    "MaskedWeight",
    "NoWeight",
    "TruncatedWeight",
    "Weight",
    "resolve_weight",
    "score_centering_loss",
    "valid_tokens",
]

TAIL_FLOOR = 1e-6
"""Smallest tail mass (1 - sum_H q, 1 - sum_H p) that enters rho."""
SUPPORT_TOLERANCE = 1e-3
"""How far from 1 the sampler's head mass may be in the support form."""
METRICS = {
    "sampler_head_mass": "sum_H q",
    "trainer_head_mass": "sum_H p, before any renormalisation",
    "rho": "tail ratio (1 - sum_H q) / (1 - sum_H p), floored; 0 in the support form",
    "tail_share": "part of drift_removed that lies outside the head",
    "weight_mean": "raw ratio p_y / q_y, before any cap or mask",
    "weight_min": "smallest raw ratio",
    "weight_max": "largest raw ratio",
    "weight_clipped_share": "tokens whose weight is a bound or 0 instead of the ratio",
    "ess": "(sum r)^2 / (n sum r^2) of the raw ratios",
    "floor_hits": "tokens where a tail mass was below its floor",
    "correction_l1": "sum_H |c_v|",
    "drift_removed": "L1 norm of the correction's gradient by the logits",
    "nan_tokens": "tokens with mask 1 left out because the sampler's values are not usable",
    "tokens": "tokens counted",
}
"""The metrics of a loss: means over valid tokens, but for extremes, ess and counts."""


def valid_tokens(
    sampler_logprobs: Tensor, sampler_head_logprobs: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return which tokens take part in the loss [N], bool. Use it for the denominator too.

    A token counts where its mask is not 0, its sampler log-probability is finite (-inf would be
    a token the sampler could not draw) and its sampler head has no NaN or +inf. Shapes:
    ``sampler_logprobs`` [N], ``sampler_head_logprobs`` [N, K], ``mask`` [N]. For logprobs
    (-1, NaN, -2), clean heads and mask (1, 1, 0) the result is (True, False, False). Edge case:
    -inf in a head is padding and leaves the token valid.
    """
    head_ok = ~(sampler_head_logprobs.isnan() | (sampler_head_logprobs == math.inf)).any(-1)
    valid = sampler_logprobs.isfinite() & head_ok
    return valid if mask is None else valid & (mask != 0)


class _Tokens(NamedTuple):
    """Checked inputs; invalid tokens hold 0, absent head entries 0 (p) and -inf (q)."""

    logp: Tensor
    logq: Tensor
    head_logp: Tensor
    head_logq: Tensor
    advantages: Tensor
    valid: Tensor
    present: Tensor
    dropped: Tensor


def score_centering_loss(
    token_logprobs: Tensor,
    head_logprobs: Tensor,
    sampler_logprobs: Tensor,
    sampler_head_logprobs: Tensor,
    advantages: Tensor,
    *,
    weight: str | Weight = "none",
    mask: Tensor | None = None,
    support: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the centred policy-gradient loss of every token, to be minimised, and metrics.

    Claim: for an advantage that does not depend on y, the expectation of the gradient over
    y ~ q is zero, for every weight f; without centering it is A times the pull towards the
    sampler. Exact when q outside H is proportional to p, in particular when H is all of q.

        rho  = max(1 - sum_H q, 1e-6) / max(1 - sum_H p, 1e-6),   alpha = rho f(1 / rho)
        c_v  = q_v f(p_v / q_v) - alpha p_v,   v in H             (Eq. 7-12)
        loss = -A (f(p_y / q_y) log p_y - sum_H c_v log p_v)

    f, c, q and A are constants: gradients reach ``token_logprobs`` and ``head_logprobs`` only.
    With the whole vocabulary as head this has the gradient of the exact form (Eq. 6).

    ``support=True`` is for a sampler truncated by top-p, top-k or min-p whose head holds its
    whole support S: p is restricted to S and renormalised, for y as well, and there is no tail.

    Args:
        token_logprobs: [N] log p_y over the whole vocabulary, differentiable.
        head_logprobs: [N, K] log p_v on the head, differentiable, not renormalised.
        sampler_logprobs: [N] log q_y as the sampler reported it, also when y is in H.
        sampler_head_logprobs: [N, K] log q_v; -inf marks an entry that is padding or was
            filtered out, and ``head_logprobs`` may hold anything there. The head must not depend
            on y, and must not name a token twice.
        advantages: [N] or broadcastable to it with the same number of axes.
        weight: "none", "tis", "mis", "is", or an object with the methods of ``Weight``.
        mask: [N], tokens with 0 give a loss and a gradient of exactly 0, whatever they hold.
        support: the sampler's support is the head; see above.

    Returns:
        The loss [N] in float32 (float64 for float64 inputs) and 0-dim detached metrics, see
        ``METRICS``. Divide by
        ``valid_tokens(...).sum()`` to average.

    Numbers: p_H = (0.4, 0.4), q_H = (0.5, 0.3) leave tails of 0.2, so rho = 1 and c = (0.1, -0.1).
    For p = (0.6, 0.4), q = (0.5, 0.5) the mean score is (-0.1, 0.1) uncentred and 0 centred.

    Edge cases: a token with NaN from the sampler leaves the loss and is counted in
    ``nan_tokens``; NaN from the trainer stays NaN, for it is a fault to be seen. A head without
    entries models q as p everywhere and corrects nothing.

    A weight shared by a whole sequence is a factor on the returned loss: it multiplies both
    parts alike. As it depends on later tokens, centering is then an approximation.
    """
    weight_fn = resolve_weight(weight)
    tok = _prepare(
        token_logprobs, head_logprobs, sampler_logprobs, sampler_head_logprobs, advantages, mask
    )
    with torch.no_grad():
        log_head_mass = _logsumexp64(torch.where(tok.present, tok.head_logp, -math.inf))
        log_sampler_mass = _logsumexp64(tok.head_logq)
    if support:
        _check_support(log_sampler_mass, tok)
        tok = _restrict_to_support(tok)
        log_rho, floored = None, torch.zeros_like(tok.valid)
    else:
        log_rho, floored = _tail_ratio(log_head_mass, log_sampler_mass, tok.logp.dtype)

    with torch.no_grad():
        log_ratio = tok.logp - tok.logq
        sample_weight = weight_fn.sample_weight(log_ratio)
        alpha = torch.zeros_like(log_ratio) if log_rho is None else weight_fn.tail_scale(log_rho)
        head_logp = torch.where(tok.present, tok.head_logp, -math.inf)
        head_p = head_logp.exp()
        coefficients = weight_fn.head_mass(head_logp, tok.head_logq) - alpha.unsqueeze(-1) * head_p
        coefficients = torch.where(tok.present, coefficients, 0.0)

    # A factor of 0 beside log p = -inf would be NaN, in the loss and in its gradient.
    logp = torch.where(sample_weight != 0, tok.logp, 0.0)
    centre = (coefficients * torch.where(coefficients != 0, tok.head_logp, 0.0)).sum(-1)
    loss = torch.where(tok.valid, -tok.advantages * (sample_weight * logp - centre), 0.0)

    with torch.no_grad():
        masses = (log_sampler_mass.exp(), log_head_mass.exp())
        rho = alpha if log_rho is None else log_rho.exp()
        metrics = _ratio_metrics(log_ratio, weight_fn, tok)
        metrics |= _centering_metrics(coefficients, head_p, masses, rho, floored, tok, support)
    return loss, {name: metrics[name] for name in METRICS}


def _prepare(
    token_logprobs: Tensor,
    head_logprobs: Tensor,
    sampler_logprobs: Tensor,
    sampler_head_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
) -> _Tokens:
    shape = token_logprobs.shape
    if sampler_logprobs.shape != shape or (mask is not None and mask.shape != shape):
        found = None if mask is None else tuple(mask.shape)
        raise ValueError(
            f"token_logprobs {tuple(shape)}, sampler_logprobs {tuple(sampler_logprobs.shape)} and "
            f"mask {found} must have one shape: one value for each token"
        )
    if head_logprobs.shape != sampler_head_logprobs.shape or head_logprobs.shape[:-1] != shape:
        raise ValueError(
            f"head_logprobs {tuple(head_logprobs.shape)} and sampler_head_logprobs "
            f"{tuple(sampler_head_logprobs.shape)} must both be {tuple(shape)} + (K,)"
        )
    # Without the same number of axes, [B] beside [B, T] would broadcast over tokens if B == T.
    if advantages.dim() not in (0, len(shape)):
        raise ValueError(
            f"advantages {tuple(advantages.shape)} beside tokens {tuple(shape)}: the axes are "
            "ambiguous; pass one advantage per row as advantages.unsqueeze(-1)"
        )
    wide = torch.float64 in (token_logprobs.dtype, head_logprobs.dtype)
    dtype = torch.float64 if wide else torch.float32
    logq, head_logq = sampler_logprobs.detach(), sampler_head_logprobs.detach()
    valid = valid_tokens(logq, head_logq, mask)
    present = valid.unsqueeze(-1) & (head_logq > -math.inf)
    asked = torch.ones_like(valid) if mask is None else mask != 0
    # Selecting before any arithmetic keeps 0 * NaN out of the backward pass.
    return _Tokens(
        logp=torch.where(valid, token_logprobs.to(dtype), 0.0),
        logq=torch.where(valid, logq.to(dtype), 0.0),
        head_logp=torch.where(present, head_logprobs.to(dtype), 0.0),
        head_logq=torch.where(present, head_logq.to(dtype), -math.inf),
        advantages=torch.where(valid, advantages.detach().to(dtype).expand(shape), 0.0),
        valid=valid,
        present=present,
        dropped=asked & ~valid,
    )


def _logsumexp64(values: Tensor) -> Tensor:
    # float32 sums of a full head miss 1 by about 1e-7, which is most of a small tail.
    return values.double().logsumexp(-1)


def _tail_ratio(log_p: Tensor, log_q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log rho [N] and where a floor was used [N], from log sum_H p and log sum_H q."""
    tail_p, tail_q = -torch.expm1(log_p), -torch.expm1(log_q)
    floored = (tail_p < TAIL_FLOOR) | (tail_q < TAIL_FLOOR)
    log_rho = tail_q.clamp(min=TAIL_FLOOR).log() - tail_p.clamp(min=TAIL_FLOOR).log()
    return log_rho.to(dtype), floored


def _check_support(log_sampler_mass: Tensor, tok: _Tokens) -> None:
    mass = torch.where(tok.valid, log_sampler_mass.exp(), 1.0)
    wrong = ~((mass - 1.0).abs() <= SUPPORT_TOLERANCE)
    if wrong.any():
        worst = mass.flatten()[(mass - 1.0).abs().argmax()].item()
        size = tok.head_logq.shape[-1]
        raise ValueError(
            f"support=True, but the sampler's head holds {worst:.4f} of its mass at the worst of "
            f"{int(wrong.sum())} tokens: the sampler keeps more tokens than the head's {size} (or "
            f"the head repeats some). Sample with top_k <= {size} (top_p and min_p alone bound no "
            "count), or record a larger head, or sample without top_p, top_k and min_p and pass "
            "support=False"
        )


def _restrict_to_support(tok: _Tokens) -> _Tokens:
    """Renormalise p over the entries that are present, with gradient."""
    # Rows without entries get a harmless one: the gradient of logsumexp over nothing is NaN.
    empty = ~tok.present.any(-1, keepdim=True)
    kept = torch.where(tok.present | empty, tok.head_logp, -math.inf).logsumexp(-1)
    kept = torch.where(tok.valid, kept, 0.0)
    head_logp = torch.where(tok.present, tok.head_logp - kept.unsqueeze(-1), 0.0)
    return tok._replace(logp=tok.logp - kept, head_logp=head_logp)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    total = torch.where(valid, values, 0.0).sum()
    return total / valid.sum().clamp(min=1)


def _ratio_metrics(log_ratio: Tensor, weight: Weight, tok: _Tokens) -> dict[str, Tensor]:
    """Raw ratios p_y / q_y, before any cap: a capped number could not show a mismatch."""
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
        "weight_clipped_share": _mean(weight.clipped(log_ratio).to(ratio.dtype), tok.valid),
        "ess": torch.where(count > 0, ess, 0.0),
        "nan_tokens": tok.dropped.sum().to(ratio.dtype),
        "tokens": count.to(ratio.dtype),
    }


def _centering_metrics(
    coefficients: Tensor,
    head_p: Tensor,
    masses: tuple[Tensor, Tensor],
    rho: Tensor,
    floored: Tensor,
    tok: _Tokens,
    support: bool,
) -> dict[str, Tensor]:
    """Sizes of the head and of the correction.

    The correction's gradient by the logits is w - p sum(w), where w = q f(p / q) on H and
    alpha p elsewhere. ``drift_removed`` is its L1 norm and ``tail_share`` the part of that norm
    outside H; for f = 1 it is q-hat - p. In terms of c: c_v - p_v sum(c) on H, -p_v sum(c) outside.
    """
    dtype = coefficients.dtype
    total = coefficients.sum(-1)
    tail_p = torch.zeros_like(masses[1]) if support else (1.0 - masses[1]).clamp(min=0.0)
    head_l1 = (coefficients - total.unsqueeze(-1) * head_p).abs().sum(-1)
    tail_l1 = tail_p.to(dtype) * total.abs()
    drift, tail = _mean(head_l1 + tail_l1, tok.valid), _mean(tail_l1, tok.valid)
    return {
        "sampler_head_mass": _mean(masses[0], tok.valid).to(dtype),
        "trainer_head_mass": _mean(masses[1], tok.valid).to(dtype),
        "rho": _mean(rho, tok.valid),
        "tail_share": torch.where(drift > 0, tail / drift, 0.0),
        "floor_hits": _mean(floored.to(dtype), tok.valid),
        "correction_l1": _mean(coefficients.abs().sum(-1), tok.valid),
        "drift_removed": drift,
    }
