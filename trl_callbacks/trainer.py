"""``ParityGRPOTrainer``: TRL's GRPOTrainer with parity rollouts and the score-centering loss."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from trl import GRPOTrainer

from trl_callbacks.callback import ParityCallback, server_url
from trl_callbacks.compat import log_metrics
from trl_callbacks.config import ParityGRPOConfig
from trl_callbacks.rollout import generation_for, log_update, padded_heads, unusable_rows
from trl_callbacks.score_centering import score_centering_loss, valid_tokens
from trl_callbacks.weight_sync import KV, Transport
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.mismatch import head_gap

HEAD_IDS = "sampler_head_ids"
HEAD_LOGPROBS = "sampler_head_logprobs"


class ParityGRPOTrainer(GRPOTrainer):
    """GRPO whose rollouts carry the sampler's head and whose loss is centred on it.

    Takes everything ``GRPOTrainer`` takes; ``args`` is a :class:`ParityGRPOConfig`. A
    ``ParityCallback`` is added unless one is given. The server is checked in the constructor, so
    an unsafe pair never starts to train.

    Raises:
        ParityError: an unsafe pair, or a setting that score centering does not fit.
    """

    _name = "ParityGRPO"

    def __init__(
        self, model: Any, *args: Any, callbacks: list[Any] | None = None, **kwargs: Any
    ) -> None:
        config = kwargs.get("args", args[1] if len(args) > 1 else None)
        if not isinstance(config, ParityGRPOConfig):
            raise ParityError(
                f"ParityGRPOTrainer got args of type {type(config).__name__}.",
                "Score centering has settings that a GRPOConfig does not carry.",
                "pass args=ParityGRPOConfig(...); it takes every GRPOConfig argument.",
            )
        if config.score_centering and (kwargs.get("tools") or kwargs.get("environment_factory")):
            raise ParityError(
                "Score centering was asked for together with tools or an environment.",
                "One completion is then sampled in several turns, and heads are kept for one.",
                "train without tools, or set score_centering=False.",
            )
        if kwargs.get("rollout_func") is not None:
            raise ParityError(
                "ParityGRPOTrainer got a rollout_func.",
                "It samples through the parity server itself, to record the sampler's heads.",
                "leave rollout_func out, or use GRPOTrainer with ParityCallback.",
            )
        callbacks = list(callbacks or [])
        given = [callback for callback in callbacks if isinstance(callback, ParityCallback)]
        self.parity = (
            given[0]
            if given
            else ParityCallback(
                mode=config.parity_mode,  # type: ignore[arg-type]
                max_mismatch=config.parity_max_mismatch,
            )
        )
        if not given:
            callbacks.append(self.parity)
        # TRL's backend would join an NCCL group with the server; ours replaces it below. Off while
        # the parent is built, so that no such group is made, then on for everything after.
        config.use_vllm = False
        try:
            super().__init__(model, *args, callbacks=callbacks, **kwargs)
        finally:
            config.use_vllm = True
        self.use_vllm = True
        self._last_loaded_step = -1
        self._weight = config.weight() if config.score_centering else None
        self._refuse_router_loss()
        self.parity.setup(
            self,
            head_size=config.score_centering_top_k if config.score_centering else 0,
            support=config.score_centering_support,
        )
        self.vllm_generation = generation_for(
            self,
            ParityClient(self._server_url(), token=self.parity.token),
            config.rollout_seed,
            cast(Transport, config.weight_transport),
            cast(KV, config.weight_kv),
        )

    def _server_url(self) -> str:
        url = self.parity.server_url or server_url(self)
        assert url is not None  # server mode is checked by the configuration
        return url

    def _refuse_router_loss(self) -> None:
        if self._weight is not None and self.aux_loss_enabled:
            raise ParityError(
                f"{type(self.model).__name__} has a router loss (router_aux_loss_coef="
                f"{self.router_aux_loss_coef}).",
                "The centred loss does not compute it.",
                "set router_aux_loss_coef=0.0, or score_centering=False.",
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's rollout and advantages, plus the sampler's heads as tensors of the batch."""
        training = self.model.training
        centring = self._weight is not None and training
        # Evaluation needs no heads and must not pay for them (case S11).
        self.vllm_generation.logprobs = self.args.score_centering_top_k if centring else 0
        updated = self.vllm_generation.last_update
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rollout = self.vllm_generation.last_rollout
        assert rollout is not None  # super() has just generated
        if self.vllm_generation.last_update is not updated:
            log_update(self, self.vllm_generation)
        dropped = unusable_rows(rollout)
        if training:
            log_metrics(self, {"parity/dropped_completions": float(len(dropped))})
        if dropped:
            self._drop(output, sorted(dropped))
        if centring:
            tokens, device = output["completion_ids"].size(1), output["completion_ids"].device
            output[HEAD_IDS], output[HEAD_LOGPROBS] = padded_heads(rollout, tokens, device)
        return output

    def _drop(self, output: dict[str, Any], rows: list[int]) -> None:
        """Take completions out of loss and denominator, as TRL does with truncated ones."""
        output["completion_mask"][rows] = 0
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        output["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The centred loss where the batch holds heads, TRL's own everywhere else."""
        if HEAD_IDS not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            raise ValueError("The GRPOTrainer does not support returning outputs")
        return self._centred_loss(model, inputs)

    def _centred_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        assert self._weight is not None  # heads are in the batch only when it is set
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        log_probs, entropy, head_log_probs = self._score(model, inputs)
        sampler, sampler_head = inputs["sampling_per_token_logps"], inputs[HEAD_LOGPROBS]
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        per_token, metrics = score_centering_loss(
            log_probs,
            head_log_probs,
            sampler,
            sampler_head,
            advantages,
            weight=self._weight,
            mask=mask,
            support=self.args.score_centering_support,
        )
        valid = valid_tokens(sampler, sampler_head, mask)
        if self.top_entropy_quantile < 1.0:
            # A function of the prefix, not of the sampled token: a constant factor on both parts.
            per_token = per_token * self.get_high_entropy_mask(
                entropy, mask, 1 - self.top_entropy_quantile
            )
        if self.vllm_importance_sampling_correction:
            per_token = per_token * inputs["importance_sampling_ratio"]
        if self.beta != 0.0:
            kl = _k3(inputs["ref_per_token_logps"], log_probs, self.args.use_bias_correction_kl)
            per_token = per_token + self.beta * torch.where(valid, kl, 0.0)
            log_metrics(self, {"kl": self._global_mean(kl, valid)})
        log_metrics(self, {"entropy": self._global_mean(entropy, valid)})
        self._log_centering(metrics, head_log_probs, sampler_head, valid)
        return self._reduce(per_token, valid, inputs["num_items_in_batch"])

    def _score(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """log p of sampled tokens [B, T], entropy [B, T] and log p on the head [B, T, K]."""
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        tokens, head_ids = inputs["completion_ids"].size(1), inputs[HEAD_IDS]
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-tokens] = -100
        prompt = inputs["prompt_ids"].size(1)
        # Position t of the output predicts token t + 1; prompt positions carry no head.
        padded = torch.nn.functional.pad(head_ids, (0, 0, prompt - 1, 0), value=-1)
        with self.accelerator.autocast():
            output = model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                labels=labels,
                fused_lm_head=True,
                head_ids=padded,
            )
        return (
            output.log_probs[:, -tokens:],
            output.entropy[:, -tokens:],
            output.head_log_probs[:, -tokens:],
        )

    def _reduce(
        self, per_token: torch.Tensor, valid: torch.Tensor, num_items: torch.Tensor
    ) -> torch.Tensor:
        """TRL's averaging over tokens for each loss type, with one mask above and below."""
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 1.0
        if self.loss_type == "grpo":
            rows = per_token.sum(-1) / valid.sum(-1).clamp(min=1.0)
            return rows.mean() / accumulation
        if self.loss_type == "bnpo":
            return per_token.sum() / valid.sum().clamp(min=1.0) / accumulation
        if self.loss_type == "dr_grpo":
            size = per_token.size(0) * self.max_completion_length
            return per_token.sum() / size / accumulation
        # dapo: tokens of the whole generation batch, rescaled to one accumulation window
        normalizer = num_items.clamp(min=1.0) / self.accelerator.num_processes
        normalizer = normalizer * accumulation / self.args.steps_per_generation
        return per_token.sum() / normalizer

    def _global_mean(self, values: torch.Tensor, valid: torch.Tensor) -> float:
        totals = torch.stack([torch.where(valid, values.detach(), 0.0).sum(), valid.sum().float()])
        totals = self.accelerator.reduce(totals, reduction="sum")
        return float(totals[0] / totals[1].clamp(min=1.0))

    def _log_centering(
        self,
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
        means = self.accelerator.gather(local.unsqueeze(0)).mean(0).tolist()
        log_metrics(
            self,
            {
                f"parity/score_centering/{name}": value
                for name, value in zip(names, means, strict=True)
                if math.isfinite(value)
            },
        )


def _k3(reference: torch.Tensor, log_probs: torch.Tensor, corrected: bool) -> torch.Tensor:
    """TRL's estimate of the KL to the reference model, per token [B, T]."""
    kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    # On-policy the correction's ratio is 1 in value; it changes the gradient only.
    return kl * torch.exp(log_probs - log_probs.detach()) if corrected else kl
