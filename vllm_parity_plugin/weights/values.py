"""The check of an update's values, before anything is touched."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from vllm_parity_plugin.weights.manifest import ManifestError


def check_values(path: Path) -> None:
    """Check that every value of a staged file is finite, one mapped tensor at a time.

    Raises:
        ManifestError: a tensor holds NaN or infinity, by name.
    """
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                count = int((~torch.isfinite(tensor)).sum())
                raise ManifestError(
                    f"{name} holds {count} value(s) that are NaN or infinite.",
                    "Every logprob of the new policy would be NaN.",
                    "look at the trainer's loss and gradients; the served policy was not touched.",
                )
