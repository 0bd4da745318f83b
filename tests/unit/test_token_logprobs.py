"""Properties of the tiled fp32 head.

- Values equal float64 log_softmax; the entropy too; both are fp32 and near-exact in the tail (G12),
  at logits of 80 and of thousands, and over a real vocabulary in bf16.
- Gradients pass gradcheck in float64 and equal plain autograd with bias, scale, soft cap (H9); the
  entropy has one when it is asked for.
- Tile sizes, strides, autocast and reduced matmul precision change nothing.
- Mixed operand dtypes work, gradients come back in the operands' dtypes (H7).
- A served weight dtype rounds the weight; its gradient passes straight through; a tied weight
  collects both of its gradients.
- Padding ids give -inf and no gradient; impossible tokens, whole tiles of them too, stay finite;
  empty inputs work; wrong inputs are refused.
- No tensor of N x V elements and no wide V x D weight is kept for the backward pass, or made in
  one piece; K more tokens cost their own results and one tile (S12).
- torch.compile takes a caller in one graph and does not compile again for every length.
- 16-bit products are chosen where they are exact and exist, and nothing waits for a device.
- A sharded weight's gradient is the ranks' average; a partitioned one is gathered for both passes.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.live_bytes import LiveBytes
from trl_callbacks import head_tiles
from trl_callbacks.head_tiles import CPU_TILE_BYTES, Head, exact_in_16_bits, exact_products
from trl_callbacks.token_logprobs import _forward_op, local_head_weight, token_logprobs

N, D, V, M = 9, 8, 37, 4
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden, weight, bias, ids; ids hold a repeat in every row."""
    ids = torch.randint(V, (N, M))
    ids[:, -1] = ids[:, 0]
    shapes = ((N, D), (V, D), (V,))
    return *(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes), ids


