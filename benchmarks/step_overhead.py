"""What score centering costs in a whole training step: steps of one run that take turns.

A real `vllm serve` and a real ParityGRPOTrainer on a random model. Every round has one step of each
kind, in rotating order:

- `trl`: TRL's loss through TRL's fused head in fp32, no heads in the rollout;
- `plain`: the same loss through our head with K = 0, so that only centring differs from the next;
- `centred`: the centred loss, with K head entries per token from the sampler.

Each step is split into the rollout, the loss with its backward pass, and the rest (optimizer,
TRL's bookkeeping).
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
from trl_callbacks.head_scorer import HeadScorer
from vllm_parity_plugin.serving import serve

app = typer.Typer(add_completion=False)
KINDS = ("trl", "plain", "centred")
PARTS = ("rollout", "loss and backward", "rest", "step")
PROMPT_TOKENS, GROUP = 32, 4
console = Console()


class Timed(ParityGRPOTrainer):
    """A trainer that can be switched between the two losses, and times the parts of a step."""

    seconds: dict[str, float]
    kind: str

    def switch(self, kind: str) -> None:
        """The kind of the next step."""
        self.kind = kind
        self.parity_weight = self.args.weight() if kind == "centred" else None
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: torch.Tensor, attention: torch.Tensor, tokens: int, **kwargs: Any
    ) -> Any:
        if self.kind == "plain":
            model = HeadScorer(model, ids.new_empty(len(ids), tokens, 0))
        return super()._get_per_token_logps_and_entropies(model, ids, attention, tokens, **kwargs)

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

    def __init__(self, rounds: int) -> None:
        self.rows: list[dict[str, Any]] = []
        # The first round warms up.
        self.order = [kind for turn in range(rounds + 1) for kind in shared.rotated(KINDS, turn)]
        self.trainer: Timed | None = None
        self._bar = iter(track(self.order, "steps", console=console))

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
        row = {"round": len(self.rows) // len(KINDS), "kind": self.trainer.kind}
        self.rows.append({**row, **seconds})


def run(path: Path, url: str, directory: Path, options: dict[str, int]) -> list[dict[str, Any]]:
    """Train, and return one row for each step after the first round."""
    switch = Switch(options["rounds"])
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
    return switch.rows[len(KINDS) :]


def coin(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that a random model gets half of the time."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]


def ratios(rows: list[dict[str, Any]], part: str, over: str) -> list[float]:
    """Seconds of a centred step over those of another kind, round by round."""
    rounds: dict[int, dict[str, float]] = {}
    for row in rows:
        rounds.setdefault(row["round"], {})[row["kind"]] = row[part]
    return [seconds["centred"] / seconds[over] for seconds in rounds.values()]


def extra(rows: list[dict[str, Any]]) -> list[float]:
    """What the trainer's part of a centred step takes more than `plain`'s, over a plain step."""
    rounds: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        rounds.setdefault(row["round"], {})[row["kind"]] = row
    part = "loss and backward"
    return [(r["centred"][part] - r["plain"][part]) / r["plain"]["step"] for r in rounds.values()]


def spread(values: list[float], form: str) -> str:
    """Median with the quartiles."""
    low, middle, high = quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Part, median seconds of each kind, and the rounds' ratios."""
    lines: list[tuple[str, ...]] = []
    for part in PARTS:
        seconds = [
            f"{median(row[part] for row in rows if row['kind'] == kind):.3f}" for kind in KINDS
        ]
        over = [spread(ratios(rows, part, kind), ".3f") for kind in ("plain", "trl")]
        lines.append((part, *seconds, *over))
    share = spread(extra(rows), "+.2%")
    lines.append(("loss and backward, extra over a plain step", "", "", "", share, ""))
    return lines


HEADER = ("part", *(f"{kind}, s" for kind in KINDS), "centred / plain", "centred / trl")
"""Ratios are medians over rounds, with quartiles."""


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=2, help="Steps of each kind.")] = 8,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    width: Annotated[int, typer.Option(help="Hidden size of the model.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = shared.VOCABULARY,
    sequences: Annotated[int, typer.Option(help="Completions of a step.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of a completion.")] = 48,
    head_size: Annotated[int, typer.Option(help="Head entries per token.")] = 128,
    threads: Annotated[int, typer.Option(help="Threads of server and trainer.")] = 2,
    write: Annotated[Path | None, typer.Option(help="Page whose table is replaced.")] = None,
) -> None:
    """Time training steps in turns and print, part by part, what centring costs."""
    torch.set_num_threads(threads)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    model = shared.qwen3(
        vocabulary=vocabulary, layers=layers, width=width, heads=width // 64, head_dim=64
    )
    options = {"rounds": rounds, "sequences": sequences, "tokens": tokens, "head_size": head_size}
    with tempfile.TemporaryDirectory() as scratch:
        path = shared.write_model(Path(scratch) / "model", model)
        environment = shared.serve_environment(threads) | {"VLLM_PARITY_HEAD_SIZE": str(head_size)}
        arguments = (*shared.SERVE_ARGS, "--max-model-len", str(PROMPT_TOKENS + tokens + 8))
        with serve(path, *arguments, env=environment) as server:
            rows = run(path, server.url, Path(scratch) / "run", options)
    shared.write_csv(shared.RESULTS / "step_overhead.csv", rows)
    lines = summary(rows)
    table = Table(*HEADER, title=f"{rounds} rounds, {shared.machine()}")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    if write is not None:
        shared.replace_table(write, "step_overhead", shared.markdown(HEADER, lines))


if __name__ == "__main__":
    app()
