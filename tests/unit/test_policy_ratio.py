"""Properties of score centering where one rollout serves several optimizer steps.

- g is the factor in the gradient of TRL's own loss, for each loss, sign of A, bound and delta.
- Enumeration over five tokens: the expectation of the gradient over y ~ q is 0 for every loss,
  weight, sign of A and form; centering that leaves g out (the clip kills the gradient of y and not
  of the mean, case S9) fails, and so does no centering.
- The tail model is exact where q and p_old are proportional to p outside the head.
- p_old = p gives the loss of one step; a sequence's weight multiplies both parts.
- Ratios of +-80 in log space stay finite; half a set of old values is refused.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trl_callbacks.policy_ratio import CappedRatio, ClippedRatio, GatedRatio, PolicyRatio
from trl_callbacks.score_centering import score_centering_loss

WEIGHTS = ("none", "tis", "mis", "is")
RATIOS: dict[str, PolicyRatio] = {
    "ppo": ClippedRatio(0.2, 0.3),
    "delta": ClippedRatio(0.2, 0.2, delta=1.5),
    "tight_delta": ClippedRatio(0.2, 0.4, delta=1.1),
    "cispo": CappedRatio(1.3),
    "sapo": GatedRatio(1.0, 1.05),
}
# Five tokens. Some ratios to the old policy lie inside every band, some above and some below.
NOW = torch.tensor([1.2, 0.3, -0.5, 0.0, -1.0], dtype=torch.float64)
OLD = torch.tensor([0.7, 0.4, -0.2, 0.6, -1.8], dtype=torch.float64)
SAMPLER = torch.tensor([0.2, 0.9, -0.9, 0.4, -1.2], dtype=torch.float64)
WHOLE = list(range(5))


def trl_loss(name: str, log_ratio: Tensor, logp: Tensor, advantage: float) -> Tensor:
    """The per-token loss as ``GRPOTrainer._compute_loss`` writes it."""
    ratio, kind = torch.exp(log_ratio), RATIOS[name]
    if isinstance(kind, CappedRatio):
        return -torch.clamp(ratio, max=kind.cap).detach() * advantage * logp
    if isinstance(kind, GatedRatio):
        tau = kind.positive if advantage > 0 else kind.negative
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    assert isinstance(kind, ClippedRatio)
    clipped = torch.clamp(ratio, 1 - kind.low, 1 + kind.high)
    if kind.delta is not None:
        ratio = torch.clamp(ratio, max=kind.delta)
    return -torch.min(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_the_factor_is_that_of_trls_gradient(name: str, advantage: float) -> None:
    logp = torch.linspace(-2.0, 2.0, 401, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(trl_loss(name, logp - 0.0, logp, advantage).sum(), logp)
    positive = torch.tensor(advantage > 0)
    factor = RATIOS[name].factor(logp.detach(), positive)
    torch.testing.assert_close(-advantage * factor, grad)
    # What is called clipped is what no longer follows r.
    held = RATIOS[name].clipped(logp.detach(), positive)
    if name != "sapo" and (advantage > 0 or name != "cispo"):
        torch.testing.assert_close(factor[~held], logp.detach().exp()[~held])
        assert held.any() and not held.all()


def test_worked_numbers() -> None:
    """The numbers of the docstrings."""

    def factor(kind: PolicyRatio, ratio: float, positive: bool) -> float:
        log_ratio = torch.tensor(ratio, dtype=torch.float64).log()
        return kind.factor(log_ratio, torch.tensor(positive)).item()

    assert factor(ClippedRatio(0.2, 0.2), 1.3, True) == 0.0
    assert factor(ClippedRatio(0.2, 0.2), 1.3, False) == pytest.approx(1.3)
    assert factor(CappedRatio(5.0), 8.0, True) == pytest.approx(5.0)
    assert factor(CappedRatio(5.0), 0.1, True) == pytest.approx(0.1)
    assert factor(GatedRatio(1.0, 1.05), 1.0, False) == pytest.approx(1.0)


def one_loss(
    logits: Tensor,
    y: int,
    head: list[int],
    advantage: float,
    *,
    ratio: PolicyRatio | None,
    old: Tensor | None = None,
    logq: Tensor | None = None,
    **options: object,
) -> Tensor:
    """The loss [1] of one sampled token; no old values where there is no ratio."""
    logp = logits.log_softmax(-1)
    then = (OLD if old is None else old).log_softmax(-1)
    q = SAMPLER.log_softmax(-1) if logq is None else logq
    both = {"old_token_logprobs": then[None, y], "old_head_logprobs": then[None, head]}
    loss, _ = score_centering_loss(
        logp[None, y],
        logp[None, head],
        q[None, y],
        q[None, head],
        torch.tensor([advantage], dtype=logp.dtype),
        ratio=ratio,
        **(both if ratio is not None else {}),
        **options,
    )
    return loss


def expectation(head: list[int], advantage: float, **options: object) -> Tensor:
    """Expectation over y ~ q of the loss's gradient by the logits [V]."""
    logq = options.get("logq", SAMPLER.log_softmax(-1))
    total = torch.zeros_like(NOW)
    for y in WHOLE:
        leaf = NOW.clone().requires_grad_()
        (grad,) = torch.autograd.grad(one_loss(leaf, y, head, advantage, **options).sum(), leaf)
        total += logq[y].exp() * grad
    return total


