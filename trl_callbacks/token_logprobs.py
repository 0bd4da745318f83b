"""Log-probabilities of a few chosen tokens through an fp32 head, without keeping all logits.

TRL's fused head (``ChunkedLogProbFunction``) takes one target per row, so K more tokens would cost
K more passes over the head: it cannot be reused here, only its tiling is.

Shapes: N tokens flat, D hidden size, V vocabulary, M chosen tokens per position (the sampled one
and the K of the sampler's head, M = 1 + K); one tile has n tokens and v vocabulary rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_callbacks.head_tiles import Head, backward, forward, wide_dtype

Gather = Callable[..., AbstractContextManager[Any]]


def local_head_weight(weight: Tensor) -> Tensor:
    """Return a head parameter as a plain tensor, gathered if it is sharded.

    Claim: each rank's gradient of the gathered tensor is averaged over the ranks and scattered
    back, as FSDP2 does for the parameters it gathers itself. A plain ``full_tensor()`` keeps the
    rank's own gradient instead. Shapes: [V, D] (or [V]) in, the full [V, D] (or [V]) out. With
    gradients 1 and 3 on two ranks, both shards receive 2. Edge case: a plain tensor is returned
    as it is. On a sharded one this is a collective: every rank must make the same calls.
    """
    # A DTensor cannot exist before its module is loaded, and loading it here would cost seconds.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(weight, module.DTensor):
        return weight
    if torch.is_grad_enabled() and weight.requires_grad:
        average = [module.Partial("avg")] * weight.device_mesh.ndim
        full: Tensor = weight.full_tensor(grad_placements=average)
    else:
        full = weight.full_tensor()
    return full


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    weight_dtype: torch.dtype | None = None,
    entropy_grad: bool = False,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of chosen tokens [N, M] and the entropy [N].

    Claim: values and gradients of the plain computation below, in float32 whatever the operand
    dtypes, autocast and TF32 settings (float64 operands stay float64), while logits, and an fp32
    copy of the weight, exist in tiles only. Logits are computed again in the backward pass.

        logits  = cap(logit_scale * (float(hidden) @ float(round(weight)).T + bias)) / temperature
        cap(x)  = softcap * tanh(x / softcap), or x
        logprob = logits[token] - logsumexp(logits)
        entropy = -sum_j p_j log p_j,   d entropy / d logits_j = -p_j (log p_j + entropy)

    ``round`` goes to ``weight_dtype``, the dtype in which the sampler serves the weight, with
    the gradient passed straight through to the master weight.

    Args:
        hidden: [N, D] last hidden states. In the served dtype, as a bf16 model makes them, their
            product runs on tensor cores with the same result; see ``exact_in_16_bits``.
        weight: [V, D] head weight; a DTensor is gathered, see ``local_head_weight``.
        token_ids: [N, M] int64; an id below 0 is padding and gets -inf and no gradient.
        bias: [V] head bias.
        temperature: the sampler's, above 0.
        logit_scale: factor on the logits (Cohere).
        softcap: bound of the logits (Gemma).
        weight_dtype: served dtype; None keeps the weight as it is.
        entropy_grad: whether the entropy has a gradient; without it, it costs none.
        gather: context manager that makes partitioned parameters whole, called with weight and
            bias around the forward and again around the backward. ZeRO-3 empties the head's
            parameters in between: pass TRL's ``trl.trainer.utils.maybe_gather_lm_head_ctx``.
        chunk_tokens: n, tokens of one tile. By default a tile of logits has 4 MiB on a CPU and
            64 MiB elsewhere. It changes memory and speed, not results.
        chunk_vocab: v, vocabulary rows of one tile.

    Numbers: hidden (1,), weight ((ln 3,), (0,)), ids (0, 1) give (ln 0.75, ln 0.25).

    Edge cases: N = 0 gives empty results and zero gradients. A temperature of 0 is refused: it
    has no distribution. An id of V or more is refused; on a GPU by a device-side assertion, which
    ends the process, because asking would wait for the device.
    """
    head = Head(
        temperature, logit_scale, softcap, weight_dtype, entropy_grad, chunk_tokens, chunk_vocab
    )
    _check_head(head)
    if gather is not None:
        # A graph cannot hold the context manager. No decorator: it loads the compiler, 3 seconds.
        run = torch.compiler.disable(_gathered) if torch.compiler.is_compiling() else _gathered
        return run(hidden, weight, bias, token_ids, head, gather)
    return _apply(hidden, weight, bias, token_ids, head, None)


def _gathered(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    head: Head,
    gather: Gather,
) -> tuple[Tensor, Tensor]:
    with gather(weight, bias):
        return _apply(hidden, weight, bias, token_ids, head, gather)


