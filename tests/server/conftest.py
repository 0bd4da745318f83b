"""Real servers, one per configuration, started when the first test asks for it.

They end with this directory's tests: a CPU server holds about 3 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import install_faults
from tests.models import Kind
from tests.servers import API_KEY, CONFLICTS, LONG, STANDARD, TOKEN
from vllm_parity_plugin.serving import Server, serve


@pytest.fixture(scope="package")
def server(model_path: Path) -> Iterator[Server]:
    """The plugin's defaults, and no flag that parity needs."""
    with serve(model_path, *STANDARD) as running:
        yield running


@pytest.fixture(scope="package")
def fault(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of ``untied_server``, with the files that make loads fail and steps long."""
    return install_faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="package")
def untied_server(tiny_model: Callable[[Kind], Path], fault: dict[str, str]) -> Iterator[Server]:
    """Untied model with an opinion on sampling, started with flags that contradict the rules.
    Uploads end after 5 s of silence, and rollouts 3 s after their caller hung up."""
    env = {**fault, "VLLM_PARITY_UPLOAD_TIMEOUT": "5", "VLLM_PARITY_ROLLOUT_GRACE": "3"}
    with serve(tiny_model("gc"), *LONG, *CONFLICTS, env=env) as running:
        yield running


@pytest.fixture(scope="package")
def tied_fault(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same for ``tied_server``."""
    return install_faults(tmp_path_factory.mktemp("tied-faults"))


@pytest.fixture(scope="package")
def tied_server(
    tiny_model: Callable[[Kind], Path],
    tmp_path_factory: pytest.TempPathFactory,
    tied_fault: dict[str, str],
) -> Iterator[Server]:
    """Tied model behind a token and an API key, with its own weights directory, no copy of the
    served weights, K = 64, and loads that can fail."""
    env = {
        **tied_fault,
        "VLLM_PARITY_ROLLBACK": "none",
        "VLLM_PARITY_TOKEN": TOKEN,
        "VLLM_PARITY_HEAD_SIZE": "64",
        "VLLM_PARITY_WEIGHTS_DIR": str(tmp_path_factory.mktemp("weights")),
    }
    with serve(tiny_model("tied"), *STANDARD, "--api-key", API_KEY, env=env) as running:
        yield running


@pytest.fixture(scope="package")
def observe_server(tiny_model: Callable[[Kind], Path]) -> Iterator[Server]:
    """Mode observe: vLLM's own head and prefix cache; a tied model with an opinion; K = V."""
    args = (*LONG, "--logprobs-mode", "processed_logprobs", "--max-logprobs", "512")
    env = {
        "VLLM_PARITY_MODE": "observe",
        "VLLM_PARITY_HEAD_SIZE": "512",
        "VLLM_SERVER_DEV_MODE": "1",  # vLLM's own lifecycle routes are there too
    }
    with serve(tiny_model("tied-gc"), *args, env=env) as running:
        yield running
