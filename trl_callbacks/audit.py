"""A check of the top-K form on a few positions of each rollout, with the whole head.

The sampler is asked once more for the next token at some prefixes of the rollout, with as many
head entries as it gives; the trainer scores the same entries. Nothing of it enters the loss.
"""

from __future__ import annotations

from typing import Any

import torch

from trl_callbacks.centering_gap import top_k_gap
from trl_callbacks.compat import log_metrics
from trl_callbacks.head_scorer import HeadScorer
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import RolloutRequest
from vllm_parity_plugin.wire import Status


def check_audit(positions: int, size: int, status: Status | None) -> None:
    """Refuse an audit that could only compare the head with itself.

    Raises:
        ParityError: the sampler returns no more entries than the loss uses.
    """
    if positions and status is not None and status.head_size <= size:
        raise ParityError(
            f"score_centering_audit={positions}, and the sampler returns at most "
            f"{status.head_size} head entries, no more than score_centering_top_k={size}.",
            "The audit compares the head with a larger one, the whole vocabulary at best.",
            "start it with a larger VLLM_PARITY_HEAD_SIZE, or set score_centering_audit=0.",
        )


@torch.no_grad()
def log_top_k_gap(trainer: Any, output: dict[str, Any], mask: torch.Tensor) -> None:
    """Log ``parity/score_centering/top_k_gap`` of some positions of a generation batch.

    Args:
        trainer: the ParityGRPOTrainer.
        output: the batch, before TRL shuffles it.
        mask: [B, T] tokens of the loss.
    """
    rows, tokens = _choose(mask, trainer.args.score_centering_audit)
    prompts, completions = output["prompt_ids"], output["completion_ids"]
    prefixes = [
        torch.cat([prompts[row][output["prompt_mask"][row].bool()], completions[row, :token]])
        for row, token in zip(rows, tokens, strict=True)
    ]
    generation = trainer.vllm_generation
    rollout = generation.fetch(
        RolloutRequest(
            prompts=[prefix.tolist() for prefix in prefixes],
            head_size=trainer.parity.status.head_size,
            sampling=generation.sampling().model_copy(update={"max_tokens": 1}),
        )
    )
    device = completions.device
    ids = torch.from_numpy(rollout.head_ids).to(device).unsqueeze(1)
    logq = torch.from_numpy(rollout.head_logprobs).to(device)
    logp = _score(trainer, prefixes, torch.from_numpy(rollout.token_ids).to(device), ids)
    errors, sizes = top_k_gap(
        logp, logq, trainer.args.score_centering_top_k, weight=trainer.parity_weight
    )
    local = torch.stack([errors.sum(), sizes.sum()]).float()
    error, size = trainer.accelerator.reduce(local, reduction="sum").tolist()
    gap = error / size if size > 0 else 0.0
    log_metrics(trainer, {"parity/score_centering/top_k_gap": gap})


def _choose(mask: torch.Tensor, count: int) -> tuple[list[int], list[int]]:
    """Rows and positions of ``count`` tokens of the loss, spread evenly over the batch.

    Every rank chooses as many, so that all take part in the same collectives; a batch without
    tokens in the loss gives its first position.
    """
    found = mask.bool().nonzero()
    if not len(found):
        return [0] * count, [0] * count
    picked = torch.linspace(0, len(found) - 1, count, device=mask.device).round().long()
    rows, tokens = found[picked].unbind(1)
    return rows.tolist(), tokens.tolist()


def _score(
    trainer: Any, prefixes: list[torch.Tensor], sampled: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The trainer's log p [N, M] on the head entries after each prefix."""
    width = max(len(prefix) for prefix in prefixes) + 1
    inputs = sampled.new_zeros(len(prefixes), width)
    attention = torch.zeros_like(inputs)
    for row, prefix in enumerate(prefixes):
        inputs[row, width - 1 - len(prefix) : -1] = prefix
        attention[row, width - 1 - len(prefix) :] = 1
    inputs[:, -1] = sampled
    scorer = HeadScorer(trainer.model, ids)
    trainer._get_per_token_logps_and_entropies(scorer, inputs, attention, 1)
    return scorer.scored("head_log_probs")[:, 0]
