"""Runs scenarios one after the other, and makes the table of how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

from tests.server.faultlab.lab import Lab, Violation
from tests.server.faultlab.scenarios import Outcome, Scenario


@dataclass(frozen=True)
class Result:
    """How one scenario ended; ``problem`` is what must never happen."""

    scenario: Scenario
    outcome: Outcome | None
    problem: str | None = None


def run(
    lab: Lab, scenarios: Iterable[Scenario], tell: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Results of all scenarios: after a violation the server is made fit for the next one."""
    results = []
    for scenario in scenarios:
        result = _run_one(lab, scenario)
        results.append(result)
        tell(result)
        if result.problem is not None:
            try:
                lab.recover()
            except Exception as error:
                lost = f"{scenario.name}: the server cannot be used any more: {error}"
                results.append(Result(scenario, None, lost))
                break
    return results


def _run_one(lab: Lab, scenario: Scenario) -> Result:
    try:
        return Result(scenario, lab.run(scenario))
    except Violation as violation:
        return Result(scenario, None, str(violation))


def violations(results: Iterable[Result]) -> list[str]:
    """What must never happen and did, each with the name and seed of its scenario."""
    return [result.problem for result in results if result.problem is not None]


def table(results: list[Result]) -> list[list[str]]:
    """Rows of the published table, its head first: family x transport, then a count by outcome."""
    outcomes = get_args(Outcome)
    head = ["what happens", "weights come by", "scenarios", "request in flight", *outcomes]
    head.append("violations")
    keys = list(dict.fromkeys((r.scenario.row.family, r.scenario.transport) for r in results))
    rows = [head]
    for key in sorted(keys, key=lambda key: ([k[0] for k in keys].index(key[0]), key[1])):
        some = [r for r in results if (r.scenario.row.family, r.scenario.transport) == key]
        rows.append([*key, *_counts(some)])
    rows.append(["all", "", *_counts(results)])
    return rows


def _counts(results: list[Result]) -> list[str]:
    ends = Counter(result.outcome for result in results)
    counts = [len(results), sum(result.scenario.flight for result in results)]
    counts += [ends[outcome] for outcome in (*get_args(Outcome), None)]
    return [str(count) for count in counts]


def markdown(rows: list[list[str]]) -> str:
    """A table in markdown; zeros are left out."""
    lines = [rows[0], ["---", "---", *["---:"] * (len(rows[0]) - 2)], *rows[1:]]
    return "\n".join(
        f"| {' | '.join('' if cell == '0' and line is not rows[-1] else cell for cell in line)} |"
        for line in lines
    )
