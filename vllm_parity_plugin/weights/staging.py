"""The directory that weight updates come through: what may be read from it, and who owns what.

Files whose names begin with a dot are the server's own; the others are the trainer's until an
update takes them over. All API-server processes of one server share the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.weights.errors import ManifestError, OutOfSpace, UpdateInProgress
from vllm_parity_plugin.wire import INCOMING, MARKER_FILE

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "vllm-parity-"
FAILURE, TRANSACTION, OPENING = ".failure", ".transaction", ".opening"
OWNER = ".owner-"
"""Prefix of an empty file that names the process by which several API servers were started."""
DIGITS = 10
"""Width of a version in the transaction's file."""
YOUNG = 60.0
"""Seconds for which a private directory without a lock may be one that is just being made."""
SET, UPLOAD = ".set-", ".upload"
"""Prefixes of sets of tensors that the server took over, and of what is being uploaded."""
LEFTOVERS = (f"{SET}*.safetensors", f"{UPLOAD}*", f"{FAILURE}*")


class Staging:
    """A directory owned by one server; updates are read from it and from nowhere else.

    Args:
        directory: an existing or new directory that the trainer can write to, or None for a
            private one in shared memory that goes with the server.
        server_id: the same in all processes of the server; written to a marker file, by which a
            trainer tells that it sees this directory and not another of the same name.

    Raises:
        ParityError: another running server uses the directory.
    """

    def __init__(self, directory: Path | None, server_id: str) -> None:
        if directory is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
            _reclaim(Path(parent))
            self.path = Path(parent) / (PREFIX + server_id)
        else:
            self.path = directory.expanduser().resolve()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory is None:
            _check_private(self.path)
        self._alive = self._open(server_id)
        self._unwritten: str | None = None
        """A failure that the full or closed directory did not take."""
        if directory is None:
            # Held for life, so that nobody takes the directory for that of a dead server.
            weakref.finalize(self, _leave, str(self.path), self._alive, os.getpid())
            if (main := multiprocessing.parent_process()) is not None:
                (self.path / f"{OWNER}{main.pid}").touch(mode=0o600)

    def _open(self, server_id: str) -> int:
        """Descriptor of the marker with a shared lock; the first process cleans what it finds."""
        with locked(self.path / OPENING):
            marker = os.open(self.path / MARKER_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            if _try_lock(marker, fcntl.LOCK_EX):
                for pattern in LEFTOVERS:  # a directory may be the user's: nothing else goes
                    for leftover in self.path.glob(pattern):
                        leftover.unlink(missing_ok=True)
                os.ftruncate(marker, 0)
                os.pwrite(marker, server_id.encode(), 0)
            elif os.pread(marker, 100, 0).decode() != server_id:
                os.close(marker)
                raise ParityError(
                    f"Another running server uses {self.path} for its weight updates.",
                    "Each would take the other's files.",
                    "give every server its own VLLM_PARITY_WEIGHTS_DIR.",
                )
            fcntl.flock(marker, fcntl.LOCK_SH)
        return marker

    # What the trainer hands over.

    def resolve(self, name: str) -> Path:
        """The trainer's file of that name.

        Raises:
            ManifestError: the name leaves the directory or is the server's own, or the file is
                a link or not a regular file.
        """
        path = self.path / name
        if not name or name != Path(name).name or name.startswith(".") or "\0" in name:
            raise ManifestError(
                f"{name!r} is not a file name in the weights directory.",
                "Updates are read from that directory only, and names with a leading dot are the "
                "server's own.",
                "pass the bare name of a file written to the directory that "
                "GET /v1/parity/weights names.",
            )
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            raise self._missing(name, error) from None
        if not stat.S_ISREG(mode):
            raise _not_regular(name)
        if not os.access(path, os.R_OK):
            raise ManifestError(
                f"The server may not read {name!r} in the weights directory.",
                "Nothing could be loaded.",
                "write it as the user that runs the server.",
            )
        return path

    def _missing(self, name: str, error: OSError) -> ManifestError:
        return ManifestError(
            f"There is no file {name!r} in the weights directory ({error.strerror}).",
            "Nothing arrived that could be loaded.",
            f"write it to {self.path} before sending the request (on a remote trainer, upload it, "
            "or share that directory and start the server with VLLM_PARITY_WEIGHTS_DIR).",
        )

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Raise OutOfSpace for a directory that is full, or closed to this process."""
        try:
            yield
        except OSError as error:
            raise OutOfSpace(
                f"{self.path} takes nothing from the server ({error.strerror}).",
                "The update could not be staged, so nothing was touched.",
                "free space there, or give the directory back to the user that runs the server.",
            ) from None

    @contextlib.contextmanager
    def taken(self, given: Path, version: int) -> Iterator[Path]:
        """Take over a file for one update; it goes back if the update is not served.

        From here on no name that the trainer knows leads to the file.
        """
        path = self.path / f"{SET}{version}-{secrets.token_hex(4)}.safetensors"
        with self.usable():
            try:
                os.rename(given, path)
            except FileNotFoundError as error:  # removed since it was resolved
                raise self._missing(given.name, error) from None
        try:
            if not stat.S_ISREG(path.lstat().st_mode):  # swapped since it was resolved
                raise _not_regular(given.name)
            yield path
        except Exception:
            with contextlib.suppress(OSError):
                os.rename(path, given)
            raise

    def keep_only(self, files: Iterable[str]) -> None:
        """Remove the server's sets that no stack needs."""
        kept = set(files)
        for path in self.path.glob(f"{SET}*"):
            if str(path) not in kept:
                path.unlink(missing_ok=True)

    def reclaim(self, older_than: float) -> list[str]:
        """Remove files of trainers that died before they sent the request.

        Only files that ``WeightSync`` names are touched: the directory may be the user's own.
        """
        removed = []
        for path in self.path.glob(f"{INCOMING}*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > older_than:
                    path.unlink()
                    removed.append(path.name)
        return removed

    # One transaction at a time, and what the last one left.

    @contextlib.contextmanager
    def transaction(self, version: int) -> Iterator[None]:
        """Hold the server for one update, across all of its API-server processes.

        The lock dies with its process, so a crashed server cannot block the next one.

        Raises:
            UpdateInProgress: another update holds it.
            OutOfSpace: the directory is full, or closed to this process.
        """
        with self.usable():
            file = os.open(self.path / TRANSACTION, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if not _try_lock(file, fcntl.LOCK_EX):
                raise UpdateInProgress(
                    f"The update to policy version {self.updating() or '?'} is in progress.",
                    "Two at once would mix policies.",
                    "wait for it, then send this one again.",
                )
            with self.usable():
                os.pwrite(file, f"{version:{DIGITS}}".encode(), 0)
            yield
            # Not truncated: with its block the file can be written when the disk is full.
            with contextlib.suppress(OSError):
                os.pwrite(file, b" " * DIGITS, 0)
        finally:
            os.close(file)

    def updating(self) -> int | None:
        """Version of the update that is being applied, by whichever process; None if none is."""
        try:
            with open(self.path / TRANSACTION) as file:
                if _try_lock(file.fileno(), fcntl.LOCK_SH):
                    return None
                return int(file.read().strip() or 0)
        except (OSError, ValueError):
            return None

    @property
    def failure(self) -> str | None:
        """Why no complete policy is loaded; None when one is. Cheap: asked at every request."""
        path = self.path / FAILURE
        if not path.exists():
            return self._unwritten
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(path.read_text()))
        return "unknown"

    @failure.setter
    def failure(self, reason: str | None) -> None:
        self._unwritten = None
        try:
            self._write_failure(reason)
        except OSError:  # it must neither hide the failure nor stop the way back
            logger.exception("cannot note in %s what is served", self.path)
            self._unwritten = reason

    def _write_failure(self, reason: str | None) -> None:
        path = self.path / FAILURE
        if reason is None:
            if path.exists():  # a closed directory refuses to remove what is not there, too
                path.unlink(missing_ok=True)
            return
        fresh = path.with_name(f"{FAILURE}-{secrets.token_hex(4)}")
        try:
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as stream:
                json.dump(reason, stream)
            os.replace(fresh, path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


def _not_regular(name: str) -> ManifestError:
    return ManifestError(
        f"{name!r} in the weights directory is a link or not a regular file.",
        "It could point outside the directory.",
        "write the tensors to a regular file.",
    )


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ParityError(
            f"{path} is not a private directory of this user.",
            "Someone else could put weights into it.",
            "remove it, or set VLLM_PARITY_WEIGHTS_DIR to a directory of your own.",
        )


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file for a moment; others wait, in whichever process they are."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _leave(path: str, alive: int, owner: int) -> None:
    """Remove a private directory with its last process. A forked child must not: it inherits the
    finalizer and, with the descriptor, the lock."""
    if os.getpid() == owner and _try_lock(alive, fcntl.LOCK_EX):
        shutil.rmtree(path, ignore_errors=True)


def remove_private(owner: int) -> None:
    """Remove the private directory of the API servers that process ``owner`` started, when it ends.

    vLLM kills several API servers at once, and none of them gets to say goodbye.
    """
    if os.getpid() != owner:  # a forked child inherits what is due at exit
        return
    for mark in SHARED_MEMORY.glob(f"{PREFIX}*/{OWNER}{owner}"):
        with contextlib.suppress(OSError):
            if mark.parent.lstat().st_uid == os.getuid():
                _remove_dead(mark.parent, patience=5.0)


def _reclaim(parent: Path) -> None:
    """Remove private directories whose server is gone without having said goodbye."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime >= YOUNG:
                _remove_dead(path)


def _remove_dead(path: Path, patience: float = 0.0) -> None:
    """Remove a private directory unless a living server holds it for longer than ``patience``."""
    deadline = time.monotonic() + patience
    marker = os.open(path / MARKER_FILE, os.O_RDWR | os.O_NOFOLLOW)
    try:
        while not (dead := _try_lock(marker, fcntl.LOCK_EX)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if dead:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(marker)
