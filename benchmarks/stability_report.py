"""Tables, plots and CSVs of the stability benchmark. All but `plot` works on rows of text.

A row is one optimizer step of one run, as a CSV gives it: every value is a string.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import shared

Row = Mapping[str, Any]

LAST = 10
"""Steps at the end of a run whose mean is its result."""
FIRST = 5
"""Steps at the beginning whose mean is its start, before it has learnt much."""
WINDOW = 10
"""Steps that are averaged before a share counts as fallen, and in the plots: a step has 4
problems, and they differ a lot."""
NAMES = {
    "plain": "plain",
    "grpo": "TRL default",
    "tis": "TIS",
    "mis": "MIS",
    "sc": "SC",
    "sc_tis": "SC+TIS",
    "sc_mis": "SC+MIS",
}
COLOURS = {
    "plain": "#444444",
    "grpo": "#b07aa1",
    "tis": "#f28e2b",
    "mis": "#e15759",
    "sc": "#1f77b4",
    "sc_tis": "#17a589",
    "sc_mis": "#59a14f",
}
HEADER = (
    "level",
    "method",
    "seeds",
    f"under the sampler: first {FIRST} steps",
    f"last {LAST} steps: mean (min..max)",
    "fell under half",
    "own policy at the end: mean (min..max)",
    "mean abs. logprob difference: start, end",
    "head mass: mean, lowest step",
)


def key(row: Row) -> tuple[str, str, str]:
    """Level, method and seed: a run of an experiment."""
    return (row["level"], row["method"], str(row["seed"]))


def csv_path(output: Path, experiment: str) -> Path:
    """Where the rows of an experiment are."""
    return output / f"stability_{experiment}.csv"


def load(output: Path, experiment: str) -> list[dict[str, str]]:
    """Rows of an experiment; none before its first run."""
    path = csv_path(output, experiment)
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append(output: Path, experiment: str, rows: Sequence[Row]) -> None:
    """Add a finished run. The file is replaced at once: a stop leaves whole runs only."""
    path = csv_path(output, experiment)
    fresh = shared.write_csv(path.with_suffix(".part"), [*load(output, experiment), *rows])
    fresh.replace(path)


def check_settings(experiment: str, rows: Sequence[Row], steps: int, prompts: int) -> None:
    """Refuse to mix runs of different lengths or batch sizes in one CSV."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        counts[key(row)] = counts.get(key(row), 0) + 1
    found = {(count, prompts) for count in counts.values()}
    found |= {(steps, int(row["prompts"])) for row in rows}
    if found - {(steps, prompts)}:
        raise SystemExit(
            f"stability_{experiment}.csv was made with other settings (steps, prompts) than "
            f"{(steps, prompts)}: {sorted(found - {(steps, prompts)})}. Use those, or another "
            "--output."
        )


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else math.nan


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and those before it, ``window`` at most.

    ``smoothed([0, 1, 2, 6], 2)`` is ``[0, 0.5, 1.5, 4]``.
    """
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def fell_at(values: Sequence[float], first: int = FIRST, window: int = WINDOW) -> int | None:
    """First step (from 1) at which the mean of a window is under half of the first steps'.

    One step has too few problems to tell, hence windows. With 1 first step and windows of 2,
    (1, 1, 1, 0, 0) has the means 1, 1, 0.5, 0 from step 2 on, so step 5. None if it never falls.
    """
    start, means = mean(values[:first]), smoothed(values, window)[window - 1 :]
    return next((i + window for i, value in enumerate(means) if value < start / 2), None)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``0.50 (0.40..0.60)``: mean, smallest and largest; empty for no values."""
    found = [value for value in values if not math.isnan(value)]
    if not found:
        return ""
    return f"{mean(found):.{digits}f} ({min(found):.{digits}f}..{max(found):.{digits}f})"


def series(rows: Iterable[Row], column: str) -> dict[tuple[str, str], list[list[float]]]:
    """(level, method) -> one list of values for each seed, in the order of the steps.

    An empty cell is NaN, so that positions stay steps.
    """
    runs: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        value = float(row[column]) if row.get(column) not in (None, "") else math.nan
        runs.setdefault(key(row), []).append((int(row["step"]), value))
    found: dict[tuple[str, str], list[list[float]]] = {}
    for (level, method, _), points in sorted(runs.items()):
        found.setdefault((level, method), []).append([value for _, value in sorted(points)])
    return found


def present(values: Sequence[float]) -> list[float]:
    """The values that are there."""
    return [value for value in values if not math.isnan(value)]


def table(rows: Sequence[Row], levels: Sequence[str], methods: Sequence[str]) -> list[list[str]]:
    """Lines below ``HEADER``, by level and method."""
    solved, own = series(rows, "solved"), series(rows, "own_solved")
    gap, head = series(rows, "logprob_diff"), series(rows, "head_mass")
    lines = []
    for level in levels:
        for method in methods:
            if runs := solved.get((level, method)):
                gaps = gap[level, method]
                lines.append(
                    [
                        level,
                        NAMES.get(method, method),
                        str(len(runs)),
                        f"{mean(mean(run[:FIRST]) for run in runs):.2f}",
                        spread([mean(run[-LAST:]) for run in runs]),
                        falls([fell_at(run) for run in runs]),
                        spread([run[-1] for run in own[level, method]]),
                        f"{mean(mean(present(run[:FIRST])) for run in gaps):.3f}, "
                        f"{mean(mean(present(run[-LAST:])) for run in gaps):.3f}",
                        masses(head[level, method]),
                    ]
                )
    return lines