def reference(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain autograd in the operands' dtype."""
    logits = hidden @ weight.T
    logits = logit_scale * (logits if bias is None else logits + bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, ids), -(logp.exp() * logp).sum(-1)


def gradients(outputs: Tensor, *inputs: Tensor, keep: bool = True) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 2.0, outputs.numel(), dtype=outputs.dtype)
    total = (outputs * weights.reshape(outputs.shape)).sum()
    return torch.autograd.grad(total, inputs, retain_graph=keep)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"logit_scale": 0.0625},
    "softcap": {"softcap": 1.5},
    "all": {"temperature": 1.3, "logit_scale": 0.5, "softcap": 2.0},
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_equal_plain_autograd(options: dict, with_bias: bool) -> None:
    """H9: scale, soft cap and bias are in the values and in every gradient, the entropy's too."""
    hidden, weight, bias, ids = operands()
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)[: 3 if with_bias else 2]]
    bias_or_none = bias if with_bias else None
    logprobs, entropy = token_logprobs(hidden, weight, ids, bias=bias_or_none, **options)
    want, want_entropy = reference(hidden, weight, ids, bias_or_none, **options)
    torch.testing.assert_close(logprobs, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy.detach(), rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad
    for found, expected in zip(gradients(logprobs, *inputs), gradients(want, *inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    options = {**options, "bias": bias_or_none, "entropy_grad": True, "chunk_vocab": 10}
    mixed = torch.cat([x.flatten() for x in token_logprobs(hidden, weight, ids, **options)])
    only_entropy = token_logprobs(hidden, weight, ids, **options)[1]
    want_mixed = torch.cat([want.flatten(), want_entropy])
    for ours, plain in ((mixed, want_mixed), (only_entropy, want_entropy)):
        found, expected = gradients(ours, *inputs), gradients(plain, *inputs)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_worked_number() -> None:
    weight = torch.tensor([[math.log(3.0)], [0.0]])
    logprobs, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([[0, 1]]))
    assert logprobs.exp().tolist() == [pytest.approx([0.75, 0.25])]
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


@pytest.mark.parametrize("tile", [(1, 37), (4, 5), (None, None)])
def test_gradcheck(tile: tuple[int | None, int | None]) -> None:
    hidden, weight, bias, ids = operands()
    inputs = tuple(x.requires_grad_() for x in (hidden, weight, bias))
    options = {"temperature": 0.7, "logit_scale": 0.5, "softcap": 2.0, "entropy_grad": True}

    def function(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        tiles = {"chunk_tokens": tile[0], "chunk_vocab": tile[1]}
        return token_logprobs(h, w, ids, bias=b, **options, **tiles)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_operands_get_no_gradient(frozen: str) -> None:
    hidden, weight, _, ids = operands()
    trained = weight if frozen == "hidden" else hidden
    trained.requires_grad_()
    with Seen() as seen:
        (found,) = gradients(token_logprobs(hidden, weight, ids)[0], trained)
    assert seen.products == ["aten::addmm", "aten::addmm", "aten::addmm_"], "frozen, but worked on"
    (want,) = gradients(reference(hidden, weight, ids)[0], trained)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("tile", [(1, None), (7, 36), (N, 1), (100, 100), (None, 37), (4, 12)])
def test_tiles_agree(tile: tuple[int | None, int | None]) -> None:
    hidden, weight, _, ids = operands()
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    whole, entropy = token_logprobs(hidden, weight, ids)
    sizes = {"chunk_tokens": tile[0], "chunk_vocab": tile[1]}
    parts, entropy2 = token_logprobs(hidden, weight, ids, **sizes)
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy2, entropy, rtol=1e-13, atol=1e-13)
    for a, b in zip(gradients(parts, *inputs), gradients(whole, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_shapes_equal_plain_autograd(data: st.DataObject) -> None:
    """Duplicates, ids at the borders of tiles, padding, and tiles that divide neither N nor V."""
    tokens, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    vocab, chosen = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 6))
    n, v = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 41))
    borders = [i for i in (-1, 0, v - 1, v, 2 * v - 1, 2 * v, vocab - 1) if i < vocab]
    entry = st.sampled_from(borders) | st.integers(0, vocab - 1)
    row = st.lists(entry, min_size=chosen, max_size=chosen)
    ids = torch.tensor(data.draw(st.lists(row, min_size=tokens, max_size=tokens)))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    shapes = ((tokens, width), (vocab, width), (vocab,))
    inputs = [(3 * torch.randn(s, dtype=torch.float64)).requires_grad_() for s in shapes]
    hidden, weight, bias = inputs
    options = {"temperature": 0.9, "softcap": data.draw(st.sampled_from([None, 4.0]))}
    logprobs, entropy = token_logprobs(
        hidden, weight, ids, bias=bias, entropy_grad=True, chunk_tokens=n, chunk_vocab=v, **options
    )
    want, want_entropy = reference(hidden, weight, ids.clamp(min=0), bias, **options)
    padding = ids < 0
    assert torch.equal(logprobs == -math.inf, padding)
    found = torch.cat([logprobs[~padding], entropy])
    expected = torch.cat([want[~padding], want_entropy])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        gradients(found, *inputs), gradients(expected, *inputs), rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("largest", [80.0, 5e3, 1e30])
def test_large_logits(largest: float) -> None:
    """Errors are those of the logits' own rounding; the maximum moves from tile to tile."""
    logits = torch.linspace(-largest, largest, V)[torch.randperm(V)].repeat(N, 1)
    logits[1], logits[2] = logits[0].sort().values, logits[0].sort(descending=True).values
    logits[3] = largest
    hidden, ids = logits.clone().requires_grad_(), torch.arange(V).repeat(N, 1)
    logprobs, entropy = token_logprobs(
        hidden, torch.eye(V), ids, entropy_grad=True, chunk_vocab=5, chunk_tokens=4
    )
    exact = logits.double().requires_grad_()
    want, want_entropy = reference(exact, torch.eye(V).double(), ids)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    for ours, plain in ((logprobs, want), (entropy, want_entropy)):
        (found,), (expected,) = gradients(ours, hidden), gradients(plain, exact)
        torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-5)
    assert logprobs[3].exp().tolist() == pytest.approx([1 / V] * V)


