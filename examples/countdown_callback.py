"""A stock TRL GRPOTrainer, made to agree with its sampler by one callback.

    vllm serve tests/data/countdown-llama --dtype bfloat16 --max-model-len 256
    python examples/countdown_callback.py
    accelerate launch --config_file examples/accelerate_cpu.yaml examples/countdown_callback.py

``ParityRollout`` samples and pushes weights through the server's /v1/parity routes, which works
without NCCL. With TRL's own server mode on GPUs, leave ``rollout_func`` out and set
``use_vllm=True, vllm_mode="server"`` in ``GRPOConfig``: the callback is the same.
"""

from pathlib import Path

import options
import typer
from countdown import problems, solved
from trl import GRPOConfig, GRPOTrainer

from trl_callbacks import ParityCallback, ParityRollout


def main(
    model: options.Model = options.REFERENCE_MODEL,
    server_url: options.ServerUrl = "http://127.0.0.1:8000",
    steps: options.Steps = 60,
    prompts: options.Prompts = 16,
    generations: options.Generations = 8,
    learning_rate: options.LearningRate = 1e-4,
    seed: options.Seed = 0,
    output_dir: options.OutputDir = Path("runs/countdown-callback"),
) -> None:
    """Train on Countdown with GRPOTrainer and ParityCallback."""
    policy, tokenizer = options.load(model)
    arguments = options.training_arguments(
        steps=steps,
        prompts=prompts,
        generations=generations,
        learning_rate=learning_rate,
        seed=seed,
        output_dir=output_dir,
    )
    trainer = GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=solved,
        args=GRPOConfig(**arguments),
        train_dataset=problems(prompts * steps, seed, tokenizer),
        rollout_func=ParityRollout(server_url, seed=seed),
        callbacks=[ParityCallback(server_url, max_mismatch=0.2)],
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    typer.run(main)
