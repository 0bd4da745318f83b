"""Heads between rollout and loss.

Properties: a token keeps its head and its logprob through turns of a tool loop, cuts and padding; a
token that was not sampled has none; lengths or ids that disagree, heads that name a token twice or
give the sampled token another value are refused by position (S7, L11); completions that must not be
trained on are found in every turn (W4, L8).
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trl_callbacks.head_scorer import HeadScorer
from trl_callbacks.heads import Rollouts, SampledLogprob, check_heads
from trl_callbacks.transfer import runs_of_equal
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import Rollout, Sampling

CPU = torch.device("cpu")


def rollout(*sequences: list[int], size: int = 3, reasons: list[str] | None = None) -> Rollout:
    """Sequences whose heads can be told apart: token t has ids t, t + 1, ... and logprobs -t/8."""
    tokens = np.array([token for sequence in sequences for token in sequence], dtype=np.int32)
    order = np.arange(size)
    return Rollout(
        token_ids=tokens,
        logprobs=(-tokens / 8).astype(np.float32),
        head_ids=(tokens[:, None] + order).astype(np.int32),
        head_logprobs=(-tokens[:, None] / 8 - order).astype(np.float32),
        sequence_offsets=np.cumsum([0, *map(len, sequences)]),
        policy_versions=np.ones(len(tokens), dtype=np.int32),
        cached_tokens=np.zeros(len(sequences), dtype=np.int32),
        finish_reasons=reasons or ["stop"] * len(sequences),
        stop_reasons=[None] * len(sequences),
        sampling=Sampling(),
    )


def test_heads_follow_their_tokens_through_turns() -> None:
    """S7: what TRL's tool loop does: a suffix of tool tokens, a second turn, a cut."""
    rollouts = Rollouts()
    first = rollouts.add(rollout([10, 11], [20, 21, 22]))
    second = rollouts.add(rollout([30, 31, 32]))
    logprobs: list[list[float]] = [[*first[0], 0.0, 0.0, *second[0][:2]], list(first[1])]
    completions = [[10, 11, 90, 91, 30, 31], [20, 21, 22]]
    rows = rollouts.rows(completions, logprobs, trained=[[1, 1, 0, 0, 1, 1], [1, 1, 1]])
    ids, values = rows.heads(7, CPU)
    assert ids.shape == values.shape == (2, 7, 3)
    assert ids[0, :, 0].tolist() == [10, 11, -1, -1, 30, 31, -1]
    assert ids[1, :, 0].tolist() == [20, 21, 22, -1, -1, -1, -1]
    assert values[0, 4].tolist() == [-3.75, -4.75, -5.75]
    assert (values[ids < 0] == -torch.inf).all()
    assert ids.dtype == torch.int32


def test_a_token_of_the_loss_without_its_head_is_refused() -> None:
    """A plain number among tokens that the loss takes: which token it is, nobody can tell. The same
    number is fine where the loss does not look."""
    rollouts = Rollouts()
    (logprobs,) = rollouts.add(rollout([10, 11]))
    values = [logprobs[0], float(logprobs[1])]
    with pytest.raises(ParityError, match="completion 0 at position 1 is a plain number"):
        rollouts.rows([[10, 11]], [values])
    rollouts.rows([[10, 11]], [values], trained=[[1, 0]])
    Rollouts().rows([[10]], [[0.0]], trained=[[0]])  # an evaluation that sampled elsewhere


def test_completions_that_were_chosen_among_sequences() -> None:
    """A rollout_func kept the second of two, whose first was aborted: nobody is dropped for it;
    one that was aborted before its first token stops the run."""
    rollouts = Rollouts()
    sampled = rollouts.add(rollout([10], [20], reasons=["abort", "stop"]))
    assert rollouts.rows([[20]], [sampled[1]], ordered=False).unusable() == {}
    assert rollouts.rows([[10]], [sampled[0]], ordered=False).unusable().keys() == {0}
    empty = Rollouts()
    sampled = empty.add(rollout([], [20], reasons=["abort", "stop"]))
    with pytest.raises(ParityError, match="could not be continued, or begun"):
        empty.rows([[20]], [sampled[1]], ordered=False).unusable()


def test_logprobs_are_floats_for_trl() -> None:
    (values,) = Rollouts().add(rollout([8, 16]))
    assert torch.tensor(values).tolist() == [-1.0, -2.0]
    assert all(isinstance(value, SampledLogprob) for value in values)


