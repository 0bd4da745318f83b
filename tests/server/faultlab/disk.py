"""A weights directory that can be full, or lose its permissions, by real means.

Where mounts are allowed it is a small tmpfs, which a filler fills and a read-only bind mount
closes. Elsewhere the server's own limit on file sizes (``RLIMIT_FSIZE``) does the one, and the
directory's mode the other; for root, whom modes do not bind, a directory in a file's place.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

from vllm_parity_plugin.weights.staging import TRANSACTION

SIZE = 16 * 2**20
Limit = tuple[int, int]


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


class Disk:
    """One weights directory.

    Args:
        path: mount point; made if it is missing.
        mount: try to mount a tmpfs there.
    """

    def __init__(self, path: Path, mount: bool = True) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        options = f"size={SIZE},mode=0700"
        self.mounted = mount and _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path))

    @property
    def means(self) -> str:
        """By what it gets full."""
        return "tmpfs" if self.mounted else "RLIMIT_FSIZE"

    def close(self) -> None:
        """Unmount."""
        if self.mounted:
            _run("umount", "-l", str(self.path))

    @contextlib.contextmanager
    def full(self, pid: int, room: int = 0) -> Iterator[None]:
        """No room but ``room`` bytes for the process ``pid`` and everyone else."""
        if not self.mounted:
            with limited(pid, room):
                yield
            return
        filler = self.path / "filler"
        free = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_frsize
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - room)
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be created, renamed or written here."""
        path = str(self.path)
        if self.mounted and _run("mount", "--bind", path, path):
            try:
                if not _run("mount", "-o", "remount,bind,ro", path):
                    raise OSError(f"cannot make {path} read-only")
                yield
            finally:
                _run("umount", "-l", path)
            return
        if os.geteuid() == 0:  # permissions do not bind root
            with _in_the_way(self.path / TRANSACTION):
                yield
            return
        self.path.chmod(0o500)
        try:
            yield
        finally:
            self.path.chmod(0o700)


@contextlib.contextmanager
def _in_the_way(path: Path) -> Iterator[None]:
    """A directory where the server needs a file."""
    path.unlink(missing_ok=True)
    path.mkdir()
    try:
        yield
    finally:
        path.rmdir()


@contextlib.contextmanager
def limited(pid: int, size: int) -> Iterator[None]:
    """No file of process ``pid`` can grow beyond ``size`` bytes."""
    before: Limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
