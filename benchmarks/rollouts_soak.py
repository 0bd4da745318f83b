"""Rollouts with heads for half an hour: resident memory of server and trainer must stay flat.

A real `vllm serve` of a small random model. Rollouts of K = 128 follow each other with a short
pause: whole, streamed, compressed, float16, and some whose caller hangs up in the middle. Exit
status 1 when resident memory moves by more than 2% after the warm-up, or a rollout lacks a token.

On the CPU oneDNN compiles a kernel for every shape of a batch that the worker meets, and keeps up
to 1024 of them, so the worker's memory rises until they are all there. `--kernels` is how many it
keeps here (ONEDNN_PRIMITIVE_CACHE_CAPACITY).
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import shared
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest, Sampling
from vllm_parity_plugin.serving import Server, serve
from vllm_parity_plugin.wire import PREFIX

KINDS = ("whole", "streamed", "zstd", "float16", "left")
TOLERANCE = 0.02
WARM_UP = 0.2
"""Share of the time that does not count."""
console = Console()


def request(turn: int) -> RolloutRequest:
    """Of 8 to 32 sequences and 32 to 128 tokens, never twice the same in a row."""
    generator = np.random.default_rng(turn)
    count, tokens = int(generator.integers(8, 33)), int(generator.integers(32, 129))
    prompts = generator.integers(3, 500, (count, 16)).tolist()
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return RolloutRequest(prompts=prompts, head_size=128, sampling=sampling)


def send(client: ParityClient, kind: str, asked: RolloutRequest) -> Rollout | None:
    """One rollout; None where the caller hung up."""
    if kind == "left":
        body = asked.model_copy(update={"stream": True}).model_dump(exclude_none=True)
        with httpx.stream(
            "POST", f"{client.url}{PREFIX}/rollouts", json=body, timeout=60
        ) as answer:
            next(answer.iter_raw())
        return None
    if kind == "streamed":
        parts = dict(client.rollout_stream(asked))
        return Rollout.join([parts[i] for i in range(len(parts))], asked.sampling)
    form: dict[str, Any] = {"zstd": {"zstd": True}, "float16": {"head_dtype": "float16"}}
    return client.rollout(asked, **form.get(kind, {}))


ROLES = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker"}


def resident(server: Server) -> dict[str, float]:
    """MiB of each of the server's processes, of all of them, and of this one."""
    front = psutil.Process(server.process.pid)
    found = {"API server": front.memory_info().rss / 2**20}
    for process in front.children(recursive=True):
        title = process.cmdline()[0] if process.cmdline() else ""
        role = ROLES.get(title.strip(), "others")
        found[role] = found.get(role, 0.0) + process.memory_info().rss / 2**20
    return found | {
        "server": sum(found.values()),
        "trainer": psutil.Process().memory_info().rss / 2**20,
    }


def moved(samples: list[dict[str, float]], name: str, seconds: float) -> float:
    """Largest deviation of a window's median after the warm-up, as a share of the first."""
    return shared.flatness([row[name] for row in samples if row["seconds"] > WARM_UP * seconds])


def main(
    minutes: Annotated[float, typer.Option(min=0.1)] = 30.0,
    pause: Annotated[float, typer.Option(min=0.0, help="Seconds between two rollouts.")] = 0.5,
    kernels: Annotated[
        int, typer.Option(min=1, help="Kernels that oneDNN keeps; its own default is 1024.")
    ] = 16,
    output: Annotated[Path, typer.Option(help="Directory for the CSV.")] = shared.RESULTS,
    page: Annotated[Path | None, typer.Option(help="Page whose table is replaced.")] = None,
) -> None:
    """Run it."""
    seconds = 60.0 * minutes
    samples: list[dict[str, float]] = []
    problems: list[str] = []
    tokens = rollouts = 0
    config = shared.qwen3(vocabulary=2048, layers=2, width=128, heads=4, head_dim=32)
    environment = shared.serve_environment(threads=1) | {
        "VLLM_PARITY_ROLLOUT_GRACE": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(kernels),
    }
    columns = (TextColumn("soak"), BarColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory() as temporary,
        serve(
            shared.write_model(Path(temporary) / "model", config),
            *shared.SERVE_ARGS,
            *("--max-model-len", "256", "--num-gpu-blocks-override", "128"),
            env=environment,
        ) as server,
        Progress(*columns, console=console) as progress,
    ):
        client = ParityClient(server.url)
        task = progress.add_task("", total=seconds)
        begun = time.monotonic()
        for turn in itertools.count():
            asked, kind = request(turn), KINDS[turn % len(KINDS)]
            rollout = send(client, kind, asked)
            if rollout is not None:
                rollouts, tokens = rollouts + 1, tokens + len(rollout.token_ids)
                if len(rollout.token_ids) != len(asked.prompts) * asked.sampling_of(0).max_tokens:
                    problems.append(f"turn {turn} ({kind}): {len(rollout.token_ids)} tokens")
            passed = time.monotonic() - begun
            samples.append({"seconds": passed, **resident(server)})
            progress.update(task, completed=min(passed, seconds))
            if passed > seconds:
                break
            time.sleep(pause)
    shared.write_csv(output / "rollouts_soak.csv", samples)
    lines = []
    for name in [name for name in samples[-1] if name != "seconds"]:
        share = moved(samples, name, seconds)
        lines.append([name, f"{samples[-1][name]:.0f} MiB", f"{share:.1%}"])
        if share > TOLERANCE and name in {"server", "trainer"}:
            problems.append(f"resident memory of the {name} moved by {share:.1%}")
    text = f"{minutes:g} minutes, {rollouts} rollouts, {tokens} tokens with heads of K = 128, and "
    text += f"{len(samples) // len(KINDS)} whose caller hung up"
    console.print(f"{text}: {lines}")
    for problem in problems[:20]:
        console.print(f"[red]FAILED[/red] {problem}")
    if page is not None:
        table = shared.markdown(("", "resident at the end", "moved after warm-up"), lines)
        shared.replace_table(page, "soak", f"{text}:\n\n{table}")
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