def test_a_real_vocabulary_in_bf16() -> None:
    """Qwen's 151,936 rows, which no tile divides; the naive bf16 head is far off."""
    vocab = 151_936
    hidden = torch.randn(4, 16).bfloat16().requires_grad_()
    weight = torch.randn(vocab, 16).bfloat16().requires_grad_()
    ids = torch.cat([torch.randint(vocab, (4, 20)), torch.tensor([[0, vocab - 1]] * 4)], 1)
    logprobs, entropy = token_logprobs(hidden, weight, ids)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want, want_entropy = reference(*wide, ids)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    for found, expected in zip(
        gradients(logprobs, hidden, weight), gradients(want, *wide), strict=True
    ):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)
    naive = (hidden @ weight.T).log_softmax(-1).gather(1, ids)
    assert (naive - want).abs().max() > 1e-2


def test_strided_operands() -> None:
    """Transposed and sliced views, and ids with a stride."""
    hidden, weight, bias, ids = operands()
    want = token_logprobs(hidden, weight, ids, bias=bias, chunk_vocab=10)[0]
    views = (
        hidden.t().contiguous().t(),
        torch.stack([weight, weight], -1)[..., 0],
        ids.t().contiguous().t(),
        torch.stack([bias, bias], -1)[..., 0],
    )
    assert not any(x.is_contiguous() for x in views)
    h, w, i, b = views
    inputs = [x.detach().requires_grad_() for x in (h, w, b)]
    found = token_logprobs(inputs[0], inputs[1], i, bias=inputs[2], chunk_vocab=10)[0]
    torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)
    plain = [x.requires_grad_() for x in (hidden, weight, bias)]
    torch.testing.assert_close(
        gradients(found, *inputs), gradients(reference(*plain[:2], ids, bias)[0], *plain)
    )


def test_a_tied_weight_collects_both_gradients() -> None:
    _, weight, _, ids = operands()
    weight.requires_grad_()

    def hidden() -> Tensor:
        return torch.nn.functional.embedding(ids[:, 0], weight).tanh()

    found = gradients(token_logprobs(hidden(), weight, ids)[0], weight)
    torch.testing.assert_close(found, gradients(reference(hidden(), weight, ids)[0], weight))
    only_head = gradients(token_logprobs(hidden().detach(), weight, ids)[0], weight)
    assert (found[0] - only_head[0]).abs().max() > 0.1


MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), MIXED)
def test_mixed_dtypes_under_autocast(
    hidden_dtype: torch.dtype, weight_dtype: torch.dtype, autocast: bool, with_bias: bool
) -> None:
    """H7: fp32 results within 1e-5 of float64; gradients in the operands' dtypes."""
    hidden, weight, bias, ids = operands()
    hidden, weight = hidden.to(hidden_dtype), weight.to(weight_dtype)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    b = bias.to(weight_dtype) if with_bias else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logprobs, entropy = token_logprobs(hidden, weight, ids, bias=b)
        grads = gradients(logprobs, *inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    want, want_entropy = reference(*wide, ids, b if b is None else b.double())
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-6)
    for grad, operand, exact in zip(grads, inputs, gradients(want, *wide), strict=True):
        assert grad.dtype == operand.dtype
        # One rounding to the operand's dtype, at the end: nothing was accumulated in it.
        tolerance = max(torch.finfo(operand.dtype).eps, 1e-5)
        torch.testing.assert_close(grad.double(), exact, rtol=tolerance, atol=1e-5)


def precision_state() -> tuple[str, str, str]:
    """Return the global setting and those of both backends."""
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:
        legacy = "mixed"
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return legacy, cuda.fp32_precision, cpu.fp32_precision


@pytest.fixture
def _restore_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "none"


PRECISIONS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "cuda": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "cpu": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
}


@pytest.mark.usefixtures("_restore_precision")
@pytest.mark.parametrize("reduce", PRECISIONS.values(), ids=PRECISIONS)
def test_reduced_matmul_precision_is_not_used_and_is_restored(
    reduce: Callable[[], None],
) -> None:
    """TF32 on GPUs, bf16 on CPUs: the setting of the rest of the model stays what it was."""
    hidden, weight = torch.randn(128, 512), torch.randn(256, 512).requires_grad_()
    ids = torch.randint(256, (128, 2))
    want, _ = token_logprobs(hidden, weight, ids)
    (want_grad,) = gradients(want, weight)
    reduce()
    before = precision_state()
    with Seen() as seen:
        logprobs, _ = token_logprobs(hidden, weight, ids)
        (grad,) = gradients(logprobs, weight)
    assert seen.precisions == {("highest", "ieee", "ieee")}
    assert torch.equal(logprobs, want) and torch.equal(grad, want_grad)
    assert precision_state() == before


