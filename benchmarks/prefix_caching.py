"""What a prefix cache keyed by policy saves: groups of completions, with and without it.

Two `vllm serve` of one random model, one with ``VLLM_PARITY_PREFIX_CACHING=versioned``. Every round
sends the same prompts, which no round had before, to both, one server after the other in
alternating order; ratios are taken within a round. A group's first completion computes the prompt,
the others find its full blocks: 128 tokens each on the CPU, so 128 of a prompt of 200.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import shared
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.append(str(shared.ROOT))
from tests.client import Client
from vllm_parity_plugin.serving import serve

OFF, VERSIONED = "off", "versioned"
COLUMNS = ("completion", "off, s", "versioned, s", "versioned / off", "its range", "cached")
"""``cached`` is the share of all prompt tokens that came from the cache."""
console = Console()


def fresh(seed: int, prompts: int, tokens: int) -> list[list[int]]:
    """Random prompts, the same for the same seed; no two begin alike."""
    draw = random.Random(seed)
    return [[draw.randrange(3, shared.VOCABULARY) for _ in range(tokens)] for _ in range(prompts)]


def measure(
    clients: dict[str, Client], lengths: list[int], rounds: int, prompts: int, tokens: int, n: int
) -> list[dict[str, Any]]:
    """One row per completion length, round and server; the first round of each does not count."""
    rows = []
    todo = list(product(range(-1, rounds), lengths))
    for number, (turn, length) in enumerate(track(todo, "rounds", console=console)):
        asked = fresh(number, prompts, tokens)
        for name in shared.rotated(list(clients), turn):
            begin = time.perf_counter()
            found = clients[name].rollout(
                asked, n=n, seeds=list(range(prompts)), max_tokens=length, ignore_eos=True
            )
            row = {"completion": length, "round": turn, "server": name}
            row |= {"seconds": time.perf_counter() - begin}
            row |= {"cached": int(found.cached_tokens.sum()), "prompt": n * prompts * tokens}
            if turn >= 0:
                rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line per completion length; a ratio is the median of those of the rounds.

    Rounds of 4 and 3 s, and of 4 and 5 s, give 1.00 and a range of 0.75 to 1.25.
    """
    lines = []
    for length in dict.fromkeys(row["completion"] for row in rows):
        of_length = [row for row in rows if row["completion"] == length]
        off, versioned = (
            [row for row in of_length if row["server"] == name] for name in (OFF, VERSIONED)
        )
        ratios = [b["seconds"] / a["seconds"] for a, b in zip(off, versioned, strict=True)]
        share = sum(row["cached"] for row in versioned) / sum(row["prompt"] for row in versioned)
        lines.append(
            (
                f"{length} tokens",
                f"{median(row['seconds'] for row in off):.2f}",
                f"{median(row['seconds'] for row in versioned):.2f}",
                f"{median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{share:.0%}",
            )
        )
    return lines


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each length.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round.")] = 4,
    group: Annotated[int, typer.Option(min=1, help="Completions of a prompt.")] = 8,
    tokens: Annotated[int, typer.Option(min=129, help="Tokens of a prompt.")] = 200,
    completion: Annotated[
        list[int] | None, typer.Option(help="Tokens of a completion; 16 and 128 by default.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    width: Annotated[int, typer.Option(help="Hidden size of the model.")] = 512,
    threads: Annotated[int, typer.Option(help="Threads of each server.")] = 2,
    write: Annotated[
        Path | None, typer.Option(help="Page whose table is replaced: docs/plugin.md.")
    ] = None,
) -> None:
    """Time groups of completions with prefix caching off and versioned, in turns."""
    lengths = completion or [16, 128]
    model = shared.qwen3(
        vocabulary=shared.VOCABULARY, layers=layers, width=width, heads=width // 64, head_dim=64
    )
    arguments = (*shared.SERVE_ARGS, "--max-model-len", str(tokens + max(lengths) + 8))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        path = shared.write_model(Path(scratch) / "model", model)
        clients = {}
        for name in (OFF, VERSIONED):
            environment = shared.serve_environment(threads) | {"VLLM_PARITY_PREFIX_CACHING": name}
            server = running.enter_context(serve(path, *arguments, env=environment))
            clients[name] = Client(server)
        rows = measure(clients, lengths, rounds, prompts, tokens, group)
    shared.write_csv(shared.RESULTS / "prefix_caching.csv", rows)
    lines = summary(rows)
    caption = (
        f"{prompts} prompts of {tokens} tokens, {group} completions each, {rounds} rounds; "
        f"{layers} layers of width {width}; {shared.machine()}"
    )
    table = Table(*COLUMNS, title=caption)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    if write is not None:
        text = f"{caption}:\n\n{shared.markdown(COLUMNS, lines)}"
        shared.replace_table(write, "prefix_caching", text)


if __name__ == "__main__":
    typer.run(main)
