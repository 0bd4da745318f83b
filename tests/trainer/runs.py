"""Small training runs on the Countdown task."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from trl_callbacks import ParityGRPOConfig, ParityGRPOTrainer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GENERATIONS = 4


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
