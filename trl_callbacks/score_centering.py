"""Score centering: the off-policy policy gradient without its drift towards the sampler.

Source: Marek & Ryabinin, arXiv 2609.20807, Eq. 3, 6, 7-12 and App. A.

Shapes: B rows, T tokens of a row, N tokens flat, K head, V vocabulary. ``[N]`` stands for any
leading shape, such as ``[B, T]``; heads add one last axis, ``[N, K]``.

Symbols at one prefix: p the trainer's next-token distribution, q the sampler's, y the sampled
token, H the head (the K tokens with most q), f the weight as a function of r = p / q, A the
advantage; p_old the trainer when the token was sampled and g the loss's factor of p / p_old, where
one rollout serves several optimizer steps. Everything that multiplies a log-probability is a
constant for the gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_callbacks.centering_inputs import (
    Policy,
    Tokens,
    broadcastable,
    old_policy,
    prepare,
    valid_tokens,
)
from trl_callbacks.centering_metrics import METRICS, Weights, centering_metrics, ratio_metrics
from trl_callbacks.importance_weights import (
    FullWeight,
    MaskedWeight,
    NoWeight,
    TruncatedWeight,
    Weight,
    resolve_weight,
)
from trl_callbacks.policy_ratio import CappedRatio, ClippedRatio, GatedRatio, PolicyRatio

__all__ = [
    "METRICS",
    "SUPPORT_TOLERANCE",
    "TAIL_FLOOR",
    "CappedRatio",
    "ClippedRatio",
    "FullWeight",
    "GatedRatio",
    "MaskedWeight",
    "NoWeight",
    "PolicyRatio",
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
    ratio: PolicyRatio | None = None,
    old_token_logprobs: Tensor | None = None,
    old_head_logprobs: Tensor | None = None,
    sequence_weight: Tensor | None = None,
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

    Several optimizer steps on one rollout: f(p / q) becomes f(p_old / q) g(p / p_old, sign A),
    for y and for every v in H alike, and outside H p_old is modelled as rho_old p:

        alpha = rho f(rho_old / rho) g(1 / rho_old)

    ``support=True`` is for a sampler truncated by top-p, top-k or min-p whose head holds its
    whole support S: p (and p_old) are restricted to S and renormalised, for y as well, and there
    is no tail.

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
        ratio: g. Without old log-probabilities p_old is p, so that g is g(1).
        old_token_logprobs: [N] log p_old of y, with ``old_head_logprobs`` and ``ratio`` only.
        old_head_logprobs: [N, K] log p_old on the head.
        sequence_weight: [N] or broadcastable as ``advantages``: a constant factor on the whole
            loss, for weights and masks that a sequence shares. As they depend on tokens after y,
            the expectation is then zero only approximately.

    Returns:
        The loss [N] in float32 (float64 for float64 inputs) and 0-dim detached metrics, see
        ``METRICS``. Divide by
        ``valid_tokens(...).sum()`` to average.

    Numbers: p_H = (0.4, 0.4), q_H = (0.5, 0.3) leave tails of 0.2, so rho = 1 and c = (0.1, -0.1).
    For p = (0.6, 0.4), q = (0.5, 0.5) the mean score is (-0.1, 0.1) uncentred and 0 centred.

    Edge cases: a token with NaN from the sampler leaves the loss and is counted in
    ``nan_tokens``; NaN from the trainer stays NaN, for it is a fault to be seen. A head without
    entries models q as p everywhere and corrects nothing.
    """
    weight_fn = resolve_weight(weight)
    tok = prepare(
        Policy(token_logprobs, head_logprobs),
        old_policy(old_token_logprobs, old_head_logprobs, ratio),
        sampler_logprobs,
        sampler_head_logprobs,
        advantages,
        mask,
    )
    with torch.no_grad():
        log_head_mass = _head_mass(tok.now, tok.present)
        log_sampler_mass = _logsumexp64(tok.head_logq)
    if support:
        _check_support(log_sampler_mass, tok)
        tok = tok._replace(
            now=_restricted(tok.now, tok),
            old=None if tok.old is None else _restricted(tok.old, tok),
        )
        log_rho, floored = None, torch.zeros_like(tok.valid)
    else:
        log_rho, floored = _tail_ratio(log_head_mass, log_sampler_mass, tok.logq.dtype)
    with torch.no_grad():
        weights = _weights(tok, weight_fn, ratio, log_rho, log_head_mass)

    # A factor of 0 beside log p = -inf would be NaN, in the loss and in its gradient.
    logp = torch.where(weights.sample != 0, tok.now.token, 0.0)
    coefficients = weights.coefficients
    centre = (coefficients * torch.where(coefficients != 0, tok.now.head, 0.0)).sum(-1)
    per_token = -tok.advantages * (weights.sample * logp - centre)
    if sequence_weight is not None:
        per_token = per_token * broadcastable("sequence_weight", sequence_weight, per_token)
    loss = torch.where(tok.valid, per_token, 0.0)

    with torch.no_grad():
        masses = (log_sampler_mass.exp(), log_head_mass.exp())
        rho = torch.zeros_like(tok.logq) if log_rho is None else log_rho.exp()
        metrics = ratio_metrics(weights, weight_fn, tok)
        metrics |= centering_metrics(weights, masses, rho, floored, tok, support)
    return loss, {name: metrics[name] for name in METRICS}


