"""The ``vllm-parity`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; a refusal is one paragraph and exit status 1, never a traceback."""
    from rich.console import Console

    from vllm_parity_plugin.cli.app import app
    from vllm_parity_plugin.errors import ParityError

    try:
        app()
    except ParityError as error:
        Console(stderr=True).print(f"[bold red]vllm-parity:[/] {error}", highlight=False)
        sys.exit(1)
