"""Real servers, one per configuration, started when the first test asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# vLLM pins spinning threads to every core, and the API servers then starve beside the engines.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.faults import install_faults
from tests.models import COUNTDOWN, Kind, large_logits, tiny_qwen3
from vllm_parity_plugin.serving import Server, serve

# vLLM's CPU build refuses to start unless this share of all memory is free, and servers add up.
MEMORY = ("--gpu-memory-utilization", "0.1")
STANDARD = ("--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager", *MEMORY)
LONG = ("--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", *MEMORY)
TOKEN = "a-token-for-tests"
API_KEY = "an-api-key-for-tests"
LOG_LINES = 40


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A failed test shows the end of the log of every server it used."""
    report = yield
    if report.failed:
        used = [getattr(v, "server", v) for v in getattr(item, "funcargs", {}).values()]
        servers = {value.url: value for value in used if isinstance(value, Server)}
        for url, running in servers.items():
            tail = "\n".join(running.log_text().splitlines()[-LOG_LINES:])
            report.sections.append((f"end of the log of {url}", tail))
    return report


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The trained countdown model (untied, 1041 tokens)."""
    return COUNTDOWN


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    """Directory of a tiny random model, made once per kind."""
    made: dict[Kind, Path] = {}

    def get(kind: Kind) -> Path:
        if kind not in made:
            made[kind] = tiny_qwen3(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def large_logits_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The countdown model with every logit moved to about +40."""
    return large_logits(tmp_path_factory.mktemp("large-logits"))


@pytest.fixture(scope="session")
def server(model_path: Path) -> Iterator[Server]:
    """The plugin's defaults, and no flag that parity needs."""
    with serve(model_path, *STANDARD) as running:
        yield running


@pytest.fixture(scope="session")
def stock_server(model_path: Path) -> Iterator[Server]:
    """The control: the plugin switched off."""
    with serve(
        model_path, *STANDARD, "--max-logprobs", "-1", env={"VLLM_PARITY_MODE": "off"}
    ) as running:
        yield running


CONFLICTS = (
    "--enable-prefix-caching",
    "--async-scheduling",
    "--logprobs-mode",
    "raw_logits",
    "--hf-overrides",
    '{"head_dtype": "model"}',
)
"""Explicit flags that contradict four rules."""


@pytest.fixture(scope="session")
def fault(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which touching the file PARITY_TEST_FAULT makes the next load fail."""
    return install_faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def untied_server(tiny_model: Callable[[Kind], Path], fault: dict[str, str]) -> Iterator[Server]:
    """Untied model with an opinion on sampling, started with flags that contradict the rules."""
    with serve(tiny_model("gc"), *LONG, *CONFLICTS, env=fault) as running:
        yield running


@pytest.fixture(scope="session")
def tied_server(
    tiny_model: Callable[[Kind], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Tied model behind a token and an API key, with its own weights directory and K = 64."""
    env = {
        "VLLM_PARITY_TOKEN": TOKEN,
        "VLLM_PARITY_HEAD_SIZE": "64",
        "VLLM_PARITY_WEIGHTS_DIR": str(tmp_path_factory.mktemp("weights")),
    }
    with serve(tiny_model("tied"), *STANDARD, "--api-key", API_KEY, env=env) as running:
        yield running


@pytest.fixture(scope="session")
def observe_server(tiny_model: Callable[[Kind], Path]) -> Iterator[Server]:
    """Mode observe: vLLM's own head and prefix cache; a tied model with an opinion; K = V."""
    args = (*LONG, "--logprobs-mode", "processed_logprobs", "--max-logprobs", "512")
    env = {"VLLM_PARITY_MODE": "observe", "VLLM_PARITY_HEAD_SIZE": "512"}
    with serve(tiny_model("tied-gc"), *args, env=env) as running:
        yield running
