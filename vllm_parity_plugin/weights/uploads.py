"""Updates that arrive over HTTP: a file in the staging directory that fills up.

One upload can be open, and it holds the server's next update: a second trainer is told so until
the first commits, gives up, or sends nothing for ``timeout`` seconds. The served weights are not
touched before the commit. State lies in files, because any API-server process may get any request.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from vllm_parity_plugin.weights.errors import (
    ManifestError,
    RangeError,
    UnknownUpload,
    UpdateInProgress,
)
from vllm_parity_plugin.weights.manifest import TensorEntry
from vllm_parity_plugin.weights.messages import Progress, UploadRequest, UploadStatus
from vllm_parity_plugin.weights.staging import UPLOAD, Staging
from vllm_parity_plugin.weights.writer import allocate, header_bytes

SESSION, DATA = f"{UPLOAD}.json", f"{UPLOAD}-"


class Session(BaseModel):
    """The open upload; its file's modification time is the last sign of life."""

    model_config = ConfigDict(frozen=True)

    upload_id: str
    request: UploadRequest
    file: str
    data_start: int
    total: int
    received: int = 0


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
        """Drop the upload if it was silent for too long, and bytes that no upload owns."""
        if self.current() is None:
            for path in self._staging.path.glob(f"{DATA}*.safetensors"):
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
        allocate(path, header, len(header) + total)
        session = Session(
            upload_id=secrets.token_hex(16),
            request=request,
            file=path.name,
            data_start=len(header),
            total=total,
        )
        self._save(session)
        return self._status(session)

    def status(self, upload_id: str) -> UploadStatus:
        """How far an upload is.

        Raises:
            UnknownUpload: it was dropped, committed or never opened.
        """
        return self._status(self._get(upload_id))

    async def write(
        self, upload_id: str, begin: int, end: int, chunks: AsyncIterator[bytes]
    ) -> UploadStatus:
        """Store bytes [begin, end) of the data section.

        What arrived before a broken connection is kept: the next request goes on from there.

        Raises:
            UnknownUpload: see :meth:`status`.
            RangeError: a range outside the upload, or one that leaves a gap.
        """
        session = self._get(upload_id)
        if not 0 <= begin <= session.received or not begin <= end <= session.total:
            raise RangeError(
                f"Bytes [{begin}, {end}) do not continue an upload that has {session.received} of "
                f"{session.total} bytes.",
                "The gap would be undefined weights.",
                f"send from byte {session.received} on.",
            )
        place = begin
        try:
            with open(self._staging.path / session.file, "r+b") as file:
                # Held while bytes come in: a commit must not verify what is still being written.
                fcntl.flock(file, fcntl.LOCK_SH)
                file.seek(session.data_start + begin)
                async for chunk in chunks:
                    if place + len(chunk) > end:
                        raise RangeError(
                            f"More bytes came than the range [{begin}, {end}) has.",
                            "They would overwrite another tensor.",
                            "make Content-Range and body agree.",
                        )
                    file.write(chunk)
                    place += len(chunk)
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(self._session)
        finally:
            self._advance(upload_id, place)
        if place < end:
            raise RangeError(
                f"The body ended at byte {place} of the range [{begin}, {end}).",
                "The rest of the range did not arrive.",
                f"send from byte {place} on.",
            )
        return self.status(upload_id)

    def complete(self, upload_id: str) -> tuple[Path, UploadRequest]:
        """The file of an upload that has all of its bytes, and its manifest.

        Raises:
            UnknownUpload: see :meth:`status`.
            RangeError: bytes are missing.
        """
        session = self._get(upload_id)
        if session.received < session.total:
            raise RangeError(
                f"The upload has {session.received} of {session.total} bytes.",
                "A truncated update would leave part of the policy undefined.",
                f"send from byte {session.received} on, then commit again.",
            )
        path = self._staging.path / session.file
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UpdateInProgress(
                    f"Bytes of policy version {session.request.version} are still being received.",
                    "They could change after they were verified.",
                    "commit when every PUT has been answered.",
                ) from None
        os.utime(self._session)
        return path, session.request

    def drop(self, upload_id: str) -> None:
        """Forget an upload and its bytes.

        Raises:
            UnknownUpload: see :meth:`status`.
        """
        self._remove(self._get(upload_id))

    def _status(self, session: Session) -> UploadStatus:
        return UploadStatus(
            upload_id=session.upload_id,
            version=session.request.version,
            received=session.received,
            total=session.total,
            timeout=self.timeout,
        )

    def _get(self, upload_id: str) -> Session:
        session = self._load()
        if session is None or not secrets.compare_digest(
            session.upload_id.encode(), upload_id.encode()
        ):
            raise UnknownUpload(
                "There is no such upload.",
                f"It was committed, given up, or its trainer sent nothing for {self.timeout:.0f} "
                "s.",
                "read policy_version from GET /v1/parity/weights, and open a new upload if it is "
                "not yours.",
            )
        return session

    def _load(self) -> Session | None:
        idle = self._idle()
        if idle is None:
            return None
        try:
            session = Session.model_validate_json(self._session.read_text())
        except (OSError, ValueError):
            return None
        if idle > self.timeout:
            self._remove(session)
            self.expired.append(session.request.version)
            return None
        return session

    def _idle(self) -> float | None:
        try:
            return max(0.0, time.time() - self._session.stat().st_mtime)
        except OSError:
            return None

    def _advance(self, upload_id: str, place: int) -> None:
        with contextlib.suppress(UnknownUpload):
            session = self._get(upload_id)
            received = max(session.received, place)
            self._save(session.model_copy(update={"received": received}))

    def _save(self, session: Session) -> None:
        fresh = self._session.with_name(f"{SESSION}-{secrets.token_hex(4)}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(session.model_dump_json())
        os.replace(fresh, self._session)

    def _remove(self, session: Session) -> None:
        (self._staging.path / session.file).unlink(missing_ok=True)
        self._session.unlink(missing_ok=True)


def check_layout(tensors: dict[str, TensorEntry]) -> int:
    """Bytes of a data section that holds the tensors one after the other, in their order.

    Raises:
        ManifestError: a byte range or checksum is missing, or ranges leave gaps or overlap.
    """
    place = 0
    for name, entry in tensors.items():
        begin, end = entry.data_offsets or (-1, -1)
        if begin != place or end - begin != entry.nbytes or entry.checksum is None:
            raise ManifestError(
                f"{name} has byte range {entry.data_offsets} and checksum {entry.checksum!r}; "
                f"expected [{place}, {place + entry.nbytes}) and a checksum.",
                "An upload is read by these ranges, one tensor after the other without gaps, and "
                "checked by these sums.",
                "give every tensor data_offsets in the order of the manifest, and its xxh3_128.",
            )
        place = end
    return place
