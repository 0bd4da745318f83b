"""The start-up table: setting, asked, enforced, why."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_parity_plugin import __version__
from vllm_parity_plugin.rules import Decision, Report
from vllm_parity_plugin.settings import ParitySettings

WIDTH = 118


def startup_table(
    decisions: list[Decision], reports: list[Report], settings: ParitySettings
) -> str:
    """The table as plain text, ready for a log."""
    observing = settings.mode == "observe"
    table = Table(
        title=f"vllm-parity {__version__}, mode {settings.mode}"
        + (" (nothing was changed)" if observing else ""),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        width=WIDTH,
    )
    for column in ("setting", "asked", "wanted" if observing else "enforced", "why"):
        table.add_column(column, overflow="fold")
    for decision in decisions:
        asked = repr(decision.asked) if decision.explicit else f"{decision.asked!r} (default)"
        mark = "" if decision.changed else " (as asked)"
        table.add_row(
            decision.rule.setting, asked, f"{decision.enforced!r}{mark}", decision.rule.why
        )
    for report in reports:
        table.add_row(report.setting, repr(report.value), "NOT CHANGED", report.why)
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None).print(table)
    return "\n" + out.getvalue().rstrip()
