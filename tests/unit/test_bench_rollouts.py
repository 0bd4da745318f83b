"""The pure parts of the rollout benchmarks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rollouts() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("rollouts")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_cells(rollouts: Any) -> None:
    assert rollouts.cell("16x128") == (16, 128)
    for wrong in ("16", "x128", "16x", "16xa"):
        with pytest.raises(typer.BadParameter, match="SEQUENCESxTOKENS"):
            rollouts.cell(wrong)


def test_the_floor_is_what_must_move(rollouts: Any) -> None:
    """K = 128: 1036 bytes per token."""
    assert rollouts.floor(2, 10, 128) == 20 * 1036
    assert rollouts.powers(9) == [1, 2, 4, 8]


def test_aims_can_be_missed(rollouts: Any) -> None:
    assert [met for _, met in rollouts.aims(1.15, 1100, 20)] == [True] * 3
    assert [met for _, met in rollouts.aims(1.16, 1101, 19.9)] == [False] * 3


def test_ratios_are_within_a_round(rollouts: Any) -> None:
    """A slow second round changes both, not the ratio; the range shows the difference."""
    zeros = dict.fromkeys(rollouts.COLUMNS, 0.0)
    rows = [
        {**zeros, "sequences": 2, "tokens": 3, "round": turn, "name": name, "seconds": seconds}
        for turn, (base, full) in enumerate([(1.0, 1.1), (10.0, 12.0), (2.0, 2.2)])
        for name, seconds in ((rollouts.BASE, base), (rollouts.FULL, full))
    ]
    lines = {line[1]: line for line in rollouts.table(rows, 2, 3)}
    assert lines[rollouts.BASE][2:4] == ["1.00", "1.00 to 1.00"]
    assert lines[rollouts.FULL][2:4] == ["1.10", "1.10 to 1.20"]
    assert rollouts.table(rows, 9, 9) == []
