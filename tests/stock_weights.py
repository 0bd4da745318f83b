"""Stock vLLM's own update session, on a CPU: start, update, finish, with nothing of ours between.

vLLM's built-in weight-transfer engines need CUDA. This one does what they do with tensors that have
arrived - vLLM's layerwise reload, ``model.load_weights``, finalize - and reads them from a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

BACKEND = "stock_file"
PLUGIN = """
from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class InitInfo:
    pass


@dataclass
class UpdateInfo:
    path: str
    names: list[str] | None = None


class StockFile(WeightTransferEngine):
    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info):
        # The base class ends with torch.accelerator.synchronize(), which needs an accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, info):
        with safe_open(info.path, framework="pt") as file:
            names = info.names or list(file.keys())
            self.model.load_weights((name, file.get_tensor(name)) for name in names)

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass


def register():
    if "stock_file" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("stock_file", StockFile)
"""
ENTRY_POINTS = "[vllm.general_plugins]\nparity_stock_file = parity_stock_file:register\n"
ARGS = ("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}')


def install_stock_engine(directory: Path) -> dict[str, str]:
    """Environment of a stock server (plugin off) that takes weights through vLLM's own routes."""
    (directory / "parity_stock_file.py").write_text(PLUGIN)
    info = directory / "parity_stock_file-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-stock-file\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return {
        "PYTHONPATH": str(directory),
        "VLLM_PARITY_MODE": "off",
        "VLLM_SERVER_DEV_MODE": "1",
    }


class StockSession:
    """vLLM's routes, as a trainer would call them."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=120.0)

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, **kwargs)

    def pause(self, **params: Any) -> None:
        self._ok("/pause", params=params)

    def resume(self) -> None:
        self._ok("/resume")

    def start(self) -> None:
        self._ok("/start_weight_update")

    def update(self, path: Path, names: list[str] | None = None) -> None:
        self._ok("/update_weights", json={"update_info": {"path": str(path), "names": names}})

    def finish(self) -> None:
        self._ok("/finish_weight_update", json={})

    def _ok(self, path: str, **kwargs: Any) -> None:
        answer = self.post(path, **kwargs)
        assert answer.status_code == 200, f"{path}: {answer.text}"
