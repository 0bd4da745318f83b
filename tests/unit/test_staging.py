"""The directory that updates are read from.

Properties:
- a bare name of a regular file is found; everything else is refused (X1);
- one update at a time, also across processes, and a dead holder does not block (W16, W18);
- a file is taken over for an update and goes back unless it is served; what the dead left goes;
- a full or closed directory is refused as one, and hides no failure;
- a private directory is private, marked with the server's id, and removed by its maker only.
"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.errors import ManifestError, OutOfSpace, UpdateInProgress
from vllm_parity_plugin.weights.staging import FAILURE, PREFIX, SET, YOUNG, Staging
from vllm_parity_plugin.wire import INCOMING, MARKER_FILE


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path / "weights", "an-id")


def test_a_regular_file_is_found(staging: Staging) -> None:
    (staging.path / "update.safetensors").write_bytes(b"x")
    assert staging.resolve("update.safetensors") == staging.path / "update.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../secret",
        "a/b",
        "/etc/passwd",
        "a/../../secret",
        "./a",
        "a/",
        MARKER_FILE,
        FAILURE,
        ".b",
    ],
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
    assert staging.updating() is None
    with pytest.raises(ValueError, match="first"), staging.transaction(7):
        assert staging.updating() == 7
        with (
            pytest.raises(UpdateInProgress, match="policy version 7 is in progress"),
            staging.transaction(8),
        ):
            pytest.fail("two updates at once")
        raise ValueError("first")
    assert staging.updating() is None
    with staging.transaction(8):
        assert staging.updating() == 8


HOLDER = """
import sys
from pathlib import Path
from vllm_parity_plugin.weights.staging import Staging
staging = Staging(Path(sys.argv[1]), sys.argv[2])
with staging.transaction(7):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(staging: Staging, server_id: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(staging.path), server_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_w16_a_dead_holder_does_not_block(staging: Staging) -> None:
    """W16: another API-server process holds the server until it is killed; then it is free."""
    with holder(staging, "an-id") as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert staging.updating() == 7
        with pytest.raises(UpdateInProgress, match="7"), staging.transaction(8):
            pytest.fail("two updates at once")
        other.kill()
        other.wait()
        assert staging.updating() is None
        with staging.transaction(8):
            pass


def test_two_servers_cannot_share_a_directory(staging: Staging) -> None:
    """The second is refused and changes nothing; a second process of the same server is let in."""
    (staging.path / f"{SET}1-x.safetensors").write_bytes(b"x")
    with holder(staging, "another-id") as other:
        assert other.stderr is not None
        assert b"Another running server uses" in other.stderr.read()
    Staging(staging.path, "an-id")
    assert (staging.path / MARKER_FILE).read_text() == "an-id"
    assert (staging.path / f"{SET}1-x.safetensors").exists()


def test_what_a_dead_server_left(tmp_path: Path) -> None:
    """Its own files go with the next start; the trainer's and the user's stay."""
    first = Staging(tmp_path, "first")
    first.failure = "half-loaded"
    kept = [tmp_path / "mine.safetensors", tmp_path / f"{INCOMING}1-x.safetensors"]
    for path in (*kept, tmp_path / f"{SET}1-x.safetensors"):
        path.write_bytes(b"x")
    os.close(first._alive)  # what a killed process does
    second = Staging(tmp_path, "second")
    assert second.failure is None
    assert sorted(tmp_path.glob("[!.]*")) == sorted(kept)
    assert not list(tmp_path.glob(f"{SET}*"))


def test_the_marker_is_not_a_link(tmp_path: Path) -> None:
    """A marker planted as a link is not followed."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / MARKER_FILE).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        Staging(weights, "an-id")
    assert victim.read_text() == "untouched"


def test_a_taken_file_goes_back_unless_it_is_served(staging: Staging) -> None:
    """While it is taken, no name that the trainer knows leads to it."""
    given = staging.path / "update.safetensors"
    given.write_bytes(b"x")
    with pytest.raises(ParityError), staging.taken(given, 3) as path:
        assert not given.exists() and path.read_bytes() == b"x"
        raise ParityError("found", "why", "fix")
    assert given.read_bytes() == b"x"
    with staging.taken(given, 3) as path:
        pass
    assert not given.exists() and path.exists()
    other = path.with_name(f"{SET}2-old.safetensors")
    other.write_bytes(b"x")
    staging.keep_only([str(path)])
    assert path.exists() and not other.exists()


def test_w16_files_of_dead_trainers(staging: Staging) -> None:
    """Abandoned files go by age and by name; the user's own files never do."""
    mine, young, old = (
        staging.path / name
        for name in ("mine.safetensors", f"{INCOMING}2.safetensors", f"{INCOMING}1.safetensors")
    )
    for path in (mine, young, old):
        path.write_bytes(b"x")
    for path in (mine, old):
        os.utime(path, (0, 0))
    assert staging.reclaim(older_than=600) == [old.name]
    assert mine.exists() and young.exists() and not old.exists()


def test_failure_is_seen_by_every_process(staging: Staging) -> None:
    """One sets it, another reads it and clears it."""
    other = Staging(staging.path, "an-id")
    assert other.failure is None
    staging.failure = "half-loaded: é"
    assert other.failure == "half-loaded: é"
    other.failure = None
    assert staging.failure is None


def test_a_failure_that_cannot_be_written_is_told(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk nothing raises, nothing is left behind, and this process knows it."""

    def no_space(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "replace", no_space)
        staging.failure = "half-loaded"
        assert staging.failure == "half-loaded"
    assert not list(staging.path.glob(f"{FAILURE}*"))
    staging.failure = None
    assert staging.failure is None


def test_a_closed_directory_is_said_to_be_one(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system refuses becomes OutOfSpace, before anything is touched."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    given = staging.path / "update.safetensors"
    given.write_bytes(b"x")
    with monkeypatch.context() as closed:
        closed.setattr(os, "rename", refuse)
        with pytest.raises(OutOfSpace, match="Read-only"), staging.taken(given, 3):
            raise AssertionError("unreachable")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OutOfSpace, match="Read-only"), staging.transaction(3):
        raise AssertionError("unreachable")
    assert given.exists()


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


def test_private_directories_of_killed_servers(tmp_path: Path, monkeypatch: Any) -> None:
    """The next start removes them once they are not brand new; a living server's stays."""
    monkeypatch.setattr("vllm_parity_plugin.weights.staging.SHARED_MEMORY", tmp_path)
    living, dead = Staging(None, "living"), Staging(None, "dead")
    os.close(dead._alive)
    for path in (living.path, dead.path):
        os.utime(path, (time.time() - 2 * YOUNG,) * 2)
    newest = Staging(None, "newest")
    assert living.path.exists() and newest.path.exists()
    assert not (tmp_path / f"{PREFIX}dead").exists()
