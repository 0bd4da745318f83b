"""Updates that arrive over HTTP: a file in the staging directory that fills up.

One upload can be open, and it holds the server's next update: a second trainer is told so until
the first commits, gives up, or sends nothing for ``timeout`` seconds. The served weights are not
touched before the commit. State lies in files, because any API-server process may get any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict

from vllm_parity_plugin.weights.errors import (
    RangeError,
    UnknownUpload,
    UpdateInProgress,
)
from vllm_parity_plugin.weights.manifest import check_layout
from vllm_parity_plugin.weights.messages import Progress, UploadRequest, UploadStatus
from vllm_parity_plugin.weights.staging import UPLOAD, Staging, locked
from vllm_parity_plugin.weights.writer import allocate, header_bytes, new_file

SESSION, DATA, LOCK = f"{UPLOAD}.json", f"{UPLOAD}-", ".sending"


class Session(BaseModel):
    """The open upload; its file's modification time is the last sign of life."""

    model_config = ConfigDict(frozen=True)

    upload_id: str
    request: UploadRequest
    file: str
    data_start: int
    total: int
    received: int = 0
    error: str | None = None


@dataclass
class Filling:
    """An upload that a worker writes to, locked against requests that would."""

    path: Path
    start: int
    sizes: list[int]
    advance: Callable[[int, str | None], None]
    """Note how many bytes are there, and why no more will come.

    Raises:
        UnknownUpload: the upload is gone.
    """


