"""Properties of score centering.

- Oracle: loss and gradient equal the float64 vectors, for each weight, exact and top-k form.
- S1: the expectation of the gradient over y ~ q is 0, for each weight and in each form; without
  centering it is q - p. A negative advantage flips it and scales it.
- S2: the head with a proportional tail has the gradient q-hat - p; the order of the head is free.
- S5: a head that covers (almost) everything gives finite values next to float64's.
- The sampled token uses its own q, in the head or outside it (L15).
- Gradients reach the trainer's log-probabilities only.
- Masked, NaN and padded values change nothing, bit for bit, and unusable tokens are counted.
- Support form: drift vanishes over the support; a head that misses part of it is refused.
- Weights: closed forms, bounds, finite at log ratios of +-80 and beyond.
- Metrics: worked numbers, and raw ratios beside clipped ones.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trl_callbacks.score_centering import (
    METRICS,
    FullWeight,
    MaskedWeight,
    NoWeight,
    TruncatedWeight,
    resolve_weight,
    score_centering_loss,
    valid_tokens,
)

VECTORS = Path(__file__).parents[1] / "data" / "score_centering_vectors.json"
CASES = json.loads(VECTORS.read_text())["cases"]
WEIGHT_NAMES = ("none", "tis", "mis", "is")
ATOL = {torch.float32: 1e-5, torch.float64: 1e-9}
# Fixture F of the S cases.
TRAINER = torch.tensor([1.2, 0.3, -0.5, 0.0, -1.0, 2.0], dtype=torch.float64)
SAMPLER = torch.tensor([0.7, 0.9, -0.2, -0.4, -1.5, 1.8], dtype=torch.float64)


def one_token(
    logits: Tensor, logq: Tensor, y: int, head: list[int], advantage: float = 1.0, **kwargs: object
) -> Tensor:
    """Return the loss of one token [1] from vocabulary logits [V], in the dtype of ``logq``.

    The inputs are log-probabilities rounded once: alpha multiplies their error, which moves the
    loss' value where the tail is small (by 6e-4 in one vector), though never its gradient.
    """
    logp = logits.double().log_softmax(-1).to(logq.dtype)
    loss, _ = score_centering_loss(
        logp[None, y],
        logp[None, head],
        logq[None, y],
        logq[None, head],
        torch.tensor([advantage], dtype=logp.dtype),
        **kwargs,
    )
    return loss


def logit_gradient(logits: Tensor, *args: object, **kwargs: object) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(one_token(leaf, *args, **kwargs).sum(), leaf)
    return grad


def expected_gradient(
    logits: Tensor, logq: Tensor, head: list[int], advantage: float = 1.0, **kwargs: object
) -> Tensor:
    """Return the expectation over y ~ q of the gradient of the objective (not the loss) [V]."""
    drawn = [y for y in range(len(logq)) if logq[y] > -math.inf]
    return -sum(
        logq[y].exp() * logit_gradient(logits, logq, y, head, advantage, **kwargs) for y in drawn
    )


def random_batch(
    tokens: int = 5, vocab: int = 11, size: int = 4, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Return the arguments of the loss for random distributions, with y inside and outside H."""
    logp = torch.randn(tokens, vocab, dtype=dtype).mul(1.5).log_softmax(-1)
    logq = (logp + 0.4 * torch.randn(tokens, vocab, dtype=dtype)).log_softmax(-1)
    head = logq.topk(size).indices
    y = torch.randint(vocab, (tokens, 1))
    return {
        "token_logprobs": logp.gather(1, y)[:, 0],
        "head_logprobs": logp.gather(1, head),
        "sampler_logprobs": logq.gather(1, y)[:, 0],
        "sampler_head_logprobs": logq.gather(1, head),
        "advantages": torch.randn(tokens, dtype=dtype),
    }