@pytest.mark.parametrize(
    ("name", "weight", "support"), list(itertools.product(RATIOS, WEIGHTS, [False, True]))
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_expectation_vanishes(name: str, weight: str, support: bool, advantage: float) -> None:
    """S9: at later steps too, for every loss that is accepted."""
    options = {"ratio": RATIOS[name], "weight": weight}
    centred = expectation(WHOLE, advantage, support=support, **options)
    assert centred.abs().max() < 1e-7
    uncentred = expectation([], advantage, **options)
    assert uncentred.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["ppo", "delta", "tight_delta", "cispo", "sapo"])
def test_centering_without_the_clip_is_biased(name: str) -> None:
    """S9: the clip taken on y alone leaves an expectation that is not zero."""
    total = torch.zeros_like(NOW)
    logq, clip = SAMPLER.log_softmax(-1), RATIOS[name]
    for y in WHOLE:
        leaf = NOW.clone().requires_grad_()
        logp, then = leaf.log_softmax(-1), OLD.log_softmax(-1)
        factor = clip.factor((logp - then)[y].detach(), torch.tensor(True))
        naive = -(factor * logp[y] - (logq.exp() * logp).sum())
        total += logq[y].exp() * torch.autograd.grad(naive, leaf)[0]
    assert total.abs().max() > 1e-2


@pytest.mark.parametrize(("name", "weight"), list(itertools.product(RATIOS, WEIGHTS)))
@pytest.mark.parametrize("head", [[0], [1, 3]])
def test_a_proportional_tail_is_exact(name: str, weight: str, head: list[int]) -> None:
    """q = rho p and p_old = rho_old p outside the head, with tails of another size each."""
    p = NOW.softmax(-1)
    tail = torch.ones(5, dtype=torch.bool)
    tail[head] = False

    def with_tail(logits: Tensor, mass: float) -> Tensor:
        kept = torch.where(tail, 0.0, logits.softmax(-1))
        kept = kept * (1 - mass) / kept.sum()
        return torch.where(tail, mass * p / p[tail].sum(), kept).log()

    for q_mass, old_mass in ((0.1, 0.6), (0.5, 0.3), (0.7, 0.65)):
        options = {"logq": with_tail(SAMPLER, q_mass), "old": with_tail(OLD, old_mass)}
        for advantage in (1.0, -1.0):
            drift = expectation(head, advantage, ratio=RATIOS[name], weight=weight, **options)
            assert drift.abs().max() < 1e-7


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("head", [[1, 3], WHOLE])
def test_an_unmoved_policy_gives_the_loss_of_one_step(weight: str, head: list[int]) -> None:
    for advantage, y in itertools.product((1.0, -2.0), (0, 1)):
        options = {"old": NOW, "weight": weight}
        clipped = one_loss(NOW, y, head, advantage, ratio=ClippedRatio(), **options)
        plain = one_loss(NOW, y, head, advantage, ratio=None, weight=weight)
        torch.testing.assert_close(clipped, plain)


def test_without_old_values_the_factor_is_that_of_ratio_one() -> None:
    """CISPO with a cap below 1 scales every token, on the first step too, as TRL's does."""
    logp, q = NOW.log_softmax(-1), SAMPLER.log_softmax(-1)
    args = (logp[None, 1], logp[None, WHOLE], q[None, 1], q[None, WHOLE], torch.ones(1))
    half, _ = score_centering_loss(*args, ratio=CappedRatio(0.5))
    whole, _ = score_centering_loss(*args)
    torch.testing.assert_close(half, 0.5 * whole)


