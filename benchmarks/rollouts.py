"""What sampler heads cost: against TRL's client of vLLM's own endpoint, and as they grow.

`compare` sends the same work (token ids, seeds, a fixed number of tokens) to one real `vllm serve`
in two ways, up to the padded tensors of a trainer: TRL's own client and the stock completions
endpoint, and `/v1/parity/rollouts`. `growth` asks for more and more entries and sequences.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import psutil
import shared
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trl_callbacks.heads import Rollouts
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.rollout_wire import HeadDtype, RolloutRequest, Sampling
from vllm_parity_plugin.serving import Server, serve

CELLS = ("16x128", "64x128", "256x128", "64x512")
PARITY: dict[str, tuple[int, dict[str, Any]]] = {
    "parity, K = 0": (0, {}),
    "parity, K = 32": (32, {}),
    "parity, K = 128": (128, {}),
    "parity, K = 128, float16": (128, {"head_dtype": "float16"}),
    "parity, K = 128, zstd": (128, {"zstd": True}),
}
"""K, and how the body is sent."""
BASE, FULL, STOCK_FULL = "stock, K = 0", "parity, K = 128", "stock, K = 128"
WALL_AIM, BYTES_AIM, CLIENT_AIM = 1.15, 1100.0, 20.0
COLUMNS = ("seconds", "bytes", "client_cpu", "front_cpu", "engine_cpu", "peak_mb", "objects")
GROWTH_SEQUENCES, GROWTH_TOKENS = 32, 64
SAMPLE_SECONDS = 0.005
console = Console()
app = typer.Typer(help=__doc__, no_args_is_help=True)


def cell(text: str) -> tuple[int, int]:
    """``"16x128"`` is 16 sequences of 128 tokens.

    Raises:
        typer.BadParameter: anything else.
    """
    sequences, times, tokens = text.partition("x")
    if not (times and sequences.isdigit() and tokens.isdigit()):
        raise typer.BadParameter(f"{text!r} is not SEQUENCESxTOKENS, such as 16x128")
    return int(sequences), int(tokens)


def floor(sequences: int, tokens: int, head: int) -> int:
    """Bytes that must move: id, logprob and version of each token, and K pairs of 8 bytes."""
    return sequences * tokens * (12 + 8 * head)


def aims(wall: float, size: float, client: float) -> list[tuple[str, bool]]:
    """What was aimed at, and whether it was met.

    Args:
        wall: seconds of parity with K = 128 over seconds of stock with K = 0.
        size: bytes per token of parity with K = 128.
        client: processor seconds of the client, stock over parity, both with K = 128.
    """
    return [
        (f"K = 128 takes {wall:.2f} x stock K = 0 (aim {WALL_AIM})", wall <= WALL_AIM),
        (f"{size:.0f} bytes per token (aim {BYTES_AIM:.0f})", size <= BYTES_AIM),
        (f"trainer's processor time {client:.0f} x less than stock (aim {CLIENT_AIM:.0f})",
         client >= CLIENT_AIM),
    ]  # fmt: skip


class Stock:
    """TRL's own client of the completions endpoint, and the tensors a trainer would make."""

    def __init__(self, url: str) -> None:
        from trl.generation.vllm_client import VLLMClient

        self._client = VLLMClient(base_url=url)
        self._client.session.hooks["response"].append(self._count)
        self.bytes = 0

    def _count(self, response: Any, *_: Any, **__: Any) -> None:
        self.bytes = len(response.content)

    def __call__(self, prompts: list[list[int]], tokens: int, head: int) -> Any:
        more = {"ignore_eos": True, "seed": 0}
        found = self._client.generate(
            prompts, max_tokens=tokens, logprobs=head, generation_kwargs=more
        )
        # Rows have K or K + 1 entries: the sampled token comes on top where it is not among them.
        values, ids = found["logprobs"], found["logprob_token_ids"]
        padded = [[row + [0.0] * (head + 1 - len(row)) for row in rows] for rows in values]
        padded_ids = [[row + [-1] * (head + 1 - len(row)) for row in rows] for rows in ids]
        return found, torch.tensor(padded), torch.tensor(padded_ids)


class Parity:
    """`/v1/parity/rollouts`, as `ParityGRPOTrainer` uses it; `bytes` are those on the network."""

    def __init__(self, url: str, head_dtype: HeadDtype = "float32", zstd: bool = False) -> None:
        self._client = ParityClient(url, timeout=1200.0)
        self._form: dict[str, Any] = {"head_dtype": head_dtype, "zstd": zstd}
        self._client._http.event_hooks["response"].append(self._keep)
        self._answer: Any = None

    def _keep(self, response: Any) -> None:
        self._answer = response

    @property
    def bytes(self) -> int:
        return int(self._answer.num_bytes_downloaded)

    def __call__(self, prompts: list[list[int]], tokens: int, head: int) -> Any:
        request = RolloutRequest(
            prompts=prompts,
            head_size=head,
            seeds=[0] * len(prompts),
            sampling=Sampling(max_tokens=tokens, ignore_eos=True),
        )
        rollout = self._client.rollout(request, **self._form)
        rollouts = Rollouts()
        logprobs = rollouts.add(rollout)
        ids = [rollout.token_ids[rollout.span(row)].tolist() for row in range(len(rollout))]
        heads = rollouts.rows(ids, logprobs).heads(tokens, torch.device("cpu"))
        return rollouts, ids, torch.tensor(logprobs), heads