@pytest.mark.usefixtures("_restore_precision")
def test_the_global_setting_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch below 2.9, whose backends have no setting of their own."""
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch.backends.cuda, "matmul", object())
    monkeypatch.setattr(torch.backends.mkldnn, "matmul", object(), raising=False)
    with exact_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


class Seen(TorchDispatchMode):
    """Records the precision in force at each product, and the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.precisions: set[tuple[str, str, str]] = set()
        self.products: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.products.append(func._schema.name)
            self.precisions.add(precision_state())
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_served_dtype_rounds_the_weight_and_passes_its_gradient() -> None:
    hidden, weight, _, ids = operands(torch.float32)
    weight.requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, ids, weight_dtype=torch.bfloat16)
    served = weight.detach().bfloat16().float().requires_grad_()
    want, _ = token_logprobs(hidden, served, ids)
    assert torch.equal(logprobs, want)
    (grad,), (want_grad,) = gradients(logprobs, weight), gradients(want, served)
    assert grad.dtype == torch.float32 and torch.equal(grad, want_grad)
    unrounded, _ = token_logprobs(hidden, weight, ids)
    assert (unrounded - logprobs).abs().max() > 1e-4


def test_g12_tail_tokens() -> None:
    """G12: a token at log-probability -20 of 512, below a shared offset of 40, to 1e-3."""
    hidden = torch.ones(1, 1)
    weight = torch.cat([torch.tensor([20.0]), torch.randn(511)])[:, None] + 40.0
    ids = torch.arange(512)[None]
    logprobs, _ = token_logprobs(hidden.bfloat16(), weight, ids)
    want, _ = reference(hidden.double(), weight.double(), ids)
    assert want.min() < -20.0
    assert (logprobs - want).abs().max() < 1e-4
    coarse = (hidden.bfloat16() @ weight.bfloat16().T).log_softmax(-1)
    assert (coarse - want).abs().max() > 0.05
    exact_in_bf16 = (logprobs == logprobs.bfloat16().float()).float().mean()
    assert logprobs.dtype == torch.float32 and exact_in_bf16 < 0.05


def test_padding_ids_give_minus_inf_and_no_gradient() -> None:
    hidden, weight, _, ids = operands()
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    padded = torch.cat([ids, torch.full((N, 2), -1)], 1)
    padded[0] = -100
    logprobs, _ = token_logprobs(hidden, weight, padded)
    want, _ = token_logprobs(hidden, weight, ids)
    assert (logprobs[padded < 0] == -math.inf).all() and torch.equal(logprobs[1:, :M], want[1:])
    # A loss may send NaN to entries it does not use.
    upstream = torch.ones_like(logprobs).masked_fill(padded < 0, math.nan)
    found = torch.autograd.grad(logprobs, inputs, upstream)
    expected = torch.autograd.grad(want[1:].sum(), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert (found[0][0] == 0).all()


def test_impossible_vocabulary_rows_stay_finite() -> None:
    """A bias of -inf (a padded vocabulary) gives probability 0, not NaN."""
    hidden, weight, bias, ids = operands()
    ids %= V - 2
    bias[V - 2 :] = -math.inf
    hidden.requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, ids, bias=bias)
    want, _ = reference(hidden, weight[:-2], ids, bias[:-2])
    torch.testing.assert_close(logprobs, want)
    assert entropy.isfinite().all()
    torch.testing.assert_close(gradients(logprobs, hidden), gradients(want, hidden))


