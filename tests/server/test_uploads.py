"""Weights that travel over HTTP, and updates that say only what changed, on real servers.

Properties:
- an uploaded policy is the served policy, whatever dtype and memory layout it had (W13);
- a broken connection goes on where it stopped, a lost answer is found out, and a flipped byte is
  refused by tensor and mended by sending that tensor again;
- a trainer that is killed holds the server no longer than the timeout, and the old policy is
  served all the while (W16);
- one sync is the same few requests, however many tensors the model has (W21);
- whatever does not fit is answered with a 4xx, and whatever comes at the same time with 409 (W18);
- changed tensors and adapters give the policy that was meant, to the last bit;
- /metrics counts exactly what happened.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.models import Kind, noisy
from tests.server.proxies import Proxy
from tests.server.test_weight_updates import Subject, accepted
from tests.servers import LONG
from tests.waiting import eventually
from trl_callbacks.weight_sync import WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.serving import Server, serve
from vllm_parity_plugin.weights.errors import (
    ApplyError,
    ConflictError,
    ManifestError,
    UpdateInProgress,
)
from vllm_parity_plugin.weights.messages import UploadRequest, UploadStatus
from vllm_parity_plugin.weights.writer import write_policy

Tensors = dict[str, torch.Tensor]
TRANSPORTS = ["file", "http"]
UPLOADS = "/v1/parity/weights/uploads"
Q, DOWN, NORM = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.input_layernorm.weight",
)


@pytest.fixture
def untied(untied_server: Server, tiny_model: Callable[[Kind], Path]) -> Iterator[Subject]:
    subject = Subject(untied_server, tiny_model("gc"))
    yield subject
    eventually(lambda: subject.client.weights_info().in_progress is None)
    subject.restore()


def sync_with(url: str, transport: Any = "http", wait: float = 60.0) -> WeightSync:
    return WeightSync(ParityClient(url), transport, wait)


def prepared(subject: Subject, tensors: Tensors, tmp_path: Path) -> tuple[UploadRequest, bytes]:
    """What a trainer would send: the manifest of the next version, and its bytes."""
    info = subject.client.weights_info()
    path = tmp_path / f"policy-{time.monotonic_ns()}"
    entries = write_policy(path, tensors.items(), info.tensors)
    request = UploadRequest(version=info.policy_version + 1, model=info.model, tensors=entries)
    size = sum(entry.nbytes for entry in entries.values())
    return request, path.read_bytes()[-size:]


@contextmanager
def uploading(subject: Subject, request: UploadRequest) -> Iterator[UploadStatus]:
    """An open upload, given up in the end."""
    answer = subject.client.http.post(UPLOADS, json=request.model_dump(mode="json"))
    assert answer.status_code == 201, answer.text
    opened = UploadStatus.model_validate(answer.json())
    yield opened
    subject.client.http.delete(f"{UPLOADS}/{opened.upload_id}")


def put(
    subject: Subject, upload: UploadStatus, data: bytes, begin: int = 0, said: str | None = None
) -> httpx.Response:
    said = said or f"bytes {begin}-{begin + len(data) - 1}/{upload.total}"
    return subject.client.http.put(
        f"{UPLOADS}/{upload.upload_id}", content=data, headers={"content-range": said}
    )


def commit(subject: Subject, upload: UploadStatus) -> httpx.Response:
    return subject.client.http.post(f"{UPLOADS}/{upload.upload_id}/commit")


def error(answer: httpx.Response, code: int) -> str:
    """The message of a refusal in vLLM's shape."""
    assert answer.status_code == code, answer.text
    found = answer.json()["error"]
    assert found["code"] == code
    return str(found["message"])


# What is sent is what is served.


