#!/usr/bin/env python3
"""Write docs/reference.md from the code: settings, rules, configuration, metrics, patches.

python scripts/make_docs.py           write it
python scripts/make_docs.py --check   exit 1 when it is not what the code says
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trl_callbacks.config import ParityGRPOConfig
from trl_callbacks.importance_weights import WEIGHTS
from trl_callbacks.loss_types import STEPS, support_table
from trl_callbacks.metrics import METRICS
from vllm_parity_plugin.cpu_seeds import CPU_SEED_PATCHES
from vllm_parity_plugin.head_order import V1_PATCH, V2_PATCH
from vllm_parity_plugin.install import PATCHES
from vllm_parity_plugin.rules import RULES
from vllm_parity_plugin.settings import ENV_PREFIX, ParitySettings
from vllm_parity_plugin.weights.checkpoint import CHECKPOINT_PATCH

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"


def table(header: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    """A Markdown table; pipes inside cells are escaped."""

    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line("---" for _ in header), *map(line, rows)])


def settings() -> str:
    """Settings of the plugin."""
    return table(
        ("key of `parity`", "variable", "default", "meaning"),
        (
            (f"`{name}`", f"`{ENV_PREFIX}{name.upper()}`", f"`{field.default}`", field.description)
            for name, field in ParitySettings.model_fields.items()
        ),
    )


def rules() -> str:
    """Engine settings that the plugin enforces."""
    return table(
        ("engine setting", "by hand", "why"),
        ((f"`{rule.setting}`", f"`{rule.flag}`", rule.why) for rule in RULES),
    )


def configuration() -> str:
    """Fields that ParityGRPOConfig adds or changes."""
    own = ParityGRPOConfig.__annotations__
    return table(
        ("field", "default", "meaning"),
        (
            (f"`{field.name}`", f"`{field.default!r}`", field.metadata["help"])
            for field in dataclasses.fields(ParityGRPOConfig)
            if field.name in own
        ),
    )


def losses() -> str:
    """Which losses, weights and numbers of optimizer steps score centering takes."""
    columns = tuple(f"`{weight}`, {steps}" for weight in WEIGHTS for steps in STEPS)
    return table(
        ("`loss_type`", "factor of r = p / p_old", *columns),
        ((f"`{name}`", factor, *cells) for name, factor, *cells in support_table()),
    )


def metrics() -> str:
    """Metrics in the trainer's logs."""
    return table(
        ("metric", "meaning", "when it moves"),
        ((f"`{m.name}`", m.meaning, m.advice) for m in METRICS),
    )


def patches() -> str:
    """Changes to vLLM's symbols."""
    return table(
        ("symbol", "without it", "versions", "upstream", "delete when"),
        (
            (f"`{p.module}.{p.attribute}`", p.why, p.versions, p.upstream, p.delete_when)
            for p in (*PATCHES, CHECKPOINT_PATCH, *CPU_SEED_PATCHES, V1_PATCH, V2_PATCH)
        ),
    )


def page() -> str:
    """The whole page."""
    parts = {
        "Plugin settings": (
            """`vllm serve MODEL --additional-config '{"parity": {"mode": "strict"}}'`, or """
            "environment variables; the former wins.\n\n" + settings()
        ),
        "Rules": (
            "Applied to every engine that generates text, however it is started (`vllm serve`, "
            "`LLM`, `AsyncLLM`), and checked on the configuration that vLLM resolves.\n\n" + rules()
        ),
        "`ParityGRPOConfig`": "Everything `GRPOConfig` takes, and:\n\n" + configuration(),
        "Losses under score centering": "Columns: `score_centering_weight`, and one or several "
        "optimizer steps on a rollout (`num_iterations`, or `steps_per_generation` above "
        "`gradient_accumulation_steps`). What is refused is refused by `ParityGRPOConfig`, with "
        "the reason; `importance_sampling_level` must be `token`.\n\n" + losses(),
        "Metrics": "In the trainer's logs, `state.log_history` and every `report_to` "
        "integration.\n\n" + metrics(),
        "Patch ledger": "Every change the plugin makes to vLLM; `vllm-parity ledger` prints it. A "
        "symbol that is missing stops the server.\n\n" + patches(),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items())
    return f"# Reference\n\nMade from the code by `scripts/make_docs.py`.\n\n{body}\n"


def main() -> int:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text() == page():
            return 0
        print(f"{PAGE.name} is not what the code says. Fix: make docs", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