@pytest.mark.parametrize("impossible", [slice(0, 12), slice(24, V), slice(5, 25), slice(1, V)])
def test_whole_tiles_of_impossible_tokens(impossible: slice) -> None:
    """The running maximum starts, or stays, at nothing; the entropy's gradient is finite too."""
    hidden, weight, bias, ids = operands()
    bias[impossible] = -math.inf
    possible = bias > -math.inf
    ids = possible.nonzero()[:, 0][ids % possible.sum()]
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    found = torch.cat(
        [
            x.flatten()
            for x in token_logprobs(
                hidden, weight, ids, bias=bias, chunk_vocab=12, chunk_tokens=4, entropy_grad=True
            )
        ]
    )
    where = possible.cumsum(0) - 1
    want, entropy = reference(hidden, weight[possible], where[ids], bias[possible])
    expected = torch.cat([want.flatten(), entropy])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, *inputs), gradients(expected, *inputs))


def test_a_row_without_possible_tokens_is_nan_and_alone() -> None:
    hidden, weight, _, ids = operands(torch.float32)
    hidden[2] = math.nan
    logprobs, entropy = token_logprobs(hidden, weight, ids, chunk_vocab=7)
    rows = torch.arange(N) == 2
    assert torch.equal(logprobs.isnan().all(1), rows) and torch.equal(entropy.isnan(), rows)
    nothing = torch.full((V,), -math.inf)
    logprobs, entropy = token_logprobs(torch.ones(N, D), weight, ids, bias=nothing)
    assert logprobs.isnan().all() and entropy.isnan().all()


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("chosen", [0, 2])
def test_empty_inputs(tokens: int, chosen: int) -> None:
    hidden = torch.randn(tokens, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    ids = torch.zeros(tokens, chosen, dtype=torch.int64)
    logprobs, entropy = token_logprobs(hidden, weight, ids)
    assert logprobs.shape == (tokens, chosen) and entropy.shape == (tokens,)
    logprobs.sum().backward()
    if not tokens * chosen:
        assert (hidden.grad == 0).all() and (weight.grad == 0).all()


def test_no_full_logits_are_kept_or_made() -> None:
    """S12: memory O(N M): what is saved are the operands, the ids and three numbers per token."""
    tokens, vocab = 64, 1000
    hidden = torch.randn(tokens, D, requires_grad=True)
    weight = torch.randn(vocab, D, requires_grad=True)
    ids = torch.randint(vocab, (tokens, M))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    seen = Seen()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), seen:
        logprobs, _ = token_logprobs(hidden, weight, ids, chunk_tokens=8)
        logprobs.sum().backward()
    assert sum(t.numel() for t in saved) == hidden.numel() + weight.numel() + ids.numel() + 3 * 64
    assert seen.largest == max(8 * vocab, vocab * D)
    with Seen() as whole:
        token_logprobs(hidden, weight, ids)[0].sum().backward()
    assert whole.largest == tokens * vocab, "the default tile fits all of them here"


def test_default_tiles_are_bounded() -> None:
    """4 MiB of logits are 2^20 float32 numbers: 2048 rows by 512 tokens."""
    hidden, weight = torch.randn(700, 1), torch.randn(2**18, 1).bfloat16()
    with Seen() as seen:
        token_logprobs(hidden, weight, torch.zeros(700, 1, dtype=torch.int64))
    assert seen.largest == 2**20 and len(seen.products) == 2 * 2**18 / 2048


def test_no_wide_copy_of_the_weight_is_made() -> None:
    """In both passes the largest tensor is the bf16 gradient itself, and the only one so large."""
    hidden = torch.randn(4, 64, requires_grad=True)
    weight = torch.randn(3000, 64).bfloat16().requires_grad_()
    with LiveBytes() as live:
        logprobs, _ = token_logprobs(
            hidden, weight, torch.zeros(4, 1, dtype=torch.int64), chunk_vocab=100
        )
        forward_peak = live.peak
        logprobs.sum().backward()
    tile = 100 * 64 * 4
    assert forward_peak < 2 * tile
    assert weight.nbytes < live.peak < weight.nbytes + 3 * tile < 2 * weight.nbytes


def test_s12_memory_of_a_head() -> None:
    """S12: at V = 32,000, N = 512, K = 128 the head costs its results, their gradient, one tile."""
    tokens, vocab, head = 512, 32_000, 128
    hidden = torch.randn(tokens, 64, requires_grad=True)
    weight = torch.randn(vocab, 64).bfloat16().requires_grad_()
    ids = torch.randint(vocab, (tokens, 1 + head))

    def peak(chosen: int) -> int:
        hidden.grad = weight.grad = None
        with LiveBytes() as live:
            logprobs, _ = token_logprobs(hidden, weight, ids[:, :chosen])
            logprobs.square().mean().backward()
        return live.peak

    one = peak(1)
    extra = peak(1 + head) - one
    assert one < 3 * CPU_TILE_BYTES + 2 * weight.nbytes < tokens * vocab * 4, "no full logits"
    assert extra <= 2 * tokens * head * 4 + CPU_TILE_BYTES


