"""What a stock vLLM server needs to load a safetensors file on a CPU: a weight transfer engine.

The built-in engines need CUDA. This one opens the file and hands its tensors to vLLM's own
layerwise reload; it checks nothing. Benchmarks measure against it, and the controls of the tests
show what it lets through. ``install`` writes it, as an installed plugin, to a directory
for PYTHONPATH. It imports nothing but vLLM, because it runs inside stock vLLM.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "benchmark-file"
MODULE = "parity_benchmark_engine"
METADATA = f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 0\n"
ENTRY_POINTS = f"[vllm.general_plugins]\n{MODULE} = {MODULE}:register\n"


def install(directory: Path) -> dict[str, str]:
    """Environment of a stock server that knows this engine."""
    shutil.copyfile(__file__, directory / f"{MODULE}.py")
    info = directory / f"{MODULE}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory), inherited]))}


@dataclass
class InitInfo:
    """Nothing to set up."""


@dataclass
class UpdateInfo:
    """Path of the safetensors file, and which of its tensors to load (None: all)."""

    path: str
    names: list[str] | None = None


def engine_class() -> type[Any]:
    """The engine, made when vLLM asks for it."""
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    class FileEngine(WeightTransferEngine):
        """Stock start, update and finish from a file."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # vLLM's own ends with an accelerator's synchronize, which a CPU build refuses.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            with safe_open(update_info.path, framework="pt") as file:
                names = update_info.names or list(file.keys())
                self.model.load_weights((name, file.get_tensor(name)) for name in names)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    return FileEngine


def register() -> None:
    """Make the engine known to vLLM, once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, engine_class())
