"""Training runs on two processes, for test_sharded: what each process runs, and how it is started.

``accelerate`` switches FSDP off on CPU and falls back to DDP without a word, so that its choice of
backend is replaced here, in the processes of these tests only.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.trainer.runs import parity_trainer
from trl_callbacks import ParityGRPOTrainer
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest

PROCESSES = 2
TIMEOUT = 600.0
SHARDED = {
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
SGD = {"optim": "sgd", "learning_rate": 0.1}
"""Adam would make a whole step of what is rounding noise in a gradient."""


@dataclasses.dataclass
class Job:
    """One run of one process or of all.

    Attributes:
        model: directory of the served model.
        url: its server.
        batch: file of a generation batch, trained on before any rollout of the run itself.
        replays: steps on that batch.
        steps: all steps; those after the replays sample from the server.
        lora: train an adapter.
        faulty: rank 1 gets a rollout with an aborted completion and a NaN.
        shard: FSDP2 instead of DDP.
    """

    model: Path
    url: str
    batch: Path
    replays: int
    steps: int
    lora: bool = False
    faulty: bool = False
    shard: bool = False


class Replaying(ParityGRPOTrainer):
    """Its first steps use a given batch, each rank its own rows."""

    job: Job

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.state.global_step >= self.job.replays:
            return super()._generate_and_score_completions(inputs)
        batch = torch.load(self.job.batch)
        rows = len(batch["advantages"]) // self.accelerator.num_processes
        first = rows * self.accelerator.process_index
        mine = slice(first, first + rows)
        return {name: v if v.dim() == 0 else v[mine] for name, v in batch.items()}


class Faulty:
    """A client whose first completion was aborted, and whose last token has a NaN in its head."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def rollout(self, request: RolloutRequest, **form: Any) -> Rollout:
        rollout = self._client.rollout(request, **form)
        heads = rollout.head_logprobs.copy()
        heads[-1, -1] = float("nan")
        reasons = ["abort", *rollout.finish_reasons[1:]]
        return dataclasses.replace(rollout, finish_reasons=reasons, head_logprobs=heads)


class Watching(TrainerCallback):
    """The whole gradients of each step, and the weights after each."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.weights.append({name: whole(p.detach()) for name, p in named})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def trainer_for(job: Job, directory: Path, **values: Any) -> Replaying:
    from peft import LoraConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    extra: dict[str, Any] = {"callbacks": [Watching()]}
    if job.lora:
        extra["peft_config"] = LoraConfig(
            r=4, lora_alpha=1, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
    trainer = parity_trainer(
        model,
        AutoTokenizer.from_pretrained(job.model),
        job.url,
        directory,
        kind=Replaying,
        max_steps=job.steps,
        max_grad_norm=1e9,
        trainer=extra,
        **SGD,
        **values,
    )
    trainer.job = job
    trainer.reward_funcs = [graded]
    return trainer


def graded(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within every group: any function of the tokens does."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def outcome(trainer: Replaying) -> dict[str, Any]:
    """Train, and tell what there is to compare."""
    trainer.train()
    watching = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Watching))
    return {
        "fsdp": trainer.is_fsdp_enabled,
        "wrapped": type(trainer.model_wrapped).__name__,
        "gradients": watching.gradients,
        "weights": watching.weights,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
    }


def process(rank: int, jobs: list[Job], out: Path) -> None:
    """One of the processes: every job, one after the other."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
    }
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(out / "store"), PROCESSES)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    for number, job in enumerate(jobs):
        if job.shard:
            _shard_on_cpu()
        values = {"per_device_train_batch_size": 8, "use_cpu": not job.shard}
        trainer = trainer_for(job, out / f"run{number}", **values)
        if job.faulty and rank == 1:
            trainer.vllm_generation.client = Faulty(trainer.vllm_generation.client)
        torch.save(outcome(trainer), out / f"{number}-{rank}.pt")
    torch.distributed.destroy_process_group()


def _shard_on_cpu() -> None:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ |= SHARDED
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    AcceleratorState._reset_state(reset_partial_state=True)


def on_two_processes(jobs: list[Job], out: Path) -> list[list[dict[str, Any]]]:
    """Run jobs on two processes: for each job, what each rank tells."""
    context = mp.spawn(process, args=(jobs, out), nprocs=PROCESSES, join=False)
    deadline = time.monotonic() + TIMEOUT
    while not context.join(timeout=1.0):
        if time.monotonic() > deadline:
            for running in context.processes:
                running.kill()
            raise TimeoutError(f"two processes did not end within {TIMEOUT:.0f} s")
    return [
        [torch.load(out / f"{number}-{rank}.pt") for rank in range(PROCESSES)]
        for number in range(len(jobs))
    ]