def test_works_in_checkpoint() -> None:
    hidden, weight, _, ids = operands(torch.float32)
    hidden.requires_grad_()

    def function(h: Tensor) -> Tensor:
        return token_logprobs(h, weight, ids)[0]

    (want,) = gradients(function(hidden), hidden)
    for reentrant in (False, True):
        found = torch.utils.checkpoint.checkpoint(function, hidden, use_reentrant=reentrant)
        found.sum().backward()
        (plain,) = torch.autograd.grad(function(hidden).sum(), hidden)
        torch.testing.assert_close(hidden.grad, plain)
        hidden.grad = None
    assert want.shape == plain.shape


def compiled_caller(gather: object = None) -> Callable[..., Tensor]:
    def caller(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        logprobs, entropy = token_logprobs(
            2 * hidden, weight, ids, weight_dtype=torch.bfloat16, entropy_grad=True, gather=gather
        )
        return torch.cat([logprobs.flatten(), entropy.square()])

    return caller


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str, gathered: bool) -> None:
    """One graph, compiled once for the first length and once for all; with gather a graph break."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    _, weight, _, _ = operands(torch.float32)
    weight.requires_grad_()
    caller = compiled_caller((lambda *_: nullcontext()) if gathered else None)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(caller, backend=counter, fullgraph=not gathered)
    for tokens in (5, 7, 30):
        hidden, ids = torch.randn(tokens, D, requires_grad=True), torch.randint(V, (tokens, M))
        found, want = compiled(hidden, weight, ids), caller(hidden, weight, ids)
        torch.testing.assert_close(found, want)
        inputs = hidden, weight
        grads = gradients(found, *inputs, keep=False)  # compiled backwards reuse their buffers
        torch.testing.assert_close(grads, gradients(want, *inputs))
    assert counter.frame_count == (4 if gathered else 2)
    with pytest.raises(ValueError, match="token id 37"):
        compiled(hidden, weight, torch.full_like(ids, V))


def test_compiled_entropy_has_no_gradient_unless_asked() -> None:
    torch._dynamo.reset()
    hidden, weight, _, ids = operands(torch.float32)
    hidden.requires_grad_()
    compiled = torch.compile(token_logprobs, backend="eager", fullgraph=True)
    logprobs, entropy = compiled(hidden, weight, ids)
    assert logprobs.requires_grad and not entropy.requires_grad


def test_the_compiler_s_operation_is_sound() -> None:
    """Torch's own checks: schema, shapes of the fake implementation, autograd, dynamic shapes."""
    hidden, weight, bias, ids = operands(torch.float32)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    torch.library.opcheck(_forward_op, (*inputs, ids, 0.7, 1.0, None, None, True, None, 10))


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without values, and with the choice of products that a GPU makes."""

    def alike(hidden: Tensor, served: Tensor) -> bool:
        return exact_in_16_bits(Device(hidden.dtype), Device(served.dtype))

    monkeypatch.setattr(head_tiles, "exact_in_16_bits", alike)
    monkeypatch.setattr(head_tiles, "check_ids", lambda *_: None)
    # Here and below, not above: spawned processes would import the compiler as well.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        yield


class Device:
    """Dtype and device of a CUDA tensor."""

    device = torch.device("cuda")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


PRODUCTS = {
    "bf16": (torch.bfloat16, torch.bfloat16, None, True),
    "rounded master": (torch.bfloat16, torch.float32, torch.bfloat16, True),
    "fp16": (torch.float16, torch.float16, None, True),
    "two formats": (torch.float16, torch.bfloat16, None, False),
    "fp32 hidden": (torch.float32, torch.bfloat16, None, False),
    "unrounded master": (torch.bfloat16, torch.float32, None, False),
}


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_16_bit_products_where_they_are_exact(
    case: tuple[torch.dtype, torch.dtype, torch.dtype | None, bool],
) -> None:
    """Logits from the operands as they are, gradients in fp32; values never reach the host."""
    hidden_dtype, weight_dtype, served, mixed = case
    hidden, weight = torch.empty(5, D, dtype=hidden_dtype), torch.empty(V, D, dtype=weight_dtype)
    ids, bias = torch.empty(5, M, dtype=torch.int64), torch.empty(V)
    head = Head(0.7, 1.0, 3.0, served, True, 2, 30)
    calls: list[tuple[str, set[torch.dtype]]] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name.startswith("aten::addmm"):
                calls.append((str(func), {x.dtype for x in args[1:3]}))
            return func(*args, **(kwargs or {}))

    with Products():
        logprobs, *results = head_tiles.forward(hidden, weight, bias, ids, head)
        operands = hidden, weight, bias, ids
        grads = head_tiles.backward(
            (logprobs, results[0]), operands, tuple(results), head, (True, True, True)
        )
    assert [x.dtype for x in grads if x is not None] == [hidden_dtype, weight_dtype, torch.float32]
    logits = {call for call in map(str, calls) if "addmm_" not in call}
    wanted = (
        ("aten.addmm.dtype_out", {hidden_dtype}) if mixed else ("aten.addmm.out", {torch.float32})
    )
    assert logits == {str(wanted)}
    wide = [dtypes for name, dtypes in calls if "addmm_" in name]
    assert len(wide) == 2 * 3 * 2 and all(dtypes == {torch.float32} for dtypes in wide)
    assert logprobs.dtype == torch.float32


def test_a_value_on_the_host_would_be_noticed() -> None:
    """The control for the test before: fake tensors have no values to wait for."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        token_logprobs(torch.empty(2, D), torch.empty(V, D), torch.zeros(2, 1, dtype=torch.int64))


