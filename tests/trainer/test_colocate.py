"""TRL's colocate mode with ``ParityCallback``: real ``GRPOTrainer``, engine in its process, on CPU.

Properties: after every sync the engine's logprobs are the trainer's, untied and tied, with an fp32
and a bf16 head, with an adapter, and on two processes; the engine attests to what it runs; the
control is stock TRL, which crashes at its first sync; a load that fails leaves the old policy, on
all processes, and the trainer with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults import install_faults
from tests.models import Kind
from tests.trainer.colocated import Run, train

SAME, MOVED = 0.02, 0.05
OBSERVE = {"VLLM_PARITY_MODE": "observe"}


def agrees(result: Run, steps: int = 3) -> None:
    """The run ended well, moved the policy, and every generation came from the trainer's."""
    assert result["error"] is None, result["error"]
    assert len(result["syncs"]) == steps
    assert all(sync["now"] <= SAME for sync in result["syncs"]), result["syncs"]
    assert result["syncs"][-1]["first"] > MOVED


@pytest.fixture(scope="module")
def alone(
    tiny_model: Callable[[Kind], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Runs of one process each, two at a time: one core is idle while another imports."""
    tied, untied = str(tiny_model("tied")), str(tiny_model("untied"))
    last = {"callback_at_last": "enforce"}
    runs: dict[str, tuple[Run, dict[str, str]]] = {
        "enforce": ({"model": tied, "callback": "enforce"}, {}),
        "observe": (
            {"model": tied, "callback": "observe", "install": True, "head": "bfloat16"},
            OBSERVE,
        ),
        "stock": ({"model": untied, "callback": None} | last, {"VLLM_PARITY_MODE": "off"}),
    }

    def result(name: str) -> Run:
        run, env = runs[name]
        (found,) = train(run | {"steps": 3}, tmp_path_factory.mktemp(name), env=env)
        return found

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(result, runs), strict=True))


def test_every_sync_reaches_the_engine(alone: dict[str, Run]) -> None:
    """Two lines of user code; versions, sizes and mismatch are in TRL's own logs. Tied here; the
    runs on two processes below are untied."""
    result = alone["enforce"]
    agrees(result)
    assert [entry["parity/policy_version"] for entry in result["log"]] == [1, 2, 3]
    assert all(0 < entry["parity/logprob_diff/mean"] <= SAME for entry in result["log"])
    status = result["status"]
    assert (status["mode"], status["state"], status["policy_version"]) == ("enforce", "serving", 0)
    assert status["workers"][0]["head"]["dtype"] == "float32"


def test_a_tied_bf16_head_follows(alone: dict[str, Run]) -> None:
    """Where vLLM's reload goes stale: mode observe leaves the head bf16 and the prefix cache on.

    The callback in mode observe changes nothing, so the transaction is installed by hand.
    """
    result = alone["observe"]
    agrees(result)
    worker = result["status"]["workers"][0]
    assert (worker["head"]["dtype"], worker["prefix_caching"]) == ("bfloat16", "on")


def test_two_processes_update_together(tiny_model: Callable[[Kind], Path], tmp_path: Path) -> None:
    """Each has its own engine; one of them stages, both load, and both are attested.

    PEFT LoRA here: the engines hold the merged weights, rounded once."""
    run: Run = {
        "model": str(tiny_model("untied")),
        "callback": "enforce",
        "lora": True,
        "steps": 3,
        "trainer": {"per_device_train_batch_size": 8, "learning_rate": 3e-2},
    }
    results = train(run, tmp_path, processes=2)
    for result in results:
        agrees(result)
        assert [worker["rank"] for worker in result["status"]["workers"]] == [0, 1]


def test_a_failed_load_ends_the_run_on_all_processes(
    tiny_model: Callable[[Kind], Path], tmp_path: Path
) -> None:
    """One of two processes fails, both go back, and both learn why."""
    env = install_faults(tmp_path)
    run: Run = {
        "model": str(tiny_model("untied")),
        "callback": "enforce",
        "arm": env["PARITY_TEST_FAULT"],
        "steps": 3,
        "trainer": {"per_device_train_batch_size": 8},
    }
    for result in train(run, tmp_path, processes=2, env=env):
        for word in ("ApplyError", "injected fault", "are served"):
            assert word in result["error"]
        assert result["held"] == [0, "committed", None]
        assert result["syncs"] == []


def test_control_stock_trl_crashes_at_its_first_sync(alone: dict[str, Run]) -> None:
    """TRL loads single tensors into layers whose weights vLLM repacked on CPU. And a callback
    refuses that engine, which has no plugin: in one paragraph, with the fix."""
    result = alone["stock"]
    assert result["error"].startswith("AttributeError")
    assert "weight_loader" in result["error"]
    assert result["syncs"] == []
    for word in ("ParityError", "plugin", "VLLM_PARITY_MODE must not be off"):
        assert word in result["refusal"]
