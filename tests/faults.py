"""A vLLM plugin of the tests: weight loads that fail and steps that take long.

``install_faults`` writes it, with the metadata of an installed package, to a directory for
PYTHONPATH. While the file named by PARITY_TEST_FAULT exists, the next load of a Qwen3 model goes
wrong; the same name with ``.0`` or ``.1`` behind it means one tensor-parallel rank only, with
``.dp0`` or ``.dp1`` one data-parallel engine. An empty file is one load that fails after a few
tensors; otherwise it holds JSON:

- ``after``: tensors that are loaded before it raises;
- ``times``: loads that go wrong before the file is taken away, -1 for all;
- ``drop``: instead of raising, swallow the tensors with that in their names;
- ``nan``: instead of raising, load NaN for them.

While the file named by PARITY_TEST_BRAKE exists, every step takes 0.1 s longer (or the seconds it
holds), so that a request stays in flight however busy the machine is. While PARITY_TEST_HOLD
exists, a worker that is about to apply a verified update writes its process id to
``PARITY_TEST_HOLD.here`` and waits. The scheduler writes the id of every request that it gets to
PARITY_TEST_ADDED, a line each.
"""

from __future__ import annotations

import os
from pathlib import Path

PLUGIN = """
import contextlib, itertools, json, os, pathlib, time

def take_fault():
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_tensor_model_parallel_rank
    flag = os.environ["PARITY_TEST_FAULT"]
    engine = get_current_vllm_config().parallel_config.data_parallel_index
    for suffix in ("", f".{get_tensor_model_parallel_rank()}", f".dp{engine}"):
        path = pathlib.Path(flag + suffix)
        if path.exists():
            fault = {"after": 9, "times": 1, **json.loads(path.read_text() or "{}")}
            fault["times"] -= 1
            if fault["times"] == 0:
                path.unlink()
            else:
                path.write_text(json.dumps(fault))
            return fault
    return None

def altered(weights, fault):
    for name, tensor in weights:
        if "nan" in fault and fault["nan"] in name:
            tensor = tensor * float("nan")
        if "drop" not in fault or fault["drop"] not in name:
            yield name, tensor

def register():
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM as model
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_parity_plugin.weights.holder import WeightHolder
    if hasattr(model.load_weights, "fault"):
        return
    original = model.load_weights

    def load_weights(self, weights):
        fault = take_fault()
        if fault is None:
            return original(self, weights)
        if "drop" in fault or "nan" in fault:
            return original(self, altered(weights, fault))
        original(self, itertools.islice(weights, fault["after"]))
        raise RuntimeError("injected fault")

    logits = model.compute_logits

    def compute_logits(self, *args, **kwargs):
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float(pathlib.Path(os.environ["PARITY_TEST_BRAKE"]).read_text() or 0.1))
        return logits(self, *args, **kwargs)

    apply = WeightHolder.apply

    def held_apply(self, *args):
        hold = pathlib.Path(os.environ["PARITY_TEST_HOLD"])
        if hold.exists():
            fresh = hold.with_suffix(f".{os.getpid()}")  # one of each rank
            fresh.write_text(str(os.getpid()))
            fresh.replace(hold.with_suffix(".here"))
            while hold.exists():
                time.sleep(0.01)
        return apply(self, *args)

    add_request = Scheduler.add_request

    def noted_add_request(self, request):
        add_request(self, request)
        with open(os.environ["PARITY_TEST_ADDED"], "a") as added:
            added.write(request.request_id + "\\n")

    load_weights.fault = True
    model.load_weights = load_weights
    model.compute_logits = compute_logits
    WeightHolder.apply = held_apply
    Scheduler.add_request = noted_add_request
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
        "PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")])),
        "PARITY_TEST_FAULT": str(directory / "fail-once"),
        "PARITY_TEST_BRAKE": str(directory / "brake"),
        "PARITY_TEST_HOLD": str(directory / "hold"),
        "PARITY_TEST_ADDED": str(directory / "added"),
    }