class Uploads:
    """The one upload that may be open.

    Args:
        staging: where its file lies.
        timeout: seconds without bytes after which it is dropped.
    """

    def __init__(self, staging: Staging, timeout: float) -> None:
        self._staging = staging
        self._session = staging.path / SESSION
        self.timeout = timeout
        self.expired: list[int] = []
        """Versions of uploads that this process dropped for their silence."""

    def current(self) -> Progress | None:
        """The open upload; one that was silent for too long is dropped."""
        session = self._load()
        if session is None:
            return None
        return Progress(
            version=session.request.version, phase="upload", idle_seconds=self._idle() or 0.0
        )

    def sweep(self) -> None:
        """Drop the upload if it was silent for too long, and files that no upload owns."""
        if self.current() is None:
            for path in self._staging.path.glob(f"{UPLOAD}*"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > self.timeout:
                        path.unlink()

    def open(self, request: UploadRequest) -> UploadStatus:
        """Make room for an update. The caller holds the transaction and has checked the manifest.

        Raises:
            UpdateInProgress: another upload is open.
            ManifestError: byte ranges or checksums are missing or wrong.
            OutOfSpace: the directory cannot hold it.
        """
        if (other := self._load()) is not None:
            raise UpdateInProgress(
                f"The update to policy version {other.request.version} is in progress: its upload "
                f"has {other.received} of {other.total} bytes.",
                "Two at once would mix policies.",
                f"wait for it; it ends by itself {self.timeout:.0f} s after its trainer stops "
                "sending.",
            )
        total = check_layout(request.tensors)
        header = header_bytes(request.tensors)
        path = self._staging.path / f"{DATA}{secrets.token_hex(8)}.safetensors"
        with self._staging.usable():
            allocate(path, header, len(header) + total)
        session = Session(
            upload_id=secrets.token_hex(16),
            request=request,
            file=path.name,
            data_start=len(header),
            total=total,
        )
        try:
            with self._staging.usable():
                self._save(session)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return self._status(session)

    def status(self, upload_id: str) -> UploadStatus:
        """How far an upload is.

        Raises:
            UnknownUpload: it was dropped, committed or never opened.
        """
        return self._status(self._get(upload_id))

    def request(self, upload_id: str) -> UploadRequest:
        """The manifest of an upload.

        Raises:
            UnknownUpload: see :meth:`status`.
        """
        return self._get(upload_id).request

    async def write(
        self,
        upload_id: str,
        begin: int,
        end: int,
        chunks: AsyncIterator[bytes],
        total: int | None = None,
    ) -> UploadStatus:
        """Store bytes [begin, end) of the data section.

        What arrived before a broken connection is kept: the next request goes on from there.

        Args:
            total: size of the data section as the sender knows it, if it said so.

        Raises:
            UnknownUpload: see :meth:`status`; also when it is dropped while bytes come in.
            RangeError: a range outside the upload, one that leaves a gap, or a body of another
                length.
            UpdateInProgress: the upload is being committed.
        """
        session = self._get(upload_id)
        _check_range(session, begin, end, total)
        # Shared while bytes come in: a commit must not verify what is still being written.
        with self._held(session, fcntl.LOCK_SH) as file:
            file.seek(session.data_start + begin)
            place = begin
            try:
                # A connection can die without a word; its request must not stay for ever.
                async with asyncio.timeout(self.timeout) as silence:
                    async for chunk in chunks:
                        if place + len(chunk) > end:
                            raise RangeError(
                                f"More bytes came than the range [{begin}, {end}) has.",
                                "They would overwrite another tensor.",
                                "make Content-Range and body agree.",
                            )
                        file.write(chunk)
                        place += len(chunk)
                        silence.reschedule(asyncio.get_running_loop().time() + self.timeout)
                        self._sign_of_life(file)
            except TimeoutError:
                pass
            finally:
                file.flush()
                self._advance(upload_id, place)
        if place < end:
            raise RangeError(
                f"The body ended at byte {place} of the range [{begin}, {end}).",
                "The rest of the range did not arrive.",
                f"send from byte {place} on.",
            )
        return self.status(upload_id)

    @contextlib.contextmanager
    def complete(self, upload_id: str) -> Iterator[Path]:
        """The file of an upload that has all of its bytes; none can be written inside the block.

        Raises:
            UnknownUpload: see :meth:`status`.
            RangeError: bytes are missing.
            UpdateInProgress: bytes are still coming in, or another commit is under way.
        """
        session = self._get(upload_id)
        if session.received < session.total:
            raise RangeError(
                f"The upload has {session.received} of {session.total} bytes.",
                "A truncated update would leave part of the policy undefined.",
                f"send from byte {session.received} on, then commit again.",
            )
        with self._held(session, fcntl.LOCK_EX):
            self._touch()
            try:
                yield self._staging.path / session.file
            finally:  # however long it took to refuse it, it may be mended and sent again
                self._touch()

    @contextlib.contextmanager
    def fill(self, upload_id: str) -> Iterator[Filling]:
        """Let somebody else write all bytes of an upload; only progress is a sign of life.

        Raises:
            UnknownUpload: see :meth:`status`.
            UpdateInProgress: bytes are coming in already, or a commit is under way.
        """
        session = self._get(upload_id)
        with self._held(session, fcntl.LOCK_EX) as file:
            noted: tuple[int, str | None] = (0, None)
            self._advance(upload_id, *noted)

            def advance(place: int, error: str | None) -> None:
                nonlocal noted
                if not os.fstat(file.fileno()).st_nlink:
                    raise self._unknown()
                if (place, error) != noted:
                    noted = (place, error)
                    self._advance(upload_id, place, error)

            sizes = [entry.nbytes for entry in session.request.tensors.values()]
            path = self._staging.path / session.file
            yield Filling(path, session.data_start, sizes, advance)

    def drop(self, upload_id: str) -> None:
        """Forget an upload and its bytes.

        Raises:
            UnknownUpload: see :meth:`status`.
            OutOfSpace: the directory is closed to this process.
        """
        with self._staging.usable():
            self._remove(self._get(upload_id))

    def _status(self, session: Session) -> UploadStatus:
        return UploadStatus(
            upload_id=session.upload_id,
            version=session.request.version,
            received=session.received,
            total=session.total,
            timeout=self.timeout,
            error=session.error,
        )

    def _get(self, upload_id: str) -> Session:
        session = self._load()
        if session is None or not _same(session.upload_id, upload_id):
            raise self._unknown()
        return session

    def _unknown(self) -> UnknownUpload:
        return UnknownUpload(
            "There is no such upload.",
            f"It was committed, given up, or its trainer sent nothing for {self.timeout:.0f} s.",
            "read policy_version from GET /v1/parity/weights, and open a new upload if it is not "
            "yours.",
        )

    @contextlib.contextmanager
    def _held(self, session: Session, kind: int) -> Iterator[BinaryIO]:
        """The upload's file with a lock: shared to write to it, exclusive to commit it."""
        busy = UpdateInProgress(
            f"The upload of policy version {session.request.version} is "
            + (
                "being applied, or received over NCCL."
                if kind == fcntl.LOCK_SH
                else "still being received, or applied."
            ),
            "Bytes could change after they were verified.",
            "wait until every PUT and every commit of it has been answered.",
        )
        with self._staging.usable():
            try:
                file = open(self._staging.path / session.file, "r+b")  # noqa: SIM115
            except FileNotFoundError:  # a commit took it over, or it was just dropped
                self._get(session.upload_id)
                raise busy from None
        with file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy from None
            yield file

    def _sign_of_life(self, file: BinaryIO) -> None:
        if not os.fstat(file.fileno()).st_nlink:
            raise self._unknown()
        self._touch()

    def _touch(self) -> None:
        with contextlib.suppress(OSError):  # gone, or the directory is closed
            os.utime(self._session)

    def _load(self) -> Session | None:
        """The open upload; one that was silent for too long is dropped."""
        session = self._read()
        if session is None or not self._silent(session):
            return session
        with contextlib.suppress(OSError):  # a closed directory keeps what nobody can use
            if self._remove(session):
                self.expired.append(session.request.version)
        return None

    def _read(self) -> Session | None:
        try:
            return Session.model_validate_json(self._session.read_text())
        except (OSError, ValueError):
            return None

    def _silent(self, session: Session) -> bool:
        idle = self._idle()
        if idle is None or idle <= self.timeout:
            return False
        taken_over = not (self._staging.path / session.file).exists()
        return not (taken_over and self._staging.updating() == session.request.version)

    def _idle(self) -> float | None:
        try:
            return max(0.0, time.time() - self._session.stat().st_mtime)
        except OSError:
            return None

    def _advance(self, upload_id: str, place: int, error: str | None = None) -> None:
        with self._staging.usable(), locked(self._staging.path / LOCK):
            session = self._read()
            if session is not None and _same(session.upload_id, upload_id):
                received = max(session.received, place)
                changes = {"received": received, "error": error}
                self._save(session.model_copy(update=changes))

    def _save(self, session: Session) -> None:
        fresh = self._session.with_name(f"{SESSION}-{secrets.token_hex(4)}")
        text = session.model_dump_json().encode()
        with new_file(fresh, len(text)) as file, open(file, "wb", closefd=False) as stream:
            stream.write(text)
        os.replace(fresh, self._session)

    def _remove(self, session: Session) -> bool:
        """Whether it was still there: another process may have been faster."""
        with locked(self._staging.path / LOCK):
            found = self._read()
            if found is None or found.upload_id != session.upload_id:
                return False
            (self._staging.path / session.file).unlink(missing_ok=True)
            self._session.unlink(missing_ok=True)
            return True


def _same(known: str, given: str) -> bool:
    return secrets.compare_digest(known.encode(), given.encode("utf-8", "surrogatepass"))


def _check_range(session: Session, begin: int, end: int, total: int | None) -> None:
    if total not in {None, session.total}:
        raise RangeError(
            f"The sender says that there are {total} bytes; the manifest has {session.total}.",
            "They are not the bytes that the manifest describes.",
            "send the tensors of this upload's manifest.",
        )
    if not 0 <= begin <= session.received or not begin <= end <= session.total:
        raise RangeError(
            f"Bytes [{begin}, {end}) do not continue an upload that has {session.received} of "
            f"{session.total} bytes.",
            "The gap would be undefined weights.",
            f"send from byte {session.received} on.",
        )
