"""Log-probabilities of a few chosen tokens through an fp32 head, without keeping all logits.

Shapes: N tokens flat, D hidden size, V vocabulary, M chosen tokens per position (the sampled one
and the K of the sampler's head, M = 1 + K), n tokens of one chunk.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 * 2**20
"""Size of one chunk of logits when ``chunk_tokens`` is not given."""
MIN_CHUNK_TOKENS = 16


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
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of chosen tokens [N, M] and the entropy [N] (no gradient).

    Claim: values and gradients of the plain computation below, in float32 whatever the operand
    dtypes, autocast and TF32 settings (float64 operands stay float64), while no [N, V] tensor
    outlives a chunk of tokens. Logits are computed again in the backward pass.

        logits  = cap(logit_scale * (float(hidden) @ float(round(weight)).T + bias)) / temperature
        cap(x)  = softcap * tanh(x / softcap), or x
        logprob = logits[token] - logsumexp(logits)

    ``round`` goes to ``weight_dtype``, the dtype in which the sampler serves the weight, with
    the gradient passed straight through to the master weight.

    Args:
        hidden: [N, D] last hidden states.
        weight: [V, D] head weight; a DTensor is gathered, see ``local_head_weight``.
        token_ids: [N, M] int64; an id below 0 is padding and gets -inf and no gradient.
        bias: [V] head bias.
        temperature: the sampler's, above 0.
        logit_scale: factor on the logits (Cohere).
        softcap: bound of the logits (Gemma).
        weight_dtype: served dtype; None keeps the weight as it is.
        chunk_tokens: tokens of one chunk; by default as many as make 64 MiB of logits, at least
            16. It changes memory, not results.

    Numbers: hidden (1,), weight ((ln 3,), (0,)), ids (0, 1) give (ln 0.75, ln 0.25).

    Edge cases: N = 0 gives empty results and zero gradients. A temperature of 0 is refused: it
    has no distribution.
    """
    weight = local_head_weight(weight)
    bias = None if bias is None else local_head_weight(bias)
    _check(hidden, weight, token_ids, bias, chunk_tokens)
    _check_scalars(temperature, logit_scale, softcap, weight_dtype)
    wide = torch.float64 in (hidden.dtype, weight.dtype)
    dtype = torch.float64 if wide else torch.float32
    row_bytes = max(1, weight.shape[0]) * dtype.itemsize
    chunk = chunk_tokens or max(MIN_CHUNK_TOKENS, CHUNK_BYTES // row_bytes)
    head = _Head(temperature, logit_scale, softcap, weight_dtype, dtype, chunk)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, token_ids, head)
    return logprobs, entropy


