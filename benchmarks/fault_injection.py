#!/usr/bin/env python3
"""Break weight updates in every way we know, and count how the servers ended.

Runs the scenarios of ``tests/server/faultlab`` against real ``vllm serve`` processes of tiny
models, on two CPU cores, and prints one table: what happened, and what was served afterwards.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import shared
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.server.faultlab.lab import laboratory
from tests.server.faultlab.runner import Result, markdown, run, table, violations
from tests.server.faultlab.scenarios import GROUPS, Host, Scenario, last, scenarios

console = Console()


def chosen(host: Host, repeats: int, only: str) -> list[Scenario]:
    """The scenarios of a server whose names contain ``only``; what kills it comes last."""
    return [s for s in scenarios(host, repeats=repeats) + last(host) if only in s.name]


def run_host(host: Host, todo: list[Scenario], repeats: int, mount: bool) -> list[Result]:
    """Results of one server, with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(f"{host}: starting", total=len(todo))

        def tell(result: Result) -> None:
            progress.update(task, advance=1, description=f"{host}: {result.scenario.row.family}")
            if result.problem is not None:
                progress.console.print(f"VIOLATION {result.problem}", style="red", markup=False)

        with laboratory(host, repeats, mount) as lab:
            return run(lab, todo, tell)


def write_table(path: Path, text: str, command: str) -> None:
    """Replace the table of a page, with the command that made it."""
    made = (
        f"vLLM {version('vllm')}, torch {version('torch')}, CPU. Made by\n"
        f"`.venv/bin/python benchmarks/fault_injection.py {command}`:\n\n"
    )
    shared.replace_table(path, "table", f"{made}{text}")


def main(
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Server to break: keep (rollback), none (no rollback, with a token), ranks "
            "(tensor parallel 2). All of them by default, one after the other."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of every scenario, each with other seeds.")
    ] = 1,
    only: Annotated[str, typer.Option(help="Run scenarios whose name contains this.")] = "",
    mount: Annotated[
        bool, typer.Option(help="Fill a small tmpfs, which takes root; else limit file sizes.")
    ] = True,
    write: Annotated[
        Path | None, typer.Option(help="Page whose table is replaced: docs/fault_injection.md.")
    ] = None,
) -> None:
    """Break weight updates and count how the servers ended. Exit status 1 on any violation."""
    hosts = [known for known in GROUPS if not host or known in host]
    if not hosts or (host and set(host) - set(GROUPS)):
        raise typer.BadParameter(f"servers are {', '.join(GROUPS)}")
    results: list[Result] = []
    for name in hosts:
        if todo := chosen(name, repeats, only):
            results += run_host(name, todo, repeats, mount)
    text = markdown(table(results))
    console.print(text, markup=False, soft_wrap=True)
    found = violations(results)
    console.print(f"{len(results)} scenarios, {len(found)} violations")
    if write is not None:
        write_table(write, text, " ".join(sys.argv[1:]))
    raise typer.Exit(1 if found or not results else 0)


if __name__ == "__main__":
    typer.run(main)
