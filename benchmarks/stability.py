"""Score centering against other losses when the sampler is not the trainer's policy.

The experiments of arXiv 2609.20807 in small: a real `vllm serve` of a 2M-parameter model, the real
`ParityGRPOTrainer.train()`, the Countdown task. Seven methods learn from samplers that are noisy,
rounded to few bits, or old, and from rewards without a baseline.

One server does all runs. Every run begins with a full weight update from the checkpoint, and all
methods of one seed see the same problems, rollout seeds and noise. Runs that the CSVs already hold
are not repeated, so a stopped benchmark goes on where it was.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import quiet_worker
import shared
import stability_report as report
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from stability_trainer import METHODS, MODEL, Level, Run, solved_share, train
from transformers import AutoTokenizer

from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.serving import serve

EXPERIMENTS: dict[str, dict[str, Level]] = {
    "noise": {f"sigma {sigma}": Level(sigma=sigma) for sigma in (0.03, 0.02, 0.01)},
    "int8": {f"int{bits}": Level(bits=bits) for bits in (8, 4)},
    "rewards": {
        f"{rewards}, {place}": Level(sigma=sigma, interval=interval, rewards=rewards)
        for place, sigma, interval in (("online", 0.03, 1), ("offline", 0.0, 0))
        for rewards in ("raw01", "raw11", "centred")
    },
    "staleness": {f"sync every {interval}": Level(interval=interval) for interval in (64, 16, 1)},
    "batch": {"int8": Level(bits=8), "sigma 0.03": Level(sigma=0.03)},
    "collapse": {"raw01, online": Level(sigma=0.03, rewards="raw01")},
}
"""Experiment -> level -> how sampler and advantages differ, in the order in which they run.

`batch` and `collapse` repeat levels, to be run with more problems a step (`--prompts 16`)."""
REWARD_METHODS = ("plain", "tis", "sc", "sc_tis")
"""The methods of `rewards` and `collapse`, unless others are asked for."""

console = Console()


def plan(
    experiments: Sequence[str], levels: Sequence[str], methods: Sequence[str], seeds: int
) -> Iterator[Run]:
    """The runs in order. Seeds are outside, so that a stop leaves no method ahead of another."""
    for experiment in experiments:
        few = experiment in ("rewards", "collapse")
        chosen = methods or (REWARD_METHODS if few else tuple(METHODS))
        for seed in range(seeds):
            for level in EXPERIMENTS[experiment]:
                if not levels or level in levels:
                    yield from (Run(experiment, level, method, seed) for method in chosen)


def missing(runs: Sequence[Run], output: Path, steps: int, prompts: int) -> list[Run]:
    """Runs that the CSVs do not hold yet."""
    found = {name: report.load(output, name) for name in {run.experiment for run in runs}}
    for name, rows in found.items():
        report.check_settings(name, rows, steps, prompts)
    done = {(row["experiment"], *report.key(row)) for rows in found.values() for row in rows}
    return [run for run in runs if (run.experiment, *run.key) not in done]


def perform(
    runs: Sequence[Run], output: Path, steps: int, prompts: int, own_every: int, minutes: float
) -> None:
    """Do the runs on one server and write each to its CSV when it ends."""
    torch.set_num_threads(1)
    begin = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        tempfile.TemporaryDirectory() as directory,
        serve(
            MODEL,
            *(*shared.SERVE_ARGS, "--max-model-len", "64"),
            env=shared.serve_environment(1) | quiet_worker.install(Path(directory)),
        ) as server,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        start = solved_share(ParityClient(server.url), AutoTokenizer.from_pretrained(MODEL))
        console.print(f"the checkpoint solves {start:.3f} of the held-out problems")
        task = progress.add_task("runs", total=len(runs))
        for run in runs:
            if time.monotonic() - begin > 60 * minutes:
                console.print(f"{minutes:.0f} minutes are over; start again to go on")
                break
            name = f"{run.experiment}, {run.level}, {run.method}, seed {run.seed}"
            progress.update(task, description=name)
            started = time.monotonic()
            rows = train(
                run,
                EXPERIMENTS[run.experiment][run.level],
                server.url,
                steps=steps,
                prompts=prompts,
                own_every=own_every,
                directory=Path(directory),
            )
            report.append(output, run.experiment, rows)
            seconds = (time.monotonic() - started) / steps
            console.print(f"{name}: {report.summary(rows)}, {seconds:.2f} s a step")
            progress.advance(task)


def main(
    experiment: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(EXPERIMENTS)}. Default: all.")
    ] = None,
    level: Annotated[
        list[str] | None, typer.Option(help="Repeatable: a level such as 'sigma 0.03'.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(METHODS)}.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to this, exclusive.")] = 3,
    steps: Annotated[int, typer.Option(min=10, help="Optimizer steps of a run.")] = 60,
    prompts: Annotated[int, typer.Option(min=1, help="Problems a step, 8 completions each.")] = 4,
    own_every: Annotated[
        int, typer.Option(min=1, help="Steps between measurements of the trainer's own policy.")
    ] = 20,
    minutes: Annotated[float, typer.Option(help="Begin no run after that time.")] = 1e6,
    output: Annotated[Path, typer.Option(help="Directory for CSVs and plots.")] = shared.RESULTS,
    plot_only: Annotated[bool, typer.Option(help="Train nothing; plot and tabulate.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Page whose tables are replaced: docs/stability.md.")
    ] = None,
) -> None:
    """Train with seven methods on samplers that differ, then plot and tabulate."""
    names = [name for name in EXPERIMENTS if not experiment or name in experiment]
    if unknown := set(experiment or ()) - set(EXPERIMENTS) | set(method or ()) - set(METHODS):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}")
    if not plot_only:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended
        runs = missing(list(plan(names, level or [], method or [], seeds)), output, steps, prompts)
        console.print(f"{len(runs)} runs to do")
        if runs:
            perform(runs, output, steps, prompts, own_every, minutes)
    for name in names:
        if rows := report.load(output, name):
            lines = report.table(rows, list(EXPERIMENTS[name]), list(METHODS))
            text = shared.markdown(report.HEADER, lines)
            separate = report.differences(rows, list(EXPERIMENTS[name]), list(METHODS))
            console.print(f"{name}\n{text}\n{separate}", markup=False, soft_wrap=True)
            report.plot(rows, list(EXPERIMENTS[name]), list(METHODS), output, name)
            if write is not None:
                shared.replace_table(write, name, report.section(rows, text, separate))


if __name__ == "__main__":
    typer.run(main)