@dataclass(frozen=True)
class _Head:
    """What turns hidden states into logits, beside its tensors."""

    temperature: float
    logit_scale: float
    softcap: float | None
    weight_dtype: torch.dtype | None
    dtype: torch.dtype
    chunk: int

    def served(self, weight: Tensor) -> Tensor:
        rounded = weight if self.weight_dtype is None else weight.to(self.weight_dtype)
        return rounded.to(self.dtype)

    def logits(self, hidden: Tensor, served: Tensor, bias: Tensor | None) -> Tensor:
        """Return fresh logits [n, V], safe to overwrite."""
        logits = hidden @ served.t()
        if bias is not None:
            logits.add_(bias)
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperature)

    def softcap_slope(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the cap [n, V], from the logits after it."""
        if self.softcap is None:
            return None
        tanh = logits * (self.temperature / self.softcap)
        return tanh.square_().neg_().add_(1.0)

    def chunks(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.chunk):
            yield slice(start, start + self.chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logprobs = hidden.new_empty(token_ids.shape, dtype=head.dtype)
        row_max, log_norm, entropy = (hidden.new_empty(tokens, dtype=head.dtype) for _ in range(3))
        wide_bias = None if bias is None else bias.to(head.dtype)
        with _exact_products(hidden.device):
            served = head.served(weight)
            for rows in head.chunks(tokens):
                logits = head.logits(hidden[rows].to(head.dtype), served, wide_bias)
                chosen = logits.gather(1, token_ids[rows].clamp(min=0))
                # logit - max first: a large offset shared by all logits then costs no precision.
                top = logits.amax(1)
                masses = logits.sub_(top.unsqueeze(1)).exp_()
                total = masses.sum(1)
                row_max[rows], log_norm[rows] = top, total.log()
                logprobs[rows] = chosen.sub_(top.unsqueeze(1)).sub_(log_norm[rows].unsqueeze(1))
                probabilities = masses.div_(total.unsqueeze(1))
                entropy[rows] = torch.special.entr(probabilities, out=probabilities).sum(1)
        logprobs.masked_fill_(token_ids < 0, -math.inf)
        ctx.save_for_backward(hidden, weight, bias, token_ids, row_max, log_norm)
        ctx.head = head
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, token_ids, row_max, log_norm = ctx.saved_tensors
        head: _Head = ctx.head
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        wide_bias = None if bias is None else bias.to(head.dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=head.dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.dtype) if need_bias else None
        with _exact_products(hidden.device):
            served = head.served(weight)
            for rows in head.chunks(hidden.shape[0]):
                wide_hidden = hidden[rows].to(head.dtype)
                logits = head.logits(wide_hidden, served, wide_bias)
                slope = head.softcap_slope(logits)
                ids = token_ids[rows]
                grad = grad_logprobs[rows].masked_fill(ids < 0, 0.0)
                shift = (row_max[rows] + log_norm[rows]).unsqueeze(1)
                delta = logits.sub_(shift).exp_().mul_(-grad.sum(1, keepdim=True))
                delta.scatter_add_(1, ids.clamp(min=0), grad)
                if slope is not None:
                    delta.mul_(slope)
                delta.mul_(head.logit_scale / head.temperature)
                if grad_hidden is not None:
                    grad_hidden[rows] = (delta @ served).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(delta.t(), wide_hidden)
                if grad_bias is not None:
                    grad_bias.add_(delta.sum(0))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """Full float32 matrix products: autocast and TF32 (bf16 on CPUs) would undo an fp32 head."""
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device_type=device.type, enabled=False))
        try:
            legacy = torch.get_float32_matmul_precision()
        except RuntimeError:  # set per backend, which the global getter refuses to report
            legacy = "highest"
        # torch below 2.9 has the global setting only.
        cpu: Any = getattr(torch.backends.mkldnn, "matmul", None)
        backends: tuple[Any, ...] = (torch.backends.cuda.matmul, cpu)
        found = {b: b.fp32_precision for b in backends if hasattr(b, "fp32_precision")}
        if legacy != "highest" or not {"none", "ieee"}.issuperset(found.values()):
            for backend, precision in found.items():
                stack.callback(setattr, backend, "fp32_precision", precision)
                backend.fp32_precision = "ieee"
            # Pushed last, undone first: restoring it overwrites the backends' own settings.
            if legacy != "highest":
                stack.callback(torch.set_float32_matmul_precision, legacy)
                torch.set_float32_matmul_precision("highest")
        yield


def _check(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, bias: Tensor | None, chunk: int | None
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, D] and "
            "[V, D]: flatten rows and tokens, and gather a sharded head, before the call"
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
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk_tokens={chunk}: a chunk holds at least 1 token; None picks a size")
    largest = int(token_ids.max()) if token_ids.numel() else -1
    if largest >= weight.shape[0]:
        raise ValueError(
            f"token id {largest} is outside the head's {weight.shape[0]} rows: the ids come from "
            "another vocabulary; use the served model's tokenizer"
        )


def _check_scalars(
    temperature: float, logit_scale: float, softcap: float | None, dtype: torch.dtype | None
) -> None:
    if not 0.0 < temperature < math.inf:
        raise ValueError(
            f"temperature={temperature}: a distribution needs a finite one above 0; pass the "
            "temperature of the rollouts"
        )
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale={logit_scale} must be finite; 1.0 scales nothing")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be finite and above 0; None caps nothing")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"weight_dtype={dtype} must be a floating dtype, the served head's")
