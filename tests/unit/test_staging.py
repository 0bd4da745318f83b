"""The directory that updates are read from.

Properties:
- a bare name of a regular file is found; everything else is refused (X1);
- one update at a time, also across processes, and a dead holder does not block;
- a private directory is private, marked with the server's id, and removed by its maker only.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_parity_plugin.weights.manifest import ManifestError
from vllm_parity_plugin.weights.staging import Staging, UpdateInProgress
from vllm_parity_plugin.wire import MARKER_FILE


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path / "weights", "an-id")


def test_a_regular_file_is_found(staging: Staging) -> None:
    (staging.path / "update.safetensors").write_bytes(b"x")
    assert staging.resolve("update.safetensors") == staging.path / "update.safetensors"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../secret", "a/b", "/etc/passwd", "a/../../secret", "./a", "a/", MARKER_FILE],
)
def test_x1_names_that_leave_the_directory(staging: Staging, name: str) -> None:
    """X1: only a bare name; even where the path would end in a file that exists."""
    (staging.path.parent / "secret").write_bytes(b"x")
    (staging.path / "a").write_bytes(b"x")
    with pytest.raises(ManifestError, match="not a file name"):
        staging.resolve(name)


def test_x1_links_and_special_files(staging: Staging) -> None:
    """X1: links (also dangling), directories and pipes are not read; a missing file is named."""
    (staging.path / "file").write_bytes(b"x")
    (staging.path / "link").symlink_to(staging.path / "file")
    (staging.path / "dangling").symlink_to("/nowhere")
    (staging.path / "directory").mkdir()
    os.mkfifo(staging.path / "pipe")
    for name in ("link", "dangling", "directory", "pipe"):
        with pytest.raises(ManifestError, match="a link or not a regular file"):
            staging.resolve(name)
    with pytest.raises(ManifestError, match="There is no file 'absent'"):
        staging.resolve("absent")


def test_w18_one_update_at_a_time(staging: Staging) -> None:
    """W18: a second update is refused while the first runs, and let in after it failed."""
    with pytest.raises(ValueError, match="first"), staging.lock():
        with pytest.raises(UpdateInProgress), staging.lock():
            pytest.fail("two updates at once")
        raise ValueError("first")
    with staging.lock():
        pass


HOLDER = """
import sys
from pathlib import Path
from vllm_parity_plugin.weights.staging import Staging
staging = Staging.__new__(Staging)
staging.path = Path(sys.argv[1])
with staging.lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_w16_a_dead_holder_does_not_block(staging: Staging) -> None:
    """W16: another process holds the lock until it is killed; then it is free."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(staging.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(UpdateInProgress), staging.lock():
            pytest.fail("two updates at once")
        holder.kill()
    with staging.lock():
        pass


def test_the_marker_is_the_servers(staging: Staging) -> None:
    """A marker left by an earlier server, or planted as a link, is replaced and not followed."""
    marker = staging.path / MARKER_FILE
    assert marker.read_text() == "an-id"
    victim = staging.path.parent / "victim"
    victim.write_text("untouched")
    marker.unlink()
    marker.symlink_to(victim)
    Staging(staging.path, "another-id")
    assert not marker.is_symlink()
    assert (marker.read_text(), victim.read_text()) == ("another-id", "untouched")


def test_a_private_directory() -> None:
    """Only its owner can read it, and it goes with the server, not with a forked child."""
    staging = Staging(None, "an-id")
    path = staging.path
    assert path.stat().st_mode & 0o077 == 0
    child = os.fork()
    if child == 0:
        del staging
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.is_dir()
    del staging
    gc.collect()
    assert not path.exists()
