"""The passes over a language-model head, tile by tile: logits, sums over them, gradients.

One tile is n tokens by v vocabulary rows. Vocabulary tiles are the outer loop, so each is cast to
fp32 once, and its gradient is complete before the next one starts. ``token_logprobs`` is the
interface; nothing here knows autograd.

Shapes: N tokens flat, D hidden size, V vocabulary, M chosen tokens per position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CPU_TILE_BYTES, GPU_TILE_BYTES = 4 * 2**20, 64 * 2**20
"""Bytes of one tile of logits: in a CPU's cache, or enough to keep a GPU busy."""
MIN_TILE_VOCAB, MAX_TILE_VOCAB, MIN_TILE_TOKENS = 2048, 16384, 16
HAS_MIXED_PRODUCT = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether 16-bit operands can be multiplied into a float32 result: torch 2.8 and newer."""
IMPOSSIBLE = -1e4
"""Stands for a log-probability of -inf: exp of it is 0 too, and 0 times it is not NaN."""


def wide_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of logits, results and sums: float32, or float64 where an operand is."""
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


def exact_in_16_bits(hidden: Tensor, served: Tensor) -> bool:
    """Return whether the product may take its 16-bit operands as they are.

    Claim: a product of two bf16 (or two fp16) numbers is exact in float32, so a tensor-core
    product that accumulates in float32 is that of the operands cast to float32, up to the order
    of the sum. Shapes: [n, D] and [v, D]. 1.0078125 squared is 1.01568603515625: 15 bits. Edge
    case: with one float32 operand, or on a CPU, which has no such product, the answer is no.
    """
    alike = hidden.dtype == served.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    return HAS_MIXED_PRODUCT and alike and served.device.type == "cuda"


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits, beside its tensors."""

    temperature: float
    logit_scale: float
    softcap: float | None
    weight_dtype: torch.dtype | None
    entropy_grad: bool
    chunk_tokens: int | None
    chunk_vocab: int | None

    def served(self, weight: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight as an operand of ``logits``."""
        rounded = weight if self.weight_dtype is None else weight.to(self.weight_dtype)
        return rounded if exact_in_16_bits(hidden, rounded) else rounded.to(dtype)

    def logits(self, tile: Tensor, hidden: Tensor, served: Tensor, bias: Tensor | None) -> None:
        """Fill a tile [n, v] with logits; with a soft cap, with the tanh in them."""
        scale = self.logit_scale / (self.softcap or self.temperature)
        options = {} if served.dtype == tile.dtype else {"out_dtype": tile.dtype}
        # addmm and not mm: its factor is free, a pass over the tile is not.
        torch.addmm(
            tile, hidden.to(served.dtype), served.t(), beta=0, alpha=scale, out=tile, **options
        )
        if bias is not None:
            tile.add_(bias.to(tile.dtype), alpha=scale)
        if self.softcap is not None:
            tile.tanh_()

    def uncap(self, tile: Tensor) -> None:
        """Turn the tanh that ``logits`` left into logits."""
        if self.softcap is not None:
            tile.mul_(self.softcap / self.temperature)


class Tiles:
    """Sizes and buffers of the tiles of one pass over the head."""

    def __init__(self, hidden: Tensor, weight: Tensor, head: Head, buffers: int) -> None:
        self.tokens, self.vocab = hidden.shape[0], weight.shape[0]
        self.dtype = wide_dtype(hidden, weight)
        cpu, size = hidden.device.type == "cpu", self.dtype.itemsize
        fit = 0 if cpu else GPU_TILE_BYTES // (size * max(1, hidden.shape[1]))
        fit = min(max(fit, MIN_TILE_VOCAB), MAX_TILE_VOCAB)
        self.v = min(self.vocab, head.chunk_vocab or fit)
        fit = (CPU_TILE_BYTES if cpu else GPU_TILE_BYTES) // (size * max(1, self.v))
        self.n = min(self.tokens, head.chunk_tokens or max(MIN_TILE_TOKENS, fit))
        self._flat = [hidden.new_empty(self.n * self.v, dtype=self.dtype) for _ in range(buffers)]

    def columns(self) -> Iterator[slice]:
        for start in range(0, self.vocab, max(1, self.v)):
            yield slice(start, min(start + self.v, self.vocab))

    def rows(self) -> Iterator[slice]:
        for start in range(0, self.tokens, max(1, self.n)):
            yield slice(start, min(start + self.n, self.tokens))

    def buffers(self, rows: slice, columns: slice) -> list[Tensor]:
        """Return the buffers as contiguous [n, v], also for the narrower last tiles."""
        n, v = rows.stop - rows.start, columns.stop - columns.start
        return [flat[: n * v].view(n, v) for flat in self._flat]