def run(
    batch: dict[str, Tensor], **kwargs: object
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """Return loss, metrics, and the gradients by both trainer tensors."""
    token = batch["token_logprobs"].clone().requires_grad_()
    head = batch["head_logprobs"].clone().requires_grad_()
    batch = {**batch, "token_logprobs": token, "head_logprobs": head}
    # Fails on NaN in any step of the backward pass, also where a later step would hide it.
    with torch.autograd.set_detect_anomaly(not kwargs.pop("allow_nan", False)):
        loss, metrics = score_centering_loss(**batch, **kwargs)
        grads = torch.autograd.grad(loss.sum(), (token, head))
    return loss.detach(), metrics, *grads


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- the oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"V{c['vocab']}k{c['k']}T{c['temperature']}")
def test_vectors(case: dict, mode: str, dtype: torch.dtype) -> None:
    """The exact form is the support form with the whole vocabulary as head."""
    vocabulary = list(range(case["vocab"]))
    want = case["modes"][mode]
    leaf = torch.tensor(case["logits"], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor(case["sampler_logprobs"], dtype=dtype)

    def check(head: list[int], support: bool, loss_name: str | None, grad_name: str) -> None:
        args = (logq, case["sampled"], head, case["advantage"])
        loss = one_token(leaf / case["temperature"], *args, weight=mode, support=support)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        close = {"rtol": ATOL[dtype], "atol": ATOL[dtype]}
        torch.testing.assert_close(grad, torch.tensor(want[grad_name], dtype=leaf.dtype), **close)
        if loss_name:
            torch.testing.assert_close(loss, torch.tensor([want[loss_name]], dtype=dtype), **close)

    check(case["head"], False, "loss_topk", "grad_topk")
    check(vocabulary, True, "loss_exact", "grad_exact")
    # The value of the folded tail differs (by A alpha times p's entropy), its gradient does not.
    check(vocabulary, False, None, "grad_exact")


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"V{c['vocab']}k{c['k']}T{c['temperature']}")
def test_vectors_of_the_parts(case: dict, mode: str) -> None:
    """Sample weight, rho, alpha and drift one by one, from the weight objects and the metrics."""
    want, weight = case["modes"][mode], resolve_weight(mode)
    logits = torch.tensor(case["logits"], dtype=torch.float64)
    logp = (logits / case["temperature"]).log_softmax(-1)
    logq = torch.tensor(case["sampler_logprobs"], dtype=torch.float64)
    y, log_rho = case["sampled"], torch.tensor(want["rho"], dtype=torch.float64).log()
    assert weight.sample_weight(logp[y] - logq[y]).item() == pytest.approx(want["sample_weight"])
    assert weight.tail_scale(log_rho).item() == pytest.approx(want["alpha"])

    def metrics(head: list[int]) -> dict[str, Tensor]:
        args = (logp[None, y], logp[None, head], logq[None, y], logq[None, head])
        return score_centering_loss(*args, torch.ones(1), weight=mode)[1]

    l1 = sum(abs(c) for c in want["head_coefficients"])
    assert metrics(case["head"])["rho"].item() == pytest.approx(want["rho"])
    assert metrics(case["head"])["correction_l1"].item() == pytest.approx(l1, rel=1e-9, abs=1e-12)
    drift = metrics(list(range(case["vocab"])))["drift_removed"].item()
    assert drift == pytest.approx(want["uncentered_mean_score_l1"], abs=1e-9)


# --- S1, S2: the expectation


@pytest.mark.parametrize("weight", WEIGHT_NAMES)
@pytest.mark.parametrize("support", [False, True])
def test_s1_expectation_vanishes_with_the_whole_vocabulary(weight: str, support: bool) -> None:
    """S1."""
    logq = SAMPLER.log_softmax(-1)
    args = (TRAINER, logq, list(range(6)))
    drift = expected_gradient(*args, weight=weight, support=support)
    assert drift.abs().max() < 1e-7
    naive = expected_gradient(TRAINER, logq, [], weight=weight)
    assert (naive.abs().max() > 1e-3) == (weight in ("none", "mis"))


def test_s1_uncentred_values() -> None:
    """S1: without a head nothing is centred, and the drift is A (q - p)."""
    logq = SAMPLER.log_softmax(-1)
    want = torch.tensor([-0.0720, 0.1048, 0.0237, -0.0165, -0.0080, -0.0321], dtype=torch.float64)
    one = expected_gradient(TRAINER, logq, [])
    torch.testing.assert_close(one, want, rtol=0, atol=5e-5)
    torch.testing.assert_close(one, logq.exp() - TRAINER.softmax(-1))
    torch.testing.assert_close(expected_gradient(TRAINER, logq, [], advantage=-2.0), -2 * one)


@pytest.mark.parametrize("weight", WEIGHT_NAMES)
@pytest.mark.parametrize("head", [[0], [5, 1], [2, 3, 5]])
def test_expectation_vanishes_with_a_proportional_tail(weight: str, head: list[int]) -> None:
    """q is rho p outside H, with rho 0.4 to 8, so the model of the tail is true."""
    p, q = TRAINER.softmax(-1), SAMPLER.softmax(-1)
    for mass in (0.1, 0.5, 0.9):
        tail = torch.ones(6, dtype=torch.bool)
        tail[head] = False
        kept = torch.where(tail, 0.0, q)
        kept = kept * (1 - mass) / kept.sum()
        logq = torch.where(tail, mass * p / p[tail].sum(), kept).log()
        assert expected_gradient(TRAINER, logq, head, weight=weight).abs().max() < 1e-7
        assert expected_gradient(TRAINER, logq, [], weight="none").abs().max() > 1e-3