def test_no_16_bit_products_on_a_cpu() -> None:
    """CPUs have none; and a product of two bf16 numbers is exact in fp32, as the choice assumes."""
    x = torch.tensor([1.0078125]).bfloat16()
    assert not exact_in_16_bits(x, x)
    assert (x.float() * x.float()).item() == 1.01568603515625


class Partitioned:
    """A head as ZeRO-3 keeps it: parameters of size 0, whole inside the context manager."""

    def __init__(self, *parameters: torch.nn.Parameter) -> None:
        self.whole = {id(p): p.data for p in parameters}
        self.parameters = parameters
        self.entered = 0
        self.empty()

    def empty(self) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)

    @contextmanager
    def gather(self, *parameters: torch.nn.Parameter | None) -> Iterator[None]:
        self.entered += 1
        for parameter in parameters:
            if parameter is not None:
                parameter.data = self.whole[id(parameter)]
        try:
            yield
        finally:
            self.empty()


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_partitioned_head_is_gathered_for_both_passes(with_bias: bool) -> None:
    hidden, weight, bias, ids = operands()
    hidden.requires_grad_()
    parameters = [torch.nn.Parameter(x) for x in (weight, bias)[: 1 + with_bias]]
    b = parameters[1] if with_bias else None
    want = token_logprobs(hidden, parameters[0], ids, bias=b)[0]
    expected = gradients(want, hidden, *parameters)
    zero = Partitioned(*parameters)
    with pytest.raises(ValueError, match="gather="):
        token_logprobs(hidden, parameters[0], ids, bias=b)
    found = token_logprobs(hidden, parameters[0], ids, bias=b, gather=zero.gather)[0]
    assert zero.entered == 1 and all(p.numel() == 0 for p in parameters)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(gradients(found, hidden, *parameters), expected)
    assert zero.entered == 2 and all(p.numel() == 0 for p in parameters)


