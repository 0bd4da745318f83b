"""Uploads filled by NCCL, with a stand-in for vLLM's communicator: no GPU took part.

Properties:
- both sides broadcast the same pieces, tensor by tensor in the manifest's order;
- the staged file is then bit for bit the policy's, and can be committed; until then neither a PUT,
  a second transfer nor a commit gets in, and only progress keeps the upload alive;
- tensors in another order are found by the checksums; other sizes, and a communicator that fails or
  is disabled, are reported as data; a wait ends by timeout or stop; a link is not followed;
- only the named worker takes part, one transfer at a time; an upload that is gone stops it;
- without CUDA both sides refuse; what vLLM's classes are asked for exists in the installed version.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_callbacks.nccl_sync import NcclWeightSync, Sender
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights import nccl
from vllm_parity_plugin.weights.errors import (
    ConflictError,
    ManifestError,
    UnknownUpload,
    UpdateInProgress,
)
from vllm_parity_plugin.weights.holder import WeightHolder
from vllm_parity_plugin.weights.manifest import TensorSpec, read_header
from vllm_parity_plugin.weights.messages import (
    UploadRequest,
    UploadStatus,
    WeightsInfo,
    WeightUpdateResult,
)
from vllm_parity_plugin.weights.nccl import Receiver, Reception, pieces, wait_for
from vllm_parity_plugin.weights.served import Served
from vllm_parity_plugin.weights.staging import Staging
from vllm_parity_plugin.weights.uploads import SESSION, Uploads
from vllm_parity_plugin.weights.verify import verify_file
from vllm_parity_plugin.weights.writer import write_policy

CPU = torch.device("cpu")
ID = bytes(range(128))
ID_TEXT = base64.b64encode(ID).decode()
POLICY = {
    "head": torch.arange(4, dtype=torch.float32),
    "odd": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 2, dtype=torch.bfloat16),
    "same": torch.full((5,), 7.0, dtype=torch.bfloat16),
}
SPECS = {
    name: TensorSpec(dtype="F32" if t.dtype == torch.float32 else "BF16", shape=tuple(t.shape))
    for name, t in POLICY.items()
}
TOTAL = 16 + 10 + 10
PIECE = 8


class Wire:
    """Stand-in for ``PyNcclCommunicator``: two ranks and a queue between them."""

    sent: ClassVar[queue.Queue[bytes]]
    joined: ClassVar[list[tuple[bytes, int, int]]]
    destroyed: ClassVar[list[int]]
    disabled: ClassVar[bool]

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @classmethod
    def from_unique_id_bytes(
        cls, unique_id_bytes: bytes, rank: int, world_size: int, device: torch.device
    ) -> Wire:
        cls.joined.append((unique_id_bytes, rank, world_size))
        return cls(rank)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self.rank == src:
            self.sent.put(tensor.numpy().tobytes())
            return
        data = self.sent.get(timeout=30)
        if len(data) != len(tensor):
            raise RuntimeError(f"NCCL error: {len(data)} bytes for {len(tensor)}")
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def destroy(self) -> None:
        self.destroyed.append(self.rank)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> type[Wire]:
    """A fresh one, in vLLM's place; pieces are small."""

    class Fresh(Wire):
        sent = queue.Queue()
        joined: ClassVar = []
        destroyed: ClassVar = []
        disabled = False

    monkeypatch.setattr(nccl, "PIECE", PIECE)
    monkeypatch.setattr(nccl, "vllm_communicator", lambda device: Fresh)
    return Fresh


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(Staging(tmp_path / "staging", "an-id"), 60.0)


@pytest.fixture
def request_and_data(tmp_path: Path) -> tuple[UploadRequest, bytes]:
    path = tmp_path / "policy"
    entries = write_policy(path, POLICY.items(), SPECS)
    return UploadRequest(version=7, tensors=entries), path.read_bytes()[-TOTAL:]


class Engine:
    """Two workers with real holders; the second is the server's."""

    def __init__(self) -> None:
        workers = (SimpleNamespace(rank=rank, device="cpu") for rank in range(2))
        self.holders = [WeightHolder(worker) for worker in workers]
        self.server_id = self.holders[1].instance

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert method == "parity_weights"
        action, *rest = args
        return [getattr(holder, action)(*rest) for holder in self.holders]

    async def received(self) -> dict[str, Any]:
        """State of the receiver when it is done."""
        while not (state := self.holders[1].received())["done"]:
            await asyncio.sleep(0.001)
        return state


