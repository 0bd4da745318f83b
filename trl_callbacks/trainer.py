"""``ParityGRPOTrainer``: TRL's GRPOTrainer with parity rollouts and the score-centering loss."""

from __future__ import annotations

from typing import Any, cast

import torch
from trl import GRPOTrainer

from trl_callbacks.audit import check_audit, log_top_k_gap
from trl_callbacks.callback import Mode, ParityCallback, server_url
from trl_callbacks.centred_loss import centred_loss, loss_mask
from trl_callbacks.colocate import install_colocated_sync
from trl_callbacks.colocated_generation import adopt
from trl_callbacks.compat import log_metrics
from trl_callbacks.config import ParityGRPOConfig
from trl_callbacks.generation import generation_for, log_update
from trl_callbacks.head_scorer import HeadScorer
from trl_callbacks.heads import (
    HEAD_IDS,
    HEAD_LOGPROBS,
    OLD_HEAD_LOGPROBS,
    Rows,
)
from trl_callbacks.rollout import ParityRollout
from trl_callbacks.score_centering import valid_tokens
from trl_callbacks.transfer import Transfer
from trl_callbacks.weight_sync import KV, Transport
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import HeadDtype


class ParityGRPOTrainer(GRPOTrainer):
    """GRPO whose rollouts carry the sampler's head and whose loss is centred on it.

    Takes everything ``GRPOTrainer`` takes; ``args`` is a :class:`ParityGRPOConfig`. A
    ``ParityCallback`` is added unless one is given. The server is checked in the constructor, so
    an unsafe pair never starts to train.

    Raises:
        ParityError: an unsafe pair, or a setting that score centering does not fit.
    """

    _name = "ParityGRPO"
    vllm_generation: Any

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
        if isinstance(kwargs.get("rollout_func"), ParityRollout):
            raise ParityError(
                "ParityGRPOTrainer got a ParityRollout as its rollout_func.",
                "It samples through the parity server itself, and the heads of another sampler "
                "would not be found.",
                "leave rollout_func out; in one of your own, sample with trainer.sample.",
            )
        callbacks = list(callbacks or [])
        given = [callback for callback in callbacks if isinstance(callback, ParityCallback)]
        self.parity = (
            given[0]
            if given
            else ParityCallback(
                mode=cast(Mode, config.parity_mode),
                max_mismatch=config.parity_max_mismatch,
            )
        )
        if not given:
            callbacks.append(self.parity)
        # TRL's backend would join an NCCL group with a server; ours replaces it below. Off while
        # the parent is built, so that no such group is made, then on for everything after.
        config.use_vllm = config.vllm_mode == "colocate"
        try:
            super().__init__(model, *args, callbacks=callbacks, **kwargs)
        finally:
            config.use_vllm = True
        self.use_vllm = True
        if config.vllm_mode == "colocate":
            own: Any = self.vllm_generation
            self.vllm_generation = adopt(own, config.rollout_seed)
        self._last_loaded_step = -1
        self.parity_weight = config.weight() if config.score_centering else None
        self.parity_ratio = config.ratio() if config.score_centering else None
        self._rows: Rows | None = None
        self._old_head: torch.Tensor | None = None
        self._scoring_old = False
        self._refuse_router_loss()
        self.parity.setup(
            self,
            head_size=config.score_centering_top_k if config.score_centering else 0,
            support=config.score_centering_support,
        )
        if config.score_centering:
            check_audit(
                config.score_centering_audit, config.score_centering_top_k, self.parity.status
            )
        if config.vllm_mode == "colocate":
            install_colocated_sync(self)  # also in mode observe: TRL's own sync has no way back
        else:
            self.vllm_generation = generation_for(
                self,
                ParityClient(self._server_url(), token=self.parity.token),
                config.rollout_seed,
                cast(Transport, config.weight_transport),
                cast(KV, config.weight_kv),
                Transfer(
                    cast(HeadDtype, config.rollout_head_dtype),
                    config.rollout_compression == "zstd",
                    config.rollout_requests == "prompt",
                ),
            )

    def sample(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """One completion per prompt from the current policy, for a ``rollout_func``.

        Call it as often as the rollout has turns. Give the logprobs back as they are: each knows
        which sampled token it is, and so which head it has. Lists may be cut and joined, and
        completions left out; tokens that come from elsewhere get any number as their logprob, and
        0 in ``env_mask``.

        Returns:
            completion ids and logprobs, token by token.

        Raises:
            ParityError: the server refuses, or is gone.
        """
        _, completion_ids, logprobs, _ = self.vllm_generation.generate(prompt_ids, None, 1)
        return completion_ids, [[token[0] for token in row] for row in logprobs]

    def _server_url(self) -> str:
        url = self.parity.server_url or server_url(self)
        assert url is not None  # server mode is checked by the configuration
        return url

    def _refuse_router_loss(self) -> None:
        if self.parity_weight is not None and self.aux_loss_enabled:
            raise ParityError(
                f"{type(self.model).__name__} has a router loss (router_aux_loss_coef="
                f"{self.router_aux_loss_coef}).",
                "The centred loss does not compute it.",
                "set router_aux_loss_coef=0.0, or score_centering=False.",
            )

    def _generate(self, prompts: list[Any]) -> Any:
        """TRL's generation, tool turns included, and where its tokens came from."""
        self.vllm_generation.begin(self.state.global_step, self.model.training)
        result = super()._generate(prompts)
        completion_ids, logprobs = result[1], result[4]
        if logprobs is None:  # a rollout_func may have none
            logprobs = [[0.0] * len(ids) for ids in completion_ids]
        rollouts = self.vllm_generation.rollouts
        if self.args.score_centering_support and self.vllm_generation.logprobs:
            rollouts.check_support()
        # An evaluation needs no heads, so its logprobs may come from anywhere.
        trained = (
            result[2]
            if self.vllm_generation.logprobs
            else [[0] * len(ids) for ids in completion_ids]
        )
        self._rows = rollouts.rows(
            completion_ids, logprobs, trained, ordered=self.rollout_func is None
        )
        return result

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's pass for the policy of the rollout also scores the heads, where the loss asks."""
        if not self._scoring_old:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        # The first call of a generation scores the old policy; the reference model's follows.
        self._scoring_old = False
        assert self._rows is not None  # tokens are scored after they were generated
        ids, _ = self._rows.heads(args[2], self.accelerator.device)
        scorer = HeadScorer(model, ids)
        result = super()._get_per_token_logps_and_entropies(scorer, *args, **kwargs)
        self._old_head = scorer.scored("head_log_probs")
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's rollout and advantages, plus the sampler's heads as tensors of the batch."""
        training = self.model.training
        centring = self.parity_weight is not None and training
        # Evaluation needs no heads and must not pay for them (case S11).
        self.vllm_generation.logprobs = self.args.score_centering_top_k if centring else 0
        updated = self.vllm_generation.last_update
        self._scoring_old = centring and self.args.several_steps
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self._rows is not None and not self._scoring_old
        # In colocate mode the sync itself logs.
        if self.vllm_generation.last_update is not updated and self.vllm_mode == "server":
            log_update(self, self.vllm_generation)
        dropped = self._rows.unusable()
        if training:
            count = torch.tensor(len(dropped), device=self.accelerator.device)
            every = float(self.accelerator.gather(count).sum())
            log_metrics(self, {"parity/dropped_completions": every})
        output["completion_mask"][sorted(dropped)] = 0
        counted = loss_mask(output)
        if centring:
            tokens, device = output["completion_ids"].size(1), output["completion_ids"].device
            ids, logprobs = self._rows.heads(tokens, device)
            output[HEAD_IDS], output[HEAD_LOGPROBS] = ids, logprobs
            if self._old_head is not None:
                output[OLD_HEAD_LOGPROBS], self._old_head = self._old_head, None
            counted = valid_tokens(output["sampling_per_token_logps"], logprobs, counted)
            if self.args.score_centering_audit:
                log_top_k_gap(self, output, counted)
        # What left the loss leaves its denominator too, as TRL's truncated completions do. Every
        # rank takes part in the sum, whether it dropped anything or not.
        output["num_items_in_batch"] = self.accelerator.gather(counted.sum()).sum()
        self._rows = None
        return output

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
        return centred_loss(self, model, inputs)