def measured(server: Server, call: Callable[[], Any]) -> dict[str, float]:
    """One request: wall and processor time of all sides, memory and objects that it leaves."""
    client, peak, over = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], client.memory_info().rss)

    gc.collect()
    objects, resident = len(gc.get_objects()), client.memory_info().rss
    watcher = threading.Thread(target=watch)
    before = processor_seconds(server.process.pid)
    watcher.start()
    started, cpu = time.perf_counter(), time.thread_time()
    held = call()
    seconds, cpu = time.perf_counter() - started, time.thread_time() - cpu
    over.set()
    watcher.join()
    gc.collect()
    after = processor_seconds(server.process.pid)
    result = {
        "seconds": seconds,
        "client_cpu": cpu,
        "front_cpu": after[0] - before[0],
        "engine_cpu": after[1] - before[1],
        "peak_mb": max(0, peak[0] - resident) / 2**20,
        "objects": len(gc.get_objects()) - objects,
    }
    del held
    return result


def processor_seconds(pid: int) -> tuple[float, float]:
    """Of the API server, and of all processes below it (engine core and workers)."""

    def seconds(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    front = psutil.Process(pid)
    return seconds(front), sum(map(seconds, front.children(recursive=True)))


def _server(directory: Path, vocabulary: int, head: int) -> Any:
    config = shared.qwen3(vocabulary=vocabulary, layers=4, width=256, heads=4, head_dim=64)
    return serve(
        shared.write_model(directory / "model", config),
        *shared.SERVE_ARGS,
        *("--max-num-seqs", "512", "--max-model-len", "1024"),
        env=shared.serve_environment(threads=2)
        | {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_PARITY_HEAD_SIZE": str(head)},
    )


def _prompts(count: int) -> list[list[int]]:
    return [[3 + (index + place) % 500 for place in range(16)] for index in range(count)]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


@app.command()
def compare(
    cells: Annotated[list[str], typer.Option("--cell", help="SEQUENCESxTOKENS.")] = list(CELLS),  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of everything.")] = 3,
    stock_rounds: Annotated[int, typer.Option(min=1, help="Rounds with stock K = 128.")] = 1,
    vocabulary: Annotated[int, typer.Option(min=1024)] = 8192,
    output: Annotated[Path, typer.Option(help="Directory for the CSV.")] = shared.RESULTS,
    page: Annotated[Path | None, typer.Option(help="Page whose table is replaced.")] = None,
) -> None:
    """Stock completions endpoint against parity rollouts, at K = 0, 32 and 128."""
    sizes = [cell(text) for text in cells]
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        _server(Path(temporary), vocabulary, 128) as server,
        _progress() as progress,
    ):
        stock = Stock(server.url)
        contestants: dict[str, tuple[Any, int]] = {BASE: (stock, 0), STOCK_FULL: (stock, 128)}
        contestants |= {
            name: (Parity(server.url, **form), head) for name, (head, form) in PARITY.items()
        }
        for call, head in contestants.values():
            call(_prompts(8), 8, head)  # compiles, and opens connections
        task = progress.add_task("compare", total=len(sizes) * (rounds + 1))
        for (sequences, tokens), turn in itertools.product(sizes, range(-1, rounds)):
            for name in shared.rotated(list(contestants), turn + 1):
                if name == STOCK_FULL and not 0 <= turn < stock_rounds:
                    continue
                if turn < 0 and name not in {BASE, FULL}:
                    continue  # the first round warms up
                call, head = contestants[name]
                found = measured(server, lambda: call(_prompts(sequences), tokens, head))  # noqa: B023
                found["bytes"] = call.bytes / (sequences * tokens)
                row = {"sequences": sequences, "tokens": tokens, "round": turn, "name": name}
                if turn >= 0:
                    rows.append(row | found)
            progress.advance(task)
    shared.write_csv(output / "rollouts_compare.csv", rows)
    lines = [line for size in sizes for line in table(rows, *size)]
    header = ("", "", "wall / stock K = 0", "its range", "bytes / token", "client CPU, s",
              "server CPU, s", "engine CPU, s", "peak, MB", "objects")  # fmt: skip
    view = Table(*header)
    for line in lines:
        view.add_row(*line)
    console.print(view)
    for size in sizes:
        verdict(rows, *size)
    if page is not None:
        caption = f"{rounds} rounds, a vocabulary of {vocabulary}, 4 layers of width 256"
        caption = f"{caption}; {shared.machine()}"
        shared.replace_table(page, "compare", f"{caption}:\n\n{shared.markdown(header, lines)}")


def table(rows: list[dict[str, Any]], sequences: int, tokens: int) -> list[list[str]]:
    """Lines of one cell: medians over the rounds, and ratios to stock K = 0 of the same round."""
    own = [row for row in rows if (row["sequences"], row["tokens"]) == (sequences, tokens)]
    base = {row["round"]: row["seconds"] for row in own if row["name"] == BASE}
    lines = []
    for name in dict.fromkeys(row["name"] for row in sorted(own, key=lambda row: row["name"])):
        mine = [row for row in own if row["name"] == name]
        ratios = sorted(row["seconds"] / base[row["round"]] for row in mine)
        middle = shared.medians([{"ratio": ratio} for ratio in ratios], ["ratio"])["ratio"]
        values = shared.medians(mine, COLUMNS)
        lines.append(
            [
                f"{sequences} x {tokens}",
                name,
                f"{middle:.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                f"{values['bytes']:.0f}",
                f"{values['client_cpu']:.3f}",
                f"{values['front_cpu']:.2f}",
                f"{values['engine_cpu']:.2f}",
                f"{values['peak_mb']:.0f}",
                f"{values['objects']:.0f}",
            ]
        )
    return lines


def verdict(rows: list[dict[str, Any]], sequences: int, tokens: int) -> None:
    """Print the aims beside what one cell gave."""
    lines = {line[1]: line for line in table(rows, sequences, tokens)}
    client = float(lines[STOCK_FULL][5]) / max(float(lines[FULL][5]), 1e-3)
    for text, met in aims(float(lines[FULL][2]), float(lines[FULL][4]), client):
        console.print(f"{sequences} x {tokens}: {text}: {'met' if met else '[red]not met[/red]'}")


@app.command()
def growth(
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of everything.")] = 3,
    largest: Annotated[int, typer.Option(min=2, help="Largest K.")] = 1024,
    most: Annotated[int, typer.Option(min=2, help="Most sequences.")] = 512,
    vocabulary: Annotated[int, typer.Option(min=1024)] = 8192,
    output: Annotated[Path, typer.Option(help="Directory for the CSV.")] = shared.RESULTS,
    plot: Annotated[Path, typer.Option(help="Where to draw.")] = shared.RESULTS / "rollouts.png",
) -> None:
    """Time and bytes by K and by sequences, beside the bytes that must move."""
    jobs = [("K", GROWTH_SEQUENCES, GROWTH_TOKENS, head) for head in powers(largest)]
    jobs += [("sequences", count, 32, 128) for count in powers(most)]
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        _server(Path(temporary), vocabulary, largest) as server,
        _progress() as progress,
    ):
        parity = Parity(server.url)
        parity(_prompts(most), 4, largest)
        task = progress.add_task("growth", total=rounds * len(jobs))
        for turn in range(rounds):
            for index in shared.rotated([str(i) for i in range(len(jobs))], turn * 7):
                kind, sequences, tokens, head = jobs[int(index)]
                started = time.perf_counter()
                parity(_prompts(sequences), tokens, head)
                row = {"kind": kind, "sequences": sequences, "tokens": tokens, "K": head}
                row |= {"round": turn, "seconds": time.perf_counter() - started}
                row |= {"bytes": parity.bytes, "floor": floor(sequences, tokens, head)}
                rows.append(row)
                progress.advance(task)
    shared.write_csv(output / "rollouts_growth.csv", rows)
    draw(rows, plot)
    console.print(f"rows and plot: {output / 'rollouts_growth.csv'}, {plot}")


