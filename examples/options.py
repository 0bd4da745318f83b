"""Command-line options and settings that the two training examples share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_parity_plugin.serving import check_model_path

ROOT = Path(__file__).parent.parent
REFERENCE_MODEL = str(ROOT / "tests" / "data" / "countdown-llama")

SERVE_ARGS = (
    *("--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager"),
    # vLLM's CPU build refuses to start unless this share of all memory is free.
    *("--gpu-memory-utilization", "0.2"),
)
"""Arguments of `vllm serve` for the reference model on a small CPU machine."""
SERVE_ENV = {
    # Without it vLLM's CPU build takes a share of all memory for its KV cache, in GiB here.
    "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    # Importing TRL lowers it to ERROR, which would hide the start-up table.
    "VLLM_LOGGING_LEVEL": "INFO",
}

Model = Annotated[str, typer.Option(help="Model directory or hub name; the served one.")]
ServerUrl = Annotated[str, typer.Option(help="Base URL of the `vllm serve` that samples.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]
Prompts = Annotated[int, typer.Option(min=1, help="Problems per step and process.")]
Generations = Annotated[int, typer.Option(min=2, help="Completions per problem.")]
LearningRate = Annotated[float, typer.Option(help="AdamW learning rate.")]
Seed = Annotated[int, typer.Option(help="Seed of data, rollouts and training.")]
OutputDir = Annotated[Path, typer.Option(help="Where logs and the report go.")]


def load(model: str) -> tuple[Any, Any]:
    """The model with float32 master weights, and its tokenizer.

    The served weights are rounded from these on every update; the fp32 head uses the rounded
    ones, so both sides compute logits from the same numbers.
    """
    check_model_path(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tokenizer


def training_arguments(
    *,
    steps: int,
    prompts: int,
    generations: int,
    learning_rate: float,
    seed: int,
    output_dir: Path,
    max_completion_length: int = 24,
) -> dict[str, Any]:
    """GRPOConfig arguments: REINFORCE with group-centred rewards, on CPU or one GPU."""
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(output_dir),
        "max_steps": steps,
        "per_device_train_batch_size": prompts * generations,
        "num_generations": generations,
        "max_completion_length": max_completion_length,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "linear",
        "scale_rewards": "none",
        "loss_type": "dapo",
        "beta": 0.0,
        "temperature": 1.0,
        "seed": seed,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "gradient_checkpointing": on_gpu,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
