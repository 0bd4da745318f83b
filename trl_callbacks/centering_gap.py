"""How far the top-K form is from the exact one, where the sampler gave more than K entries."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_callbacks.importance_weights import Weight
from trl_callbacks.score_centering import score_centering_loss


def top_k_gap(
    head_logprobs: Tensor, sampler_head_logprobs: Tensor, size: int, *, weight: str | Weight
) -> tuple[Tensor, Tensor]:
    """Return the error of the correction from the first ``size`` entries, and its size, both [N].

    The L1 norm of the difference between this correction's gradient by the logits and that from
    all entries, and the norm of the latter. With the whole vocabulary as entries the latter is
    exact (Eq. 6). Divide sums over tokens: where policies agree both are 0.

    Args:
        head_logprobs: [N, M] log p_v, entries in the order of falling q.
        sampler_head_logprobs: [N, M] log q_v.
        size: K, at most M.
        weight: as for ``score_centering_loss``.

    Numbers: p = (0.4, 0.4, 0.1, 0.1) and q = (0.5, 0.3, 0.1, 0.1) differ on the first two entries
    only, so that K = 2 gives 0; K = 1 models q as (0.5, 1/3, 1/12, 1/12), which is off by
    (0, 1/30, -1/60, -1/60): 0.0667 over the norm 0.2 of (0.1, -0.1, 0, 0).

    Edge case: where p = q there is nothing to correct, and the gap is 0.
    """
    logp, logq = head_logprobs.detach().double(), sampler_head_logprobs.detach().double()
    whole = _coefficients(logp, logq, weight)
    first = torch.zeros_like(whole)
    first[..., :size] = _coefficients(logp[..., :size], logq[..., :size], weight)
    p = logp.exp()
    rest = (1.0 - p.sum(-1)).clamp(min=0.0)
    return _norm(first - whole, p, rest), _norm(whole, p, rest)


def _coefficients(logp: Tensor, logq: Tensor, weight: str | Weight) -> Tensor:
    """c_v [N, M]: what the loss for A = 1 has as its gradient by the head's log-probabilities."""
    head = logp.clone().requires_grad_()
    ones = torch.ones_like(logp[..., 0])
    with torch.enable_grad():
        loss, _ = score_centering_loss(logp[..., 0], head, logq[..., 0], logq, ones, weight=weight)
        (coefficients,) = torch.autograd.grad(loss.sum(), head)
    return coefficients


def _norm(coefficients: Tensor, p: Tensor, rest: Tensor) -> Tensor:
    """L1 norm of c_v - p_v sum(c), with ``rest`` the mass of p that has no entry."""
    total = coefficients.sum(-1)
    return (coefficients - total.unsqueeze(-1) * p).abs().sum(-1) + rest * total.abs()
