"""One server for all trainer tests; every training run starts from the checkpoint's weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.servers import STANDARD
from tests.trainer.runs import Start, parity_trainer
from trl_callbacks.weight_sync import WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.serving import Server, serve


@pytest.fixture(scope="package")
def trained_server(model_path: Path) -> Iterator[Server]:
    """The server whose policy these tests replace."""
    with serve(model_path, *STANDARD) as running:
        yield running


@pytest.fixture(scope="package")
def tokenizer(model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture
def policy(model_path: Path) -> Any:
    """The countdown model with float32 master weights."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)


@pytest.fixture
def restored(trained_server: Server, policy: Any) -> Iterator[Server]:
    """The server, holding the checkpoint's weights when the test begins."""
    WeightSync(ParityClient(trained_server.url)).push(policy.named_parameters())
    yield trained_server


@pytest.fixture
def start(policy: Any, tokenizer: Any, restored: Server, tmp_path: Path) -> Start:
    """``parity_trainer`` on the restored server, with this test's policy and directory."""
    return partial(parity_trainer, policy, tokenizer, restored.url, tmp_path)