def test_worked_numbers() -> None:
    """The numbers of the docstring: c = (0.1, -0.1), and mean scores (-0.1, 0.1) and 0."""
    p = torch.tensor([[0.4, 0.4]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.3]], dtype=torch.float64)
    head = p.log().requires_grad_()
    args = (torch.tensor([0.4]).log(), head, torch.tensor([0.5]).log(), q.log(), torch.ones(1))
    loss, metrics = score_centering_loss(*args)
    (grad,) = torch.autograd.grad(loss.sum(), head)
    torch.testing.assert_close(grad, torch.tensor([[0.1, -0.1]], dtype=torch.float64))
    assert metrics["rho"].item() == pytest.approx(1.0)
    logits = torch.tensor([0.6, 0.4], dtype=torch.float64).log()
    logq = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    want = torch.tensor([-0.1, 0.1], dtype=torch.float64)
    torch.testing.assert_close(expected_gradient(logits, logq, []), want)
    assert expected_gradient(logits, logq, [0, 1]).abs().max() < 1e-12


def correction_gradient(head: list[int]) -> Tensor:
    """Return the gradient of sum_H c log p by the logits [V], on fixture F."""
    logq = SAMPLER.log_softmax(-1)
    return logit_gradient(TRAINER, logq, 0, head) - logit_gradient(TRAINER, logq, 0, [])


def test_s2_proportional_tail() -> None:
    """S2: q-hat - p, with q-hat = q on H and alpha p elsewhere, of sum 1."""
    p, q = TRAINER.softmax(-1), SAMPLER.softmax(-1)
    want = [-0.045622, 0.104838, -0.008334, -0.013741, -0.005055, -0.032085]
    grad = correction_gradient([5, 1])
    assert grad.tolist() == pytest.approx(want, abs=1e-6)
    q_hat = 0.807164 * p
    q_hat[[5, 1]] = q[[5, 1]]
    torch.testing.assert_close(grad, q_hat - p, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, correction_gradient([1, 5]), rtol=0, atol=1e-15)
    by_mass = q.argsort(descending=True).tolist()
    for size, alpha in ((1, 1.067766), (2, 0.807164), (5, 0.695675)):
        head = by_mass[:size]
        args = (TRAINER.log_softmax(-1), SAMPLER.log_softmax(-1))
        logs = [x[None, i] for i in (0, head) for x in args]
        _, metrics = score_centering_loss(logs[0], logs[2], logs[1], logs[3], torch.ones(1))
        assert metrics["rho"].item() == pytest.approx(alpha, abs=1e-6)
        assert metrics["sampler_head_mass"].item() == pytest.approx(q[head].sum().item())
        assert metrics["drift_removed"] == pytest.approx(correction_gradient(head).abs().sum())
        tail = [i for i in range(6) if i not in head]
        share = correction_gradient(head)[tail].abs().sum() / correction_gradient(head).abs().sum()
        assert metrics["tail_share"].item() == pytest.approx(share.item())


@pytest.mark.parametrize("weight", WEIGHT_NAMES)
def test_drift_metrics_are_norms_of_the_logit_gradient(weight: str) -> None:
    p_logits, logq = TRAINER, (SAMPLER * 1.8).log_softmax(-1)
    head, tail = [5, 1], [0, 2, 3, 4]
    grad = logit_gradient(p_logits, logq, 0, head, weight=weight)
    grad = grad - logit_gradient(p_logits, logq, 0, [], weight=weight)
    logp = p_logits.log_softmax(-1)
    args = (logp[None, 0], logp[None, head], logq[None, 0], logq[None, head], torch.ones(1))
    metrics = score_centering_loss(*args, weight=weight)[1]
    total = grad.abs().sum().item()
    assert metrics["drift_removed"].item() == pytest.approx(total, abs=1e-12)
    if total > 1e-9:
        share = grad[tail].abs().sum().item() / total
        assert metrics["tail_share"].item() == pytest.approx(share)


