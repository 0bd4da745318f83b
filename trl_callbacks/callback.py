"""``ParityCallback``: makes a GRPOTrainer and its sampler agree, and says when they do not."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import torch
from transformers import TrainerCallback
from trl.trainer.utils import FusedCausalLMOutput

from trl_callbacks.colocate import colocated_engine, colocated_status, install_colocated_sync
from trl_callbacks.compat import calling_trainer, log_metrics
from trl_callbacks.handshake import TrainerFacts, check_pair, check_sampling
from trl_callbacks.lm_head import ParityHead, install_parity_head
from trl_callbacks.ranks import on_main_process
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.mismatch import mismatch_metrics
from vllm_parity_plugin.wire import Status

Mode = Literal["enforce", "observe"]


class ParityCallback(TrainerCallback):
    """Parity for any ``GRPOTrainer``: fp32 head, handshake, metrics, and a stop on drift.

    Before step 1 the trainer's lm_head is made to run in fp32 on the served weights, the server
    (or the colocated engine) is asked what it really runs, and an unsafe pair refuses to train.
    A colocated engine takes weights by transaction from then on (see ``colocate``).
    During training ``parity/*`` metrics appear beside TRL's own.

    Args:
        server_url: base URL of the ``vllm serve`` that samples. By default the trainer's
            ``vllm_server_base_url`` (or host and port) in server mode, its own engine in
            colocate mode, and none otherwise.
        mode: ``enforce`` refuses unsafe pairs; ``observe`` warns instead and changes nothing.
        max_mismatch: stop training when the mean |logprob difference| of one step exceeds this
            (nats). None never stops. A healthy bf16 pair stays below about 0.02.
        token: the server's VLLM_PARITY_TOKEN; by default this process's variable.
    """

    def __init__(
        self,
        server_url: str | None = None,
        mode: Mode = "enforce",
        *,
        max_mismatch: float | None = None,
        token: str | None = None,
    ) -> None:
        if mode not in ("enforce", "observe"):
            raise ParityError(
                f"ParityCallback got mode={mode!r}.",
                "It knows two modes.",
                "use mode='enforce' (refuse unsafe pairs) or mode='observe' (only report).",
            )
        if max_mismatch is not None and not max_mismatch > 0:
            raise ParityError(
                f"ParityCallback got max_mismatch={max_mismatch}.",
                "Every run would stop at once.",
                "pass a positive number of nats such as 0.1, or None.",
            )
        self.server_url = server_url
        self.mode = mode
        self.max_mismatch = max_mismatch
        self.token = token
        self.status: Status | None = None
        self.head: ParityHead | None = None
        self.stop_reason: str | None = None
        self._trainer: Any = None
        self._log_probs: torch.Tensor | None = None
        self._step_mismatch: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set up, at the latest possible moment before step 1."""
        self.setup(calling_trainer())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the run when the sampler has drifted away from the trainer."""
        values, self._step_mismatch = self._step_mismatch, []
        if self.max_mismatch is None or not values:
            return
        mismatch = sum(values) / len(values)
        if mismatch > self.max_mismatch or math.isnan(mismatch):
            self.stop_reason = (
                f"Training stopped at step {state.global_step}: the mean logprob difference "
                f"between sampler and trainer is {mismatch:.4f} nats, above max_mismatch="
                f"{self.max_mismatch}. Gradients from such rollouts are biased. Fix: check that "
                "weight updates reach the server (parity/policy_version grows by one a step) and "
                "its GET /v1/parity/status."
            )
            warnings.warn(self.stop_reason, stacklevel=2)
            control.should_training_stop = True

    def setup(self, trainer: Any, *, head_size: int = 0, support: bool = False) -> None:
        """Check the pair and prepare the trainer, once.

        Args:
            trainer: the GRPOTrainer.
            head_size: sampler head entries per token that the loss needs.
            support: the loss uses the support form.

        Raises:
            ParityError: the pair is unsafe (mode ``enforce``).
        """
        if self._trainer is trainer:
            return
        facts = trainer_facts(trainer, head_size=head_size, support=support)
        self._guard(lambda: check_sampling(facts))
        self.status = self._ask(trainer)
        if self.status is not None:
            status = self.status
            self._guard(lambda: self._warn(check_pair(status, facts)))
        self._trainer = trainer
        if self.mode == "enforce" and colocated_engine(trainer) is not None:
            install_colocated_sync(trainer)
        if self.mode == "enforce" or head_size:
            self.head = install_parity_head(
                trainer.model,
                temperature=trainer.temperature,
                served_dtype=self._served_dtype(trainer),
            )
        self._watch_loss(trainer)

    def record(
        self, trainer: Any, log_probs: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Measure one micro-batch ([B, T] each) and add it to the trainer's metrics."""
        metrics = mismatch_metrics(log_probs, sampler, mask)
        # One vector, one collective: every rank takes part, whatever it holds.
        values = torch.tensor(
            [
                metrics.mean_abs,
                metrics.p99_abs,
                metrics.max_abs,
                metrics.k1,
                metrics.k3,
                metrics.ess,
                metrics.ratio_mean,
                metrics.ratio_min,
                metrics.ratio_max,
                float(metrics.nan_tokens),
            ],
            dtype=torch.float64 if log_probs.device.type != "mps" else torch.float32,
            device=log_probs.device,
        )
        gathered = trainer.accelerator.gather(values.unsqueeze(0))
        mean, low, high = gathered.mean(0), gathered.amin(0), gathered.amax(0)
        log_metrics(
            trainer,
            {
                "parity/logprob_diff/mean": mean[0].item(),
                "parity/logprob_diff/p99": high[1].item(),
                "parity/logprob_diff/max": high[2].item(),
                "parity/kl/k1": mean[3].item(),
                "parity/kl/k3": mean[4].item(),
                "parity/ess": mean[5].item(),
                "parity/ratio/mean": mean[6].item(),
                "parity/ratio/min": low[7].item(),
                "parity/ratio/max": high[8].item(),
                "parity/nan_tokens": gathered[:, 9].sum().item(),
            },
        )
        if trainer.model.training:
            self._step_mismatch.append(mean[0].item())

    def _ask(self, trainer: Any) -> Status | None:
        url = self.server_url or server_url(trainer)
        if url is None:
            return None if colocated_engine(trainer) is None else colocated_status(trainer)

        def ask() -> Status:
            client = ParityClient(url, token=self.token, timeout=60.0)
            try:
                return client.status()
            finally:
                client.close()

        return on_main_process(trainer.accelerator, ask)

    def _served_dtype(self, trainer: Any) -> torch.dtype:
        """Dtype of the served head's weights; the trainer's own when nothing is served."""
        served = self.status.head if self.status is not None else None
        if served is None:
            own: torch.dtype = next(trainer.model.parameters()).dtype
            return own
        dtype: torch.dtype = getattr(torch, served.weight_dtype)
        return dtype

    def _watch_loss(self, trainer: Any) -> None:
        """Read the log-probabilities of every loss, and the sampler's beside them."""

        def keep_log_probs(model: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, FusedCausalLMOutput):
                self._log_probs = output.log_probs.detach()

        trainer.model.register_forward_hook(keep_log_probs)
        original = trainer.compute_loss

        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._log_probs = None
            loss = original(model, inputs, *args, **kwargs)
            sampler, log_probs = inputs.get("sampling_per_token_logps"), self._log_probs
            if sampler is not None and log_probs is not None:
                mask = inputs["completion_mask"]
                if "tool_mask" in inputs:
                    mask = mask * inputs["tool_mask"]
                self.record(trainer, log_probs[:, -sampler.size(1) :], sampler, mask)
            return loss

        trainer.compute_loss = compute_loss

    def _guard(self, check: Any) -> None:
        try:
            check()
        except ParityError as error:
            if self.mode == "enforce":
                raise
            self._warn([str(error)])

    def _warn(self, messages: list[str]) -> None:
        for message in messages:
            warnings.warn(f"vllm-parity: {message}", stacklevel=3)


def trainer_facts(trainer: Any, *, head_size: int, support: bool) -> TrainerFacts:
    """What the handshake needs to know of a GRPOTrainer."""
    config = trainer.model.config.get_text_config()
    return TrainerFacts(
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k or 0,
        min_p=trainer.min_p,
        repetition_penalty=trainer.repetition_penalty,
        overrides=dict(trainer.args.generation_kwargs or {}),
        dtype=str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        vocab_size=int(config.vocab_size),
        head_size=head_size,
        support=support,
        moe=hasattr(config, "output_router_logits"),
    )


def server_url(trainer: Any) -> str | None:
    """URL of the server that a trainer's own arguments name, None outside server mode."""
    args = trainer.args
    if not (args.use_vllm and args.vllm_mode == "server"):
        return None
    if args.vllm_server_base_url:
        return str(args.vllm_server_base_url)
    return f"http://{args.vllm_server_host}:{args.vllm_server_port}"
