"""The loss of ``ParityGRPOTrainer``: TRL's, with its policy term replaced by the centred one.

KL, entropy bonus, router loss and their metrics stay TRL's own code: it is called with advantages
of zero, which leaves nothing of its policy term, value and gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import nanmax, nanmin

from trl_callbacks.compat import log_metrics, replace_metrics
from trl_callbacks.head_scorer import HeadScorer
from trl_callbacks.heads import HEAD_IDS, HEAD_LOGPROBS, OLD_HEAD_LOGPROBS
from trl_callbacks.loss_types import LOSSES
from trl_callbacks.score_centering import score_centering_loss, valid_tokens
from vllm_parity_plugin.mismatch import head_gap


def centred_loss(trainer: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The loss of one micro-batch whose tokens carry heads.

    Args:
        trainer: the ParityGRPOTrainer.
        model: what TRL trains (a DDP or FSDP wrapper, or the bare model).
        inputs: TRL's batch with the tensors of ``heads``.
    """
    sampler, sampler_head = inputs["sampling_per_token_logps"], inputs[HEAD_LOGPROBS]
    mask = loss_mask(inputs)
    valid = valid_tokens(sampler, sampler_head, mask)
    advantages = inputs["advantages"]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    scorer = HeadScorer(model, inputs[HEAD_IDS], entropy_grad=bool(trainer._entropy_bonus_enabled))
    # The attention mask is left alone: tokens without a usable logprob are still context.
    others = GRPOTrainer._compute_loss(
        trainer,
        scorer,
        {
            **inputs,
            "advantages": torch.zeros_like(inputs["advantages"]),
            "tool_mask": valid.to(mask.dtype),
        },
    )
    log_probs, head_log_probs = scorer.scored("log_probs"), scorer.scored("head_log_probs")
    # Values of one optimizer step: p_old is p, whatever TRL computed for its own correction.
    old = inputs.get("old_per_token_logps") if OLD_HEAD_LOGPROBS in inputs else None
    per_token, metrics = score_centering_loss(
        log_probs,
        head_log_probs,
        sampler,
        sampler_head,
        advantages,
        weight=trainer.parity_weight,
        mask=mask,
        support=trainer.args.score_centering_support,
        ratio=trainer.parity_ratio,
        old_token_logprobs=old,
        old_head_logprobs=inputs.get(OLD_HEAD_LOGPROBS),
        sequence_weight=_outer_factor(trainer, inputs, scorer, advantages, valid),
    )
    policy = _average(trainer, per_token, valid, inputs["num_items_in_batch"])
    if old is not None:
        _log_clipping(trainer, log_probs.detach() - old, advantages, valid)
    _log_centering(trainer, metrics, head_log_probs, sampler_head, valid)
    loss: torch.Tensor = others + policy
    if trainer._entropy_bonus_enabled:
        mean = trainer.accelerator.gather(policy.detach()).nanmean().item()
        replace_metrics(trainer, {"policy_loss": mean})
    return loss


def loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """Tokens of the loss [B, T]: the completion's, without those that a tool wrote."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _outer_factor(
    trainer: Any,
    inputs: dict[str, Any],
    scorer: HeadScorer,
    advantages: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """Constants that are no function of the sampled token at one prefix [B, T] or [B, 1].

    The entropy mask is a function of the prefix, so it changes nothing about the expectation. The
    off-policy mask and TRL's sequence-level corrections depend on later tokens: with them centering
    is an approximation.
    """
    factor = torch.ones_like(valid[:, :1], dtype=torch.float32)
    mask = valid.to(inputs["completion_mask"].dtype)
    if trainer.top_entropy_quantile < 1.0:
        entropy = scorer.scored("entropy").detach()
        factor = factor * trainer.get_high_entropy_mask(
            entropy, mask, 1 - trainer.top_entropy_quantile
        )
    if trainer.off_policy_mask_threshold is not None:
        factor = factor * trainer.get_off_policy_mask(
            advantages=advantages,
            per_token_logps=scorer.scored("log_probs"),
            sampling_per_token_logps=inputs["sampling_per_token_logps"],
            mask=mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    if trainer.vllm_importance_sampling_correction:
        factor = factor * inputs["importance_sampling_ratio"]
    return factor


def _average(
    trainer: Any, per_token: torch.Tensor, valid: torch.Tensor, num_items: torch.Tensor
) -> torch.Tensor:
    """TRL's averaging over tokens for each loss type, with one mask above and below."""
    accumulation = trainer.current_gradient_accumulation_steps if trainer.model.training else 1.0
    averaging = LOSSES[trainer.loss_type].averaging
    if averaging == "rows":
        rows = per_token.sum(-1) / valid.sum(-1).clamp(min=1.0)
        return rows.mean() / accumulation
    if averaging == "local_tokens":
        return per_token.sum() / valid.sum().clamp(min=1.0) / accumulation
    if averaging == "constant":
        size = per_token.size(0) * trainer.max_completion_length
        return per_token.sum() / size / accumulation
    # Tokens of the whole generation batch, rescaled to one accumulation window.
    normalizer = num_items.clamp(min=1.0) / trainer.accelerator.num_processes
    normalizer = normalizer * accumulation / trainer.args.steps_per_generation
    return per_token.sum() / normalizer


