"""Pause and total time of one weight update, against stock vLLM and against a plain memcpy.

Two real `vllm serve` of the same random bf16 model run side by side: one with the plugin, one
without, which loads the same bytes from the same kind of file through vLLM's own
start/update/finish. Every round does a memcpy, a stock update and an update of ours, in rotating
order. Stock is paused from before start to after finish, as its documentation asks; it checks
nothing. Ours runs every check it has.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import shared
import stock_engine
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trl_callbacks.weight_sync import WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.serving import Server, serve
from vllm_parity_plugin.weights.manifest import TensorSpec
from vllm_parity_plugin.weights.writer import write_policy

CONTENDERS = ("memcpy", "stock", "ours")
COLUMNS = {
    "memcpy_s": "memcpy of the same bytes, warm",
    "stock_s": "stock: pause, start, update, finish, resume",
    "stock_load_s": "- of it update_weights",
    "ours_pause_s": "ours: generation paused",
    "ours_total_s": "ours: request to answer, checks included",
    "ours_checks_s": "- of it verification and questions to the workers",
    "ours_push_s": "ours: WeightSync.push, writing or sending included",
    "ours_write_s": "- of it rounding, checksums, writing, sending",
}
RATIOS = (
    ("pause, ours / stock", "ours_pause_s", "stock_s", 1.0),
    ("total, ours / stock", "ours_total_s", "stock_s", 1.5),
    ("push with writing, ours / stock", "ours_push_s", "stock_s", None),
    ("total, ours / memcpy", "ours_total_s", "memcpy_s", None),
    ("pause, ours / memcpy", "ours_pause_s", "memcpy_s", None),
)
"""Name, numerator, denominator, and the ratio that is aimed at."""

Tensors = dict[str, torch.Tensor]
console = Console()


class Stock:
    """A server without the plugin, and a file with the new policy."""

    def __init__(self, server: Server, file: Path) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=300.0, trust_env=False)
        self._file = file
        self._post("/init_weight_transfer_engine", {"init_info": {}})
        self.url = server.url

    def run(self) -> dict[str, float]:
        """One update as a user of stock vLLM does it; all of it is paused."""
        begin = time.perf_counter()
        self._post("/pause?mode=keep&clear_cache=false")
        self._post("/start_weight_update")
        load = time.perf_counter()
        self._post("/update_weights", {"update_info": {"path": str(self._file)}})
        loaded = time.perf_counter()
        self._post("/finish_weight_update")
        self._post("/resume")
        return {"stock_s": time.perf_counter() - begin, "stock_load_s": loaded - load}

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._http.post(path, json=body).raise_for_status()


class Ours:
    """A server with the plugin."""

    def __init__(self, server: Server, tensors: Tensors, transport: Any) -> None:
        client = ParityClient(server.url)
        self.directory = Path(client.weights_info().directory)
        self._sync = WeightSync(client, transport)
        self._tensors = tensors
        self.url = server.url

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The served tensors."""
        return self._sync.expected

    def run(self) -> dict[str, float]:
        """One update as a trainer does it."""
        begin = time.perf_counter()
        result = self._sync.push(self._tensors.items())
        push = time.perf_counter() - begin
        return {
            "ours_pause_s": result.pause_seconds,
            "ours_total_s": result.total_seconds,
            "ours_checks_s": result.total_seconds - result.pause_seconds,
            "ours_push_s": push,
            "ours_write_s": push - result.total_seconds,
        }


class Memcpy:
    """A copy between two buffers whose pages are all present."""

    def __init__(self, size: int) -> None:
        self._source = torch.ones(size, dtype=torch.uint8)
        self._target = torch.zeros(size, dtype=torch.uint8)

    def run(self) -> dict[str, float]:
        """One copy."""
        begin = time.perf_counter()
        self._target.copy_(self._source)
        return {"memcpy_s": time.perf_counter() - begin}