def reception(engine: Engine, uploads: Uploads, upload: UploadStatus) -> Reception:
    served = Served(engine, cast(Staging, None))
    return Reception(served, uploads, upload.upload_id, engine.server_id)


def receiver(path: Path, wire: type[Wire], sizes: list[int], start: int = 0) -> Receiver:
    return Receiver(ID, sizes, CPU, 60.0, str(path), start, communicator=wire)


def finished(transfer: nccl.Transfer) -> nccl.Transfer:
    transfer.start()
    transfer.join(30)
    assert transfer.done
    return transfer


# What is broadcast.


def test_pieces_of_the_docstring() -> None:
    assert list(pieces([5, 0, 3], 4)) == [(0, 4), (4, 5), (5, 8)]
    assert list(pieces([], 4)) == []


@given(st.lists(st.integers(0, 40)), st.integers(1, 9))
def test_pieces_cover_every_byte_once(sizes: list[int], piece: int) -> None:
    """In order, none across two tensors, none empty."""
    found = list(pieces(sizes, piece))
    assert [i for begin, end in found for i in range(begin, end)] == list(range(sum(sizes)))
    borders = {sum(sizes[:i]) for i in range(len(sizes) + 1)}
    assert borders - {0} <= {end for _, end in found} | {0}
    assert all(0 < end - begin <= piece for begin, end in found)


def test_bytes_land_at_their_places(
    tmp_path: Path, wire: type[Wire], request_and_data: tuple[UploadRequest, bytes]
) -> None:
    """Sender to receiver; nothing before the data section is touched."""
    request, data = request_and_data
    sizes = [entry.nbytes for entry in request.tensors.values()]
    path = tmp_path / "file"
    path.write_bytes(b"header" + bytes(TOTAL))
    sender = Sender(ID, sizes, CPU, 60.0, memoryview(data), communicator=wire)
    assert finished(sender).error is None
    there = finished(receiver(path, wire, sizes, start=6))
    assert (there.error, there.bytes) == (None, TOTAL)
    assert path.read_bytes() == b"header" + data
    assert wire.joined == [(ID, 0, 2), (ID, 1, 2)]
    assert wire.destroyed == [0, 1]


# What can go wrong on the worker.


def test_other_sizes_are_reported(tmp_path: Path, wire: type[Wire]) -> None:
    """NCCL's own error; what came before it stays, and the communicator is aborted."""
    (tmp_path / "file").write_bytes(bytes(10))
    for part in (b"12345", b"123"):
        wire.sent.put(part)
    there = finished(receiver(tmp_path / "file", wire, [5, 5]))
    assert there.error == "NCCL error: 3 bytes for 5"
    assert (there.bytes, wire.destroyed) == (5, [1])


def test_a_disabled_communicator_is_reported(tmp_path: Path, wire: type[Wire]) -> None:
    """Its broadcasts would return at once and leave the buffer undefined."""
    (tmp_path / "file").write_bytes(bytes(5))
    wire.disabled = True
    there = finished(receiver(tmp_path / "file", wire, [5]))
    assert "VLLM_DISABLE_PYNCCL" in str(there.error)
    assert (tmp_path / "file").read_bytes() == bytes(5)


def test_a_link_is_not_followed(tmp_path: Path, wire: type[Wire]) -> None:
    (tmp_path / "target").write_bytes(bytes(5))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        receiver(tmp_path / "link", wire, [5])


@pytest.mark.parametrize(("stopped", "words"), [(False, "for 0 s"), (True, "given up")])
def test_a_wait_ends(stopped: bool, words: str) -> None:
    """By its timeout or by stop(), though the stream never becomes idle."""
    event = threading.Event()
    if stopped:
        event.set()
    busy = SimpleNamespace(query=lambda: False)
    with pytest.raises(ParityError, match=words):
        wait_for(busy, event, 0.0)
    wait_for(None, threading.Event(), 0.0)


# The server.


def test_an_upload_is_filled(
    uploads: Uploads, wire: type[Wire], request_and_data: tuple[UploadRequest, bytes]
) -> None:
    """Its file is the policy's; while bytes come in, nothing else gets at it."""
    request, data = request_and_data
    upload, engine = uploads.open(request), Engine()

    async def run() -> None:
        there = reception(engine, uploads, upload)
        await there.start(ID_TEXT)
        with pytest.raises(UpdateInProgress, match="NCCL"):
            await uploads.write(upload.upload_id, 0, 0, _nothing())
        with pytest.raises(UpdateInProgress):
            await reception(engine, uploads, upload).start(ID_TEXT)
        sizes = [entry.nbytes for entry in request.tensors.values()]
        for begin, end in pieces(sizes, PIECE):
            wire.sent.put(data[begin:end])
        await there.follow()

    asyncio.run(run())
    assert uploads.status(upload.upload_id) == upload.model_copy(update={"received": TOTAL})
    with uploads.complete(upload.upload_id) as path:
        verify_file(path, read_header(path), request.tensors)
        assert path.read_bytes()[-TOTAL:] == data
    assert wire.joined == [(ID, 1, 2)], "one worker of two takes part"


