"""Updates that arrive over HTTP.

Properties:
- whatever breaks, at whatever byte, the upload goes on from there and its file is bit for bit the
  policy's;
- no byte lands outside its range, and no gap is left; a range that was sent may be sent again;
- bytes and a commit exclude each other, and an upload that is dropped stays dropped;
- one that is silent for too long makes room, is counted once, and is never one being applied (W16);
- state lies in files: any process of the server goes on with any upload;
- what nobody owns is swept, and a full disk leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_parity_plugin.weights.errors import (
    ManifestError,
    RangeError,
    UnknownUpload,
    UpdateInProgress,
)
from vllm_parity_plugin.weights.manifest import TensorSpec, check_layout, read_header
from vllm_parity_plugin.weights.messages import UploadRequest, UploadStatus
from vllm_parity_plugin.weights.staging import Staging
from vllm_parity_plugin.weights.uploads import DATA, SESSION, Uploads
from vllm_parity_plugin.weights.verify import verify_file
from vllm_parity_plugin.weights.writer import write_policy

POLICY = {
    "head": torch.arange(4, dtype=torch.float32),
    "odd": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 2, dtype=torch.bfloat16),
    "last": torch.ones(1, dtype=torch.bfloat16),
}
SPECS = {
    name: TensorSpec(dtype="F32" if t.dtype == torch.float32 else "BF16", shape=tuple(t.shape))
    for name, t in POLICY.items()
}
TOTAL = 4 * 4 + 5 * 2 + 1 * 2


@dataclass
class Trainer:
    """The other side of an upload: a manifest and its bytes."""

    request: UploadRequest
    data: bytes


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    path = tmp_path_factory.mktemp("trainer") / "policy"
    entries = write_policy(path, POLICY.items(), SPECS)
    assert check_layout(entries) == TOTAL
    data = path.read_bytes()[-TOTAL:]
    return Trainer(UploadRequest(version=7, tensors=entries), data)


def make(directory: Path, timeout: float = 60.0) -> Uploads:
    return Uploads(Staging(directory, "an-id"), timeout)


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return make(tmp_path)


async def pieces(*parts: bytes | Callable[[], object]) -> AsyncIterator[bytes]:
    """A body: bytes, and things that happen while it comes in."""
    for part in parts:
        if isinstance(part, bytes):
            yield part
        else:
            part()


def put(
    uploads: Uploads,
    upload_id: str,
    begin: int,
    end: int,
    *parts: bytes | Callable[[], object],
    total: int | None = None,
) -> UploadStatus:
    return asyncio.run(uploads.write(upload_id, begin, end, pieces(*parts), total))


def broken() -> None:
    raise ConnectionResetError


def arrives(uploads: Uploads, upload_id: str, trainer: Trainer) -> None:
    """The upload is whole, and its file is the policy."""
    with uploads.complete(upload_id) as path:
        assert path.stat().st_mode & 0o777 == 0o600
        header = read_header(path)
        verify_file(path, header, trainer.request.tensors)
        assert path.read_bytes()[header.data_start :] == trainer.data


def silence(uploads: Uploads, seconds: float) -> None:
    """Move the last sign of life into the past."""
    then = time.time() - seconds
    os.utime(uploads._session, (then, then))


def own_files(uploads: Uploads) -> list[str]:
    return sorted(path.name for path in uploads._staging.path.glob(".upload*"))


def test_an_upload(uploads: Uploads, trainer: Trainer) -> None:
    opened = uploads.open(trainer.request)
    assert (opened.version, opened.received, opened.total) == (7, 0, TOTAL)
    assert uploads.request(opened.upload_id) == trainer.request
    whole = put(uploads, opened.upload_id, 0, TOTAL, trainer.data, total=TOTAL)
    assert whole.received == TOTAL
    arrives(uploads, opened.upload_id, trainer)
    uploads.drop(opened.upload_id)
    assert own_files(uploads) == [] and uploads.current() is None


def test_resume_at_every_byte(tmp_path: Path, trainer: Trainer) -> None:
    """A connection that breaks after any byte loses none before it."""
    uploads = make(tmp_path)
    for cut in range(TOTAL + 1):
        upload_id = uploads.open(trainer.request).upload_id
        with pytest.raises(ConnectionResetError):
            put(uploads, upload_id, 0, TOTAL, trainer.data[:cut], broken)
        assert uploads.status(upload_id).received == cut
        put(uploads, upload_id, cut, TOTAL, trainer.data[cut:])
        arrives(uploads, upload_id, trainer)
        uploads.drop(upload_id)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, TOTAL), st.booleans(), st.integers(1, 9)), max_size=6))
def test_any_history(
    tmp_path_factory: pytest.TempPathFactory,
    trainer: Trainer,
    steps: list[tuple[int, bool, int]],
) -> None:
    """Connections that break or end early, over and over, in pieces of any size, one process or
    another: what is received is a prefix that only grows."""
    directory = tmp_path_factory.mktemp("any")
    processes = [make(directory), make(directory)]
    upload_id = processes[0].open(trainer.request).upload_id
    received = 0
    for index, (cut, breaks, size) in enumerate(steps):
        uploads = processes[index % 2]
        cut = max(cut, received)
        parts = [trainer.data[i : min(i + size, cut)] for i in range(received, cut, size)]
        with contextlib.suppress(ConnectionResetError, RangeError):
            put(uploads, upload_id, received, TOTAL, *parts, *([broken] if breaks else []))
        received = processes[1 - index % 2].status(upload_id).received
        assert received == cut
    if received < TOTAL:
        put(uploads := processes[0], upload_id, received, TOTAL, trainer.data[received:])
    arrives(processes[1], upload_id, trainer)
    processes[0].drop(upload_id)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, TOTAL + 2), st.integers(0, TOTAL + 2)), max_size=8))
def test_any_ranges(
    tmp_path_factory: pytest.TempPathFactory, trainer: Trainer, ranges: list[tuple[int, int]]
) -> None:
    """A range is taken when it starts in what is there and ends in the upload; else nothing is."""
    uploads = make(tmp_path_factory.mktemp("ranges"))
    upload_id = uploads.open(trainer.request).upload_id
    received = 0
    for begin, end in ranges:
        if begin <= received and begin <= end <= TOTAL:
            put(uploads, upload_id, begin, end, trainer.data[begin:end])
            received = max(received, end)
        else:
            with pytest.raises(RangeError, match=f"send from byte {received} on"):
                put(uploads, upload_id, begin, end, b"")
        assert uploads.status(upload_id).received == received
    if received < TOTAL:
        with (
            pytest.raises(RangeError, match=f"has {received} of {TOTAL}"),
            uploads.complete(upload_id),
        ):
            pass
        put(uploads, upload_id, received, TOTAL, trainer.data[received:])
    arrives(uploads, upload_id, trainer)


def test_one_tensor_again(uploads: Uploads, trainer: Trainer) -> None:
    """Bytes that arrived wrong are found by tensor, and its range is enough to mend it."""
    upload_id = uploads.open(trainer.request).upload_id
    begin, end = trainer.request.tensors["odd"].data_offsets or (0, 0)
    flipped = bytearray(trainer.data)
    flipped[begin] ^= 1
    put(uploads, upload_id, 0, TOTAL, bytes(flipped))
    with (
        uploads.complete(upload_id) as path,
        pytest.raises(ManifestError, match=r"^odd has checksum"),
    ):
        verify_file(path, read_header(path), trainer.request.tensors)
    put(uploads, upload_id, begin, end, trainer.data[begin:end])
    arrives(uploads, upload_id, trainer)


@pytest.mark.parametrize(
    ("begin", "end"), [(-1, 4), (4, 3), (0, TOTAL + 1), (1, 4), (10**17, 10**17)]
)
def test_ranges_outside(uploads: Uploads, trainer: Trainer, begin: int, end: int) -> None:
    upload_id = uploads.open(trainer.request).upload_id
    with pytest.raises(RangeError, match="do not continue"):
        put(uploads, upload_id, begin, end, b"xxxx")
    assert uploads.status(upload_id).received == 0


def test_a_body_that_is_too_long(uploads: Uploads, trainer: Trainer) -> None:
    """Nothing lands behind its range, and what fitted in whole pieces is kept."""
    upload_id = uploads.open(trainer.request).upload_id
    put(uploads, upload_id, 0, TOTAL, trainer.data)
    with pytest.raises(RangeError, match=r"range \[0, 4\)"):
        put(uploads, upload_id, 0, 4, trainer.data[:3], b"\xff\xff")
    arrives(uploads, upload_id, trainer)


def test_another_total(uploads: Uploads, trainer: Trainer) -> None:
    """A sender with other tensors in mind is stopped before its bytes are."""
    upload_id = uploads.open(trainer.request).upload_id
    with pytest.raises(RangeError, match=f"999 bytes; the manifest has {TOTAL}"):
        put(uploads, upload_id, 0, 4, trainer.data[:4], total=999)


UNKNOWN = ["", "0" * 32, "..", "été", "日本語", "\ud800", "0" * 10_000]


@pytest.mark.parametrize("open_one", [False, True])
@pytest.mark.parametrize("upload_id", UNKNOWN, ids=range(len(UNKNOWN)))
def test_unknown_ids(uploads: Uploads, trainer: Trainer, upload_id: str, open_one: bool) -> None:
    if open_one:
        uploads.open(trainer.request)
    for call in (
        uploads.status,
        uploads.request,
        uploads.drop,
        lambda i: put(uploads, i, 0, 1, b""),
    ):
        with pytest.raises(UnknownUpload):
            call(upload_id)
    with pytest.raises(UnknownUpload), uploads.complete(upload_id):
        pass
    assert (uploads.current() is not None) == open_one


def test_a_commit_and_bytes_exclude_each_other(uploads: Uploads, trainer: Trainer) -> None:
    """Neither is verified what may change, nor changed what was verified; both work afterwards."""
    upload_id = uploads.open(trainer.request).upload_id
    put(uploads, upload_id, 0, TOTAL, trainer.data)

    def commit() -> None:
        with (
            pytest.raises(UpdateInProgress, match="still being received"),
            uploads.complete(upload_id),
        ):
            pass

    put(uploads, upload_id, 0, 8, trainer.data[:4], commit, trainer.data[4:8])
    with uploads.complete(upload_id):
        commit()
        with pytest.raises(UpdateInProgress, match="being applied"):
            put(uploads, upload_id, 0, 4, b"evil")
    arrives(uploads, upload_id, trainer)


def test_while_it_is_applied(uploads: Uploads, trainer: Trainer) -> None:
    """Taken over, it is nobody's file any more; refused, it is back and may be mended."""
    upload_id = uploads.open(trainer.request).upload_id
    put(uploads, upload_id, 0, TOTAL, trainer.data)
    with (
        contextlib.suppress(ManifestError),
        uploads.complete(upload_id) as path,
        uploads._staging.taken(path, 7),
    ):
        with pytest.raises(UpdateInProgress):
            put(uploads, upload_id, 0, 4, b"evil")
        with pytest.raises(UpdateInProgress), uploads.complete(upload_id):
            pass
        raise ManifestError("found", "why", "fix")
    arrives(uploads, upload_id, trainer)


