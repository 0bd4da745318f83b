"""A vLLM plugin of the tests: weight loads that fail half-way and steps that take long.

``install_faults`` writes it, with the metadata of an installed package, to a directory for
PYTHONPATH. While the file named by PARITY_TEST_FAULT exists, the next load of a Qwen3 model takes
that file away, loads a few tensors and fails. While the one named by PARITY_TEST_BRAKE exists,
every step takes 0.1 s longer, so that a request stays in flight however busy the machine is.
"""

from __future__ import annotations

from pathlib import Path

PLUGIN = """
import itertools, os, pathlib, time

def register():
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM as model
    if hasattr(model.load_weights, "fault"):
        return
    original = model.load_weights

    def load_weights(self, weights):
        flag = pathlib.Path(os.environ["PARITY_TEST_FAULT"])
        if not flag.exists():
            return original(self, weights)
        flag.unlink()
        original(self, itertools.islice(weights, 9))
        raise RuntimeError("injected fault")

    logits = model.compute_logits

    def compute_logits(self, *args, **kwargs):
        if os.path.exists(os.environ["PARITY_TEST_BRAKE"]):
            time.sleep(0.1)
        return logits(self, *args, **kwargs)

    load_weights.fault = True
    model.load_weights = load_weights
    model.compute_logits = compute_logits
"""
ENTRY_POINTS = "[vllm.general_plugins]\nparity_test_fault = parity_test_fault:register\n"


def install_faults(directory: Path) -> dict[str, str]:
    """Environment of a server in which loads can fail and steps can take long."""
    (directory / "parity_test_fault.py").write_text(PLUGIN)
    info = directory / "parity_test_fault-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-test-fault\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return {
        "PYTHONPATH": str(directory),
        "PARITY_TEST_FAULT": str(directory / "fail-once"),
        "PARITY_TEST_BRAKE": str(directory / "brake"),
    }
