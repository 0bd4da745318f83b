"""Properties of the mismatch metrics.

- Worked numbers, raw before clipped (G8); equal inputs give no mismatch.
- k1 and k3 both estimate KL(q || p); k3 is never negative and precise near zero.
- Masked and unusable tokens change nothing; unusable ones are counted.
- Ratios stay finite; the percentile is a nearest rank.
- Heads: gaps and masses over the entries that exist.
- Ages partition the tokens.
"""

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_parity_plugin.mismatch import (
    HeadGap,
    MismatchMetrics,
    head_gap,
    mismatch_by_version,
    mismatch_metrics,
)


def test_g8_raw_maximum_beside_the_clipped_share() -> None:
    """G8: differences (0, log 10), cap 3, and 50 at a masked position."""
    sampler = torch.tensor([-3.0, -3.0, -3.0])
    trainer = sampler + torch.tensor([0.0, math.log(10.0), 50.0])
    found = mismatch_metrics(trainer, sampler, torch.tensor([1, 1, 0]), clip=(0.0, 3.0))
    assert found.ratio_max == pytest.approx(10.0, rel=1e-6)
    assert found.clipped_share == 0.5
    assert (found.tokens, found.nan_tokens, found.ratio_min) == (2, 0, 1.0)
    assert found.ratio_mean == pytest.approx(5.5, rel=1e-6)
    assert found.ess == pytest.approx(121 / 202, rel=1e-6)
    assert found.mean_abs == pytest.approx(math.log(10.0) / 2, rel=1e-6)
    assert found.max_abs == found.p99_abs == pytest.approx(math.log(10.0), rel=1e-6)
    assert found.k1 == pytest.approx(-math.log(10.0) / 2, rel=1e-6)
    assert found.k3 == pytest.approx((9.0 - math.log(10.0)) / 2, rel=1e-6)
    unmasked = mismatch_metrics(trainer, sampler, clip=(0.0, 3.0))
    assert unmasked.ratio_max == pytest.approx(math.exp(50.0), rel=1e-4)
    assert unmasked.clipped_share == pytest.approx(2 / 3)


def test_clip_bounds() -> None:
    sampler = torch.zeros(4, dtype=torch.float64)
    trainer = torch.tensor([0.2, 0.6, 1.5, 4.0], dtype=torch.float64).log()
    for clip, share in (
        ((0.5, 3.0), 0.5),
        ((0.0, 3.0), 0.25),
        ((0.5, math.inf), 0.25),
        (None, 0.0),
    ):
        assert mismatch_metrics(trainer, sampler, clip=clip).clipped_share == share
    for clip in ((3.0, 0.5), (-1.0, 2.0), (math.nan, 2.0)):
        with pytest.raises(ValueError, match="clip="):
            mismatch_metrics(trainer, sampler, clip=clip)