def falls(steps: Sequence[int | None]) -> str:
    """``2 of 3: step 14, 30``, or ``none``."""
    found = sorted(step for step in steps if step is not None)
    if not found:
        return "none"
    return f"{len(found)} of {len(steps)}: step {', '.join(map(str, found))}"


def masses(runs: Sequence[Sequence[float]]) -> str:
    """Mean and lowest head mass of all steps of all seeds; empty without centering."""
    found = [value for run in runs for value in present(run)]
    return f"{mean(found):.4f}, {min(found):.4f}" if found else ""


def apart(
    results: Mapping[str, Sequence[float]], base: str = "plain"
) -> tuple[list[str], list[str]]:
    """Methods whose every seed is above, and below, every seed of ``base``.

    {plain: (1, 2), sc: (3, 4), tis: (2, 5)} gives ([sc], []): with few seeds, ranges that overlap
    say nothing.
    """
    low, high = min(results[base]), max(results[base])
    above = [name for name, found in results.items() if min(found) > high]
    return above, [name for name, found in results.items() if max(found) < low]


def differences(rows: Sequence[Row], levels: Sequence[str], methods: Sequence[str]) -> str:
    """For each level, the methods whose seeds are all above or all below the plain ones."""
    solved, own = series(rows, "solved"), series(rows, "own_solved")
    lines = []
    for level in levels:
        if (level, "plain") not in solved:
            continue
        ends = {
            "under the sampler": {
                method: [mean(run[-LAST:]) for run in solved[level, method]]
                for method in methods
                if (level, method) in solved
            },
            "own policy": {
                method: [run[-1] for run in own[level, method]]
                for method in methods
                if (level, method) in own
            },
        }
        found = []
        for what, results in ends.items():
            sides = zip(("above", "below"), apart(results), strict=True)
            named = [f"{side}: {', '.join(NAMES[m] for m in ms)}" for side, ms in sides if ms]
            found.append(f"{what}: {'; '.join(named) or 'none'}")
        lines.append(f"- {level}: {' | '.join(found)}")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """One line about a run."""
    values = [float(row["solved"]) for row in rows]
    return (
        f"solved {mean(values[:LAST]):.2f} at first, {mean(values[-LAST:]):.2f} at the end, "
        f"own policy {float(rows[-1]['own_solved']):.2f}"
    )


def section(rows: Sequence[Row], text: str, separate: str) -> str:
    """What stands between the markers of a page: settings, table, and what is apart in it."""
    steps = max(int(row["step"]) for row in rows)
    prompts = sorted({row["prompts"] for row in rows})
    runs = len({key(row) for row in rows})
    return (
        f"{runs} runs of {steps} steps, {', '.join(prompts)} problems x 8 completions a step. "
        f"vLLM {version('vllm')}, torch {version('torch')}, CPU.\n\n{text}\n\n"
        "Methods of which every seed ends above, or below, every seed of plain:\n\n"
        f"{separate}"
    )


def plot(
    rows: Sequence[Row], levels: Sequence[str], methods: Sequence[str], output: Path, name: str
) -> Path:
    """Solved share against step: above under the sampler, below of the trainer's own policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    solved, own = series(rows, "solved"), series(rows, "own_solved")
    shown = [level for level in levels if any(level == found for found, _ in solved)]
    size = (0.8 + 2.9 * len(shown), 5.2)
    figure, axes = pyplot.subplots(
        2, len(shown), figsize=size, squeeze=False, sharex=True, sharey=True
    )
    for column, level in enumerate(shown):
        top, bottom = axes[0][column], axes[1][column]
        for method in methods:
            if (level, method) in solved:
                _band(top, [smoothed(run) for run in solved[level, method]], method)
                _band(bottom, own[level, method], method, marker=".")
        top.set_title(level, fontsize=9)
        bottom.set_xlabel("optimizer step")
    axes[0][0].set_ylabel(f"solved, sampler\n(mean of {WINDOW} steps)")
    axes[1][0].set_ylabel("solved, own policy\n(held-out problems)")
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="upper center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    path = output / f"stability_{name}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _band(axis: Any, runs: Sequence[Sequence[float]], method: str, **style: Any) -> None:
    """Mean of the seeds and the band from the lowest to the highest."""
    points = [
        (step, column)
        for step, column in enumerate(zip(*runs, strict=True), start=1)
        if not any(math.isnan(value) for value in column)
    ]
    steps = [step for step, _ in points]
    colour = COLOURS[method]
    middle = [mean(column) for _, column in points]
    axis.plot(steps, middle, color=colour, label=NAMES[method], lw=1.3, **style)
    low, high = [min(column) for _, column in points], [max(column) for _, column in points]
    axis.fill_between(steps, low, high, color=colour, alpha=0.1, lw=0)
