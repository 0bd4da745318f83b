"""Sampler heads on their way from rollouts to the loss.

TRL hands a generation's logprobs around as lists of floats, and joins and cuts them when a
completion has several turns. Here each of these floats knows which sampled token it is, so the
heads find their tokens again wherever TRL put them.

Shapes: B rows, T tokens of the padded completions, K head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import Rollout

HEAD_IDS = "sampler_head_ids"
HEAD_LOGPROBS = "sampler_head_logprobs"
OLD_HEAD_LOGPROBS = "old_head_logprobs"
"""Keys of a batch: [B, T, K] int32 (padding -1), float32 (padding -inf) and float32."""
SAME_LOGPROB = 1e-6
"""Largest difference between a sampled token's logprob and its entry in the head."""
HALF_ROUNDING = 2.0**-11
"""Relative error of a float16."""


class SampledLogprob(float):
    """The logprob of a sampled token, and which token of the generation it is."""

    __slots__ = ("index",)
    index: int


NOBODYS = SampledLogprob(0.0)
"""In place of the logprob of a completion that was aborted before its first token."""
NOBODYS.index = -1


class Rollouts:
    """The rollouts of one generation: one, or one for each turn of a tool loop."""

    def __init__(self) -> None:
        self._rollouts: list[Rollout] = []
        self._tokens = 0

    def add(self, rollout: Rollout) -> list[list[SampledLogprob]]:
        """Keep a rollout and return its logprobs, sequence by sequence."""
        values = [SampledLogprob(value) for value in rollout.logprobs.tolist()]
        for index, value in enumerate(values, self._tokens):
            value.index = index
        self._rollouts.append(rollout)
        self._tokens += len(values)
        return [values[rollout.span(row)] for row in range(len(rollout))]

    def check_support(self) -> None:
        """Refuse heads that are not the sampler's whole support.

        Raises:
            ParityError: see ``Rollout.check_support``.
        """
        for rollout in self._rollouts:
            rollout.check_support()

    def rows(
        self,
        completion_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        trained: Sequence[Sequence[int]] | None = None,
        ordered: bool = True,
    ) -> Rows:
        """Where each token of the finished completions came from.

        Args:
            completion_ids, logprobs: of every completion, token by token.
            trained: 1 for a token that the loss takes, 0 for a tool's; None takes all of them.
            ordered: completion i is sequence i of the first rollout. Somebody's own
                ``rollout_func`` may have chosen among sequences.

        Raises:
            ParityError: lengths differ, a token is not the one that was sampled (case L11), or a
                token that the loss takes has lost its head.
        """
        none = np.empty(0, dtype=np.int32)
        sampled = np.concatenate([none, *(rollout.token_ids for rollout in self._rollouts)])
        indices = []
        for row, (ids, values) in enumerate(zip(completion_ids, logprobs, strict=True)):
            mask = [1] * len(values) if trained is None else trained[row]
            for token, (value, taken) in enumerate(zip(values, mask, strict=False)):
                if taken and not isinstance(value, SampledLogprob):
                    raise ParityError(
                        f"The logprob of completion {row} at position {token} is a plain number "
                        f"({value!r}).",
                        "It does not say which sampled token it belongs to, so the sampler's head "
                        "of that token cannot be found.",
                        "return the logprobs of trainer.sample(prompt_ids) as they are from "
                        "rollout_func (lists may be cut and joined), and mark tokens that were "
                        "not sampled with 0 in env_mask.",
                    )
            index = np.array([getattr(value, "index", -1) for value in values], dtype=np.int64)
            own = index >= 0
            if len(ids) != len(values) or (sampled[index[own]] != np.asarray(ids)[own]).any():
                raise ParityError(
                    f"Completion {row} has {len(ids)} tokens and {len(values)} logprobs that are "
                    "not of the same tokens.",
                    "Its logprobs and heads would be taken for those of other tokens.",
                    "do not change completions between sampling and the loss.",
                )
            indices.append(index)
        return Rows(self._rollouts, indices, ordered)