@given(st.lists(st.floats(-100.0, 0.0), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_equal_inputs_have_no_mismatch(values: list[float]) -> None:
    logprobs = torch.tensor(values)
    found = mismatch_metrics(logprobs, logprobs.clone(), clip=(1.0, 1.0))
    assert found == MismatchMetrics(len(values), 0, 0, 0, 0, 0, 0, 1.0, 1.0, 1.0, 1.0, 0.0)


def test_kl_estimators() -> None:
    """Weighting each token of a vocabulary by q gives KL(q || p), from k1 and from k3."""
    q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    p = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    drawn = torch.tensor([0, 0, 1, 2])
    found = mismatch_metrics(p.log()[drawn], q.log()[drawn])
    want = (q * (q / p).log()).sum().item()
    assert found.k1 == pytest.approx(want) and found.k3 == pytest.approx(want)
    assert found.ratio_mean == pytest.approx(1.0)
    opposite = mismatch_metrics(torch.tensor([-1.0]), torch.tensor([-2.0]))
    assert opposite.k1 < 0.0 < opposite.k3
    tiny = mismatch_metrics(torch.tensor([1e-9]).double(), torch.zeros(1).double())
    assert tiny.k3 == pytest.approx(5e-19, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("side", [0, 1])
def test_masked_tokens_change_nothing(garbage: float, side: int) -> None:
    torch.manual_seed(0)
    pair = [torch.randn(3, 4), torch.randn(3, 4)]
    mask = torch.rand(3, 4) > 0.4
    want = mismatch_metrics(*pair, mask)
    pair[side][~mask] = garbage
    assert mismatch_metrics(*pair, mask) == want
    assert want.tokens == int(mask.sum())
    shrunk = [x[mask] for x in pair]
    assert mismatch_metrics(*shrunk) == want


def test_unusable_tokens_leave_and_are_counted() -> None:
    trainer = torch.tensor([math.nan, -1.0, -1.0, -math.inf, math.nan])
    sampler = torch.tensor([-1.0, math.nan, -1.5, -1.0, -1.0])
    found = mismatch_metrics(trainer, sampler, torch.tensor([1, 1, 1, 1, 0]))
    assert (found.tokens, found.nan_tokens, found.mean_abs) == (1, 3, 0.5)
    nothing = mismatch_metrics(trainer[:2], sampler[:2])
    assert nothing == MismatchMetrics(0, 2, *([0.0] * 10))
    assert mismatch_metrics(torch.empty(0), torch.empty(0)).tokens == 0


@pytest.mark.parametrize("gap", [-1e4, -81.0, 81.0, 1e4])
def test_ratios_stay_finite(gap: float) -> None:
    found = mismatch_metrics(torch.tensor([gap, 0.0]), torch.zeros(2))
    assert all(math.isfinite(value) for value in found.as_dict().values())
    assert found.max_abs == abs(gap)
    bound = math.exp(math.copysign(80.0, gap))
    assert pytest.approx(bound) in (found.ratio_min, found.ratio_max)


def test_p99_is_a_nearest_rank() -> None:
    sampler = torch.zeros(200, dtype=torch.float64)
    trainer = -torch.arange(1.0, 201.0, dtype=torch.float64)[torch.randperm(200)]
    assert mismatch_metrics(trainer, sampler).p99_abs == 198.0


def test_as_dict_names_every_field() -> None:
    found = mismatch_metrics(torch.zeros(2), torch.zeros(2)).as_dict("parity/")
    assert list(found) == [f"parity/{field.name}" for field in fields(MismatchMetrics)]
    assert found["parity/tokens"] == 2.0 and all(type(v) is float for v in found.values())


def test_head_gap() -> None:
    """p = (0.6, 0.3) beside q = (0.5, 0.3), and a padded entry."""
    trainer = torch.tensor([[0.6, 0.3, 0.7], [0.1, 0.1, 0.1]]).log()
    sampler = torch.tensor([[0.5, 0.3, 0.0], [0.9, 0.9, 0.9]]).log()
    found = head_gap(trainer, sampler, torch.tensor([1, 0]))
    want = HeadGap(1, math.log(1.2) / 2, math.log(1.2), 0.1, 0.9, 0.8)
    for field in fields(HeadGap):
        name = field.name
        assert getattr(found, name) == pytest.approx(getattr(want, name), abs=1e-6), name
    both = head_gap(trainer, sampler)
    assert both.positions == 2 and both.l1 == pytest.approx((0.1 + 2.4) / 2, abs=1e-6)
    assert head_gap(trainer, torch.full_like(trainer, -math.inf)) == HeadGap(0, 0, 0, 0, 0, 0)
    assert head_gap(trainer[:, :0], sampler[:, :0], torch.ones(2)).positions == 0
    with pytest.raises(ValueError, match="mask"):
        head_gap(trainer, sampler, torch.ones(3))


def test_ages_partition_the_tokens() -> None:
    torch.manual_seed(0)
    trainer, sampler = torch.randn(2, 6), torch.randn(2, 6)
    versions = torch.tensor([[3, 3, 4, 4, 5, 99], [5, 5, 5, 4, 3, -1]])
    mask = versions.ne(99) & versions.ne(-1)
    mask[1, 0] = False
    found = mismatch_by_version(trainer, sampler, versions, 5, mask, clip=(0.5, 2.0))
    assert list(found) == [0, 1, 2]
    assert [m.tokens for m in found.values()] == [3, 3, 3]
    for age, metrics in found.items():
        own = mask & (versions == 5 - age)
        assert metrics == mismatch_metrics(trainer[own], sampler[own], clip=(0.5, 2.0))
    with pytest.raises(ValueError, match="version 99 at current version 5"):
        mismatch_by_version(trainer, sampler, versions, 5)
    assert mismatch_by_version(trainer, sampler, versions, 5, torch.zeros(2, 6)) == {}


def test_shapes_must_agree() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(3)
    for args in ((a, b), (a, a, b)):
        with pytest.raises(ValueError, match="one shape"):
            mismatch_metrics(*args)
    with pytest.raises(ValueError, match="versions"):
        mismatch_by_version(a, a, torch.zeros(2, 1), 0)
    with pytest.raises(ValueError, match="sampler_head"):
        head_gap(a, b)