def _weights(
    tok: Tokens,
    weight: Weight,
    ratio: PolicyRatio | None,
    log_rho: Tensor | None,
    log_head_mass: Tensor,
) -> Weights:
    """The weight of y, and c_v on the head, as products of f and g."""
    then = tok.old or tok.now
    positive = tok.advantages > 0
    log_importance = then.token - tok.logq
    sample = weight.sample_weight(log_importance)
    coefficients = weight.head_mass(torch.where(tok.present, then.head, -math.inf), tok.head_logq)
    clipped = torch.zeros_like(tok.valid)
    if ratio is not None:
        log_step = tok.now.token - then.token
        sample = sample * ratio.factor(log_step, positive)
        clipped = ratio.clipped(log_step, positive)
        on_head = ratio.factor(tok.now.head - then.head, positive.unsqueeze(-1))
        # 0 times an overflowing factor is 0 here: the entry has no mass.
        coefficients = torch.where(coefficients != 0, coefficients * on_head, 0.0)
    if log_rho is not None:
        log_old = torch.zeros_like(log_rho)
        if tok.old is not None:
            old_mass = _head_mass(tok.old, tok.present)
            # p_old = rho_old p outside the head: the ratio of two tails, as for q.
            log_old, _ = _tail_ratio(log_head_mass, old_mass, log_rho.dtype)
        alpha = weight.tail_scale(log_rho - log_old) * log_old.exp()
        if ratio is not None:
            alpha = alpha * ratio.factor(-log_old, positive)
        head_p = torch.where(tok.present, tok.now.head, -math.inf).exp()
        coefficients = coefficients - alpha.unsqueeze(-1) * head_p
    coefficients = torch.where(tok.present, coefficients, 0.0)
    return Weights(sample, coefficients, log_importance, clipped)


def _head_mass(policy: Policy, present: Tensor) -> Tensor:
    """log of a policy's mass on the head [N], float64."""
    return _logsumexp64(torch.where(present, policy.head.detach(), -math.inf))


def _logsumexp64(values: Tensor) -> Tensor:
    # float32 sums of a full head miss 1 by about 1e-7, which is most of a small tail.
    return values.double().logsumexp(-1)


def _tail_ratio(log_p: Tensor, log_q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log rho [N] and where a floor was used [N], from log sum_H p and log sum_H q."""
    tail_p, tail_q = -torch.expm1(log_p), -torch.expm1(log_q)
    floored = (tail_p < TAIL_FLOOR) | (tail_q < TAIL_FLOOR)
    log_rho = tail_q.clamp(min=TAIL_FLOOR).log() - tail_p.clamp(min=TAIL_FLOOR).log()
    return log_rho.to(dtype), floored


def _check_support(log_sampler_mass: Tensor, tok: Tokens) -> None:
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


def _restricted(policy: Policy, tok: Tokens) -> Policy:
    """Renormalise a policy over the entries that are present, with gradient."""
    # Rows without entries get a harmless one: the gradient of logsumexp over nothing is NaN.
    empty = ~tok.present.any(-1, keepdim=True)
    kept = torch.where(tok.present | empty, policy.head, -math.inf).logsumexp(-1)
    kept = torch.where(tok.valid, kept, 0.0)
    head = torch.where(tok.present, policy.head - kept.unsqueeze(-1), 0.0)
    return Policy(policy.token - kept, head)