def test_permuted_heads_give_the_same_loss() -> None:
    batch = random_batch()
    loss, _, grad, head_grad = run(batch, weight="tis")
    order = torch.tensor([2, 0, 3, 1])
    names = ("head_logprobs", "sampler_head_logprobs")
    permuted = {**batch, **{n: batch[n][:, order] for n in names}}
    loss2, _, grad2, head_grad2 = run(permuted, weight="tis")
    torch.testing.assert_close(loss2, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad2, grad, rtol=0, atol=0)
    torch.testing.assert_close(head_grad2, head_grad[:, order], rtol=1e-12, atol=1e-12)


# --- S5: small tails


@pytest.mark.parametrize("size", [20, 128, 511, 512])
@pytest.mark.parametrize("peaky", [False, True])
def test_s5_head_covers_almost_everything(size: int, peaky: bool) -> None:
    """S5: finite in float32, and as in float64 with the same head; no tail when there is none."""
    vocab = 512
    logits, sampler = torch.randn(vocab), torch.randn(vocab)
    if peaky:
        logits, sampler = torch.zeros(vocab), torch.zeros(vocab)
        logits[7], sampler[7] = 60.0, 59.0
    head = sampler.topk(size).indices.tolist()
    results = {}
    for dtype in (torch.float32, torch.float64):
        logp = logits.double().log_softmax(-1).to(dtype)
        logq = sampler.double().log_softmax(-1).to(dtype)
        args = (logp[None, 7], logp[None, head], logq[None, 7], logq[None, head], torch.ones(1))
        loss, metrics = score_centering_loss(*args)
        grad = logit_gradient(logits.to(dtype), logq, 7, head)
        assert loss.isfinite().all() and grad.isfinite().all()
        assert all(value.isfinite() for value in metrics.values())
        if peaky or size == vocab:
            tail = (metrics["drift_removed"] * metrics["tail_share"]).item()
            assert tail < 1e-6
            assert metrics["floor_hits"] == 1.0
            assert metrics["rho"] == pytest.approx(1.0)
        results[dtype] = (loss.detach(), grad)
    narrow, wide = results[torch.float32], results[torch.float64]
    torch.testing.assert_close(narrow[1].double(), wide[1], rtol=0, atol=1e-5)
    # With a real but small tail, alpha multiplies the rounding of the float32 inputs: it moves
    # the loss' value (alpha sum_H p log p), not its gradient.
    value_atol = 2e-3 if size == 511 and not peaky else 1e-5
    torch.testing.assert_close(narrow[0].double(), wide[0], rtol=1e-5, atol=value_atol)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    sharpness=st.floats(0.2, 6.0),
    mismatch=st.floats(0.0, 1.0),
    lead=st.floats(0.0, 60.0),
    weight=st.sampled_from(WEIGHT_NAMES),
    narrow=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_float32_is_close_to_float64_on_a_large_vocabulary(
    seed: int, sharpness: float, mismatch: float, lead: float, weight: str, narrow: torch.dtype
) -> None:
    """S5: 152k tokens, K = 128; head masses from almost nothing to 1 - 1e-20.

    Inputs are rounded once, then both computations see the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(151_936, generator=generator, dtype=torch.float64)
    logits[0] += lead
    noise = torch.randn(151_936, generator=generator, dtype=torch.float64)
    logp, logq = logits.log_softmax(-1), (logits + mismatch * noise).log_softmax(-1)
    head = logq.topk(128).indices
    rounded = [x.to(narrow) for x in (logp[:1], logp[None, head], logq[:1], logq[None, head])]
    found = []
    for dtype in (torch.float32, torch.float64):
        token, head_logp, *sampler = (x.to(dtype) for x in rounded)
        leaves = token.clone().requires_grad_(), head_logp.clone().requires_grad_()
        loss, metrics = score_centering_loss(*leaves, *sampler, torch.ones(1), weight=weight)
        found.append(torch.autograd.grad(loss.sum(), leaves))
        assert loss.isfinite().all() and all(value.isfinite() for value in metrics.values())
    (token32, head32), (token64, head64) = found
    torch.testing.assert_close(token32.double(), token64, rtol=1e-5, atol=1e-6)
    # A band's edge is a step: float32 may round a ratio to its other side.
    if weight != "mis":
        torch.testing.assert_close(head32.double(), head64, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("weight", WEIGHT_NAMES)
@pytest.mark.parametrize("gap", [-80.0, 80.0, -1000.0, 1000.0])
def test_extreme_ratios_stay_finite(weight: str, gap: float) -> None:
    """Log ratios of +-80 and beyond on the token and in the head; head mass 1 - 1e-8."""
    near_one = math.log1p(-1e-8)
    batch = {
        "token_logprobs": torch.tensor([-0.5 + min(gap, 0.0)]),
        "head_logprobs": torch.tensor([[near_one, -5.0 + min(gap, 0.0), -0.7]]),
        "sampler_logprobs": torch.tensor([-0.5 - max(gap, 0.0)]),
        "sampler_head_logprobs": torch.tensor([[near_one, -5.0 - max(gap, 0.0), -100.0]]),
        "advantages": torch.tensor([1.0]),
    }
    loss, metrics, grad, head_grad = run(batch, weight=weight)
    assert loss.isfinite().all() and grad.isfinite().all() and head_grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_zero_coefficients_meet_impossible_tokens() -> None:
    """p = 0 in the trainer: min(p, C q) = 0 beside log p = -inf must give 0, not NaN."""
    batch = random_batch()
    batch["head_logprobs"][0, 1] = -math.inf
    batch["token_logprobs"][1] = -math.inf
    for weight in ("tis", "mis", "is"):
        loss, _, grad, head_grad = run(batch, weight=weight)
        assert loss.isfinite().all() and grad.isfinite().all() and head_grad.isfinite().all()


# --- constants, the sampled token, dtypes


@pytest.mark.parametrize("weight", WEIGHT_NAMES)
@pytest.mark.parametrize("support", [False, True])
def test_no_gradient_to_the_constants(weight: str, support: bool) -> None:
    batch = {k: v.requires_grad_() for k, v in random_batch(vocab=4).items()}
    loss, metrics = score_centering_loss(**batch, weight=weight, support=support)
    loss.sum().backward()
    for name in ("sampler_logprobs", "sampler_head_logprobs", "advantages"):
        assert batch[name].grad is None
    assert batch["token_logprobs"].grad is not None
    assert not any(value.requires_grad for value in metrics.values())


def test_coefficients_are_constants_for_the_gradient() -> None:
    """d loss / d log p_y = -A f and d loss / d log p_v = A c_v, without derivatives of f or c."""
    batch = random_batch()
    _, _, grad, head_grad = run(batch, weight=TruncatedWeight(1.1))
    p, q = batch["head_logprobs"].exp(), batch["sampler_head_logprobs"].exp()
    rho = (1 - q.sum(1)) / (1 - p.sum(1))
    c = torch.minimum(p, 1.1 * q) - (1.1 * rho).clamp(max=1.0)[:, None] * p
    ratio = (batch["token_logprobs"] - batch["sampler_logprobs"]).exp().clamp(max=1.1)
    torch.testing.assert_close(grad, -batch["advantages"] * ratio)
    torch.testing.assert_close(head_grad, batch["advantages"][:, None] * c)


def test_the_sampled_token_uses_its_own_logprob() -> None:
    """As in L15: neither the first entry of the head nor membership in it enters the weight."""
    batch = random_batch(tokens=1)
    batch["token_logprobs"], batch["sampler_logprobs"] = torch.tensor([-2.7]), torch.tensor([-3.0])
    batch["sampler_head_logprobs"] = torch.tensor([[-0.2, -2.0, -9.0, -9.0]])
    _, metrics, grad, _ = run(batch, weight="tis")
    assert metrics["weight_mean"].item() == pytest.approx(math.exp(0.3), rel=1e-6)
    assert grad.item() == pytest.approx(-batch["advantages"].item() * math.exp(0.3), rel=1e-6)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    batch = {k: v.bfloat16() for k, v in random_batch(dtype=torch.float32).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, metrics, grad, _ = run(batch, weight="tis")
    wide, *_ = run({k: v.float() for k, v in batch.items()}, weight="tis")
    assert loss.dtype == metrics["rho"].dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert torch.equal(loss, wide)
    assert run(random_batch())[0].dtype == torch.float64


def test_leading_shapes_agree() -> None:
    batch = random_batch(tokens=6)
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    flat, metrics, *_ = run(batch, mask=mask, weight="mis")
    nested = {k: v.reshape(2, 3, *v.shape[1:]) for k, v in batch.items()}
    loss, metrics2, *_ = run(nested, mask=mask.reshape(2, 3), weight="mis")
    assert torch.equal(loss, flat.reshape(2, 3))
    assert metrics2 == metrics
    nested["advantages"] = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    by_row, *_ = run(nested)
    ones, *_ = run({**nested, "advantages": torch.ones(2, 3, dtype=torch.float64)})
    torch.testing.assert_close(by_row, ones * nested["advantages"])


def test_ambiguous_and_wrong_shapes_are_refused() -> None:
    batch = {k: v.reshape(2, 2, *v.shape[1:]) for k, v in random_batch(tokens=4).items()}
    with pytest.raises(ValueError, match=r"advantages\.unsqueeze"):
        score_centering_loss(**{**batch, "advantages": torch.ones(2)})
    with pytest.raises(ValueError, match="one value for each token"):
        score_centering_loss(**batch, mask=torch.ones(2))
    short = batch["head_logprobs"][..., :2]
    with pytest.raises(ValueError, match=r"\(K,\)"):
        score_centering_loss(**{**batch, "head_logprobs": short})


# --- masks, NaN, padding


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_change_nothing(garbage: float, support: bool) -> None:
    batch = random_batch(vocab=4)
    mask = torch.tensor([1, 0, 1, 0, 1])
    loss, metrics, *grads = run(batch, mask=mask, weight="tis", support=support)
    dirty = {k: v.clone() for k, v in batch.items()}
    for value in dirty.values():
        value[mask == 0] = garbage
    loss2, metrics2, *grads2 = run(dirty, mask=mask, weight="tis", support=support)
    assert torch.equal(loss, loss2) and all(map(torch.equal, grads, grads2))
    assert metrics == metrics2
    assert (loss[mask == 0] == 0).all() and all((g[mask == 0] == 0).all() for g in grads)
    assert (loss[mask == 1] != 0).all()
    assert metrics["tokens"] == 3 and metrics["nan_tokens"] == 0


def test_unusable_tokens_leave_and_are_counted() -> None:
    batch = random_batch(tokens=6)
    whole, *_ = run(batch)
    batch["sampler_logprobs"][0] = math.nan
    batch["sampler_head_logprobs"][1, 2] = math.nan
    batch["sampler_logprobs"][2] = -math.inf
    batch["sampler_logprobs"][3] = math.nan
    mask = torch.tensor([1, 1, 1, 0, 1, 1])
    loss, metrics, *grads = run(batch, mask=mask)
    assert metrics["nan_tokens"] == 3 and metrics["tokens"] == 2
    assert torch.equal(loss, torch.cat([torch.zeros(4, dtype=loss.dtype), whole[4:]]))
    assert all(g.isfinite().all() and (g[:4] == 0).all() for g in grads)
    valid = valid_tokens(batch["sampler_logprobs"], batch["sampler_head_logprobs"], mask)
    assert valid.tolist() == [False] * 4 + [True] * 2
    sampler, mask = torch.tensor([-1.0, math.nan, -2.0]), torch.tensor([1, 1, 0])
    assert valid_tokens(sampler, torch.zeros(3, 1), mask).tolist() == [True, False, False]
    assert valid_tokens(sampler, torch.full((3, 1), -math.inf)).tolist() == [True, False, True]


def test_trainer_nan_stays_visible() -> None:
    batch = random_batch()
    batch["head_logprobs"][0, 0] = math.nan
    loss, *_ = run(batch, allow_nan=True)
    assert loss.isnan().tolist() == [True] + [False] * 4


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("weight", WEIGHT_NAMES)
def test_padded_head_entries_change_nothing(weight: str, support: bool) -> None:
    """Ragged heads: -inf from the sampler, anything (-inf, NaN, 0) from the trainer."""
    batch = random_batch(vocab=4)
    loss, metrics, grad, head_grad = run(batch, weight=weight, support=support)
    pad = torch.tensor([-math.inf, math.nan, 0.0], dtype=torch.float64).expand(5, 3)
    padded = {
        **batch,
        "head_logprobs": torch.cat([batch["head_logprobs"], pad], 1),
        "sampler_head_logprobs": torch.cat(
            [batch["sampler_head_logprobs"], torch.full_like(pad, -math.inf)], 1
        ),
    }
    loss2, metrics2, grad2, head_grad2 = run(padded, weight=weight, support=support)
    torch.testing.assert_close(loss2, loss, rtol=1e-12, atol=1e-12)
    assert torch.equal(grad2, grad) and (head_grad2[:, 4:] == 0).all()
    torch.testing.assert_close(head_grad2[:, :4], head_grad, rtol=1e-12, atol=1e-12)
    for name in METRICS:
        assert metrics2[name].item() == pytest.approx(metrics[name].item(), abs=1e-12)


def test_empty_heads_and_empty_batches() -> None:
    batch = random_batch()
    no_head = {k: v[:, :0] if v.dim() == 2 else v for k, v in batch.items()}
    loss, metrics, *_ = run(no_head)
    torch.testing.assert_close(loss, -batch["advantages"] * batch["token_logprobs"])
    assert metrics["rho"] == 1.0 and metrics["correction_l1"] == 0.0
    _, metrics, *_ = run(batch, mask=torch.zeros(5))
    assert set(metrics) == set(METRICS) and all(v == 0 for v in metrics.values())
    loss, metrics, *_ = run({k: v[:0] for k, v in batch.items()})
    assert loss.shape == (0,) and all(v == 0 for v in metrics.values())


# --- the support form


@pytest.mark.parametrize("weight", WEIGHT_NAMES)
def test_support_form_removes_the_drift_over_the_support(weight: str) -> None:
    """q is renormalised over S = {5, 1, 0}; the trainer's distribution covers the vocabulary."""
    support = [5, 1, 0]
    logq = torch.full((6,), -math.inf, dtype=torch.float64)
    logq[support] = SAMPLER[support].log_softmax(-1)
    drift = expected_gradient(TRAINER, logq, support, weight=weight, support=True)
    assert drift.abs().max() < 1e-12
    padded = [2, *support]
    drift = expected_gradient(TRAINER, logq, padded, weight=weight, support=True)
    assert drift.abs().max() < 1e-12
    # Over the whole vocabulary every score also pushes mass into S: that drift stays.
    naive = expected_gradient(TRAINER, logq, [], weight=weight)
    assert naive.abs().max() > 1e-3