def powers(largest: int) -> list[int]:
    """``powers(8)`` is ``[1, 2, 4, 8]``."""
    return [2**exponent for exponent in range(largest.bit_length()) if 2**exponent <= largest]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Two panels, over K and over sequences: median seconds, bytes, and the floor."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), dpi=110, layout="constrained")
    for panel, kind in zip(panels, ("K", "sequences"), strict=True):
        own = [row for row in rows if row["kind"] == kind]
        x = sorted({row[kind] for row in own})
        middle = [
            shared.medians([row for row in own if row[kind] == at], ("seconds", "bytes", "floor"))
            for at in x
        ]
        seconds = [row["seconds"] for row in middle]
        panel.loglog(x, seconds, "o-", label="seconds")
        panel.set_ylim(min(seconds) / 4, max(seconds) * 4)  # noise must not fill the panel
        other = panel.twinx()
        other.loglog(x, [row["bytes"] for row in middle], "s-", color="C1", label="bytes sent")
        other.loglog(x, [row["floor"] for row in middle], "--", color="C7", label="floor")
        panel.set(xlabel=kind, ylabel="seconds")
        other.set(ylabel="bytes")
        lines = [*panel.get_lines(), *other.get_lines()]
        panel.legend(lines, [str(line.get_label()) for line in lines], loc="upper left")
    panels[0].set_title(f"{GROWTH_SEQUENCES} sequences of {GROWTH_TOKENS} tokens")
    panels[1].set_title("K = 128, 32 tokens each")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    app()
