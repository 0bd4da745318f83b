"""Properties of the chunked fp32 head.

- Values equal float64 log_softmax; the entropy too; both are fp32 and near-exact in the tail (G12).
- Gradients pass gradcheck in float64 and equal plain autograd with bias, scale, soft cap (H9).
- Chunk size, autocast and reduced matmul precision change nothing.
- Mixed operand dtypes work, gradients come back in the operands' dtypes (H7).
- A served weight dtype rounds the weight; its gradient passes straight through.
- Padding ids give -inf and no gradient; empty inputs work; wrong inputs are refused.
- No tensor of N x V elements is kept for the backward pass, or made in one piece (S12).
- A sharded weight's gradient is the ranks' average.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trl_callbacks.token_logprobs import _exact_products, local_head_weight, token_logprobs

N, D, V, M = 9, 8, 37, 4


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


def gradients(outputs: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 2.0, outputs.numel(), dtype=outputs.dtype)
    return torch.autograd.grad((outputs * weights.reshape(outputs.shape)).sum(), inputs)


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
    """H9: scale, soft cap and bias are in the values and in every gradient."""
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


def test_worked_number() -> None:
    weight = torch.tensor([[math.log(3.0)], [0.0]])
    logprobs, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([[0, 1]]))
    assert logprobs.exp().tolist() == [pytest.approx([0.75, 0.25])]
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_gradcheck(chunk: int | None) -> None:
    hidden, weight, bias, ids = operands()
    inputs = tuple(x.requires_grad_() for x in (hidden, weight, bias))

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        options = {"temperature": 0.7, "logit_scale": 0.5, "softcap": 2.0, "chunk_tokens": chunk}
        return token_logprobs(h, w, ids, bias=b, **options)[0]

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_operands_get_no_gradient(frozen: str) -> None:
    hidden, weight, _, ids = operands()
    trained = weight if frozen == "hidden" else hidden
    trained.requires_grad_()
    with Seen() as seen:
        (found,) = gradients(token_logprobs(hidden, weight, ids)[0], trained)
    assert ("aten::addmm_" in seen.products) == (frozen == "hidden"), "work for a frozen weight"
    (want,) = gradients(reference(hidden, weight, ids)[0], trained)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("chunk", [1, 7, N, 100])
def test_chunks_agree(chunk: int) -> None:
    hidden, weight, _, ids = operands()
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    whole, entropy = token_logprobs(hidden, weight, ids)
    parts, entropy2 = token_logprobs(hidden, weight, ids, chunk_tokens=chunk)
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy2, entropy, rtol=1e-13, atol=1e-13)
    for a, b in zip(gradients(parts, *inputs), gradients(whole, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


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
    with _exact_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


class Seen(TorchDispatchMode):
    """Records the precision in force at each product, and the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.precisions: set[tuple[str, str, str]] = set()
        self.products: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm_"):
            self.products.add(func._schema.name)
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
    """S12: memory O(N M): what is saved are the operands, the ids and two numbers per token."""
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
    assert sum(t.numel() for t in saved) == hidden.numel() + weight.numel() + ids.numel() + 2 * 64
    assert seen.largest == max(8 * vocab, vocab * D)
    with Seen() as whole:
        token_logprobs(hidden, weight, ids)[0].sum().backward()
    assert whole.largest == tokens * vocab, "the default chunk fits all tokens here"


def test_default_chunk_is_bounded() -> None:
    """64 MiB of logits: 2^24 float32 numbers; at V = 2^18 that is 64 tokens."""
    hidden, weight = torch.randn(80, 1), torch.randn(2**18, 1)
    with Seen() as seen:
        token_logprobs(hidden, weight, torch.zeros(80, 1, dtype=torch.int64))
    assert seen.largest == 2**24


def test_works_in_checkpoint_and_compile() -> None:
    hidden, weight, _, ids = operands(torch.float32)
    hidden.requires_grad_()

    def function(h: Tensor) -> Tensor:
        return token_logprobs(h, weight, ids)[0]

    (want,) = gradients(function(hidden), hidden)
    checkpointed = torch.utils.checkpoint.checkpoint(function, hidden, use_reentrant=False)
    torch.testing.assert_close(gradients(checkpointed, hidden), (want,))
    compiled = torch.compile(function, backend="eager")(hidden)
    torch.testing.assert_close(gradients(compiled, hidden), (want,))


BAD = {
    "temperature": ({"temperature": 0.0}, "temperature=0.0"),
    "nan temperature": ({"temperature": math.nan}, "temperature=nan"),
    "softcap": ({"softcap": -1.0}, "softcap=-1.0"),
    "scale": ({"logit_scale": math.inf}, "logit_scale=inf"),
    "chunk": ({"chunk_tokens": 0}, "chunk_tokens=0"),
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
    dist.destroy_process_group()


def test_sharded_weight_averages_the_gradients(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """H7: FSDP2's head in its own unit, two gloo processes."""
    mp.spawn(_sharded_worker, args=(str(tmp_path / "store"),), nprocs=2)