def test_support_form_restricts_the_sampled_token_too() -> None:
    """The ratio is p(y | S) / q(y), without the log mass of S; no gradient leaves S."""
    support = [5, 1]
    logq = torch.full((6,), -math.inf, dtype=torch.float64)
    logq[support] = TRAINER[support].log_softmax(-1)
    logp = TRAINER.log_softmax(-1)
    args = (logp[None, 1], logp[None, support], logq[None, 1], logq[None, support], torch.ones(1))
    _, metrics = score_centering_loss(*args, weight="tis", support=True)
    assert metrics["weight_mean"].item() == pytest.approx(1.0, abs=1e-12)
    assert metrics["drift_removed"].item() == pytest.approx(0.0, abs=1e-12)
    mass = TRAINER.softmax(-1)[support].sum().item()
    assert metrics["trainer_head_mass"].item() == pytest.approx(mass)
    assert score_centering_loss(*args)[1]["weight_mean"].item() == pytest.approx(mass)
    grad = logit_gradient(TRAINER, logq, 1, support, support=True)
    assert grad[[0, 2, 3, 4]].abs().max() < 1e-15 and grad[[5, 1]].abs().min() > 1e-3


def test_support_form_refuses_a_head_that_misses_part_of_the_support() -> None:
    batch = random_batch()
    with pytest.raises(ValueError, match=r"top_k <= 4") as error:
        score_centering_loss(**batch, support=True)
    worst = batch["sampler_head_logprobs"].exp().sum(1).min().item()
    assert f"{worst:.4f}" in str(error.value) and "5 tokens" in str(error.value)
    # Within the tolerance, and at masked tokens, nothing is refused.
    batch = random_batch(vocab=4)
    batch["sampler_head_logprobs"] += math.log(1 - 9e-4)
    score_centering_loss(**batch, support=True)
    batch["sampler_head_logprobs"][0] -= 1.0
    with pytest.raises(ValueError, match="1 tokens"):
        score_centering_loss(**batch, support=True)
    score_centering_loss(**batch, support=True, mask=torch.tensor([0, 1, 1, 1, 1]))
    batch["sampler_head_logprobs"][0] = -math.inf
    with pytest.raises(ValueError, match=r"0\.0000"):
        score_centering_loss(**batch, support=True)