def test_dropped_while_bytes_come_in(uploads: Uploads, trainer: Trainer) -> None:
    """The rest of the body is not read, nothing comes back to life, and the next one is free."""
    upload_id = uploads.open(trainer.request).upload_id
    reached: list[int] = []
    with pytest.raises(UnknownUpload):
        put(
            uploads,
            upload_id,
            0,
            TOTAL,
            trainer.data[:4],
            lambda: uploads.drop(upload_id),
            trainer.data[4:8],
            lambda: reached.append(1),
        )
    assert not reached and own_files(uploads) == []
    following = uploads.open(trainer.request)
    assert following.upload_id != upload_id
    put(uploads, following.upload_id, 0, TOTAL, trainer.data)
    arrives(uploads, following.upload_id, trainer)


def test_replaced_while_bytes_come_in(uploads: Uploads, trainer: Trainer) -> None:
    """The first one's progress is not written into the second."""
    first = uploads.open(trainer.request).upload_id
    second: list[str] = []

    def replace() -> None:
        uploads.drop(first)
        second.append(uploads.open(trainer.request).upload_id)

    with pytest.raises(UnknownUpload):
        put(uploads, first, 0, TOTAL, trainer.data[:8], replace, trainer.data[8:])
    assert uploads.status(second[0]).received == 0