class Rows:
    """The completions of a generation, as indices of sampled tokens (-1 for a tool's tokens)."""

    def __init__(
        self, rollouts: Sequence[Rollout], indices: Sequence[np.ndarray], ordered: bool
    ) -> None:
        self._rollouts, self._indices, self._ordered = rollouts, indices, ordered
        self._padded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def heads(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Head ids [B, T, K] (int32, padding -1) and log q [B, T, K] (padding -inf).

        Padded to ``tokens``, the width that TRL padded the completions to.

        Raises:
            ParityError: a head that names a token twice, or gives the sampled token another
                logprob than the rollout (case S7).
        """
        if tokens in self._padded:
            return self._padded[tokens]
        index = np.full((len(self._indices), tokens), -1, dtype=np.int64)
        for row, found in enumerate(self._indices):
            index[row, : len(found)] = found
        own = index >= 0
        size = self._rollouts[0].head_ids.shape[1]
        ids = np.full((*index.shape, size), -1, dtype=np.int32)
        logprobs = np.full((*index.shape, size), -np.inf, dtype=np.float32)
        ids[own] = self._joined("head_ids")[index[own]]
        logprobs[own] = self._joined("head_logprobs")[index[own]]
        sampled = np.full(index.shape, -1, dtype=np.int64)
        sampled[own] = self._joined("token_ids")[index[own]]
        values = np.zeros(index.shape, dtype=np.float32)
        values[own] = self._joined("logprobs")[index[own]]
        half = self._rollouts[0].head_logprobs.dtype == np.float16
        check_heads(ids, logprobs, sampled, values, rounding=HALF_ROUNDING if half else 0.0)
        padded = torch.from_numpy(ids).to(device), torch.from_numpy(logprobs).to(device)
        self._padded[tokens] = padded
        return padded

    def unusable(self) -> dict[int, str]:
        """Completions that must not be trained on: row -> reason.

        Raises:
            ParityError: a sequence was aborted before its first token, in a later turn or in a
                rollout_func, so that no completion can be told to be the one.
        """
        first, reasons = 0, {}
        for turn, rollout in enumerate(self._rollouts):
            for sequence, reason in unusable_rows(rollout).items():
                span = rollout.span(sequence)
                if span.stop > span.start:
                    rows = self._rows_with(first + span.start, first + span.stop)
                    reasons.update(dict.fromkeys(rows, reason))
                elif turn == 0 and self._ordered:
                    reasons[sequence] = reason
                else:
                    raise ParityError(
                        f"A completion could not be continued, or begun: {reason}.",
                        "It has no token that would tell which completion it is, and a fragment "
                        "must not be graded as an answer.",
                        "look at the server's log.",
                    )
            first += len(rollout.token_ids)
        return reasons

    def _rows_with(self, start: int, stop: int) -> list[int]:
        return [
            row
            for row, index in enumerate(self._indices)
            if ((index >= start) & (index < stop)).any()
        ]

    def _joined(self, name: str) -> np.ndarray:
        arrays = [getattr(rollout, name) for rollout in self._rollouts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def unusable_rows(rollout: Rollout) -> dict[int, str]:
    """Sequences that must not be trained on: row -> reason.

    ``abort`` is never an answer (case W4), and a NaN logprob means that the whole row of logits
    was broken, so the tokens themselves are garbage (case L8).
    """
    reasons = {}
    for row, finish in enumerate(rollout.finish_reasons):
        broken = np.flatnonzero(~np.isfinite(rollout.logprobs[rollout.span(row)]))
        if finish not in {"stop", "length"}:
            reasons[row] = f"it ended with {finish!r}"
        elif len(broken):
            reasons[row] = f"its logprob at position {int(broken[0])} is not finite"
    return reasons


def check_heads(
    ids: np.ndarray,
    logprobs: np.ndarray,
    sampled: np.ndarray,
    values: np.ndarray,
    rounding: float = 0.0,
) -> None:
    """Refuse heads that do not belong to their tokens.

    Args:
        ids: [B, T, K], -1 for padding.
        logprobs: [B, T, K].
        sampled: [B, T] sampled token ids, -1 where there is none.
        values: [B, T] logprobs of the sampled tokens.
        rounding: relative error of ``logprobs`` (float16 heads; ``values`` are float32 always).

    Raises:
        ParityError: naming the completion and the position.
    """
    # A sampled token outside its head has no entry to compare; a NaN one leaves the loss later.
    moved = np.zeros(sampled.shape, dtype=bool)
    row, token, entry = np.nonzero((ids == sampled[..., None]) & (ids >= 0))
    own = values[row, token]
    far = np.abs(logprobs[row, token, entry] - own) > SAME_LOGPROB + rounding * np.abs(own)
    moved[row[far], token[far]] = True
    ordered = np.sort(ids, axis=-1)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
    wrong = moved | twice
    if wrong.any():
        place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        problem = (
            "names a token twice"
            if twice[place]
            else "gives the sampled token another logprob than the rollout"
        )
        raise ParityError(
            f"The sampler's head of completion {place[0]} at position {place[1]} {problem} "
            f"({int(wrong.sum())} of {int((sampled >= 0).sum())} positions are wrong).",
            "The centering term would not be the sampler's expected score.",
            "use the vllm-parity plugin of this version on the server; report it if it is.",
        )