def test_the_benchmark_compares_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("bench", BENCHMARKS / "token_logprobs.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench", bench)  # its dataclass looks itself up
    spec.loader.exec_module(bench)
    times = {bench.TRL: (2.0, 2.0), bench.NAIVE: (4.0, 5.0), "ours, K = 0": (1.0, 3.0)}
    times |= {f"ours, K = {head}": (1.0, 1.0) for head in bench.HEADS[1:]}
    rows = [
        {"vocab": V, "head": name, "seconds": found, "peak_bytes": 2**20 * (3 + len(name))}
        for name, both in times.items()
        for found in both
    ]
    lines = {line[1]: line[2:] for line in bench.summary(rows)}
    assert lines["ours, K = 0"] == ["2.000", "1.00", "0.50 to 1.50", "14.0", "0.00"]
    assert lines[bench.NAIVE][:3] == ["4.500", "2.25", "2.00 to 2.50"]
    assert lines["ours, K = 512"][-1] == "2.00" and lines[bench.TRL][1] == "1.00"


def test_live_bytes() -> None:
    """The worked number of what measures memory here and in the benchmark."""
    with LiveBytes() as live:
        x = torch.ones(4)
        view = x.view(2, 2).mul_(2.0)
        del x, view
        torch.ones(2)
    assert (live.now, live.peak) == (0, 16)


BAD = {
    "temperature": ({"temperature": 0.0}, "temperature=0.0"),
    "nan temperature": ({"temperature": math.nan}, "temperature=nan"),
    "softcap": ({"softcap": -1.0}, "softcap=-1.0"),
    "scale": ({"logit_scale": math.inf}, "logit_scale=inf"),
    "chunk of tokens": ({"chunk_tokens": 0}, "chunk_tokens=0"),
    "chunk of the vocabulary": ({"chunk_vocab": -1}, "chunk_vocab=-1"),
    "weight dtype": ({"weight_dtype": torch.int8}, "floating dtype"),
    "bias": ({"bias": torch.zeros(3)}, r"bias \(3,\)"),
}


@pytest.mark.parametrize(("kwargs", "message"), BAD.values(), ids=BAD)
def test_wrong_options_are_refused(kwargs: dict, message: str) -> None:
    hidden, weight, _, ids = operands()
    with pytest.raises(ValueError, match=message):
        token_logprobs(hidden, weight, ids, **kwargs)


def test_wrong_shapes_and_ids_are_refused() -> None:
    hidden, weight, _, ids = operands()
    with pytest.raises(ValueError, match=r"\[V, D\]"):
        token_logprobs(hidden, weight.T, ids)
    with pytest.raises(ValueError, match=r"\[V, D\]"):
        token_logprobs(hidden[None], weight, ids)
    with pytest.raises(ValueError, match="N = 9"):
        token_logprobs(hidden, weight, ids[1:])
    with pytest.raises(ValueError, match="int64"):
        token_logprobs(hidden, weight, ids.int())
    ids[2, 1] = V
    with pytest.raises(ValueError, match=r"token id 37 .* 37 rows"):
        token_logprobs(hidden, weight, ids)


def test_a_plain_weight_is_returned_as_it_is() -> None:
    weight = torch.randn(3, 2)
    assert local_head_weight(weight) is weight


def _sharded_worker(rank: int, store: str) -> None:
    """Each rank has its own tokens; a shard's gradient must be that of the mean loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    hidden, weight, bias, ids = operands()
    mesh = init_device_mesh("cpu", (2,))
    # 37 rows on two ranks: the shards are uneven.
    sharded = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in (weight, bias)]
    own = slice(0, 5) if rank == 0 else slice(5, N)
    found = token_logprobs(hidden[own], sharded[0], ids[own], bias=sharded[1])[0]
    found.sum().backward()
    full = [x.clone().requires_grad_() for x in (weight, bias)]
    (token_logprobs(hidden, full[0], ids, bias=full[1])[0].sum() / 2).backward()
    for shard, whole in zip(sharded, full, strict=True):
        torch.testing.assert_close(shard.grad.full_tensor(), whole.grad)
    with torch.no_grad():
        assert torch.equal(local_head_weight(sharded[0]), weight)
    dist.barrier()
    dist.destroy_process_group()
    # Past the interpreter's end, where a thread of gloo that still runs would abort the process.
    os._exit(0)


def test_sharded_weight_averages_the_gradients(tmp_path) -> None:
    """H7: FSDP2's head in its own unit, two gloo processes."""
    mp.spawn(_sharded_worker, args=(str(tmp_path / "store"),), nprocs=2)
