"""The examples as users start them: plain, through accelerate launch, and on two processes.

Properties: both scripts train against a running server; two DDP ranks sample their own prompts and
push one update per step between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import EXAMPLES, ROOT
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.serving import Server

SMALL = ("--steps", "2", "--prompts", "2", "--generations", "2")
SCRIPTS = ("countdown_callback.py", "countdown_score_centering.py")


def run(*command: str, timeout: float = 300) -> str:
    """Output of a command run in the repository root; fails with its output."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def history(directory: Path) -> list[dict[str, Any]]:
    state = json.loads((directory / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "reward" in entry]


@pytest.mark.parametrize("script", SCRIPTS)
def test_accelerate_launch(script: str, restored: Server, tmp_path: Path) -> None:
    """`accelerate launch` with the committed CPU configuration."""
    run(
        str(Path(sys.executable).parent / "accelerate"),
        *("launch", "--config_file", str(EXAMPLES / "accelerate_cpu.yaml")),
        *(str(EXAMPLES / script), "--server-url", restored.url, *SMALL),
        *("--output-dir", str(tmp_path)),
    )
    entries = history(tmp_path)
    assert len(entries) == 2
    assert all(entry["parity/logprob_diff/mean"] <= 0.05 for entry in entries)
    centred = "parity/score_centering/drift_removed" in entries[0]
    assert centred == (script == "countdown_score_centering.py")


def test_two_processes(restored: Server, tmp_path: Path) -> None:
    """Two gloo ranks: each samples its own prompts, one pushes, and both report the same run."""
    before = ParityClient(restored.url).status().policy_version
    run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *(str(EXAMPLES / "countdown_score_centering.py"), "--server-url", restored.url, *SMALL),
        *("--output-dir", str(tmp_path)),
    )
    entries = history(tmp_path)
    assert [entry["parity/policy_version"] for entry in entries] == [before + 1, before + 2]
    assert all(entry["parity/logprob_diff/mean"] <= 0.05 for entry in entries)
    # 2 ranks x 2 problems x 2 completions of about 10 tokens.
    assert entries[0]["num_tokens"] > 8 * 20


def test_the_report_command(restored: Server, tmp_path: Path) -> None:
    """`vllm-parity check` and `vllm-parity report` on what a user has at hand."""
    command = str(Path(sys.executable).parent / "vllm-parity")
    assert "float32" in run(command, "check", restored.url)
    run(
        sys.executable,
        *(str(EXAMPLES / "countdown_score_centering.py"), "--server-url", restored.url, *SMALL),
        *("--output-dir", str(tmp_path)),
    )
    run(command, "report", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert "Mismatch of sampler and trainer" in page
