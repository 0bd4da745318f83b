"""TRL's generation backend against a parity server, with sampler heads.

``ParityGeneration`` stands in for TRL's ``VLLMGeneration``. It pushes weights through
``/v1/parity/weights``, so it works without NCCL, on CPU and CUDA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from trl.generation.vllm_generation import VLLMGeneration

from trl_callbacks.compat import log_metrics
from trl_callbacks.heads import NOBODYS, Rollouts
from trl_callbacks.policy_tensors import check_ties, merged_tensors, policy_tensors
from trl_callbacks.ranks import on_main_process
from trl_callbacks.transfer import PLAIN, Transfer
from trl_callbacks.weight_sync import KV, Transport, WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest, Sampling
from vllm_parity_plugin.weights.messages import WeightUpdateResult


class ParityBackend(VLLMGeneration):
    """TRL's generation backend, with heads: what server and colocate mode share.

    Attributes:
        seed: makes rollouts repeatable; each sequence gets a seed derived from it, the rank and
            the place of the call (see ``begin``). None leaves sampling to the engine's own
            generator.
        rollouts: this process's rollouts since the trainer began a generation.
        last_rollout: this process's latest rollout, prompt-major as TRL's rows are.
        last_update: the latest weight update; None before the first.
    """

    def _prepare(self, seed: int | None) -> None:
        self.seed = seed
        self._step, self._training = 0, True
        self._calls: Counter[bool] = Counter()
        self.rollouts = Rollouts()
        self.last_rollout: Rollout | None = None
        self.last_update: WeightUpdateResult | None = None

    def begin(self, step: int, training: bool) -> None:
        """Start a generation: forget earlier rollouts, and say where in the run its seeds stand.

        A count of all calls would not do: it starts again in a resumed run, whose steps would
        repeat the seeds of the first ones, and an evaluation would shift those of training.
        """
        self.rollouts = Rollouts()
        if step != self._step:
            self._calls.clear()
        self._step, self._training = step, training

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """One completion per prompt (TRL repeats prompts ``num_generations`` times).

        Returns:
            prompt ids, completion ids, ``[[logprob]]`` of each sampled token (a
            ``SampledLogprob``), and None in place of TRL's top-k ids: heads are arrays in
            ``last_rollout``.
        """
        if images is not None and any(image is not None for image in images):
            raise ParityError(
                "The prompts hold images.",
                "Parity rollouts carry token ids only.",
                "train on text, or use TRL's own vLLM mode with ParityCallback.",
            )
        request = RolloutRequest(
            prompts=prompts,
            head_size=self.logprobs or 0,
            seeds=self._seeds(len(prompts)),
            sampling=self.sampling(),
        )
        with profiler or nullcontext():
            rollout = self.fetch(request)
        self.last_rollout = rollout
        # TRL reads the last token of each completion. One that was aborted before its first gets
        # padding that nobody sampled; it is dropped whole once its row is known.
        padding = [self.processing_class.pad_token_id or 0]
        ids = [
            rollout.token_ids[rollout.span(row)].tolist() or padding for row in range(len(rollout))
        ]
        logprobs: list[list[list[float]]] = [
            [[value] for value in row] or [[NOBODYS]] for row in self.rollouts.add(rollout)
        ]
        return prompts, ids, logprobs, None

    def fetch(self, request: RolloutRequest) -> Rollout:
        """The completions of a request, of which nothing is remembered here."""
        raise NotImplementedError

    def sampling(self) -> Sampling:
        """The sampling parameters of a request.

        Raises:
            ParityError: ``generation_kwargs`` asks for something that would be dropped.
        """
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "max_tokens": self.max_completion_length,
            **self.generation_kwargs,
        }
        unknown = sorted(values.keys() - Sampling.model_fields.keys())
        if unknown:
            raise ParityError(
                f"generation_kwargs has {', '.join(unknown)}, which parity rollouts do not take.",
                "It would be dropped, and the sampler would not do what was asked.",
                f"remove it; parity rollouts take {', '.join(sorted(Sampling.model_fields))}.",
            )
        return Sampling(**values)

    def _seeds(self, count: int) -> list[int] | None:
        self._calls[self._training] += 1
        if self.seed is None:
            return None
        place = [self._step, int(self._training), self._calls[self._training]]
        entropy = [self.seed, self.accelerator.process_index, *place]
        state = np.random.SeedSequence(entropy).generate_state(count, dtype=np.uint32)
        return [int(value) for value in state]


class ParityGeneration(ParityBackend):
    """The backend against a parity server.

    Every process samples its own prompts, so heads never travel between ranks; the main process
    alone pushes weights.

    Args:
        client: the server.
        seed: see :class:`ParityBackend`.
        transport: how weights travel (see ``WeightSync``).
        kv: what becomes of the KV cache of requests in flight when weights change.
        transfer: how rollouts travel.
        **kwargs: TRL's ``VLLMGeneration`` arguments. ``logprobs`` is the head size K.
    """

    def __init__(
        self,
        *args: Any,
        client: ParityClient,
        seed: int | None,
        transport: Transport = "auto",
        kv: KV = "keep",
        transfer: Transfer = PLAIN,
        **kwargs: Any,
    ) -> None:
        self.client = client
        self._prepare(seed)
        self._transport: Transport = transport
        self._kv: KV = kv
        self._transfer = transfer
        self._sync: WeightSync | None = None
        super().__init__(*args, mode="server", **kwargs)

    def _init_vllm(self) -> None:
        """Find the weights directory instead of joining an NCCL group."""

        def connect() -> None:
            self._sync = WeightSync(self.client, self._transport)
            check_ties(self.model, self._sync.expected)

        on_main_process(self.accelerator, connect)

    def sync_weights(self) -> None:
        """Push the trainer's weights as the next policy version, on all ranks or none."""
        named = named_params(self)

        def push() -> WeightUpdateResult:
            assert self._sync is not None
            try:
                return self._sync.push(policy_tensors(named), kv=self._kv)
            finally:
                for _ in named:  # other ranks are in the same gathers
                    pass

        if not self.accelerator.is_main_process:
            for _ in named:
                pass
        self.last_update = on_main_process(self.accelerator, push)

    def fetch(self, request: RolloutRequest) -> Rollout:
        """See :class:`ParityBackend`."""
        return self._transfer.fetch(self.client, request)