def test_a_body_that_falls_silent(tmp_path: Path, trainer: Trainer) -> None:
    """A connection that died without a word does not hold its upload for ever."""
    uploads = make(tmp_path, timeout=0.2)
    upload_id = uploads.open(trainer.request).upload_id

    async def silent() -> AsyncIterator[bytes]:
        yield trainer.data[:5]
        await asyncio.Event().wait()

    with pytest.raises(RangeError, match="ended at byte 5"):
        asyncio.run(uploads.write(upload_id, 0, TOTAL, silent()))


def test_one_upload_at_a_time(uploads: Uploads, trainer: Trainer) -> None:
    """W16: the second trainer is told which version is in the way, and how long at most."""
    upload_id = uploads.open(trainer.request).upload_id
    put(uploads, upload_id, 0, 5, trainer.data[:5])
    match = f"policy version 7 is in progress: its upload has 5 of {TOTAL}.*60 s"
    with pytest.raises(UpdateInProgress, match=match):
        uploads.open(trainer.request.model_copy(update={"version": 8}))
    progress = uploads.current()
    assert progress is not None and (progress.version, progress.phase) == (7, "upload")


@pytest.mark.parametrize("sign", ["bytes", "a refused commit"])
def test_w16_silence_ends_an_upload(uploads: Uploads, trainer: Trainer, sign: str) -> None:
    """W16: a sign of life starts the time anew; after it, the upload is gone and there is room."""
    upload_id = uploads.open(trainer.request).upload_id
    put(uploads, upload_id, 0, TOTAL, trainer.data)
    silence(uploads, 59)
    assert uploads.current() is not None
    if sign == "bytes":
        put(uploads, upload_id, 0, 1, trainer.data[:1])
    else:
        with pytest.raises(ManifestError), uploads.complete(upload_id):
            silence(uploads, 61)
            raise ManifestError("found", "why", "fix")
    progress = uploads.current()
    assert progress is not None and progress.idle_seconds < 30
    silence(uploads, 61)
    assert uploads.current() is None and uploads.expired == [7]
    with pytest.raises(UnknownUpload, match="nothing for 60 s"):
        uploads.status(upload_id)
    assert own_files(uploads) == []
    uploads.open(trainer.request)