def test_an_uploaded_policy_is_served(untied: Subject) -> None:
    sync = sync_with(untied.server.url)
    assert sync.transport == "http"
    new = noisy(untied.original, seed=50)
    result = sync.push(new.items())
    assert (result.applied, result.tensors) == (True, len(new))
    assert untied.client.status().policy_version == sync.policy_version == result.policy_version
    untied.serves(new, untied.original)
    directory = Path(untied.client.weights_info().directory)
    assert not list(directory.glob(".upload*"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_w13_what_the_trainer_holds(untied: Subject, transport: str) -> None:
    """W13: fp32, fp16 and bf16, contiguous or not: the bits of ``x.to(bfloat16)``."""
    sync = sync_with(untied.server.url, transport)
    exact = noisy({name: t.float() for name, t in untied.original.items()}, seed=51)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        held = {name: tensor.to(dtype) for name, tensor in exact.items()}
        scattered = {n: t.T.contiguous().T if t.ndim == 2 else t for n, t in held.items()}
        assert not scattered[Q].is_contiguous()
        assert sync.push(scattered.items()).applied
        found = untied.fingerprint()
        accepted(untied.client.update({name: t.bfloat16() for name, t in held.items()}))
        assert untied.fingerprint() == found
        sync = sync_with(untied.server.url, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_w13_what_does_not_fit_is_found_before_it_is_sent(untied: Subject, transport: str) -> None:
    """W13: short, transposed and empty tensors, and missing ones; the server is never asked."""
    before = untied.fingerprint()
    client = ParityClient(untied.server.url)
    sync = WeightSync(client, transport)
    asked: list[httpx.Request] = []
    client._http.event_hooks["request"].append(asked.append)
    for wrong in (untied.original[Q][1:], untied.original[Q].T, untied.original[Q][:0]):
        with pytest.raises(ManifestError, match=Q):
            sync.push((untied.original | {Q: wrong}).items())
        with pytest.raises(ManifestError, match=Q):
            sync.push_changed({Q: wrong})
    with pytest.raises(ManifestError, match="missing"):
        sync.push([(Q, untied.original[Q])])
    assert not asked
    with pytest.raises(ManifestError, match=f"{Q} holds 1 value"):
        spoilt = untied.original[Q].clone()
        spoilt[0, 0] = torch.inf
        sync.push((untied.original | {Q: spoilt}).items())
    assert untied.fingerprint() == before
    assert untied.client.weights_info().in_progress is None


# Networks.


def test_a_broken_connection_goes_on(untied: Subject) -> None:
    """Four connections end in the middle of the bytes; none of those that arrived is sent again
    once the server knows of it, and the policy is right."""
    port = int(untied.server.url.rsplit(":", 1)[1])
    with Proxy(port, cuts=[60_000, 90_000, 50_000, 40_000]) as proxy:
        client = ParityClient(proxy.url)
        sync = WeightSync(client, "http")
        begins: list[int] = []

        def note(request: httpx.Request) -> None:
            if request.method == "PUT":
                begins.append(int(request.headers["content-range"].split()[1].split("-")[0]))

        client._http.event_hooks["request"].append(note)
        new = noisy(untied.original, seed=52)
        assert sync.push(new.items()).applied
    assert proxy.broken == 4
    assert len(begins) == 5 and begins == sorted(begins) and begins[-1] > 0
    untied.serves(new, untied.original)


@pytest.mark.parametrize(
    ("transport", "line"),
    [("file", b"POST /v1/parity/weights "), ("http", b"/commit "), ("http", b"PUT /v1/parity/")],
)
def test_a_lost_answer_is_found_out(untied: Subject, transport: str, line: bytes) -> None:
    """The update is applied once, and the trainer knows its version."""
    applied = outcomes(untied)["applied"]
    port = int(untied.server.url.rsplit(":", 1)[1])
    with Proxy(port, lose=line) as proxy:
        sync = sync_with(proxy.url, transport)
        before = sync.policy_version
        new = noisy(untied.original, seed=53)
        result = sync.push(new.items())
    assert proxy.broken == 1
    assert result.policy_version == sync.policy_version == before + 1
    assert outcomes(untied)["applied"] == applied + 1
    untied.serves(new, untied.original)


def test_a_flipped_byte_is_mended(untied: Subject, tmp_path: Path) -> None:
    """Refused by the tensor's name, the old policy untouched; its range is sent again, no other."""
    before = untied.fingerprint()
    new = noisy(untied.original, seed=54)
    request, data = prepared(untied, new, tmp_path)
    begin, end = request.tensors[DOWN].data_offsets or (0, 0)
    flipped = bytearray(data)
    flipped[(begin + end) // 2] ^= 0x10
    with uploading(untied, request) as upload:
        assert put(untied, upload, bytes(flipped)).status_code == 200
        message = error(commit(untied, upload), 422)
        assert message.startswith(f"{DOWN} has checksum")
        assert untied.fingerprint() == before
        assert put(untied, upload, data[begin:end], begin).json()["received"] == len(data)
        accepted(commit(untied, upload))
        assert error(commit(untied, upload), 404)
    untied.serves(new, untied.original)


# Trainers that die.

TRAINER = """
import sys, time
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.weights.messages import UploadRequest

client = ParityClient(sys.argv[1])
request = UploadRequest.model_validate_json(sys.stdin.readline())
upload = client.open_upload(request)

def slowly():
    yield bytes(1000)
    print("sending", flush=True)
    while True:
        yield b"x"
        time.sleep(0.1)

size = {"content-range": f"bytes 0-{upload.total - 1}/{upload.total}"}
size["content-length"] = str(upload.total)
client._call("PUT", f"/weights/uploads/{upload.upload_id}", content=slowly(), headers=size)
"""


def test_w16_a_killed_trainer(untied: Subject, tmp_path: Path) -> None:
    """W16: while it sends, and until the timeout, others are told which version is in the way;
    then they sync. The old policy is served at every moment before."""
    before, aborted = untied.fingerprint(), outcomes(untied)["aborted"]
    request, _ = prepared(untied, noisy(untied.original, seed=55), tmp_path)
    impatient = [sync_with(untied.server.url, transport, wait=0.0) for transport in TRANSPORTS]
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TRAINER, untied.server.url]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        trainer.stdin.write(request.model_dump_json() + "\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "sending\n"
        new = noisy(untied.original, seed=56)
        for sync in impatient:
            with pytest.raises(UpdateInProgress, match=f"version {request.version} is in progress"):
                sync.push(new.items())
        progress = untied.client.status().in_progress
        assert progress is not None
        assert (progress.version, progress.phase) == (request.version, "upload")
        assert untied.fingerprint() == before
        trainer.send_signal(signal.SIGKILL)
    assert untied.fingerprint() == before
    patient = sync_with(untied.server.url, "http", wait=60.0)
    result = patient.push(new.items())
    assert result.applied and result.policy_version == request.version
    untied.serves(new, untied.original)
    eventually(lambda: outcomes(untied)["aborted"] == aborted + 1)


def test_an_upload_that_is_applied_for_long(
    untied: Subject, fault: dict[str, str], tmp_path: Path
) -> None:
    """Longer than the timeout: it is not taken for dead. Meanwhile nothing can change its bytes,
    and nothing else can pause, resume or update (W7, W18)."""
    aborted = outcomes(untied)["aborted"]
    new = noisy(untied.original, seed=57)
    request, data = prepared(untied, new, tmp_path)
    hold = Path(fault["PARITY_TEST_HOLD"])
    here = hold.with_suffix(".here")
    here.unlink(missing_ok=True)
    http = untied.client.http
    with uploading(untied, request) as upload, ThreadPoolExecutor(1) as pool:
        assert put(untied, upload, data).status_code == 200
        hold.touch()
        try:
            committed = pool.submit(commit, untied, upload)
            eventually(here.exists)
            now = time.time()
            version = f"version {request.version}"
            assert "being applied" in error(put(untied, upload, data[:8]), 409)
            assert version in error(commit(untied, upload), 409)
            another = request.model_copy(update={"version": request.version + 1})
            assert version in error(http.post(UPLOADS, json=another.model_dump(mode="json")), 409)
            body = {"version": request.version + 1, "file": "x"}
            assert version in error(http.post("/v1/parity/weights", json=body), 409)
            for route in ("pause", "resume"):
                assert version in error(http.post(f"/v1/parity/{route}"), 409)
            while time.time() < now + upload.timeout + 1.5:
                assert http.get(f"{UPLOADS}/{upload.upload_id}").json()["received"] == upload.total
                time.sleep(0.2)
        finally:
            hold.unlink()
        accepted(committed.result())
    assert outcomes(untied)["aborted"] == aborted
    untied.serves(new, untied.original)


# The number of requests.


def deep_model(directory: Path, shallow: Path) -> Path:
    """The same model with 24 layers."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    kinds = ["full_attention"] * 24
    config = Qwen3Config.from_pretrained(shallow, num_hidden_layers=24, layer_types=kinds)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(shallow).save_pretrained(directory)
    return directory


def requests_of_a_sync(url: str, transport: str) -> list[str]:
    """Methods of all HTTP requests of a WeightSync from its making to the end of its push."""
    client = ParityClient(url)
    asked: list[str] = []
    client._http.event_hooks["request"].append(lambda request: asked.append(request.method))
    sync = WeightSync(client, transport)
    sync.push((name, torch.zeros(spec.shape)) for name, spec in sync.expected.items())
    return asked


def test_w21_requests_of_one_sync(
    untied: Subject, tiny_model: Callable[[Kind], Path], tmp_path: Path
) -> None:
    """W21: as many for 2 layers as for 24, and at most eight."""
    counts = {t: requests_of_a_sync(untied.server.url, t) for t in TRANSPORTS}
    with serve(deep_model(tmp_path / "deep", tiny_model("untied")), *LONG) as deep:
        tensors = sync_with(deep.url).expected
        assert len(tensors) > 10 * len(untied.original)
        assert {t: requests_of_a_sync(deep.url, t) for t in TRANSPORTS} == counts
    assert counts == {"file": ["GET", "POST"], "http": ["GET", "POST", "PUT", "POST"]}


# What does not fit.


def raw(server: Server, head: str) -> str:
    """Status line of the answer to a request of which only the head is ever sent."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        return connection.makefile("rb").readline().decode()


@pytest.mark.parametrize(
    "path", ["rollouts", "weights", "weights/uploads", "weights/uploads/x/commit", "nothing"]
)
def test_bodies_that_are_too_large(untied: Subject, path: str) -> None:
    """413 and 411 come before the body: neither is read into memory."""
    head = f"POST /v1/parity/{path} HTTP/1.1\nHost: 127.0.0.1\nContent-Type: application/json\n"
    assert " 413 " in raw(untied.server, head + "Content-Length: 70000000")
    assert " 411 " in raw(untied.server, head + "Transfer-Encoding: chunked")
    answer = untied.client.http.post(f"/v1/parity/{path}", content=iter([b"{}"]))
    assert "Content-Length" in error(answer, 411)


MALFORMED = [
    "",
    "bytes",
    "0-3/4",
    "bytes 0-3",
    "bytes 0/4",
    "bytes */4",
    "bytes -1-3/4",
    "bytes 0-3/4x",
    "bytes 0-3/4, 5-6/7",
    "bytes ²-³/4",
    "items 0-3/4",
    f"bytes 0-{'9' * 19}/4",
]


def test_malformed_ranges(untied: Subject, tmp_path: Path) -> None:
    """400, and the upload goes on."""
    request, data = prepared(untied, untied.original, tmp_path)
    with uploading(untied, request) as upload:
        url = f"{UPLOADS}/{upload.upload_id}"
        for said in MALFORMED:
            headers = {"content-range": said.encode("latin-1")}
            answer = untied.client.http.put(url, content=b"abcd", headers=headers)
            assert "content-range" in error(answer, 400).lower(), said
        assert error(untied.client.http.put(url, content=b"abcd"), 400)
        assert untied.client.http.get(url).json()["received"] == 0
        assert put(untied, upload, data, said=f"bytes 0-{len(data) - 1}/*").status_code == 200


def test_ranges_that_do_not_fit(untied: Subject, tmp_path: Path) -> None:
    """416 with where to go on; never a byte outside the range."""
    request, data = prepared(untied, untied.original, tmp_path)
    with uploading(untied, request) as upload:
        total = upload.total
        assert "send from byte 0 on" in error(put(untied, upload, b"abcd", begin=4), 416)
        assert "More bytes" in error(put(untied, upload, data[:9], said=f"bytes 0-3/{total}"), 416)
        assert "ended at byte 4" in error(put(untied, upload, data[:4], said="bytes 0-8/*"), 416)
        assert "there are 5 bytes" in error(put(untied, upload, data[:4], said="bytes 0-3/5"), 416)
        past = put(untied, upload, data, said=f"bytes 0-{total}/*")
        assert "do not continue" in error(past, 416)
        assert f"4 of {total} bytes" in error(commit(untied, upload), 416)
        assert put(untied, upload, data[2:], begin=2).json()["received"] == total
        result = accepted(commit(untied, upload))
    assert result["policy_version"] == request.version


@pytest.mark.parametrize("upload_id", ["0" * 32, "x", "%C3%A9t%C3%A9", "%00", "%FF", "..%2F.."])
def test_unknown_uploads(untied: Subject, upload_id: str) -> None:
    """404 for every verb, whatever the id is made of."""
    http, url = untied.client.http, f"{UPLOADS}/{upload_id}"
    sized = {"content-range": "bytes 0-3/4"}
    answers = [
        http.get(url),
        http.put(url, content=b"abcd", headers=sized),
        http.post(f"{url}/commit"),
        http.delete(url),
    ]
    assert [answer.status_code for answer in answers] == [404] * 4


def test_w18_while_an_upload_is_open(untied: Subject, tmp_path: Path) -> None:
    """W18: other updates are refused with 409 and the version in progress; once it is given up,
    they are not."""
    request, _ = prepared(untied, untied.original, tmp_path)
    http = untied.client.http
    another = request.model_dump(mode="json") | {"version": request.version + 1}
    with uploading(untied, request):
        version = f"version {request.version} is in progress"
        assert version in error(http.post(UPLOADS, json=another), 409)
        assert version in error(untied.client.update(untied.original, request.version + 1), 409)
    accepted(untied.client.update(untied.original, request.version + 1))
    assert "is older than" in error(http.post(UPLOADS, json=request.model_dump(mode="json")), 409)
    assert "or the same" in error(http.post(UPLOADS, json=another), 409)


def test_manifests_that_do_not_fit(untied: Subject, tmp_path: Path) -> None:
    """Refused when the upload is opened, by name, before a byte is sent."""
    request, _ = prepared(untied, untied.original, tmp_path)
    http, good = untied.client.http, request.model_dump(mode="json")

    def opened(tensors: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
        body = good | fields | ({} if tensors is None else {"tensors": tensors})
        return http.post(UPLOADS, json=body)

    tensors = good["tensors"]
    entry = tensors[Q]
    without = {name: e for name, e in tensors.items() if name != Q}
    assert Q in error(opened(without), 422)
    assert "unknown" in error(opened(tensors | {"x": entry}), 422)
    assert Q in error(opened(tensors | {Q: entry | {"shape": [64, 128]}}), 422)
    assert Q in error(opened(tensors | {Q: entry | {"dtype": "F16"}}), 422)
    assert Q in error(opened(tensors | {Q: entry | {"checksum": None}}), 422)
    assert "has byte range" in error(opened(tensors | {Q: entry | {"data_offsets": [0, 4]}}), 422)
    assert "another model" in error(opened(model="0" * 32), 422)
    assert error(opened(version=0), 400) and error(opened(kind="lora"), 400)
    assert error(opened({}), 400) and error(opened(scaling="NaN"), 400)
    assert "lora_A" in error(opened(kind="lora", base_version=request.version - 1), 422)
    assert untied.client.weights_info().in_progress is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_trainers(untied: Subject, transport: str) -> None:
    """W18: the one that comes second with the same version is told that its weights were not
    loaded, not that all is well."""
    first, second = (sync_with(untied.server.url, transport) for _ in range(2))
    new = noisy(untied.original, seed=58)
    assert first.push(new.items()).applied
    with pytest.raises(ConflictError):
        second.push(untied.original.items())
    untied.serves(new, untied.original)


# Partial updates.


def adapter(weights: Tensors, names: list[str], seed: int) -> dict[str, Any]:
    """{base name: (A [r, in], B [out, r])} whose products are about as large as the weights."""
    generator = torch.Generator().manual_seed(seed)

    def pair(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(4, weight.shape[1], generator=generator)
        b = torch.randn(weight.shape[0], 4, generator=generator)
        return a, b * float(weight.float().std())

    return {name.removesuffix(".weight"): pair(weights[name]) for name in names}


def merged(weights: Tensors, pairs: dict[str, Any], scaling: float) -> Tensors:
    """W + scaling * B A in float32, rounded once."""
    sums = {f"{name}.weight": scaling * (b @ a) for name, (a, b) in pairs.items()}
    return {
        name: (w.float() + sums[name]).bfloat16() if name in sums else w
        for name, w in weights.items()
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_partial_updates(untied: Subject, transport: str) -> None:
    """An adapter is merged into the weights below it; the next one takes its place; changed
    tensors lie on top, and an adapter on top of those. Each is the policy that the trainer meant:
    a full update with its weights changes no bit."""
    sync = sync_with(untied.server.url, transport)
    base = noisy(untied.original, seed=60)
    sync.push(base.items())

    first = adapter(base, [Q, DOWN, "lm_head.weight"], seed=61)
    assert sync.push_adapter(first, scaling=0.5).applied
    with_first = merged(base, first, 0.5)
    untied.serves(with_first, base)

    second = adapter(base, [Q, "model.layers.1.self_attn.k_proj.weight"], seed=62)
    sync.push_adapter(second, scaling=0.25)
    with_second = merged(base, second, 0.25)
    untied.serves(with_second, with_first)

    new = noisy(untied.original, seed=63)
    changed = {name: new[name] for name in (DOWN, NORM, "lm_head.weight")}
    sync.push_changed(changed)
    with_changed = with_second | changed
    untied.serves(with_changed, with_second)

    third = adapter(with_changed, [Q, DOWN], seed=64)
    sync.push_adapter(third, scaling=0.5)
    with_third = merged(with_changed, third, 0.5)
    untied.serves(with_third, with_changed)

    found = untied.fingerprint()
    accepted(untied.client.update(with_third))
    assert untied.fingerprint() == found


def test_the_wrong_base(untied: Subject) -> None:
    """409 with both versions; what is served stays."""
    sync = sync_with(untied.server.url, "file")
    sync.push(untied.original.items())
    base = sync.policy_version
    pairs = adapter(untied.original, [Q], seed=65)
    sync.push_adapter(pairs, scaling=0.5)
    before = untied.fingerprint()
    a, b = pairs[Q.removesuffix(".weight")]
    lora = {Q.replace(".weight", ".lora_A"): a, Q.replace(".weight", ".lora_B"): b}
    for wrong in (base - 1, base + 1):
        answer = untied.client.update(lora, kind="lora", base_version=wrong)
        assert f"builds on policy version {wrong}" in error(answer, 409)
        assert f"under its adapter, version {base}" in answer.text
    for wrong in (base, base + 2):
        changed = {Q: untied.original[Q]}
        answer = untied.client.update(changed, kind="changed", base_version=wrong)
        assert f"serves version {base + 1}" in error(answer, 409)
    assert untied.fingerprint() == before


def test_a_partial_update_that_fails_goes_back(untied: Subject, fault: dict[str, str]) -> None:
    """Over HTTP as well: base and adapter are loaded again, and the same push then succeeds."""
    sync = sync_with(untied.server.url)
    sync.push(untied.original.items())
    first, second = (adapter(untied.original, [Q, DOWN], seed=seed) for seed in (66, 67))
    sync.push_adapter(first)
    before = untied.fingerprint()
    Path(fault["PARITY_TEST_FAULT"]).touch()
    with pytest.raises(ApplyError, match="injected fault"):
        sync.push_adapter(second)
    assert untied.fingerprint() == before
    sync.push_adapter(second)
    untied.serves(merged(untied.original, second, 1.0), merged(untied.original, first, 1.0))


# Metrics.


def samples(subject: Subject) -> dict[str, float]:
    """Our metrics, by name and outcome."""
    text = subject.client.http.get("/metrics").text
    return {
        ":".join([sample.name, *(v for k, v in sample.labels.items() if k in {"outcome", "le"})]): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        if family.name.startswith("vllm_parity:")
        for sample in family.samples
    }


def outcomes(subject: Subject) -> dict[str, int]:
    prefix = "vllm_parity:weight_updates_total:"
    found = samples(subject)
    return {k.removeprefix(prefix): int(v) for k, v in found.items() if k.startswith(prefix)}


def test_metrics(untied: Subject, fault: dict[str, str], tmp_path: Path) -> None:
    """Each update moves its outcome by one and nothing else; only those that paused generation
    are in the pause's histogram; bytes are those of applied updates."""
    before, started = samples(untied), time.time()
    client, served = untied.client, untied.client.weights_info().policy_version
    new = noisy(untied.original, seed=70)
    sizes = [
        accepted(client.update(new))["bytes"],
        sync_with(untied.server.url).push(new.items()).bytes,
    ]
    path = client.stage(new)
    repeated = client.post_weights(version=served + 2, file=path.name)
    assert repeated.json()["applied"] is False
    assert client.update({Q: new[Q]}).status_code == 422
    assert client.update(new, version=served + 1).status_code == 409
    assert client.http.post(UPLOADS, json={}).status_code == 400  # no update at all
    Path(fault["PARITY_TEST_FAULT"]).touch()
    assert client.update(new).status_code == 500
    request, data = prepared(untied, new, tmp_path)
    opened = client.http.post(UPLOADS, json=request.model_dump(mode="json")).json()
    upload = UploadStatus.model_validate(opened)
    assert put(untied, upload, data[:-1]).status_code == 200
    assert commit(untied, upload).status_code == 416
    name = "vllm_parity:weight_updates_total"
    eventually(lambda: samples(untied)[f"{name}:aborted"] > before[f"{name}:aborted"])

    after = samples(untied)
    moved = {k: after[k] - v for k, v in before.items() if k.startswith(f"{name}:")}
    expected = {"applied": 2, "repeated": 1, "refused": 3, "restored": 1, "aborted": 1}
    assert moved == {f"{name}:{o}": expected.get(o, 0) for o in outcomes(untied)}
    assert set(outcomes(untied)) == {*expected, "unhealthy"}

    def gain(suffix: str) -> float:
        return after[f"vllm_parity:{suffix}"] - before[f"vllm_parity:{suffix}"]

    assert gain("weight_update_pause_seconds_count") == 3
    assert gain("weight_update_pause_seconds_bucket:+Inf") == 3
    assert 0 < gain("weight_update_pause_seconds_sum") < gain("weight_update_seconds_sum")
    assert gain("weight_update_seconds_count") == 7
    assert gain("weight_update_bytes_total") == sum(sizes)
    assert after["vllm_parity:policy_version"] == served + 2
    changed = after["vllm_parity:weights_timestamp_seconds"]
    assert before["vllm_parity:weights_timestamp_seconds"] < started <= changed <= time.time()