def test_a_sequences_weight_multiplies_both_parts() -> None:
    whole = one_loss(NOW, 2, [0, 1], 1.0, ratio=None)
    half = one_loss(NOW, 2, [0, 1], 1.0, ratio=None, sequence_weight=torch.tensor([0.5]))
    torch.testing.assert_close(half, 0.5 * whole)
    rows = torch.full((2, 2), -1.0)
    args = (rows, rows[..., None], rows, rows[..., None], torch.ones(2, 1))
    with pytest.raises(ValueError, match="sequence_weight"):
        score_centering_loss(*args, sequence_weight=torch.ones(2))
    masked, _ = score_centering_loss(*args, sequence_weight=torch.tensor([[1.0], [0.0]]))
    assert (masked[0] != 0).all() and (masked[1] == 0).all()


@pytest.mark.parametrize(("name", "weight"), list(itertools.product(RATIOS, WEIGHTS)))
@pytest.mark.parametrize("gap", [-80.0, -30.0, 30.0, 80.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(name: str, weight: str, gap: float, advantage: float) -> None:
    """log p - log p_old and log p_old - log q of +-80, in float32."""
    logp = torch.tensor([[-0.2, -81.0]]).requires_grad_()
    old = (logp.detach() - torch.tensor([[0.0, gap]])).clamp(max=0.0)
    q = torch.tensor([[-0.3, -1.5]])
    with torch.autograd.set_detect_anomaly(True):
        loss, metrics = score_centering_loss(
            logp[:, 1],
            logp,
            q[:, 1],
            q,
            torch.tensor([advantage]),
            weight=weight,
            ratio=RATIOS[name],
            old_token_logprobs=old[:, 1],
            old_head_logprobs=old,
        )
        (grad,) = torch.autograd.grad(loss.sum(), logp)
    assert loss.isfinite().all() and grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.lists(st.floats(-4, 4), min_size=5, max_size=5), min_size=3, max_size=3),
    name=st.sampled_from(sorted(RATIOS)),
    weight=st.sampled_from(WEIGHTS),
    advantage=st.sampled_from([2.0, -0.5]),
)
def test_any_three_policies(
    logits: list[list[float]], name: str, weight: str, advantage: float
) -> None:
    """The expectation vanishes whatever p, p_old and q are."""
    now, old, sampler = torch.tensor(logits, dtype=torch.float64)
    logq, total = sampler.log_softmax(-1), torch.zeros(5, dtype=torch.float64)
    for y in WHOLE:
        leaf = now.clone().requires_grad_()
        loss = one_loss(
            leaf, y, WHOLE, advantage, ratio=RATIOS[name], old=old, logq=logq, weight=weight
        )
        total += logq[y].exp() * torch.autograd.grad(loss.sum(), leaf)[0]
    # The floor of an empty tail is 1e-6 of a probability, times a ratio of at most e^16.
    assert total.abs().max() < 1e-6 * math.exp(8)


def test_half_a_set_of_old_values_is_refused() -> None:
    logp = NOW.log_softmax(-1)
    args = (logp[None, 1], logp[None, WHOLE], logp[None, 1], logp[None, WHOLE], torch.ones(1))
    for missing in ("old_token_logprobs", "old_head_logprobs", "ratio"):
        given_ = {
            "old_token_logprobs": logp[None, 1],
            "old_head_logprobs": logp[None, WHOLE],
            "ratio": ClippedRatio(),
        }
        del given_[missing]
        with pytest.raises(ValueError, match=next(iter(given_))):
            score_centering_loss(*args, **given_)
    with pytest.raises(ValueError, match="old_head_logprobs"):
        score_centering_loss(
            *args,
            ratio=ClippedRatio(),
            old_token_logprobs=logp[None, 1],
            old_head_logprobs=logp[None, :2],
        )


def test_clipped_tokens_are_counted() -> None:
    logp = torch.tensor([math.log(0.3), math.log(0.2)], dtype=torch.float64)
    old = torch.tensor([math.log(0.2), math.log(0.2)], dtype=torch.float64)
    head = logp[:, None]
    _, metrics = score_centering_loss(
        logp,
        head,
        old,
        old[:, None],
        torch.ones(2),
        ratio=ClippedRatio(0.2, 0.2),
        old_token_logprobs=old,
        old_head_logprobs=old[:, None],
    )
    assert metrics["policy_clipped_share"].item() == 0.5
    assert metrics["weight_used_mean"].item() == pytest.approx(0.5)
    assert metrics["weight_used_max"].item() == pytest.approx(1.0)
    assert metrics["weight_mean"].item() == pytest.approx(1.0)  # p_old / q