async def _nothing() -> Any:
    return
    yield


def test_another_order_is_found(
    uploads: Uploads, wire: type[Wire], request_and_data: tuple[UploadRequest, bytes]
) -> None:
    """Two tensors of one size changed places: NCCL cannot tell, the checksums can."""
    request, data = request_and_data
    assert data[16:26] != data[26:36]
    upload, engine = uploads.open(request), Engine()

    async def run() -> None:
        there = reception(engine, uploads, upload)
        await there.start(ID_TEXT)
        for begin, end in ((0, 8), (8, 16), (26, 34), (34, 36), (16, 24), (24, 26)):
            wire.sent.put(data[begin:end])
        await there.follow()

    asyncio.run(run())
    with (
        uploads.complete(upload.upload_id) as path,
        pytest.raises(ManifestError, match=r"odd|same"),
    ):
        verify_file(path, read_header(path), request.tensors)


def test_a_failure_is_told_and_the_upload_can_be_filled_anew(
    uploads: Uploads, wire: type[Wire], request_and_data: tuple[UploadRequest, bytes]
) -> None:
    request, data = request_and_data
    upload, engine = uploads.open(request), Engine()

    async def once(*parts: bytes) -> UploadStatus:
        there = reception(engine, uploads, upload)
        await there.start(ID_TEXT)
        for part in parts:
            wire.sent.put(part)
        await there.follow()
        return uploads.status(upload.upload_id)

    status = asyncio.run(once(data[:8], b"short"))
    assert (status.received, status.error) == (8, "NCCL error: 5 bytes for 8")
    sizes = [entry.nbytes for entry in request.tensors.values()]
    status = asyncio.run(once(*(data[begin:end] for begin, end in pieces(sizes, PIECE))))
    assert (status.received, status.error) == (TOTAL, None)


def test_an_upload_that_is_gone_stops_the_worker(
    uploads: Uploads, wire: type[Wire], request_and_data: tuple[UploadRequest, bytes]
) -> None:
    """Its trainer died: nothing was sent, the silence dropped it, another may open one."""
    request, _ = request_and_data
    upload, engine = uploads.open(request), Engine()

    async def run() -> dict[str, Any]:
        there = reception(engine, uploads, upload)
        await there.start(ID_TEXT)
        uploads.drop(upload.upload_id)
        await there.follow()
        with pytest.raises(UnknownUpload):
            await reception(engine, uploads, upload).start(ID_TEXT)
        again = uploads.open(request)
        with pytest.raises(ConflictError, match="earlier NCCL transfer"):
            await reception(engine, uploads, again).start(ID_TEXT)
        wire.sent.put(bytes(8))  # the real one is woken by its stream's wait
        return await engine.received()

    assert "given up" in asyncio.run(run())["failure"]


def test_only_progress_is_a_sign_of_life(
    uploads: Uploads, request_and_data: tuple[UploadRequest, bytes]
) -> None:
    """A worker that answers without receiving must not hold the server for ever."""
    import os

    upload = uploads.open(request_and_data[0])
    session = uploads._staging.path / SESSION
    with uploads.fill(upload.upload_id) as filling:
        filling.advance(8, None)
        os.utime(session, (1, 1))
        filling.advance(8, None)
        assert session.stat().st_mtime == 1
        filling.advance(16, None)
        assert session.stat().st_mtime > 1
        uploads.drop(upload.upload_id)
        with pytest.raises(UnknownUpload):
            filling.advance(24, None)


def test_without_cuda_the_server_refuses(
    uploads: Uploads, request_and_data: tuple[UploadRequest, bytes]
) -> None:
    """As data from the worker, as 409 from the server; the upload stays open for a PUT."""
    upload, engine = uploads.open(request_and_data[0]), Engine()
    with pytest.raises(ConflictError, match=r"NCCL was asked for.*cpu.*over HTTP"):
        asyncio.run(reception(engine, uploads, upload).start(ID_TEXT))
    with uploads.fill(upload.upload_id):
        pass
    assert engine.holders[1].received()["failure"] == "nothing was started"
    assert engine.holders[1].stop()["error"] is None


# The trainer.


