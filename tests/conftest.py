"""Models, the control server, and what every test shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Importing TRL lowers it to ERROR, and tests read what servers log.
os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
# vLLM pins spinning threads to every core, and the API servers then starve beside the engines.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.models import COUNTDOWN, Kind, large_logits, tiny_qwen3
from tests.servers import STANDARD
from vllm_parity_plugin.serving import Server, serve

LOG_LINES = 40


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A failed test shows the end of the log of every server it used."""
    report = yield
    if report.failed:
        used = [getattr(v, "server", v) for v in getattr(item, "funcargs", {}).values()]
        servers = {v.url: v for v in used if isinstance(v, Server) and v.log.exists()}
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
def stock_server(model_path: Path) -> Iterator[Server]:
    """The control: the plugin switched off."""
    with serve(
        model_path, *STANDARD, "--max-logprobs", "-1", env={"VLLM_PARITY_MODE": "off"}
    ) as running:
        yield running