@pytest.mark.parametrize(
    ("ids", "cut"), [([10, 11], 3), ([10, 11, 12, 13], 3), ([10, 12, 11], 3), ([10, 11], 1)]
)
def test_tokens_of_other_logprobs_are_refused(ids: list[int], cut: int) -> None:
    """L11: 2 ids beside 3 logprobs, or ids in another order."""
    rollouts = Rollouts()
    (logprobs,) = rollouts.add(rollout([10, 11, 12]))
    with pytest.raises(ParityError, match="Completion 0"):
        rollouts.rows([ids], [logprobs[:cut]])


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_unusable_completions_of_every_turn(reason: str) -> None:
    """W4, L8: the completion that an aborted or broken second turn belongs to."""
    rollouts = Rollouts()
    first = rollouts.add(rollout([10], [20], [40], reasons=["stop", "stop", reason]))
    second = rollouts.add(rollout([30], [31], reasons=["stop", reason]))
    logprobs = [[*first[0], *second[1]], [*first[1], *second[0]], list(first[2])]
    rows = rollouts.rows([[10, 31], [20, 30], [40]], logprobs)
    assert sorted(rows.unusable()) == [0, 2]
    broken = rollout([10, 11])
    broken.logprobs[1] = np.nan
    rollouts = Rollouts()
    logprobs = [list(row) for row in rollouts.add(broken)]
    assert "position 1" in rollouts.rows([[10, 11]], logprobs).unusable()[0]


def test_a_turn_without_tokens_stops_the_run() -> None:
    """W4: aborted before its first token, a later turn cannot be told to be anyone's."""
    rollouts = Rollouts()
    first = rollouts.add(rollout([10]))
    rollouts.add(rollout([], reasons=["abort"]))
    rows = rollouts.rows([[10]], [list(first[0])])
    with pytest.raises(ParityError, match="could not be continued"):
        rows.unusable()


def test_heads_that_do_not_belong_are_refused() -> None:
    """S7: by completion and position; padding may repeat."""
    none = -np.inf
    ids = np.array([[[5, 6, -1, -1]], [[7, 8, 9, -1]]], dtype=np.int32)
    logprobs = np.array([[[-0.5, -1.0, none, none]], [[-0.1, -3.0, -4.0, -9.0]]], dtype=np.float32)
    sampled, values = np.array([[6], [3]]), np.array([[-1.0], [-5.0]], dtype=np.float32)
    check_heads(ids, logprobs, sampled, values)
    check_heads(ids, logprobs, np.array([[6], [-1]]), values)
    with pytest.raises(ParityError, match="completion 1 at position 0 gives"):
        check_heads(ids, logprobs, np.array([[6], [7]]), values)
    twice = ids.copy()
    twice[0, 0, 1] = 5
    with pytest.raises(ParityError, match="completion 0 at position 0 names a token twice"):
        check_heads(twice, logprobs, sampled, values)
    moved = Rollouts()
    good = rollout([10, 11])
    bad = dataclasses.replace(good, head_logprobs=good.head_logprobs + 0.01)
    rows = moved.rows([[10, 11]], moved.add(bad))
    with pytest.raises(ParityError, match="2 of 2"):
        rows.heads(2, CPU)


def test_the_scorer_hands_each_batch_its_own_heads() -> None:
    """TRL scores a generation in batches; prompt positions get no head."""
    head_ids = torch.arange(3 * 2 * 2).view(3, 2, 2)
    seen: list[torch.Tensor] = []

    def model(*, labels: Any, head_ids: Any, entropy_grad: bool, **_: Any) -> Any:
        seen.append(head_ids)
        rows, width = labels.shape
        assert entropy_grad
        return SimpleNamespace(log_probs=torch.zeros(rows, width - 1), head_log_probs=head_ids)

    scorer = HeadScorer(model, head_ids, entropy_grad=True)
    for rows in (2, 1):
        scorer(input_ids=torch.zeros(rows, 5), labels=torch.zeros(rows, 5))
    assert [tuple(ids.shape) for ids in seen] == [(2, 4, 2), (1, 4, 2)]
    assert (seen[0][:, :2] == -1).all()
    assert torch.equal(scorer.scored("head_log_probs"), head_ids)
    assert scorer.scored("log_probs").shape == (3, 2)


def test_float16_heads_pass_within_their_rounding() -> None:
    """S7: a float16 head may differ from its token's float32 logprob by 2**-11 of it."""
    found = rollout([9, 30], size=3)
    exact = np.where(found.head_logprobs == 0, 0, found.head_logprobs - 1e-3).astype(np.float32)
    sent = dataclasses.replace(found, head_logprobs=exact.astype(np.float16), logprobs=exact[:, 0])
    rollouts = Rollouts()
    rows = rollouts.rows([[9, 30]], rollouts.add(sent))
    ids, logprobs = rows.heads(4, CPU)
    assert logprobs.dtype == torch.float32 and ids.shape == (1, 4, 3)
    moved = dataclasses.replace(sent, logprobs=sent.logprobs * np.float32(1.002))
    rollouts = Rollouts()
    with pytest.raises(ParityError, match="another logprob"):
        rollouts.rows([[9, 30]], rollouts.add(moved)).heads(4, CPU)


def test_runs_of_equal_neighbours() -> None:
    assert runs_of_equal([]) == []
    assert runs_of_equal([[1], [1], [2], [1]]) == [slice(0, 2), slice(2, 3), slice(3, 4)]