def named_params(generation: VLLMGeneration) -> Iterator[tuple[str, torch.Tensor]]:
    """TRL's gathered parameters; of a whole PEFT model, merged ones that leave it as it is."""
    dist = generation._dist
    if is_peft_model(generation.model) and not (dist.is_fsdp or dist.is_zero3):
        return merged_tensors(generation.model)
    named: Iterator[tuple[str, torch.Tensor]] = generation._iter_named_params()
    return named


def generation_for(
    trainer: Any,
    client: ParityClient,
    seed: int | None,
    transport: Transport = "auto",
    kv: KV = "keep",
    transfer: Transfer = PLAIN,
) -> ParityGeneration:
    """A backend with the sampling parameters of a trainer."""
    return ParityGeneration(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        logprobs=0,
        generation_kwargs=trainer.args.generation_kwargs,
        client=client,
        seed=seed,
        transport=transport,
        kv=kv,
        transfer=transfer,
    )


def log_update(trainer: Any, generation: ParityGeneration) -> None:
    """Put the latest weight update among the trainer's metrics."""
    update = generation.last_update
    if update is not None:
        log_metrics(
            trainer,
            {
                "parity/policy_version": float(update.policy_version),
                "parity/weight_update/pause_seconds": update.pause_seconds,
                "parity/weight_update/total_seconds": update.total_seconds,
                "parity/weight_update/bytes": float(update.bytes),
            },
        )
