"""Commands of ``vllm-parity``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_parity_plugin import __version__
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.wire import Status

app = typer.Typer(
    name="vllm-parity",
    help="Make vLLM's rollout logprobs mean what a trainer expects, and see that they do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def check(
    url: Annotated[str, typer.Argument(help="Base URL of a running `vllm serve`.")],
    token: Annotated[
        str | None, typer.Option(help="The server's VLLM_PARITY_TOKEN.", envvar="VLLM_PARITY_TOKEN")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the attestation as JSON.")] = False,
) -> None:
    """Ask a server what its workers really run. Exit status 1 when a rule does not hold."""
    status = ParityClient(url, token=token, timeout=30.0).status()
    if json:
        print(status.model_dump_json(indent=2))
    else:
        Console().print(attestation_table(status))
    if status.state == "unhealthy":
        raise ParityError(
            f"{url} holds no complete policy: {status.failure}.",
            "It answers 503 instead of sampling from a mixture.",
            "send a full weight update (docs/weight-updates.md), or restart the server.",
        )
    problems = violations(status)
    if problems:
        raise ParityError(
            f"{url} does not hold: {'; '.join(problems)}.",
            "Its logprobs do not mean what a trainer expects.",
            "restart the server in mode enforce (the default).",
        )


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Output directory of a training run.")],
    output: Annotated[
        Path | None, typer.Option(help="Where to write; the run's directory by default.")
    ] = None,
) -> None:
    """Draw reward, mismatch, head mass and update pauses of a run; writes report.html and PNGs."""
    from vllm_parity_plugin.cli.report import load_history, write_report

    page = write_report(load_history(run), output or run, title=f"Parity report: {run.name}")
    print(page)


@app.command()
def ledger() -> None:
    """List every change that the plugin makes to vLLM, and why."""
    from vllm_parity_plugin.cpu_seeds import CPU_SEED_PATCHES
    from vllm_parity_plugin.head_order import V1_PATCH, V2_PATCH
    from vllm_parity_plugin.install import PATCHES
    from vllm_parity_plugin.weights.checkpoint import CHECKPOINT_PATCH

    table = Table("symbol", "without it", "versions", "upstream", "delete when", box=box.SIMPLE)
    for patch in (*PATCHES, CHECKPOINT_PATCH, *CPU_SEED_PATCHES, V1_PATCH, V2_PATCH):
        table.add_row(
            f"{patch.module}.{patch.attribute}",
            patch.why,
            patch.versions,
            patch.upstream,
            patch.delete_when,
        )
    Console().print(table)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def violations(status: Status) -> list[str]:
    """Rules that a server's attestation does not fulfil, in words."""
    problems = []
    for worker in status.workers:
        found = {
            "logprobs_mode": (worker.logprobs_mode, "processed_logprobs"),
            "prefix_caching": (worker.prefix_caching == "on", False),
            "async_scheduling": (worker.async_scheduling, False),
            "generation_config": (worker.generation_config, "vllm"),
            "lm_head": (worker.head.dtype if worker.head else "float32", "float32"),
        }
        problems += [
            f"worker {worker.rank} has {name}={value!r} (wanted {wanted!r})"
            for name, (value, wanted) in found.items()
            if value != wanted
        ]
    return problems


def _progress(status: Status) -> str:
    going = status.in_progress
    return "" if going is None else f", {going.phase} of version {going.version} in progress"


def attestation_table(status: Status) -> Table:
    """One column per worker."""
    table = Table(
        title=f"{status.model}: {status.state}, policy version {status.policy_version}, "
        f"mode {status.mode}{_progress(status)}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("what it runs")
    for worker in status.workers:
        table.add_column(f"worker {worker.rank} ({worker.host})", overflow="fold")
    names = [name for name in type(status.workers[0]).model_fields if name not in {"rank", "host"}]
    for name in names:
        values = []
        for worker in status.workers:
            value = getattr(worker, name)
            if name == "head" and value is not None:
                value = (
                    f"{value.dtype} product of {value.weight_dtype} weights "
                    f"({value.bf16_share:.1%} of logits fit bf16)"
                )
            values.append(str(value))
        table.add_row(name, *values)
    return table