class Server(ParityClient):
    """The client's half of a server, without HTTP: real uploads and a real receiver."""

    def __init__(self, uploads: Uploads, wire: type[Wire]) -> None:
        self.uploads, self.wire, self.committed = uploads, wire, b""
        self.stack = contextlib.ExitStack()
        self.url = "here"

    def weights_info(self) -> WeightsInfo:
        return WeightsInfo(
            server_id="an-id",
            directory="/nowhere",
            model="a-model",
            policy_version=0,
            adapter_base=0,
            rollback="keep",
            upload_timeout=60.0,
            tensors=SPECS,
        )

    def open_upload(self, request: UploadRequest) -> UploadStatus:
        self.request = request
        return self.uploads.open(request)

    def start_nccl(self, upload_id: str, unique_id: bytes) -> UploadStatus:
        self.filling = self.stack.enter_context(self.uploads.fill(upload_id))
        self.receiver = receiver(
            self.filling.path, self.wire, self.filling.sizes, self.filling.start
        )
        self.receiver.start()
        return self.uploads.status(upload_id)

    def upload_status(self, upload_id: str) -> UploadStatus:
        done = self.receiver.done
        self.filling.advance(self.receiver.bytes, self.receiver.error)
        if done:
            self.stack.close()
        return self.uploads.status(upload_id)

    def commit_upload(self, upload_id: str) -> WeightUpdateResult:
        self.stack.close()
        with self.uploads.complete(upload_id) as path:
            verify_file(path, read_header(path), self.request.tensors)
            self.committed = path.read_bytes()[-TOTAL:]
        return WeightUpdateResult(
            policy_version=self.request.version,
            applied=True,
            tensors=len(POLICY),
            bytes=TOTAL,
            pause_seconds=0.0,
            total_seconds=0.0,
        )

    def drop_upload(self, upload_id: str) -> None:
        self.stack.close()
        self.uploads.drop(upload_id)


def test_a_trainer_pushes(
    uploads: Uploads, wire: type[Wire], request_and_data: tuple[UploadRequest, bytes]
) -> None:
    server = Server(uploads, wire)
    sync = NcclWeightSync(server, device=CPU, communicator=wire, new_unique_id=lambda: ID)
    assert sync.transport == "nccl"
    assert sync.push(POLICY.items()).policy_version == 1
    assert server.committed == request_and_data[1]
    assert sorted(wire.destroyed) == [0, 1]


def test_a_trainer_hears_of_a_failure(uploads: Uploads, wire: type[Wire]) -> None:
    """The worker's words are raised, the upload is given up, and the version stays."""
    wire.sent.put(b"somebody else's")
    server = Server(uploads, wire)
    sync = NcclWeightSync(server, device=CPU, communicator=wire, new_unique_id=lambda: ID)
    with pytest.raises(ParityError, match="15 bytes for 8"):
        sync.push(POLICY.items())
    assert sync.policy_version == 0
    assert uploads.current() is None


def test_without_cuda_the_trainer_refuses(
    uploads: Uploads, wire: type[Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ParityError, match="NCCL moves bytes between CUDA devices only"):
        NcclWeightSync(Server(uploads, wire))


# What is asked of vLLM.


def test_vllm_has_what_is_called() -> None:
    """Names and parameters in the installed version; the stand-in has the same."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    for owner in (PyNcclCommunicator, Wire):
        made = inspect.signature(owner.from_unique_id_bytes).parameters
        assert list(made)[:4] == ["unique_id_bytes", "rank", "world_size", "device"]
        sent = inspect.signature(owner.broadcast).parameters
        assert list(sent) == ["self", "tensor", "src", "stream"]
        assert list(inspect.signature(owner.destroy).parameters) == ["self"]
    assert "disabled" in inspect.getsource(PyNcclCommunicator.from_unique_id_bytes)


def test_vllm_takes_the_bytes_of_an_id() -> None:
    """What the trainer sends is what the worker's vLLM reads back."""
    from vllm.distributed.device_communicators.pynccl_wrapper import (
        NCCL_UNIQUE_ID_BYTES,
        NCCLLibrary,
        ncclUniqueId,
    )

    assert len(ID) == NCCL_UNIQUE_ID_BYTES
    made = NCCLLibrary.unique_id_from_bytes(cast(Any, None), ID)
    assert isinstance(made, ncclUniqueId)
    assert bytes(made.internal) == ID == nccl.decoded(ID_TEXT)
    assert "ncclGetUniqueId" in dir(NCCLLibrary)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "parity-nccl":
            thread.join(30)
            assert not thread.is_alive()
