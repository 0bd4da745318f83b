"""What score centering costs in a whole training step: paired steps of one run, on and off.

A real `vllm serve` and a real ParityGRPOTrainer on a random model. Steps alternate between centring
with K heads and TRL's own loss on the same path (same fp32 head, no correction), in an order that
changes from pair to pair. Each step is split into the rollout, the loss with its backward pass, and
the rest (optimizer, weight update, TRL's bookkeeping).
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import shared
import torch
import typer
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_callbacks import ParityGRPOConfig, ParityGRPOTrainer
from vllm_parity_plugin.serving import serve

app = typer.Typer(add_completion=False)
PARTS = ("rollout", "loss and backward", "rest", "step")
PROMPT_TOKENS, GROUP = 32, 4
console = Console()


class Timed(ParityGRPOTrainer):
    """A trainer that can be switched between the two losses, and times the parts of a step."""

    seconds: dict[str, float]

    def switch(self, on: bool) -> None:
        """Centring on, or TRL's own loss without heads."""
        self.parity_weight = self.args.weight() if on else None
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def _generate(self, prompts: list[Any]) -> Any:
        with self.part("rollout"):
            return super()._generate(prompts)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        before = self.seconds["rollout"]
        with self.part("loss and backward"):
            result = super().training_step(*args, **kwargs)
        self.seconds["loss and backward"] -= self.seconds["rollout"] - before
        return result


class Switch(TrainerCallback):
    """Chooses the loss before each step and keeps the step's times after it."""

    def __init__(self, pairs: int) -> None:
        self.rows: list[dict[str, Any]] = []
        # Two steps to warm up, then pairs whose order alternates.
        order = [True, False]
        for pair in range(pairs):
            order += [True, False] if pair % 2 == 0 else [False, True]
        self.order = order
        self.trainer: Timed | None = None
        self._bar = iter(track(order, "steps", console=console))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.trainer.switch(next(self._bar))
        gc.collect()
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = self.trainer.seconds
        seconds["step"] = time.perf_counter() - self._started
        seconds["rest"] = seconds["step"] - seconds["rollout"] - seconds["loss and backward"]
        index = len(self.rows)
        self.rows.append({"pair": (index - 2) // 2, "centring": int(self.order[index]), **seconds})


def run(path: Path, url: str, directory: Path, options: dict[str, int]) -> list[dict[str, Any]]:
    """Train, and return one row for each step after the first two."""
    switch = Switch(options["pairs"])
    config = ParityGRPOConfig(
        output_dir=str(directory),
        vllm_server_base_url=url,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        max_steps=len(switch.order),
        per_device_train_batch_size=options["sequences"],
        num_generations=GROUP,
        max_completion_length=options["tokens"],
        score_centering_top_k=options["head_size"],
        vllm_importance_sampling_correction=False,
        generation_kwargs={"ignore_eos": True},
        scale_rewards="none",
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.decode(list(range(10, 10 + PROMPT_TOKENS)))
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=coin,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 64),
        callbacks=[switch],
    )
    switch.trainer = trainer
    trainer.train()
    return switch.rows[2:]


def coin(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that a random model gets half of the time."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]


def ratios(rows: list[dict[str, Any]], part: str) -> list[float]:
    """Seconds with centring over seconds without, pair by pair."""
    pairs: dict[int, dict[int, float]] = {}
    for row in rows:
        pairs.setdefault(row["pair"], {})[row["centring"]] = row[part]
    return [pair[1] / pair[0] for pair in pairs.values()]


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Part, median seconds off and on, median of the pairs' ratios with their quartiles."""
    lines = []
    for part in PARTS:
        off, on = (
            median(row[part] for row in rows if row["centring"] == centring) for centring in (0, 1)
        )
        low, middle, high = quantiles(ratios(rows, part), n=4)
        lines.append((part, f"{off:.3f}", f"{on:.3f}", f"{middle:.3f} ({low:.3f} to {high:.3f})"))
    # The claim is about the trainer: a difference of a part over the time of the whole step.
    part, step = "loss and backward", median(r["step"] for r in rows if not r["centring"])
    extra = median(r[part] for r in rows if r["centring"]) - median(
        r[part] for r in rows if not r["centring"]
    )
    lines.append(("loss and backward, extra over step", "", "", f"{extra / step:+.2%}"))
    return lines


HEADER = ("part", "off, s", "on, s", "on / off, median of pairs (quartiles)")


@app.command()
def main(
    pairs: Annotated[int, typer.Option(help="Pairs of steps, with and without.")] = 12,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    width: Annotated[int, typer.Option(help="Hidden size of the model.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = shared.VOCABULARY,
    sequences: Annotated[int, typer.Option(help="Completions of a step.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of a completion.")] = 48,
    head_size: Annotated[int, typer.Option(help="Head entries per token.")] = 128,
    threads: Annotated[int, typer.Option(help="Threads of server and trainer.")] = 2,
    write: Annotated[Path | None, typer.Option(help="Page whose table is replaced.")] = None,
) -> None:
    """Time paired training steps and print, part by part, what centring costs."""
    torch.set_num_threads(threads)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    model = shared.qwen3(
        vocabulary=vocabulary, layers=layers, width=width, heads=width // 64, head_dim=64
    )
    options = {"pairs": pairs, "sequences": sequences, "tokens": tokens, "head_size": head_size}
    with tempfile.TemporaryDirectory() as scratch:
        path = shared.write_model(Path(scratch) / "model", model)
        environment = shared.serve_environment(threads) | {"VLLM_PARITY_HEAD_SIZE": str(head_size)}
        arguments = (*shared.SERVE_ARGS, "--max-model-len", str(PROMPT_TOKENS + tokens + 8))
        with serve(path, *arguments, env=environment) as server:
            rows = run(path, server.url, Path(scratch) / "run", options)
    shared.write_csv(shared.RESULTS / "step_overhead.csv", rows)
    lines = summary(rows)
    table = Table(*HEADER, title=f"{pairs} pairs, {shared.machine()}")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    if write is not None:
        shared.replace_table(write, "step_overhead", shared.markdown(HEADER, lines))


if __name__ == "__main__":
    app()