def test_w16_it_is_dropped_by_whoever_asks(uploads: Uploads, trainer: Trainer) -> None:
    """W16: a second trainer need not wait for the sweep."""
    uploads.open(trainer.request)
    silence(uploads, 61)
    assert uploads.open(trainer.request.model_copy(update={"version": 8})).version == 8
    assert uploads.expired == [7]


def test_an_expired_upload_is_counted_once(tmp_path: Path, trainer: Trainer) -> None:
    processes = [make(tmp_path), make(tmp_path)]
    processes[0].open(trainer.request)
    silence(processes[0], 61)
    stale = processes[1]._read()
    assert stale is not None
    assert processes[0].current() is None
    assert processes[1]._remove(stale) is False
    assert [p.current() for p in processes] == [None, None]
    assert processes[0].expired + processes[1].expired == [7]


def test_an_upload_that_is_applied_does_not_expire(uploads: Uploads, trainer: Trainer) -> None:
    """However long the load takes; when its process died over it, it does."""
    upload_id = uploads.open(trainer.request).upload_id
    put(uploads, upload_id, 0, TOTAL, trainer.data)
    staging = uploads._staging
    with staging.transaction(7), uploads.complete(upload_id) as path:
        path.rename(staging.path / ".set-7-x.safetensors")
        silence(uploads, 3600)
        uploads.sweep()
        assert uploads.status(upload_id).received == TOTAL
    silence(uploads, 3600)
    uploads.sweep()
    assert uploads.current() is None and uploads.expired == [7]


def test_sweep(uploads: Uploads, trainer: Trainer) -> None:
    """What an API server that died between two steps left goes, when it is old; nothing else."""
    directory, old = uploads._staging.path, time.time() - 61
    orphans = [f"{DATA}x.safetensors", f"{SESSION}-0123", SESSION]
    kept = ["parity-7-x.safetensors", ".set-7-x.safetensors", "mine"]
    for name in orphans + kept:
        (directory / name).write_bytes(b"not a session")
        os.utime(directory / name, (old, old))
    young = directory / f"{DATA}young.safetensors"
    young.touch()
    uploads.sweep()
    assert own_files(uploads) == [young.name]
    assert all((directory / name).exists() for name in kept)


def test_sweep_spares_the_open_upload(uploads: Uploads, trainer: Trainer) -> None:
    """A slow trainer's file may be older than the timeout: its session is what counts."""
    upload_id = uploads.open(trainer.request).upload_id
    data = uploads._staging.path / uploads._read().file
    os.utime(data, (0, 0))
    uploads.sweep()
    put(uploads, upload_id, 0, TOTAL, trainer.data)
    arrives(uploads, upload_id, trainer)


OTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from vllm_parity_plugin.weights.errors import UpdateInProgress
from vllm_parity_plugin.weights.staging import Staging
from vllm_parity_plugin.weights.uploads import Uploads

