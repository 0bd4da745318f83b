"""Rollouts with heads from the engine in a trainer's own process (TRL's colocate mode)."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl.generation.vllm_generation import VLLMGeneration

from trl_callbacks.generation import ParityBackend
from vllm_parity_plugin.colocated_rollouts import colocated_rollout
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest


class ColocatedGeneration(ParityBackend):
    """TRL's colocated backend, whose engine returns arrays with heads.

    Waking, sleeping and gathering are in TRL's order (read in 1.16). Sleep mode and tensor
    parallelism need CUDA, and have not been run here.
    """

    _llm_weights_sleeping: bool

    def fetch(self, request: RolloutRequest) -> Rollout:
        """See :class:`ParityBackend`."""
        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:  # level 2 discards them
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        if self.tensor_parallel_size > 1:
            rollout = self._of_group(request)
        else:
            rollout = colocated_rollout(self.llm, request)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        return rollout

    def _of_group(self, request: RolloutRequest) -> Rollout:
        """Every rank of a tensor-parallel group samples for all of them, in step, and keeps its
        own share."""
        gathered: list[Any] = [None] * self.tensor_parallel_size
        own = (request.prompts, request.seeds)
        torch.distributed.all_gather_object(gathered, own, group=self.tp_group)
        if is_peft_model(self.model):  # trl#3671: NCCL of the trainer and of vLLM must not overlap
            torch.distributed.barrier(device_ids=[self.accelerator.local_process_index])
        prompts = [prompt for theirs, _ in gathered for prompt in theirs]
        seeds = None
        if request.seeds is not None:
            seeds = [seed for _, theirs in gathered for seed in theirs]
        everyone = request.model_copy(update={"prompts": prompts, "seeds": seeds})
        rollout = colocated_rollout(self.llm, everyone)
        before = torch.distributed.get_rank(group=self.tp_group)
        first = sum(len(theirs) for theirs, _ in gathered[:before])
        return rollout.part(first, first + len(request.prompts))


def adopt(generation: VLLMGeneration, seed: int | None) -> ColocatedGeneration:
    """The backend that TRL made, engine included, as one that returns heads."""
    adopted = ColocatedGeneration.__new__(ColocatedGeneration)
    adopted.__dict__.update(generation.__dict__)
    adopted._prepare(seed)
    return adopted
