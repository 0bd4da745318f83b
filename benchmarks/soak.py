"""Weight updates every few seconds for an hour, under constant generation load.

A real `vllm serve` of a small random model. Several rollouts are in flight all the time, while
full, changed and lora updates arrive through both transports, and some that must be refused.
Checked all the while:

- no token is lost: every rollout has exactly the tokens that were asked for;
- policy versions never fall within a sequence, and are versions that were served meanwhile;
- what must be refused is, and leaves the served version alone;
- files in the staging directory stay within two sets of weights;
- the resident memory of all of the server's processes stays within 2% after warm-up.

Exit status: 0 when every check held, 1 when one did not.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import shared
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trl_callbacks.weight_sync import WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest, Sampling
from vllm_parity_plugin.serving import Server, serve
from vllm_parity_plugin.weights.errors import ConflictError, ManifestError, RangeError
from vllm_parity_plugin.weights.messages import UploadRequest, WeightUpdate
from vllm_parity_plugin.weights.writer import header_bytes, write_policy
from vllm_parity_plugin.wire import INCOMING

CYCLE = (
    ("full", "file"),
    ("changed", "file"),
    ("lora", "file"),
    ("nan", "file"),
    ("lora", "http"),
    ("changed", "http"),
    ("full", "http"),
    ("older", "file"),
    ("changed", "file"),
    ("checksum", "file"),
    ("lora", "http"),
    ("cut", "http"),
)
"""Updates in turn: what arrives and how. The last word of a refused one says what is wrong."""
REFUSED = {"nan": ManifestError, "older": ConflictError, "checksum": ManifestError}
REFUSED |= {"cut": RangeError}

CONTEXT, BLOCK, BLOCKS = 2048, 128, 256
"""Tokens of context, tokens of a KV block, KV blocks: few, so that all are touched at once."""
SETS = 2.5
"""Bytes that staging may hold, in full sets: two, and the partial updates on top of one."""
FILES = 8
TOLERANCE = 0.02
MEASURE_SECONDS = 0.25
RANK = 8

Tensors = dict[str, torch.Tensor]
console = Console()


@dataclass
class Book:
    """What happened so far, shared by the threads."""

    begun: float = field(default_factory=time.monotonic)
    served: set[int] = field(default_factory=lambda: {0})
    """Versions that were served, and the one that is being loaded."""
    newest: int = 0
    """Newest version known to be served."""
    rollouts: int = 0
    tokens: int = 0
    spanning: int = 0
    """Sequences that were in flight during an update."""
    problems: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    staged_bytes: int = 0
    staged_files: int = 0
    """Most seen at once."""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.begun

    def complain(self, problem: str) -> None:
        """Note a check that failed."""
        with self.lock:
            self.problems.append(f"{self.seconds:.0f} s: {problem}")


class Load:
    """Rollouts that follow each other without a pause."""

    def __init__(self, url: str, book: Book, prompts: int, tokens: int, seed: int) -> None:
        self._client = ParityClient(url)
        self._book = book
        self._request = RolloutRequest(
            prompts=[[3 + seed, 4 + index] for index in range(prompts)],
            head_size=8,
            sampling=Sampling(max_tokens=tokens, ignore_eos=True),
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        book = self._book
        while not book.stop.is_set():
            floor = book.newest
            try:
                rollout = self._client.rollout(self._request)
            except Exception as error:
                book.complain(f"a rollout was lost: {error}")
                time.sleep(1.0)
                continue
            with book.lock:
                served = {version for version in book.served if version >= floor}
            problems = check_rollout(rollout, self._request, served)
            for problem in problems:
                book.complain(problem)
            with book.lock:
                book.rollouts += 1
                book.tokens += len(rollout.token_ids)
                book.spanning += crossings(rollout)


def check_rollout(rollout: Rollout, request: RolloutRequest, served: set[int]) -> list[str]:
    """What is wrong with an answer: tokens, reasons, or versions that were not served."""
    problems = []
    wanted = len(request.prompts) * request.n
    lengths = np.diff(rollout.sequence_offsets).tolist()
    if lengths != [request.sampling.max_tokens] * wanted:
        problems.append(
            f"{wanted} sequences of {request.sampling.max_tokens} were asked, {lengths} came"
        )
    if set(rollout.finish_reasons) != {"length"}:
        problems.append(f"finish reasons {sorted(set(rollout.finish_reasons))}")
    for index in range(len(rollout)):
        versions = rollout.policy_versions[rollout.span(index)]
        if (np.diff(versions) < 0).any():
            problems.append(f"policy versions fall within a sequence: {versions.tolist()}")
    if strange := sorted(set(rollout.policy_versions.tolist()) - served):
        problems.append(f"versions {strange} were not served then; {sorted(served)} were")
    return problems


def crossings(rollout: Rollout) -> int:
    """Sequences that more than one policy sampled."""
    spans = [rollout.policy_versions[rollout.span(index)] for index in range(len(rollout))]
    return sum(bool((versions != versions[:1]).any()) for versions in spans)


class Trainer:
    """Sends one update after the other."""

    def __init__(self, url: str, book: Book, weights: Tensors) -> None:
        self._client = ParityClient(url)
        self._book = book
        self._weights = weights
        self._seed = itertools.count(1)
        self.directory = Path(self._client.weights_info().directory)

    def send(self, kind: str, transport: str) -> dict[str, Any]:
        """One update of the cycle; returns its row."""
        row: dict[str, Any] = {"kind": kind, "transport": transport}
        before = self._book.newest
        begin = time.monotonic()
        try:
            if kind in REFUSED:
                self._refused(kind)
                row["outcome"] = "refused"
            else:
                row |= self._applied(kind, transport)
        except Exception as error:
            row["outcome"] = "failed"
            self._book.complain(f"{kind} update through {transport}: {error}")
        row["push_s"] = time.monotonic() - begin
        row["version"] = self._client.weights_info().policy_version
        expected = before + (row["outcome"] == "applied")
        if row["version"] != expected:
            self._book.complain(f"version {row['version']} is served, {expected} was expected")
        return row

    def _applied(self, kind: str, transport: Any) -> dict[str, Any]:
        sync = WeightSync(self._client, transport)
        version = sync.policy_version + 1
        with self._book.lock:
            self._book.served.add(version)
        if kind == "full":
            result = sync.push(self._noisy(self._weights).items())
        elif kind == "changed":
            result = sync.push_changed(self._noisy(self._part()))
        else:
            result = sync.push_adapter(self._adapter(), scaling=0.1)
        with self._book.lock:
            self._book.newest = result.policy_version
        return {
            "outcome": "applied",
            "pause_s": result.pause_seconds,
            "total_s": result.total_seconds,
        }

    def _refused(self, kind: str) -> None:
        send: dict[str, Callable[[], object]] = {
            "nan": lambda: self._file(spoil=True),
            "older": lambda: self._file(version=max(1, self._book.newest - 1)),
            "checksum": lambda: self._file(checksum="0" * 32),
            "cut": self._cut,
        }
        try:
            send[kind]()
        except REFUSED[kind]:
            return
        raise AssertionError("it should have been refused")

    def _file(self, version: int | None = None, checksum: str = "", spoil: bool = False) -> None:
        info = self._client.weights_info()
        path = self.directory / f"{INCOMING}{secrets.token_hex(8)}.safetensors"
        tensors = self._noisy(self._weights)
        if spoil:
            next(reversed(tensors.values())).view(-1)[0] = torch.nan
        entries = write_policy(path, tensors.items(), info.tensors)
        if checksum:
            name = next(iter(entries))
            entries[name] = entries[name].model_copy(update={"checksum": checksum})
        update = WeightUpdate(
            version=version or info.policy_version + 1,
            model=info.model,
            file=path.name,
            tensors=entries,
        )
        try:
            self._client.update_weights(update)
        finally:
            path.unlink(missing_ok=True)

    def _cut(self) -> None:
        """Half of an upload, then its commit."""
        info = self._client.weights_info()
        with tempfile.TemporaryDirectory() as own:
            path = Path(own) / "policy"
            entries = write_policy(path, self._noisy(self._weights).items(), info.tensors)
            data = memoryview(path.read_bytes())[len(header_bytes(entries)) :]
        upload = self._client.open_upload(
            UploadRequest(version=info.policy_version + 1, model=info.model, tensors=entries)
        )
        try:
            self._client.send(upload.upload_id, 0, upload.total, data[: len(data) // 2])
            self._client.commit_upload(upload.upload_id)
        finally:
            self._client.drop_upload(upload.upload_id)

    def _part(self) -> Tensors:
        return {name: t for name, t in self._weights.items() if ".layers.1.mlp." in name}

    def _noisy(self, tensors: Tensors) -> Tensors:
        return shared.test_models().noisy(tensors, seed=next(self._seed), sd=0.1)

    def _adapter(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(next(self._seed))
        pairs = {}
        for name, weight in self._weights.items():
            if name.endswith("q_proj.weight"):
                rows, columns = weight.shape
                a = torch.randn(RANK, columns, generator=generator) * 0.05
                b = torch.randn(rows, RANK, generator=generator) * 0.05
                pairs[name.removesuffix(".weight")] = (a, b)
        return pairs


def main(
    minutes: Annotated[float, typer.Option(min=0.2, help="How long, after warm-up.")] = 60.0,
    interval: Annotated[
        float, typer.Option(min=0.0, help="Seconds from one update's start to the next's.")
    ] = 7.5,
    rollouts: Annotated[int, typer.Option(min=1, help="Requests in flight all the time.")] = 4,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of each request.")] = 4,
    warmup: Annotated[int, typer.Option(min=1, help="Cycles of updates before.")] = 4,
    output: Annotated[Path, typer.Option(help="Directory for CSV and plot.")] = shared.RESULTS,
) -> None:
    """Soak a real server in weight updates and rollouts, and check all the while."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = shared.qwen3(vocabulary=8192, layers=6, width=256, heads=4, head_dim=64)
        model = shared.write_model(directory, config)
        with console.status("starting the server (about 30 s) ..."):
            server = stack.enter_context(_server(model))
        book = Book()
        trainer = Trainer(server.url, book, shared.random_weights(config, seed=1))
        size = (model / "model.safetensors").stat().st_size
        threading.Thread(target=_watch, args=(trainer.directory, book, size), daemon=True).start()
        with console.status("warming up: every KV page, and every kind of update ..."):
            _touch_kv(server.url)
            loads = [
                Load(server.url, book, sequences, 64 * (index + 1), index)
                for index in range(rollouts)
            ]
            for load in loads:
                load.thread.start()
            for kind, transport in CYCLE * warmup:
                trainer.send(kind, transport)
        book.begun = time.monotonic()
        rows, samples = _soak(server, trainer, book, minutes * 60, interval)
        book.stop.set()
        for load in loads:
            load.thread.join(timeout=300)
            if load.thread.is_alive():
                book.complain("a rollout hangs")
        health = httpx.get(f"{server.url}/health", timeout=30.0, trust_env=False)
        if health.status_code != 200:
            book.complain(f"/health answers {health.status_code}")
    memory = [sample["rss_mb"] for sample in samples]
    if (off := shared.flatness(memory)) > TOLERANCE:
        book.complain(f"resident memory moved by {off:.1%}, more than {TOLERANCE:.0%}")
    shared.write_csv(output / "soak_updates.csv", rows)
    shared.write_csv(output / "soak_memory.csv", samples)
    _plot(rows, samples, output / "soak.png")
    _report(rows, samples, book, size)
    console.print(f"rows and plot: {output}/soak_updates.csv, soak_memory.csv, soak.png")
    for problem in book.problems[:20]:
        console.print(f"[red]FAILED[/red] {problem}")
    raise typer.Exit(1 if book.problems else 0)


