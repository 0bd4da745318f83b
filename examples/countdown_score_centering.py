"""GRPO with the score-centering loss and sampler heads from the server.

    vllm serve tests/data/countdown-llama --dtype bfloat16 --max-model-len 256
    python examples/countdown_score_centering.py
    accelerate launch --config_file examples/accelerate_cpu.yaml \
        examples/countdown_score_centering.py
"""

from pathlib import Path
from typing import Annotated

import options
import typer
from countdown import problems, solved

from trl_callbacks import ParityGRPOConfig, ParityGRPOTrainer


def main(
    model: options.Model = options.REFERENCE_MODEL,
    server_url: options.ServerUrl = "http://127.0.0.1:8000",
    steps: options.Steps = 60,
    prompts: options.Prompts = 16,
    generations: options.Generations = 8,
    learning_rate: options.LearningRate = 1e-4,
    seed: options.Seed = 0,
    output_dir: options.OutputDir = Path("runs/countdown-score-centering"),
    top_k: Annotated[int, typer.Option(min=1, help="Size of the sampler's head.")] = 128,
    weight: Annotated[str, typer.Option(help="none, tis, mis or is.")] = "none",
) -> None:
    """Train on Countdown with ParityGRPOTrainer."""
    policy, tokenizer = options.load(model)
    arguments = options.training_arguments(
        steps=steps,
        prompts=prompts,
        generations=generations,
        learning_rate=learning_rate,
        seed=seed,
        output_dir=output_dir,
    )
    trainer = ParityGRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=solved,
        args=ParityGRPOConfig(
            vllm_server_base_url=server_url,
            score_centering_top_k=top_k,
            score_centering_weight=weight,
            rollout_seed=seed,
            **arguments,
        ),
        train_dataset=problems(prompts * steps, seed, tokenizer),
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    typer.run(main)
