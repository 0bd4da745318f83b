"""The directory that weight updates are read from, and what may be read from it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from vllm_parity_plugin.weights.manifest import ManifestError
from vllm_parity_plugin.wire import MARKER_FILE

SHARED_MEMORY = Path("/dev/shm")


class UpdateInProgress(RuntimeError):
    """Another update holds the directory."""


class Staging:
    """A directory owned by one server; updates are read from it and from nowhere else.

    Args:
        directory: an existing or new directory that the trainer can write to, or None for a
            private one in shared memory that is removed when the server ends.
        server_id: written to a marker file, by which a trainer tells that it sees this directory
            and not another of the same name on its own host.
    """

    def __init__(self, directory: Path | None, server_id: str) -> None:
        if directory is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
            self.path = Path(tempfile.mkdtemp(prefix="vllm-parity-", dir=parent))
            self._cleanup = weakref.finalize(self, _remove_if_owner, str(self.path), os.getpid())
        else:
            self.path = directory.expanduser().resolve()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker = self.path / MARKER_FILE
        marker.unlink(missing_ok=True)
        with os.fdopen(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(server_id)

    def resolve(self, name: str) -> Path:
        """The staged file of that name.

        Raises:
            ManifestError: the name leaves the directory, is a link, or is not a regular file.
        """
        path = self.path / name
        if not name or name != Path(name).name or name in {".", "..", MARKER_FILE}:
            raise ManifestError(
                f"{name!r} is not a file name in the weights directory.",
                "Updates are read from that directory only.",
                "pass the bare name of a file written to the directory that "
                "GET /v1/parity/weights names.",
            )
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            raise ManifestError(
                f"There is no file {name!r} in the weights directory.",
                "Nothing arrived that could be loaded.",
                f"write it to {self.path} before sending the request (on a remote trainer, share "
                "that directory and start the server with VLLM_PARITY_WEIGHTS_DIR).",
            ) from None
        if not stat.S_ISREG(mode):
            raise ManifestError(
                f"{name!r} in the weights directory is a link or not a regular file.",
                "It could point outside the directory.",
                "write the tensors to a regular file.",
            )
        return path

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for one update, across all API-server processes of this host.

        The lock dies with its process, so a crashed server cannot block the next one.

        Raises:
            UpdateInProgress: another update holds it.
        """
        with open(self.path / MARKER_FILE) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UpdateInProgress from None
            yield


def _remove_if_owner(path: str, owner: int) -> None:
    # A forked child inherits the finalizer, and must not remove its parent's directory.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