# --- weights

FUNCTIONS = {
    "none": (NoWeight(), lambda r: 1.0),
    "tis": (TruncatedWeight(), lambda r: min(r, 2.0)),
    "mis": (MaskedWeight(), lambda r: r if 0.5 <= r <= 5.0 else 0.0),
    "is": (FullWeight(), lambda r: r),
}


@pytest.mark.parametrize("name", WEIGHT_NAMES)
@given(logp=st.floats(-30, 0), logq=st.floats(-30, 0), log_rho=st.floats(-13, 13))
@settings(max_examples=50, deadline=None)
def test_weights_equal_their_closed_forms(
    name: str, logp: float, logq: float, log_rho: float
) -> None:
    weight, f = FUNCTIONS[name]
    p, q, rho, r = (
        torch.tensor(x, dtype=torch.float64) for x in (logp, logq, log_rho, logp - logq)
    )
    close = {"rel": 1e-9, "abs": 1e-300}
    assert weight.sample_weight(r).item() == pytest.approx(f(math.exp(logp - logq)), **close)
    mass = math.exp(logq) * f(math.exp(logp - logq))
    assert weight.head_mass(p, q).item() == pytest.approx(mass, **close)
    alpha = math.exp(log_rho) * f(math.exp(-log_rho))
    assert weight.tail_scale(rho).item() == pytest.approx(alpha, **close)
    changed = name != "none" and f(math.exp(logp - logq)) != math.exp(logp - logq)
    assert weight.clipped(r).item() == changed