uploads = Uploads(Staging(Path(sys.argv[1]), "an-id"), 60.0)
upload_id, data = sys.argv[2], bytes.fromhex(sys.argv[3])

async def body():
    yield data[uploads.status(upload_id).received:]

try:
    uploads.open(uploads.request(upload_id))
    print("opened twice")
except UpdateInProgress:
    begin = uploads.status(upload_id).received
    print(asyncio.run(uploads.write(upload_id, begin, len(data), body())).received)
sys.stdout.flush()
with uploads.complete(upload_id):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_process(
    uploads: Uploads, trainer: Trainer
) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(upload_id: str) -> subprocess.Popen[str]:
        directory = str(uploads._staging.path)
        command = [sys.executable, "-c", OTHER_PROCESS, directory, upload_id, trainer.data.hex()]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_two_processes(
    uploads: Uploads,
    trainer: Trainer,
    other_process: Callable[[str], subprocess.Popen[str]],
) -> None:
    """Another API-server process knows the upload, goes on with it, and holds it while it commits;
    when it is killed over that, the upload is free again, with all of its bytes."""
    upload_id = uploads.open(trainer.request).upload_id
    put(uploads, upload_id, 0, 5, trainer.data[:5])
    other = other_process(upload_id)
    assert other.stdout is not None
    assert [other.stdout.readline() for _ in range(2)] == [f"{TOTAL}\n", "held\n"]
    assert uploads.status(upload_id).received == TOTAL
    with pytest.raises(UpdateInProgress), uploads.complete(upload_id):
        pass
    with pytest.raises(UpdateInProgress):
        put(uploads, upload_id, 0, 4, b"evil")
    other.kill()
    other.wait()
    arrives(uploads, upload_id, trainer)


FULL_DISK = """
import resource, sys
from pathlib import Path
from vllm_parity_plugin.weights.errors import OutOfSpace
from vllm_parity_plugin.weights.messages import UploadRequest
from vllm_parity_plugin.weights.staging import Staging
from vllm_parity_plugin.weights.uploads import Uploads

uploads = Uploads(Staging(Path(sys.argv[1]), "an-id"), 60.0)
request = UploadRequest.model_validate_json(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    uploads.open(request)
except OutOfSpace as error:
    assert "no room" in str(error), error
    print([path.name for path in uploads._staging.path.glob(".upload*")])
"""


@pytest.mark.parametrize("room", [100, 500])
def test_a_full_disk(tmp_path: Path, trainer: Trainer, room: int) -> None:
    """Refused before a byte is sent, whether the data or the note about it has no room (the data
    takes less than 500 bytes, the note more); nothing is left."""
    request = trainer.request.model_dump_json()
    assert len(request) > 500
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), request, str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def spoilt(trainer: Trainer, name: str, **fields: object) -> UploadRequest:
    entry = trainer.request.tensors[name].model_copy(update=fields)
    return trainer.request.model_copy(update={"tensors": trainer.request.tensors | {name: entry}})


@pytest.mark.parametrize(
    "fields",
    [
        {"data_offsets": None},
        {"checksum": None},
        {"data_offsets": (18, 26)},
        {"data_offsets": (20, 30)},
        {"data_offsets": (16, 26)},
        {"data_offsets": (28, 18)},
        {"data_offsets": (-10, 0)},
        {"shape": (6,)},
        {"shape": (-5,)},
        {"dtype": "F32"},
        {"dtype": "?"},
    ],
    ids=str,
)
def test_layouts_that_are_refused(
    uploads: Uploads, trainer: Trainer, fields: dict[str, object]
) -> None:
    """Gaps, overlaps, other sizes, no checksum: by name, before there is a file."""
    assert trainer.request.tensors["odd"].data_offsets == (18, 28)
    with pytest.raises(ManifestError, match=r"^odd has byte range"):
        uploads.open(spoilt(trainer, "odd", **fields))
    assert own_files(uploads) == []


def test_an_upload_without_bytes(uploads: Uploads) -> None:
    """All tensors empty: nothing to send, and a commit that finds nothing missing."""
    path = uploads._staging.path / "own"
    specs = {"a": TensorSpec(dtype="BF16", shape=(0, 4))}
    entries = write_policy(path, [("a", torch.empty(0, 4))], specs)
    opened = uploads.open(UploadRequest(version=1, tensors=entries))
    assert opened.total == 0
    with uploads.complete(opened.upload_id) as data:
        verify_file(data, read_header(data), entries)
