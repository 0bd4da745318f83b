"""The audit of a head's size.

Properties: the docstring's numbers; 0 for the whole head, for equal policies and for a truly
proportional tail; the gap is the distance of the two gradients by the logits, from autograd.
"""

from __future__ import annotations

import pytest
import torch

from trl_callbacks.centering_gap import top_k_gap
from trl_callbacks.score_centering import score_centering_loss


def test_worked_number() -> None:
    p = torch.tensor([[0.4, 0.4, 0.1, 0.1]], dtype=torch.float64).log()
    q = torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64).log()
    for size, error in ((1, 1 / 30 + 2 / 60), (2, 0.0), (4, 0.0)):
        found = [value.item() for value in top_k_gap(p, q, size, weight="none")]
        assert found == pytest.approx([error, 0.2], abs=1e-5)
    assert max(value.item() for value in top_k_gap(p, p, 2, weight="none")) < 1e-5


@pytest.mark.parametrize("weight", ["none", "tis", "mis"])
@pytest.mark.parametrize("entries", [7, 12])
def test_it_is_the_distance_of_the_gradients(weight: str, entries: int) -> None:
    """With all 12 entries the second gradient is the exact form's."""
    torch.manual_seed(0)
    logits = torch.randn(4, 12, dtype=torch.float64) * 1.5
    logq = (logits + torch.randn_like(logits)).log_softmax(-1)
    order = logq.argsort(-1, descending=True)

    def gradient(size: int) -> torch.Tensor:
        """Gradient by the logits of the centering term alone."""
        leaf = logits.clone().requires_grad_()
        logp, head = leaf.log_softmax(-1), order[:, :size]
        args = (logp[:, 0].detach(), logp.gather(1, head), logq[:, 0], logq.gather(1, head))
        loss, _ = score_centering_loss(*args, torch.ones(4), weight=weight)
        return torch.autograd.grad(loss.sum(), leaf)[0]

    exact = gradient(entries)
    want = (gradient(3) - exact).abs().sum(-1), exact.abs().sum(-1)
    logp, head = logits.log_softmax(-1), order[:, :entries]
    got = top_k_gap(logp.gather(1, head), logq.gather(1, head), 3, weight=weight)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    assert (got[0] > 0.01).any()