def test_weights_do_not_overflow_and_honour_their_bounds() -> None:
    huge = torch.tensor([-1e4, -81.0, math.log(0.5), 0.0, math.log(5.0) - 1e-6, 81.0, 1e4])
    for weight, _ in FUNCTIONS.values():
        assert weight.sample_weight(huge).isfinite().all()
        assert weight.head_mass(huge.clamp(max=-1.0), (-huge).clamp(max=-1.0)).isfinite().all()
    tis = TruncatedWeight(2.0).sample_weight(huge)
    assert tis.tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 2.0, 2.0, 2.0], abs=1e-6)
    mis = MaskedWeight().sample_weight(huge)
    assert mis.tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 5.0, 0.0, 0.0], rel=1e-5)
    assert MaskedWeight(low=0.0, high=math.inf).clipped(huge).sum() == 0


def test_weight_parameters_are_checked() -> None:
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="cap"):
            TruncatedWeight(cap)
    for low, high in ((5.0, 0.5), (1.0, 1.0), (-1.0, 2.0), (2.0, 3.0), (0.1, 0.5), (math.nan, 2.0)):
        with pytest.raises(ValueError, match="low"):
            MaskedWeight(low, high)


def test_resolve_weight() -> None:
    assert resolve_weight("tis", cap=3.0) == TruncatedWeight(3.0)
    assert resolve_weight("mis") == MaskedWeight(0.5, 5.0)
    assert resolve_weight("none") == NoWeight() and resolve_weight("is") == FullWeight()
    own = TruncatedWeight(7.0)
    assert resolve_weight(own) is own
    with pytest.raises(ValueError, match="one of is, mis, none, tis"):
        resolve_weight("gspo")
    with pytest.raises(ValueError, match="high"):
        resolve_weight("tis", high=3.0)
    with pytest.raises(ValueError, match="beside a weight object"):
        resolve_weight(own, cap=3.0)
    with pytest.raises(TypeError, match="float"):
        resolve_weight(2.0)