def _apply(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    head: Head,
    gather: Gather | None,
) -> tuple[Tensor, Tensor]:
    weight = local_head_weight(weight)
    bias = None if bias is None else local_head_weight(bias)
    _check(hidden, weight, token_ids, bias)
    if torch.compiler.is_compiling():
        logprobs, entropy, _, _ = _forward_op(
            hidden, weight, bias, token_ids, *(getattr(head, f.name) for f in fields(head))
        )
        return logprobs, entropy if head.entropy_grad else entropy.detach()
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, token_ids, head, gather)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        head: Head,
        gather: Gather | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logprobs, entropy, top, mass = forward(hidden, weight, bias, token_ids, head)
        ctx.save_for_backward(hidden, weight, bias, token_ids, entropy, top, mass)
        ctx.head, ctx.gather = head, gather
        if not head.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, *results = ctx.saved_tensors
        with nullcontext() if ctx.gather is None else ctx.gather(weight, bias):
            grads = backward(
                (grad, grad_entropy),
                (hidden, weight, bias, token_ids),
                tuple(results),
                ctx.head,
                ctx.needs_input_grad,
            )
        return *grads, None, None, None


# For torch.compile only: one opaque operation in its graph, instead of a trace of every tile that
# would depend on the number of tokens. Elsewhere it would hide the tiles from profilers and modes.
_HEAD = (
    "float temperature, float logit_scale, float? softcap, ScalarType? weight_dtype, "
    "bool entropy_grad, SymInt? chunk_tokens, SymInt? chunk_vocab"
)


@torch.library.custom_op(
    "vllm_parity::token_logprobs",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor token_ids, {_HEAD})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *head: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward(hidden, weight, bias, token_ids, Head(*head))


@_forward_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *head: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = wide_dtype(hidden, weight)
    entropy, top, mass = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
    return hidden.new_empty(token_ids.shape, dtype=dtype), entropy, top, mass


@torch.library.custom_op(
    "vllm_parity::token_logprobs_backward",
    mutates_args=(),
    schema="(Tensor? grad, Tensor? grad_entropy, Tensor hidden, Tensor weight, Tensor? bias, "
    f"Tensor token_ids, Tensor entropy, Tensor top, Tensor mass, bool[] needs, {_HEAD})"
    " -> Tensor[]",
)
def _backward_op(
    grad: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    entropy: Tensor,
    top: Tensor,
    mass: Tensor,
    needs: list[bool],
    *head: Any,
) -> list[Tensor]:
    operands = (hidden, weight, bias, token_ids)
    grads = backward((grad, grad_entropy), operands, (entropy, top, mass), Head(*head), needs)
    return [hidden.new_empty(0) if g is None else g for g in grads]


@_backward_op.register_fake
def _(
    grad: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    entropy: Tensor,
    top: Tensor,
    mass: Tensor,
    needs: list[bool],
    *head: Any,
) -> list[Tensor]:
    wanted = zip((hidden, weight, bias), needs, strict=True)
    return [
        x.new_empty(x.shape) if need and x is not None else hidden.new_empty(0)
        for x, need in wanted
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.head = inputs[4:]
    ctx.set_materialize_grads(False)


def _op_backward(
    ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    grads = _backward_op(grad, grad_entropy, *ctx.saved_tensors, needs, *ctx.head)
    rest = [None] * (1 + len(ctx.head))
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *rest


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)


def _check(hidden: Tensor, weight: Tensor, token_ids: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, D] and "
            "[V, D]: flatten rows and tokens, and gather a sharded head, before the call; an empty "
            "weight is a ZeRO-3 partition, which takes gather="
        )
    if token_ids.dim() != 2 or token_ids.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"token_ids {tuple(token_ids.shape)} must be [N, M] with N = {hidden.shape[0]} as in "
            "hidden: one row of chosen ids for each position"
        )
    if token_ids.dtype != torch.int64:
        raise ValueError(f"token_ids are {token_ids.dtype}, gather needs int64: use .long()")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must be [V] = ({weight.shape[0]},)")


def _check_head(head: Head) -> None:
    if not 0.0 < head.temperature < math.inf:
        raise ValueError(
            f"temperature={head.temperature}: a distribution needs a finite one above 0; pass the "
            "temperature of the rollouts"
        )
    if not math.isfinite(head.logit_scale):
        raise ValueError(f"logit_scale={head.logit_scale} must be finite; 1.0 scales nothing")
    if head.softcap is not None and not 0.0 < head.softcap < math.inf:
        raise ValueError(f"softcap={head.softcap} must be finite and above 0; None caps nothing")
    if head.weight_dtype is not None and not head.weight_dtype.is_floating_point:
        raise ValueError(
            f"weight_dtype={head.weight_dtype} must be a floating dtype, the served head's"
        )
    for name in ("chunk_tokens", "chunk_vocab"):
        size = getattr(head, name)
        if size is not None and size < 1:
            raise ValueError(f"{name}={size}: a tile has at least 1; None picks a size")
