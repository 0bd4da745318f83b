"""The whole of vllm-parity on two CPU cores: serve, train, and show that both sides agree.

Starts a real `vllm serve` of the reference model with the plugin, trains it with score centering,
measures the solved share on held-out problems before and after, and writes report.html.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import options
import torch
import typer
from countdown import is_solution, problems, solved
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from trl_callbacks import ParityGRPOConfig, ParityGRPOTrainer
from vllm_parity_plugin.cli.report import write_report
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import RolloutRequest, Sampling
from vllm_parity_plugin.serving import serve

HELD_OUT = 512
HELD_OUT_SEED = 1_000_003
MAX_COMPLETION = 24
console = Console()


@dataclass
class Outcome:
    """One seed's run."""

    seed: int
    before: float
    after: float
    history: list[dict[str, Any]]
    seconds: float

    def edge(self, metric: str, *, last: bool, window: int = 5) -> float:
        """Mean of a metric over the first or last steps."""
        values = [entry[metric] for entry in self.history if metric in entry]
        return mean(values[-window:] if last else values[:window])


class ShowProgress(TrainerCallback):
    """A progress bar with reward and mismatch."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self._progress.update(
                self._task,
                completed=state.global_step,
                status=f"reward {logs['reward']:.2f}  "
                f"mismatch {logs['parity/logprob_diff/mean']:.4f}",
            )


def main(
    model: options.Model = options.REFERENCE_MODEL,
    steps: options.Steps = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Runs, with seeds 0, 1, ...")] = 1,
    prompts: options.Prompts = 40,
    generations: options.Generations = 8,
    learning_rate: options.LearningRate = 2e-4,
    weight: Annotated[str, typer.Option(help="none, tis, mis or is.")] = "none",
    port: Annotated[int, typer.Option(help="Port of the server; 0 takes a free one.")] = 0,
    output_dir: options.OutputDir = Path("runs/demo"),
) -> None:
    """Serve the reference model with vLLM, train it with TRL, show the parity report."""
    _quiet()
    outcomes = []
    for seed in range(seeds):
        directory = output_dir if seeds == 1 else output_dir / f"seed-{seed}"
        directory.mkdir(parents=True, exist_ok=True)
        with (
            console.status(f"starting vllm serve {model} (about 30 s) ..."),
            serve(
                model,
                *options.SERVE_ARGS,
                port=port,
                env=options.SERVE_ENV,
                log=directory / "server.log",
            ) as server,
        ):
            console.print(f"server up at {server.url}, log in {directory / 'server.log'}")
            _print_startup_table(server.log_text())
            outcome = _run(
                server.url,
                model,
                seed,
                directory,
                steps=steps,
                prompts=prompts,
                generations=generations,
                learning_rate=learning_rate,
                weight=weight,
            )
        page = write_report(
            outcome.history,
            directory,
            title=f"Countdown with score centering, seed {seed}",
            facts={
                "solved share, held out": f"{outcome.before:.3f} before, {outcome.after:.3f} after"
            },
        )
        outcomes.append(outcome)
        console.print(f"report: {page}")
    console.print(_table(outcomes))


def _run(
    url: str, model: str, seed: int, directory: Path, *, weight: str, **training: Any
) -> Outcome:
    policy, tokenizer = options.load(model)
    held_out = problems(HELD_OUT, HELD_OUT_SEED, tokenizer)["prompt"]
    client = ParityClient(url)
    arguments = options.training_arguments(
        seed=seed, output_dir=directory, max_completion_length=MAX_COMPLETION, **training
    )
    before = _solved_share(client, held_out, tokenizer)
    with Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    ) as progress:
        task = progress.add_task("", total=training["steps"], status="")
        trainer = ParityGRPOTrainer(
            model=policy,
            processing_class=tokenizer,
            reward_funcs=solved,
            args=ParityGRPOConfig(
                vllm_server_base_url=url,
                score_centering_weight=weight,
                rollout_seed=seed,
                disable_tqdm=True,
                **arguments,
            ),
            train_dataset=problems(training["prompts"] * training["steps"], seed, tokenizer),
            callbacks=[ShowProgress(progress, task)],
        )
        trainer.remove_callback(PrinterCallback)  # the progress bar replaces it
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    trainer.save_state()
    # The last optimizer step has not reached the server yet: the trainer pushes before it samples.
    trainer.vllm_generation.sync_weights()
    after = _solved_share(client, held_out, tokenizer)
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    return Outcome(seed, before, after, history, seconds)


def _solved_share(client: ParityClient, prompts: list[str], tokenizer: Any) -> float:
    """Share of held-out problems solved when sampling at temperature 1 from the server."""
    rollout = client.rollout(
        RolloutRequest(
            prompts=[tokenizer(prompt)["input_ids"] for prompt in prompts],
            n=4,
            seeds=list(range(0, 4 * len(prompts), 4)),
            sampling=Sampling(max_tokens=MAX_COMPLETION),
        )
    )
    answers = [
        tokenizer.decode(rollout.token_ids[rollout.span(row)].tolist(), skip_special_tokens=True)
        for row in range(len(rollout))
    ]
    return mean(is_solution(prompts[row // 4], answer) for row, answer in enumerate(answers))


def _print_startup_table(log: str) -> None:
    """The table that the plugin printed when the server started."""
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if "] vllm-parity" in line), None)
    if start is None:
        return
    for line in lines[start:]:
        if "engine_args.py" not in line:
            break
        console.print(line.split("] ", 1)[-1], highlight=False, markup=False, soft_wrap=True)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="vllm-parity demo", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(f"seed {outcome.seed}", justify="right")

    def row(name: str, show: Any) -> None:
        table.add_row(name, *(show(outcome) for outcome in outcomes))

    def edges(metric: str, digits: int) -> Any:
        return lambda run: (
            f"{run.edge(metric, last=False):.{digits}f} -> {run.edge(metric, last=True):.{digits}f}"
        )

    row(
        f"solved share, {HELD_OUT} held-out problems x 4",
        lambda run: f"{run.before:.3f} -> {run.after:.3f}",
    )
    row("training reward, first -> last 5 steps", edges("reward", 3))
    row("mean |logprob difference|, likewise", edges("parity/logprob_diff/mean", 4))
    row("sampler head mass, likewise", edges("parity/score_centering/sampler_head_mass", 4))
    row("update pause (s), likewise", edges("parity/weight_update/pause_seconds", 3))
    row("steps", lambda run: str(len(run.history)))
    row("training time (s)", lambda run: f"{run.seconds:.0f}")
    return table


def _quiet() -> None:
    """Leave the screen to the progress bar: the details are in the logs."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # Trainer and sampler take turns, so each may use every core.
    torch.set_num_threads(os.cpu_count() or 1)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ParityError as error:
        console.print(f"[bold red]demo:[/] {error}", highlight=False)
        sys.exit(1)
