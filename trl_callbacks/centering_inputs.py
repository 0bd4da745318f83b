"""The checked inputs of score centering: shapes, dtypes, and which tokens count.

Shapes: [N] any leading shape of tokens, such as [B, T]; heads add one last axis, [N, K].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trl_callbacks.policy_ratio import PolicyRatio


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


class Policy(NamedTuple):
    """One policy's log-probabilities: of the sampled tokens [N] and of the heads [N, K]."""

    token: Tensor
    head: Tensor


class Tokens(NamedTuple):
    """Checked inputs; invalid tokens hold 0, absent head entries 0 (p, p_old) and -inf (q)."""

    now: Policy
    old: Policy | None
    logq: Tensor
    head_logq: Tensor
    advantages: Tensor
    valid: Tensor
    present: Tensor
    dropped: Tensor


def prepare(
    now: Policy,
    old: Policy | None,
    logq: Tensor,
    head_logq: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
) -> Tokens:
    shape = now.token.shape
    if logq.shape != shape or (mask is not None and mask.shape != shape):
        found = None if mask is None else tuple(mask.shape)
        raise ValueError(
            f"token_logprobs {tuple(shape)}, sampler_logprobs {tuple(logq.shape)} and "
            f"mask {found} must have one shape: one value for each token"
        )
    if now.head.shape != head_logq.shape or now.head.shape[:-1] != shape:
        raise ValueError(
            f"head_logprobs {tuple(now.head.shape)} and sampler_head_logprobs "
            f"{tuple(head_logq.shape)} must both be {tuple(shape)} + (K,)"
        )
    if old is not None and (old.token.shape != shape or old.head.shape != head_logq.shape):
        raise ValueError(
            f"old_token_logprobs {tuple(old.token.shape)} and old_head_logprobs "
            f"{tuple(old.head.shape)} must have the shapes of token_logprobs {tuple(shape)} and "
            f"head_logprobs {tuple(head_logq.shape)}"
        )
    wide = torch.float64 in (now.token.dtype, now.head.dtype)
    dtype = torch.float64 if wide else torch.float32
    logq, head_logq = logq.detach(), head_logq.detach()
    valid = valid_tokens(logq, head_logq, mask)
    present = valid.unsqueeze(-1) & (head_logq > -math.inf)
    asked = torch.ones_like(valid) if mask is None else mask != 0

    def selected(policy: Policy) -> Policy:
        # Selecting before any arithmetic keeps 0 * NaN out of the backward pass.
        return Policy(
            torch.where(valid, policy.token.to(dtype), 0.0),
            torch.where(present, policy.head.to(dtype), 0.0),
        )

    tok_q = torch.where(valid, logq.to(dtype), 0.0)
    advantages = broadcastable("advantages", advantages, tok_q)
    return Tokens(
        now=selected(now),
        old=None if old is None else selected(old),
        logq=tok_q,
        head_logq=torch.where(present, head_logq.to(dtype), -math.inf),
        advantages=torch.where(valid, advantages, 0.0),
        valid=valid,
        present=present,
        dropped=asked & ~valid,
    )


def old_policy(
    token: Tensor | None, head: Tensor | None, ratio: PolicyRatio | None
) -> Policy | None:
    if token is None and head is None:
        return None
    if token is None or head is None or ratio is None:
        given = [
            name
            for name, value in (
                ("old_token_logprobs", token),
                ("old_head_logprobs", head),
                ("ratio", ratio),
            )
            if value is not None
        ]
        raise ValueError(
            f"of old_token_logprobs, old_head_logprobs and ratio only {', '.join(given)} was "
            "given: the ratio to the old policy is needed for the sampled token and on the head "
            "alike; pass all three, or none of the first two"
        )
    return Policy(token.detach(), head.detach())


def broadcastable(name: str, values: Tensor, like: Tensor) -> Tensor:
    """Return constants in the dtype of the loss, refusing what would broadcast over tokens."""
    # Without the same number of axes, [B] beside [B, T] would broadcast over tokens if B == T.
    if values.dim() not in (0, like.dim()):
        raise ValueError(
            f"{name} {tuple(values.shape)} beside tokens {tuple(like.shape)}: the axes are "
            f"ambiguous; pass one value per row as {name}.unsqueeze(-1)"
        )
    return values.detach().to(like.dtype).expand(like.shape)
