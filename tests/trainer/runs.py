"""Small training runs on the Countdown task."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from trl_callbacks import ParityGRPOConfig, ParityGRPOTrainer
from trl_callbacks.head_scorer import HeadScorer
from trl_callbacks.heads import HEAD_IDS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GENERATIONS = 4
Start = Callable[..., ParityGRPOTrainer]
"""``parity_trainer`` with what every test gives it."""


def example(name: str) -> ModuleType:
    """A module of the examples directory, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


countdown = example("countdown")


def arguments(directory: Path, **values: Any) -> dict[str, Any]:
    """Settings of a run of a few steps: 4 problems x 4 completions, on the CPU, silent."""
    return {
        "output_dir": str(directory),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "per_device_train_batch_size": 4 * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": 24,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "scale_rewards": "none",
        "loss_type": "dapo",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        **values,
    }


def parity_trainer(
    policy: Any, tokenizer: Any, url: str, directory: Path, *, kind: Any = None, **values: Any
) -> ParityGRPOTrainer:
    """A ParityGRPOTrainer (or a subclass) on a server; trainer arguments under ``trainer``."""
    extra = values.pop("trainer", {})
    config = ParityGRPOConfig(
        **{"vllm_server_base_url": url, "rollout_seed": 0, **arguments(directory, **values)}
    )
    return (kind or ParityGRPOTrainer)(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=countdown.solved,
        args=config,
        train_dataset=countdown.problems(64, 0, tokenizer),
        **extra,
    )


def stock_trainer(policy: Any, tokenizer: Any, directory: Path, **values: Any) -> GRPOTrainer:
    """TRL's own trainer; trainer arguments under ``trainer``."""
    extra = values.pop("trainer", {})
    return GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=countdown.solved,
        args=GRPOConfig(**arguments(directory, **values)),
        train_dataset=countdown.problems(64, 0, tokenizer),
        **extra,
    )


def logged(trainer: Any) -> list[dict[str, Any]]:
    """The training entries of a trainer's log history."""
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def one_batch(trainer: Any) -> dict[str, Any]:
    """One generation batch, as the loss sees it."""
    trainer.model.train()
    rows = [trainer.train_dataset[i // GENERATIONS] for i in range(4 * GENERATIONS)]
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions(rows)


@torch.no_grad()
def scored(trainer: Any, batch: dict[str, Any], *names: str) -> tuple[torch.Tensor, ...]:
    """The trainer's log-probabilities of sampled tokens [B, T] and heads [B, T, K].

    Other fields of the output where they are named.
    """
    scorer = HeadScorer(trainer.model, batch[HEAD_IDS])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    trainer._get_per_token_logps_and_entropies(
        scorer, ids, attention, batch["completion_ids"].size(1)
    )
    return tuple(scorer.scored(name) for name in names or ("log_probs", "head_log_probs"))


def gradients(trainer: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest relative error of a parameter's gradient."""
    return max(
        float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12))
        for name in theirs
    )
