"""Plots and an HTML page from a run's metrics."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_parity_plugin import __version__
from vllm_parity_plugin.errors import ParityError

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """One plot: which metrics, on which axis."""

    name: str
    title: str
    ylabel: str
    metrics: Mapping[str, str]
    note: str
    log: bool = False


PANELS = (
    Panel(
        "reward",
        "Reward",
        "mean reward",
        {"reward": "reward"},
        "Should rise. If it falls while the mismatch stays flat, the cause is not the backend.",
    ),
    Panel(
        "mismatch",
        "Mismatch of sampler and trainer",
        "|log p - log q| (nats)",
        {
            "parity/logprob_diff/mean": "mean",
            "parity/logprob_diff/p99": "99th percentile",
            "parity/logprob_diff/max": "max",
        },
        "Should stay at the level of step 1. A level that grows means weight updates do not "
        "arrive, or arrive as other weights.",
        log=True,
    ),
    Panel(
        "head_mass",
        "Sampler mass that the head covers",
        "sum of q over the head",
        {
            "parity/score_centering/sampler_head_mass": "sampler",
            "parity/score_centering/trainer_head_mass": "trainer",
        },
        "Should be above about 0.99; raise score_centering_top_k when it is not.",
    ),
    Panel(
        "update_pause",
        "Weight update",
        "seconds",
        {
            "parity/weight_update/pause_seconds": "generation paused",
            "parity/weight_update/total_seconds": "whole update",
        },
        "Requests in flight wait this long at every step.",
    ),
    Panel(
        "drift",
        "Drift removed by score centering",
        "L1 of the expected score",
        {"parity/score_centering/drift_removed": "drift removed"},
        "How strongly an uncentred gradient would have been pulled towards the sampler.",
    ),
)


def load_history(run: Path) -> list[dict[str, Any]]:
    """Logged metrics of a run, one mapping per training step.

    Args:
        run: a directory with ``trainer_state.json`` (``trainer.save_state()`` writes it), or
            that file.

    Raises:
        ParityError: there is no such file, or it holds no training step.
    """
    path = run / "trainer_state.json" if run.is_dir() else run
    try:
        history = json.loads(path.read_text())["log_history"]
    except (OSError, ValueError, KeyError) as error:
        raise ParityError(
            f"{path} cannot be read as a trainer state ({error}).",
            "There are no metrics to draw.",
            "pass the output_dir of a run that called trainer.save_state().",
        ) from None
    steps = [entry for entry in history if "reward" in entry]
    if not steps:
        raise ParityError(
            f"{path} holds no training step.",
            "There is nothing to draw.",
            "train for at least one step with logging_steps=1.",
        )
    return steps


def write_report(
    history: History, directory: Path, *, title: str, facts: Mapping[str, str] | None = None
) -> Path:
    """Write one PNG per panel and ``report.html``, which holds them all.

    Args:
        history: one mapping of metrics per step, with ``step``.
        directory: where to write; made when missing.
        title: heading of the page.
        facts: rows of the table above the plots.

    Returns:
        Path of ``report.html``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sections = []
    for panel in PANELS:
        png = _draw(panel, history, directory)
        if png is not None:
            image = base64.b64encode(png.read_bytes()).decode()
            sections.append(
                f"<section><h2>{html.escape(panel.title)}</h2>"
                f'<img alt="{html.escape(panel.title)}" src="data:image/png;base64,{image}">'
                f"<p>{html.escape(panel.note)}</p></section>"
            )
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in {**(facts or {}), **_first_and_last(history)}.items()
    )
    page = directory / "report.html"
    page.write_text(_PAGE.format(title=html.escape(title), rows=rows, sections="".join(sections)))
    return page


def _first_and_last(history: History) -> dict[str, str]:
    result = {"steps": str(len(history))}
    for panel in PANELS:
        for metric, label in panel.metrics.items():
            values = [entry[metric] for entry in history if entry.get(metric) is not None]
            if values:
                name = panel.title if label == metric else f"{panel.title}: {label}"
                result[name] = f"{values[0]:.4g} at first, {values[-1]:.4g} at last"
    return result


def _draw(panel: Panel, history: History, directory: Path) -> Path | None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ParityError(
            "matplotlib is not installed.",
            "The report draws its plots with it.",
            "pip install 'vllm-parity[report]'.",
        ) from None
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.subplots()
    drawn = False
    for metric, label in panel.metrics.items():
        points = [
            (entry.get("step", index + 1), entry[metric])
            for index, entry in enumerate(history)
            if entry.get(metric) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.5)
            drawn = True
    if not drawn:
        return None
    axes.set_xlabel("step")
    axes.set_ylabel(panel.ylabel)
    if panel.log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if len(panel.metrics) > 1:
        axes.legend(frameon=False)
    path = directory / f"{panel.name}.png"
    figure.savefig(path, dpi=110)
    return path


_PAGE = (
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
color: #1d2329; background: #fff; }}
table {{ border-collapse: collapse; }} th, td {{ text-align: left; padding: .25rem 1rem .25rem 0;
border-bottom: 1px solid #dde2e7; font-weight: normal; }}
td {{ font-variant-numeric: tabular-nums; }}
img {{ width: 100%; }} h2 {{ margin-top: 2.5rem; }} footer {{ margin-top: 3rem; color: #6a737d; }}
</style></head><body><h1>{title}</h1><table>{rows}</table>{sections}
<footer>vllm-parity """
    + __version__
    + """</footer></body></html>
"""
)
