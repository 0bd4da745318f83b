"""Time and memory of the chosen tokens' log-probabilities, against TRL's fused head.

Forward and backward of one head, in bf16 weights with fp32 logits: TRL's fused head for the
sampled token alone, plain full logits (log_softmax and gather), and ours for the sampled token
and K more. Every round runs all of them, in rotating order; ratios are taken within a round.
Memory is measured in a pass of its own: the allocator's peak on CUDA, elsewhere the bytes of all
tensors that are alive. It includes the gradients.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import shared
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from trl_callbacks.token_logprobs import token_logprobs

sys.path.append(str(shared.ROOT))
from tests.live_bytes import LiveBytes

HEADS = (0, 32, 128, 512)
TRL, NAIVE = "TRL fused head, K = 0", "full logits, K = 128"
NAIVE_HEAD = 128
TRL_CHUNK = 32768  # trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
TEMPERATURE = 0.7
COLUMNS = ("V", "head", "seconds", "time / TRL", "its range", "peak MiB", "above K = 0, MiB")
console = Console()


@dataclass(frozen=True)
class Problem:
    """Operands of one head, and the outside gradient of its results."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor

    def trl(self) -> None:
        """TRL's fused head as ``add_fused_lm_head(cast_lm_head_to_fp32=True)`` calls it."""
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        outputs = ("log_probs", "entropy")
        logprobs, *_ = ChunkedLogProbFunction.apply(
            self.hidden.float(),
            self.weight,
            None,
            self.ids[:, 0],
            TEMPERATURE,
            TRL_CHUNK,
            None,
            1.0,
            outputs,
        )
        logprobs.mean().backward()

    def naive(self) -> None:
        """All logits, in fp32, with their entropy."""
        logits = self.hidden.float() @ self.weight.float().T / TEMPERATURE
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            torch.special.entr(logprobs.exp()).sum(-1)
        logprobs.gather(1, self.ids[:, : 1 + NAIVE_HEAD]).mean().backward()

    def ours(self, head: int) -> Callable[[], None]:
        """Ours for 1 + head tokens."""

        def run() -> None:
            ids = self.ids[:, : 1 + head]
            logprobs, _ = token_logprobs(self.hidden, self.weight, ids, temperature=TEMPERATURE)
            logprobs.mean().backward()

        return run

    def contenders(self) -> dict[str, Callable[[], None]]:
        """All of them by name."""
        ours = {f"ours, K = {head}": self.ours(head) for head in HEADS}
        return {TRL: self.trl, NAIVE: self.naive, **ours}

    def forget(self) -> None:
        """Drop the gradients, so that every run makes its own."""
        self.hidden.grad = self.weight.grad = None


def problem(device: torch.device, vocab: int, tokens: int, width: int) -> Problem:
    """Random operands; logits have a standard deviation of 3 before the temperature."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((tokens, width), generator=generator)
    weight = torch.randn((vocab, width), generator=generator) * (3 / width**0.5)
    ids = torch.randint(vocab, (tokens, 1 + max(HEADS)), generator=generator)
    # A leaf in each dtype, as a bf16 model has them.
    leaves = (x.to(device, torch.bfloat16).requires_grad_() for x in (hidden, weight))
    return Problem(*leaves, ids.to(device))


def clock() -> Callable[[], float]:
    """CPU time of the process for one thread, which other processes do not lengthen; else time."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def seconds(device: torch.device, run: Callable[[], None]) -> float:
    """Time of one run, on CUDA between two events on the device."""
    if device.type != "cuda":
        now = clock()
        begin = now()
        run()
        return now() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(stop)) / 1e3


def peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """Largest number of bytes alive during a run beyond those before it."""
    gc.collect()
    if device.type != "cuda":
        with LiveBytes() as live:
            run()
        return live.peak
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure(
    device: torch.device, vocab: int, tokens: int, width: int, warmup: int, rounds: int
) -> list[dict[str, Any]]:
    """One row per contender and round."""
    head = problem(device, vocab, tokens, width)
    contenders = head.contenders()
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(f"V = {vocab}", total=(warmup + rounds + 1) * len(contenders))
        peaks = {}
        for name, run in contenders.items():
            head.forget()
            peaks[name] = peak_bytes(device, run)
            progress.advance(task)
        for turn in range(warmup + rounds):
            order = shared.rotated(list(contenders), turn)
            for place, name in enumerate(order):
                head.forget()
                begin = time.perf_counter()
                taken = seconds(device, contenders[name])
                wall = time.perf_counter() - begin
                if turn >= warmup:
                    row: dict[str, Any] = {
                        "vocab": vocab,
                        "head": name,
                        "round": turn - warmup,
                        "place": place,
                    }
                    row |= {"seconds": taken, "wall_s": wall, "peak_bytes": peaks[name]}
                    rows.append(row)
                progress.advance(task)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[list[str]]:
    """One line per vocabulary and contender; a ratio is the median of those of the rounds.

    Times of 1 and 3 s against TRL's 2 and 2 s give 1.00 and a range of 0.50 to 1.50.
    """
    lines = []
    names = [TRL, NAIVE, *(f"ours, K = {head}" for head in HEADS)]
    for vocab, name in product(dict.fromkeys(row["vocab"] for row in rows), names):
        of_vocab = [row for row in rows if row["vocab"] == vocab]
        times = {
            contender: [row["seconds"] for row in of_vocab if row["head"] == contender]
            for contender in (name, TRL)
        }
        peaks = {row["head"]: row["peak_bytes"] for row in of_vocab}
        ratios = [a / b for a, b in zip(times[name], times[TRL], strict=True)]
        above = peaks[name] - peaks["ours, K = 0"]
        lines.append(
            [
                f"{vocab:,}",
                name,
                f"{median(times[name]):.3f}",
                f"{median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{peaks[name] / 2**20:.1f}",
                f"{above / 2**20:.2f}" if name.startswith("ours") else "",
            ]
        )
    return lines


def device_name(device: torch.device) -> str:
    """The GPU, or the processor, the number of threads and what their time is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    kind = "CPU time" if clock() is time.process_time else "elapsed time"
    return f"{shared.machine()}; {torch.get_num_threads()} thread(s), {kind}"


def main(
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run; auto prefers CUDA.")
    ] = "auto",
    vocab: Annotated[
        list[int] | None, typer.Option(help="Vocabulary sizes; 32000 and 151936 by default.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens; 512 on a CPU and 8192 on CUDA by default.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Hidden size; 512 on a CPU, 2048 on CUDA by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of all of them.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before, which do not count.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads on a CPU.")] = 1,
    quick: Annotated[
        bool, typer.Option(help="Small sizes and two rounds, to see that it runs.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Directory for the CSV.")] = shared.RESULTS,
    write: Annotated[
        Path | None, typer.Option(help="Page whose table is replaced: docs/token_logprobs.md.")
    ] = None,
) -> None:
    """Compare our head with TRL's and with full logits, interleaved in one run."""
    torch.set_num_threads(threads)
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    where = torch.device("cuda" if cuda else "cpu")
    sizes = vocab or ([2048] if quick else [32_000, 151_936])
    rounds = 2 if quick else rounds
    tokens = tokens or (64 if quick else 8192 if cuda else 512)
    width = width or (64 if quick else 2048 if cuda else 512)
    rows = [row for size in sizes for row in measure(where, size, tokens, width, warmup, rounds)]
    caption = (
        f"{device_name(where)}; torch {version('torch')}, trl {version('trl')};\n"
        f"N = {tokens}, D = {width}, {rounds} rounds. Made by\n"
        f"`.venv/bin/python benchmarks/token_logprobs.py {' '.join(sys.argv[1:])}`:"
    )
    lines = summary(rows)
    table = Table(title=f"N = {tokens}, D = {width}, {rounds} rounds", caption=device_name(where))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "head" else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    path = shared.write_csv(output / f"token_logprobs_{where.type}.csv", rows)
    console.print(f"rounds: {path}")
    if write is not None:
        shared.replace_table(write, "table", f"{caption}\n\n{shared.markdown(COLUMNS, lines)}")


if __name__ == "__main__":
    typer.run(main)