def _server(model: Path) -> contextlib.AbstractContextManager[Server]:
    return serve(
        model,
        *shared.SERVE_ARGS,
        *("--max-model-len", str(CONTEXT), "--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", str(BLOCKS)),
        env=shared.serve_environment(threads=1),
    )


def _touch_kv(url: str) -> None:
    """Fill the whole KV cache twice: its pages become resident only when they are written."""
    client = ParityClient(url)
    prompt = [index % 200 + 3 for index in range(CONTEXT - 2)]
    count = BLOCKS * BLOCK // CONTEXT
    request = RolloutRequest(prompts=[prompt] * count, sampling=Sampling(max_tokens=1))
    for _ in range(2):
        client.rollout(request)
    client.close()


def _soak(
    server: Server, trainer: Trainer, book: Book, seconds: float, interval: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    with Progress(
        TextColumn("soak"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    ) as progress:
        task = progress.add_task("", total=seconds, status="")
        for index in itertools.count():
            if book.seconds > seconds:
                break
            row = {"index": index, "seconds": round(book.seconds, 2)}
            rows.append(row | trainer.send(*CYCLE[index % len(CYCLE)]))
            until = row["seconds"] + interval
            while True:
                samples.append({"seconds": round(book.seconds, 2), **resident(server.process.pid)})
                progress.update(
                    task, completed=min(seconds, book.seconds), status=_status(rows, samples, book)
                )
                if book.seconds >= until:
                    break
                time.sleep(min(1.0, max(0.0, until - book.seconds)))
    return rows, samples


def _status(rows: list[dict[str, Any]], samples: list[dict[str, Any]], book: Book) -> str:
    return (
        f"{len(rows)} updates, version {book.newest}, {book.tokens} tokens, "
        f"{samples[-1]['rss_mb']:.0f} MB, {len(book.problems)} problems"
    )


def _watch(directory: Path, book: Book, size: int) -> None:
    """Look at the staging directory all the time."""
    while not book.stop.is_set():
        files = list(_sets(directory))
        total = sum(files)
        with book.lock:
            book.staged_bytes = max(book.staged_bytes, total)
            book.staged_files = max(book.staged_files, len(files))
        if total > SETS * size or len(files) > FILES:
            book.complain(f"staging holds {len(files)} files, {total / size:.1f} sets of weights")
            time.sleep(5.0)
        time.sleep(MEASURE_SECONDS)


def _sets(directory: Path) -> Iterator[int]:
    """Bytes of each file of tensors."""
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.suffix == ".safetensors":
                yield path.stat().st_size


def resident(pid: int) -> dict[str, float]:
    """Resident memory in MB of a process and its descendants: together, and by name."""
    parents, names = {}, {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
                parents[int(path.name)], names[int(path.name)] = int(rest.split()[1]), name
    family, fresh = {pid}, {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - family
        family |= fresh
    found: dict[str, float] = {"rss_mb": 0.0}
    for member in sorted(family):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{member}/status").read_text().splitlines()
            line = next(line for line in lines if line.startswith("VmRSS:"))
            megabytes = int(line.split()[1]) / 1024
            column = f"rss_mb {names.get(member, '?')}"
            found["rss_mb"] += megabytes
            found[column] = found.get(column, 0.0) + megabytes
    return {name: round(value, 1) for name, value in found.items()}


def _plot(rows: list[dict[str, Any]], samples: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, version, pause) = pyplot.subplots(3, sharex=True, figsize=(9, 8))
    memory.plot([s["seconds"] / 60 for s in samples], [s["rss_mb"] for s in samples], lw=0.8)
    memory.set_ylim(0, 1.15 * max(s["rss_mb"] for s in samples))
    memory.set_ylabel("resident memory, MB")
    version.step([r["seconds"] / 60 for r in rows], [r["version"] for r in rows], where="post")
    refused = [row for row in rows if row["outcome"] == "refused"]
    version.plot(
        [r["seconds"] / 60 for r in refused], [r["version"] for r in refused], "x", label="refused"
    )
    version.set_ylabel("policy version")
    version.legend()
    for kind in ("full", "changed", "lora"):
        of_kind = [row for row in rows if row["kind"] == kind and row["outcome"] == "applied"]
        pause.plot(
            [r["seconds"] / 60 for r in of_kind],
            [1000 * r["pause_s"] for r in of_kind],
            ".",
            label=kind,
        )
    pause.set_ylim(bottom=0)
    pause.set_ylabel("pause, ms")
    pause.set_xlabel("minutes")
    pause.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _report(
    rows: list[dict[str, Any]], samples: list[dict[str, Any]], book: Book, size: int
) -> None:
    memory = [sample["rss_mb"] for sample in samples]
    hours = [sample["seconds"] / 3600 for sample in samples]
    outcomes = [row["outcome"] for row in rows]
    pauses = [row["pause_s"] for row in rows if row.get("pause_s") is not None]
    facts = {
        "minutes": f"{samples[-1]['seconds'] / 60:.1f}",
        "updates applied": str(outcomes.count("applied")),
        "updates refused, as they must be": str(outcomes.count("refused")),
        "rollouts, tokens": f"{book.rollouts}, {book.tokens}",
        "sequences that an update crossed": str(book.spanning),
        "pause, median and largest": f"{1000 * np.median(pauses):.0f} ms, "
        f"{1000 * max(pauses):.0f} ms",
        "resident memory, first and last": f"{memory[0]:.0f} MB, {memory[-1]:.0f} MB",
        "largest deviation of a tenth of the run": f"{shared.flatness(memory):.2%} of "
        f"{TOLERANCE:.0%} allowed",
        "slope": f"{shared.slope(hours, memory):+.1f} MB per hour",
        "staging, most at once": f"{book.staged_files} files, {book.staged_bytes / size:.2f} sets",
        "checks that failed": str(len(book.problems)),
    }
    table = Table(title=shared.machine())
    table.add_column("what")
    table.add_column("found")
    for what, found in facts.items():
        table.add_row(what, found)
    console.print(table)
    print(shared.markdown(["what", "found"], [list(fact) for fact in facts.items()]))


if __name__ == "__main__":
    typer.run(main)