def _inside(token_ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the columns of ids [n, M] within a tile, and which of the ids lie in it.

    Ids outside are wrapped into it and masked by the caller: picking out the others would wait
    for the device, and clamping would send them all to one column, where atomic additions queue.
    """
    local, width = token_ids - columns.start, columns.stop - columns.start
    found = (local >= 0).logical_and_(local < width)
    return local.remainder_(width), found


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, head: Head
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities [N, M]; entropy, largest logit, sum of exp(logit - largest) [N]."""
    check_ids(token_ids, weight.shape[0])
    tiles = Tiles(hidden, weight, head, buffers=2)
    # Not -inf: a first tile of impossible tokens would make it -inf minus -inf.
    lowest = torch.finfo(tiles.dtype).min
    top = hidden.new_full((tiles.tokens,), lowest, dtype=tiles.dtype)
    mass, moment = torch.zeros_like(top), torch.zeros_like(top)
    logprobs = hidden.new_full(token_ids.shape, -math.inf, dtype=tiles.dtype)
    with exact_products(hidden.device):
        for columns in tiles.columns():
            served = head.served(weight[columns], hidden, tiles.dtype)
            for rows in tiles.rows():
                tile, masses = tiles.buffers(rows, columns)
                head.logits(tile, hidden[rows], served, None if bias is None else bias[columns])
                head.uncap(tile)
                column, found = _inside(token_ids[rows], columns)
                torch.where(found, tile.gather(1, column), logprobs[rows], out=logprobs[rows])
                old, new = top[rows], torch.maximum(top[rows], tile.amax(1))
                # logit - max first: a large offset shared by all logits then costs no precision.
                tile.sub_(new.unsqueeze(1))
                if bias is not None:
                    tile.clamp_(min=IMPOSSIBLE)
                torch.exp(tile, out=masses)
                step = old - new
                fade = step.exp()
                moment[rows] = fade * (moment[rows] + step * mass[rows])
                mass[rows] = fade * mass[rows] + masses.sum(1)
                moment[rows] += masses.mul_(tile).sum(1)
                top[rows] = new
            del served  # or the next tile would be made beside this one
    log_mass = mass.log()
    # Two steps: the sum of both is rounded where it is large.
    logprobs.sub_(top.unsqueeze(1)).sub_(log_mass.unsqueeze(1))
    return logprobs, log_mass - moment / mass, top, mass


def backward(
    upstream: tuple[Tensor | None, Tensor | None],
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    head: Head,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias in their dtypes, summed in a wide one."""
    grad, grad_entropy = upstream
    hidden, weight, bias, token_ids = operands
    entropy, top, mass = (x.unsqueeze(1) for x in results)
    extra = (head.softcap is not None) + (grad_entropy is not None)
    tiles = Tiles(hidden, weight, head, buffers=1 + extra)
    grad_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if needs[0] else None
    grad_weight = torch.zeros_like(weight) if needs[1] else None
    grad_bias = None
    if bias is not None and needs[2]:
        grad_bias = torch.zeros_like(bias, dtype=tiles.dtype)
    scale = head.logit_scale / head.temperature
    with exact_products(hidden.device):
        share = torch.zeros_like(mass)
        if grad is not None:
            for rows in tiles.rows():  # or another [N, M] tensor would be made
                share[rows] = grad[rows].masked_fill(token_ids[rows] < 0, 0.0).sum(1, keepdim=True)
        # d loss / d logits_j = exp(x_j) (drift - pull x_j), x = logits - top, and the chosen ones'.
        drift, pull = -share / mass, None
        if grad_entropy is not None:
            pull = grad_entropy.unsqueeze(1) / mass
            drift += pull * (mass.log() - entropy)
        for columns in tiles.columns():
            served = head.served(weight[columns], hidden, tiles.dtype)
            wide_served = served.to(tiles.dtype)
            grad_rows = None if grad_weight is None else grad_weight[columns]
            wide_grad = None if grad_rows is None else grad_rows.to(tiles.dtype)
            for rows in tiles.rows():
                tile, *spare = tiles.buffers(rows, columns)
                head.logits(tile, hidden[rows], served, None if bias is None else bias[columns])
                if head.softcap is not None:
                    torch.square(tile, out=spare[0]).neg_().add_(1.0)
                head.uncap(tile)
                tile.sub_(top[rows])
                if pull is None:
                    tile.exp_().mul_(drift[rows])
                else:
                    if bias is not None:
                        tile.clamp_(min=IMPOSSIBLE)
                    torch.exp(tile, out=spare[-1])
                    tile.mul_(-pull[rows]).add_(drift[rows]).mul_(spare[-1])
                if grad is not None:
                    column, found = _inside(token_ids[rows], columns)
                    tile.scatter_add_(1, column, torch.where(found, grad[rows], 0.0))
                if head.softcap is not None:
                    tile.mul_(spare[0])
                if grad_hidden is not None:
                    grad_hidden[rows].addmm_(tile, wide_served, alpha=scale)
                if wide_grad is not None:
                    wide_grad.addmm_(tile.t(), hidden[rows].to(tiles.dtype), alpha=scale)
                if grad_bias is not None:
                    grad_bias[columns].add_(tile.sum(0), alpha=scale)
            if grad_rows is not None and wide_grad is not None and wide_grad is not grad_rows:
                grad_rows.copy_(wide_grad)
            del served, wide_served, wide_grad
    return (
        None if grad_hidden is None else grad_hidden.to(hidden.dtype),
        grad_weight,
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
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


def check_ids(token_ids: Tensor, vocab: int) -> None:
    """Refuse ids outside the vocabulary, without waiting for a GPU."""
    advice = (
        f"is outside the head's {vocab} rows: the ids come from another vocabulary; use the "
        "served model's tokenizer"
    )
    if token_ids.device.type != "cpu":
        torch._assert_async((token_ids < vocab).all(), f"a token id {advice}")
    elif token_ids.numel() and (largest := int(token_ids.max())) >= vocab:
        raise ValueError(f"token id {largest} {advice}")