# --- metrics


def test_ratio_metrics_are_raw() -> None:
    """G8: ratios (1, 10) with cap 3: the metric shows 10, the loss uses 3."""
    batch = random_batch(tokens=3)
    logp = batch["token_logprobs"]
    batch["sampler_logprobs"] = logp - torch.tensor([0.0, math.log(10.0), 50.0])
    mask = torch.tensor([1, 1, 0])
    _, metrics, grad, _ = run(batch, mask=mask, weight=TruncatedWeight(3.0))
    assert metrics["weight_max"].item() == pytest.approx(10.0)
    assert metrics["weight_min"].item() == pytest.approx(1.0)
    assert metrics["weight_mean"].item() == pytest.approx(5.5)
    assert metrics["weight_clipped_share"].item() == 0.5
    assert metrics["ess"].item() == pytest.approx(121 / 202)
    assert (grad / -batch["advantages"]).tolist() == pytest.approx([1.0, 3.0, 0.0])
    assert run(batch, mask=mask)[1]["weight_clipped_share"] == 0.0


def test_means_are_over_valid_tokens() -> None:
    batch = random_batch()
    mask = torch.tensor([1, 0, 1, 1, 0])
    _, metrics, *_ = run(batch, mask=mask)
    kept = batch["sampler_head_logprobs"][mask == 1].exp().sum(1).mean()
    assert metrics["sampler_head_mass"].item() == pytest.approx(kept.item())
    kept = batch["head_logprobs"][mask == 1].exp().sum(1).mean()
    assert metrics["trainer_head_mass"].item() == pytest.approx(kept.item())
    assert all(v.dim() == 0 for v in metrics.values()) and list(metrics) == list(METRICS)
    assert metrics["floor_hits"] == 0.0