def main(
    gb: Annotated[float, typer.Option(min=0.1, help="Size of the bf16 weights in GB.")] = 0.94,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of all three.")] = 7,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before, which do not count.")] = 2,
    transport: Annotated[
        Literal["file", "http"], typer.Option(help="How our weights travel.")
    ] = "file",
    rollback: Annotated[
        Literal["keep", "none"], typer.Option(help="VLLM_PARITY_ROLLBACK of our server.")
    ] = "keep",
    threads: Annotated[
        int, typer.Option(min=1, help="OMP threads of each server and of the memcpy.")
    ] = os.cpu_count() or 1,
    output: Annotated[Path, typer.Option(help="Directory for the CSV.")] = shared.RESULTS,
) -> None:
    """Compare our weight update with stock vLLM's and with a memcpy, interleaved in one run."""
    torch.set_num_threads(threads)
    with contextlib.ExitStack() as stack:
        with console.status(f"making {gb} GB of random weights ..."):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            config = shared.sized(gb)
            model = shared.write_model(directory / "model", config)
            tensors = shared.random_weights(config, seed=1)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with console.status("starting two servers (about a minute) ..."):
            environment = shared.serve_environment(threads)
            arguments = (model, *shared.SERVE_ARGS, "--max-model-len", "256")
            ours_server = stack.enter_context(
                serve(*arguments, env=environment | {"VLLM_PARITY_ROLLBACK": rollback})
            )
            ours = Ours(ours_server, tensors, transport)
            # Beside ours, in shared memory; it goes with our server's directory.
            file = ours.directory / "benchmark.safetensors"
            write_policy(file, tensors.items(), ours.specs)
            stock_server = stack.enter_context(
                serve(
                    *arguments,
                    "--weight-transfer-config",
                    f'{{"backend": "{stock_engine.NAME}"}}',
                    env=environment
                    | stock_engine.install(directory)
                    | {"VLLM_PARITY_MODE": "off", "VLLM_SERVER_DEV_MODE": "1"},
                )
            )
        contenders = {"memcpy": Memcpy(size), "stock": Stock(stock_server, file), "ours": ours}
        rows = _measure(contenders, warmup, rounds)
    name = f"weight_update_{transport}_{rollback}.csv"
    path = shared.write_csv(output / name, rows)
    _report(rows, size, f"{shared.machine()}; {threads} threads, {transport}, rollback {rollback}")
    console.print(f"rounds: {path}")


def _measure(contenders: dict[str, Any], warmup: int, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before = {name: _logprobs(contenders[name].url) for name in ("stock", "ours")}
    with Progress(
        TextColumn("rounds"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        for turn in progress.track(range(warmup + rounds)):
            order = shared.rotated(CONTENDERS, turn)
            row: dict[str, Any] = {"round": turn - warmup, "order": " ".join(order)}
            for name in order:
                row |= contenders[name].run()
            if turn >= warmup:
                rows.append(row)
    for name, old in before.items():
        if _logprobs(contenders[name].url) == old:
            raise SystemExit(f"{name} still serves the policy it started with: nothing measured")
    return rows


def _logprobs(url: str) -> list[float]:
    """Greedy logprobs of a fixed prompt: what the server really serves."""
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        answer = http.post("/v1/completions", json={**body, "logprobs": 1}).raise_for_status()
    logprobs: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return logprobs


def _report(rows: list[dict[str, Any]], size: int, caption: str) -> None:
    found = shared.medians(rows, list(COLUMNS))
    table = Table(title=f"{size / 1e9:.3f} GB, median of {len(rows)} rounds")
    for column in ("what", "median s", "min s", "max s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    lines = []
    for name, what in COLUMNS.items():
        values = [row[name] for row in rows]
        lines.append([what, *(f"{v:.3f}" for v in (found[name], min(values), max(values)))])
        table.add_row(*lines[-1])
    ratios = Table(title=caption)
    for column in ("ratio of medians", "found", "aim"):
        ratios.add_column(column)
    ratio_lines = []
    for what, top, bottom, aim in RATIOS:
        ratio = found[top] / found[bottom]
        wanted = "" if aim is None else f"<= {aim:.1f}: {'met' if ratio <= aim else 'MISSED'}"
        ratio_lines.append([what, f"{ratio:.2f}", wanted])
        ratios.add_row(*ratio_lines[-1])
    console.print(table, ratios)
    print(shared.markdown(["what", "median s", "min s", "max s"], lines))
    print()
    print(shared.markdown(["ratio of medians", "found", "aim"], ratio_lines))


if __name__ == "__main__":
    typer.run(main)