def _log_clipping(
    trainer: Any, log_ratio: torch.Tensor, advantages: torch.Tensor, valid: torch.Tensor
) -> None:
    """TRL's clip metrics: it counted clips of the zero advantages it was given."""
    ratio = log_ratio.exp()
    if trainer.loss_type == "cispo":
        capped = (ratio > trainer.epsilon_high) & (advantages > 0)
        replace_metrics(trainer, {"cispo_clip_ratio": _global_mean(trainer, capped, valid)})
    if trainer.loss_type in ("cispo", "sapo"):
        return
    low = (ratio < 1 - trainer.epsilon_low) & (advantages < 0)
    high = (ratio > 1 + trainer.epsilon_high) & (advantages > 0)

    def rows(clipped: torch.Tensor) -> torch.Tensor:
        share = torch.where(valid, clipped, False).sum(-1) / valid.sum(-1)
        gathered: torch.Tensor = trainer.accelerator.gather(share)
        return gathered

    replace_metrics(
        trainer,
        {
            "clip_ratio/low_mean": _global_mean(trainer, low, valid),
            "clip_ratio/high_mean": _global_mean(trainer, high, valid),
            "clip_ratio/region_mean": _global_mean(trainer, low | high, valid),
            "clip_ratio/low_min": nanmin(rows(low)).item(),
            "clip_ratio/high_max": nanmax(rows(high)).item(),
        },
    )


def _global_mean(trainer: Any, values: torch.Tensor, valid: torch.Tensor) -> float:
    totals = torch.stack([torch.where(valid, values, False).sum(), valid.sum()]).float()
    totals = trainer.accelerator.reduce(totals, reduction="sum")
    return float(totals[0] / totals[1].clamp(min=1.0))


def _log_centering(
    trainer: Any,
    metrics: dict[str, torch.Tensor],
    head_log_probs: torch.Tensor,
    sampler_head: torch.Tensor,
    valid: torch.Tensor,
) -> None:
    gap = head_gap(head_log_probs.detach(), sampler_head, valid)
    names = [*metrics, "head_gap_mean", "head_gap_l1"]
    local = torch.stack(
        [value.float() for value in metrics.values()]
        + [torch.tensor(value, device=valid.device) for value in (gap.mean_abs, gap.l1)]
    )
    ranks = trainer.accelerator.gather(local.unsqueeze(0)).unbind(1)
    columns = dict(zip(names, ranks, strict=True))
    # A rank without a token in the loss has nothing to say about tokens.
    busy = columns["tokens"] > 0
    logged = {name: _over_ranks(name, values, busy) for name, values in columns.items()}
    log_metrics(
        trainer,
        {
            f"parity/score_centering/{name}": value
            for name, value in logged.items()
            if math.isfinite(value)
        },
    )


def _over_ranks(name: str, values: torch.Tensor, busy: torch.Tensor) -> float:
    """A metric of all ranks: extremes stay extremes, and one rank's fault is not divided."""
    if name == "nan_tokens":
        return float(values.sum())
    if name == "tokens" or not busy.any():
        return float(values.mean())
    values = values[busy]
    if name.endswith("_min"):
        return float(values.amin())
    return float(values.amax() if name.endswith("_max") else values.mean())
