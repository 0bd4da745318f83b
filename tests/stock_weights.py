"""Stock vLLM's own update session: start, update, finish, with nothing of ours between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from benchmarks.stock_engine import NAME, install

ARGS = ("--weight-transfer-config", f'{{"backend": "{NAME}"}}')


def install_stock_engine(directory: Path) -> dict[str, str]:
    """Environment of a stock server (plugin off) that takes weights through vLLM's own routes."""
    return install(directory) | {"VLLM_PARITY_MODE": "off", "VLLM_SERVER_DEV_MODE": "1"}


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
