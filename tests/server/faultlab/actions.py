"""What happens in a scenario: each action drives a real server and notes what was answered."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from safetensors.torch import save_file

from tests.client import Client
from tests.server.faultlab.disk import limited
from tests.server.faultlab.lab import STAGED, Case, Lab, Violation, in_parallel, told
from tests.server.faultlab.policies import SCALING, Draft, Policy
from tests.server.faultlab.spoil import SPOILERS, flip_bit
from tests.server.faultlab.trainer import Job
from trl_callbacks.weight_sync import WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.weights.errors import OutOfSpace
from vllm_parity_plugin.wire import TOKEN_HEADER

Action = Callable[[Lab, Case], None]
ACTIONS: dict[str, Action] = {}


def action(function: Action) -> Action:
    ACTIONS[function.__name__] = function
    return function


def good(lab: Lab, case: Case) -> Draft:
    """The update of a case, unspoilt."""
    return lab.draft(case.new, case.version, case.scenario.kv)


def note(case: Case, *answers: httpx.Response) -> None:
    """Remember what was answered."""
    case.codes += [answer.status_code for answer in answers]


def demand(answer: httpx.Response, *codes: int) -> httpx.Response:
    """An answer that the scenario cannot go on without."""
    if answer.status_code not in codes:
        raise Violation(f"expected {codes}, got {answer.status_code}: {answer.text}")
    return answer


# Updates that are spoilt.


@action
def send(lab: Lab, case: Case) -> None:
    """Spoil the update and send it."""
    draft = good(lab, case)
    if case.scenario.row.what in {"older", "repeated"}:
        draft.manifest["version"] = case.served + 1
    SPOILERS[case.scenario.row.what](draft, case.rng)
    note(case, lab.send(draft, case.new, case.transport))


# Trainers that are killed.


def job_of(lab: Lab, case: Case, phase: str) -> Job:
    """The trainer of a case; its tensors lie outside the server's directory."""
    name = case.new[-1].replace(":", "-")
    payload = lab.scratch / f"{name}.safetensors"
    if not payload.exists():
        save_file(lab.part(case.new[-1]), payload)
    return Job(
        url=lab.server.url,
        token=lab.setup.token,
        transport=case.transport,
        kind=case.scenario.kind,
        kv=case.scenario.kv,
        scaling=SCALING,
        payload=str(payload),
        phase=phase,
    )


@action
def kill_trainer(lab: Lab, case: Case) -> None:
    """A real trainer is killed at a phase of its push."""
    real_time = case.scenario.row.what == "mid-put-timeout"
    phase = "mid-put" if real_time else case.scenario.row.what
    version = case.served + 1
    lab.versions[version] = case.new  # of this trainer, which counts by itself
    end = lab.trainers.run_until(job_of(lab, case, phase))
    if end != ("here" if phase != "done" else version):
        raise Violation(f"the trainer came to {end!r}")
    if real_time:
        lab.until(lambda: lab.client.status().in_progress is None, "a silent upload ends")


@action
def reclaim(lab: Lab, case: Case) -> None:
    """What killed trainers left in the server's directory goes when it is old enough."""
    known = set(lab.directory.glob("parity-*"))
    lab.versions[case.served + 1] = case.new
    if lab.trainers.run_until(job_of(lab, case, "unsent")) != "here":
        raise Violation("the trainer did not come to its request")
    if not set(lab.directory.glob("parity-*")) - known:
        raise Violation("the trainer left nothing")
    for path in lab.directory.glob("parity-*"):
        os.utime(path, (0, 0))
    lab.until(lambda: not list(lab.directory.glob("parity-*")), "abandoned files go")


# Files that are not what they seem.


def elsewhere(lab: Lab, draft: Draft) -> Path:
    """The update as a good file outside the server's directory."""
    path = lab.scratch / STAGED
    path.write_bytes(draft.file())
    return path


@contextlib.contextmanager
def put_in_place(lab: Lab, draft: Draft, what: str) -> Iterator[str]:
    """Something that is not a file of the directory, under a name in the request."""
    path, outside = lab.directory / STAGED, elsewhere(lab, draft)
    listener = None
    if what == "directory":
        path.mkdir()
    elif what == "symlink":
        path.symlink_to(outside)
    elif what == "dangling":
        path.symlink_to(lab.scratch / "nowhere")
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "socket":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
    elif what == "hidden":
        path = lab.directory / ".lab.safetensors"
        path.write_bytes(draft.file())
    names = {"parent": f"../{STAGED}", "absolute": str(outside), "hidden": path.name}
    try:
        yield names.get(what, STAGED)
    finally:
        if listener is not None:
            listener.close()
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@action
def misplaced(lab: Lab, case: Case) -> None:
    draft = good(lab, case)
    with put_in_place(lab, draft, case.scenario.row.what) as name:
        note(case, lab.post_file(draft, case.new, name))


@action
def rewritten_in_request(lab: Lab, case: Case) -> None:
    """The file changes while its request is being sent."""
    draft, path = good(lab, case), lab.directory / STAGED
    path.write_bytes(draft.file())
    lab.register(case.version, case.new)
    with raw_request(lab, "/weights", {**draft.body(), "file": STAGED}) as (wire, body):
        wire.sendall(body[: len(body) // 2])
        flip_bit(draft, case.rng)
        path.write_bytes(draft.file())
        wire.sendall(body[len(body) // 2 :])
        case.codes.append(status_line(wire))
    path.unlink(missing_ok=True)


def tamper(path: Path, how: str, rng: random.Random) -> None:
    """Do something to a file that the server holds."""
    size = path.stat().st_size
    if how == "write":
        with open(path, "r+b") as file:
            file.seek(size - 1 - rng.randrange(1000))
            old = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old[0] ^ 1 << rng.randrange(8)]))
    elif how == "truncate":
        os.truncate(path, size - rng.randint(1, 5000))
    elif how == "delete":
        path.unlink()
    else:
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        if how == "symlink":
            path.unlink()
            path.symlink_to(other)
        else:
            other.replace(path)


@action
def tampered_before_load(lab: Lab, case: Case) -> None:
    """The verified file changes before a worker loads it."""
    draft = good(lab, case)
    with lab.held(lambda: lab.send_file(draft, case.new)) as (_, result):
        (path,) = lab.directory.glob(f".set-{case.version}-*")
        tamper(path, case.scenario.row.what, case.rng)
        lab.hold.unlink()
        note(case, result.result())
    (lab.directory / "other").unlink(missing_ok=True)


@action
def kept_set_lost(lab: Lab, case: Case) -> None:
    """The served set's file changes, and then a load fails: there is nothing to go back to."""
    (path,) = lab.own_sets()
    tamper(path, case.scenario.row.what, case.rng)
    lab.intact = False
    with lab.faulty(after=case.rng.randint(0, 20)):
        note(case, lab.send(good(lab, case), case.new, case.transport))


@action
def base_lost(lab: Lab, case: Case) -> None:
    """The served set's file changes, and then an update wants to build on it."""
    for path in lab.own_sets():
        tamper(path, case.scenario.row.what, case.rng)
    lab.intact = False
    note(case, lab.send(good(lab, case), case.new, case.transport))


# A disk that is full, a directory that is closed.


def push(lab: Lab, case: Case) -> int:
    """Push the update as a trainer does; the status it got, 507 for its own full disk."""
    client = ParityClient(lab.server.url, token=lab.setup.token)
    sync = WeightSync(client, transport="file", wait=0.0)
    tensors = lab.part(case.new[-1])
    try:
        if case.scenario.kind == "changed":
            sync.push_changed(tensors)
        elif case.scenario.kind == "full":
            sync.push(tensors.items())
        else:
            bases = {name.rsplit(".", 1)[0] for name in tensors}
            pairs = {b: (tensors[f"{b}.lora_A"], tensors[f"{b}.lora_B"]) for b in bases}
            sync.push_adapter(pairs, SCALING)
    except OutOfSpace:
        return 507
    finally:
        client.close()
    return 200


@contextlib.contextmanager
def trouble(lab: Lab, case: Case) -> Iterator[None]:
    """No room, or no permission, for the server's directory."""
    what = case.scenario.row.what
    if case.scenario.row.action == "read_only":
        with lab.disk.read_only():
            yield
    elif what == "server_limit_open":
        with limited(lab.server.process.pid, 4096):
            yield
    else:
        # A limit on the size of a file says nothing about the next file.
        exact = what == "room_for_data_only" and lab.disk.mounted
        room = len(good(lab, case).file()) if exact else 0
        page = os.sysconf("SC_PAGE_SIZE")
        with lab.disk.full(lab.server.process.pid, -(-room // page) * page):
            yield


@action
def disk_full(lab: Lab, case: Case) -> None:
    draft, what = good(lab, case), case.scenario.row.what
    if what == "before_write":
        lab.versions[case.served + 1] = case.new
        with lab.disk.full(os.getpid()):
            case.codes.append(push(lab, case))
    elif what == "before_request":
        path = lab.directory / STAGED
        path.write_bytes(draft.file())
        with trouble(lab, case):
            note(case, lab.post_file(draft, case.new))
        path.unlink(missing_ok=True)
    else:
        _upload_in_trouble(lab, case, draft)


def _upload_in_trouble(lab: Lab, case: Case, draft: Draft) -> None:
    """Trouble that begins before a step of an upload, and lasts to the end."""
    what = case.scenario.row.what
    steps = contextlib.ExitStack()
    with steps:
        if what not in {"before_put", "before_commit"}:
            steps.enter_context(trouble(lab, case))
        answer = lab.open_upload(draft, case.new)
        if answer.status_code == 201:
            upload = answer.json()["upload_id"]
            if what == "before_put":
                steps.enter_context(trouble(lab, case))
            answer = lab.put(upload, draft.data)
            if what == "before_commit":
                steps.enter_context(trouble(lab, case))
            if answer.status_code == 200:
                answer = lab.commit(upload)
        note(case, answer)


@action
def disk_full_failing(lab: Lab, case: Case) -> None:
    """A load fails while the disk is full, so that nothing can be written down either."""
    healed = case.scenario.row.what == "healed"
    times = -1 if healed and lab.setup.rollback == "keep" else 1
    draft = good(lab, case)
    with (
        lab.held(lambda: lab.send_file(draft, case.new)) as (_, result),
        lab.disk.full(lab.server.process.pid),
        lab.faulty(after=case.rng.randint(0, 20), times=times),
    ):
        lab.hold.unlink()
        note(case, result.result())
        if healed:
            lab.examine_unhealthy()


@action
def read_only(lab: Lab, case: Case) -> None:
    draft, what = good(lab, case), case.scenario.row.what
    if what == "while_loading":
        with (
            lab.held(lambda: lab.send(draft, case.new, case.transport)) as (_, result),
            lab.disk.read_only(),
        ):
            lab.hold.unlink()
            note(case, result.result())
        lab.intact = False  # its tidying failed
    elif what == "before_request":
        path = lab.directory / STAGED
        path.write_bytes(draft.file())
        with trouble(lab, case):
            note(case, lab.post_file(draft, case.new))
        path.unlink(missing_ok=True)
    else:
        _upload_in_trouble(lab, case, draft)


# Several at once.


@action
def race(lab: Lab, case: Case) -> None:
    """Several trainers send different policies at the same moment."""
    policies: list[Policy] = [case.new, *case.others]
    same = case.scenario.row.what == "same_version"
    mixed = case.scenario.row.what == "mixed"
    jobs, sent = [], []
    for index, policy in enumerate(policies * (2 if mixed else 1)):
        version = case.version + (0 if same else index)
        sent.append((version, policy))
        transport = ("file", "http")[index % 2] if mixed else case.transport
        jobs.append(_one_of_many(lab, policy, version, transport, index))
    answers = in_parallel(*jobs)
    note(case, *answers)
    case.codes = [200]
    winners = [pair for pair, answer in zip(sent, answers, strict=True) if _applied(answer)]
    if not winners or not {a.status_code for a in answers} <= {200, 409}:
        raise Violation(f"answers {[a.status_code for a in answers]}, winners {winners}")
    if same and len(winners) != 1:
        raise Violation(f"one version was applied {len(winners)} times")
    lab.versions |= dict(winners)
    case.news = {policy for _, policy in winners}
    case.old = ()  # somebody won
    if lab.served_version() != max(version for version, _ in winners):
        raise Violation("the served version is not the last that was applied")


def _one_of_many(
    lab: Lab, policy: Policy, version: int, transport: str, index: int
) -> Callable[[], httpx.Response]:
    draft, own = lab.draft(policy, version), Lab.__new__(Lab)
    own.__dict__ = {**lab.__dict__, "client": Client(lab.server, token=lab.setup.token)}
    own.versions = dict(lab.versions)
    if transport == "http":
        return lambda: own.send_http(draft, policy)
    return lambda: own.send_file(draft, policy, f"lab-{index}.safetensors")


def _applied(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and answer.json()["applied"]


@action
def rival_of_upload(lab: Lab, case: Case) -> None:
    """Others are told that an upload holds the server; it goes on."""
    draft = good(lab, case)
    upload = demand(lab.open_upload(draft, case.new), 201).json()["upload_id"]
    rival = lab.draft(case.others[0], case.version + 1)
    for answer in (
        lab.send_file(rival, case.others[0]),
        lab.open_upload(rival, case.others[0]),
    ):
        demand(answer, 409)
    demand(lab.put(upload, draft.data), 200)
    note(case, demand(lab.commit(upload), 200))


@action
def commit_twice(lab: Lab, case: Case) -> None:
    """The same upload is committed by two at once: it is applied once."""
    draft = good(lab, case)
    upload = demand(lab.open_upload(draft, case.new), 201).json()["upload_id"]
    demand(lab.put(upload, draft.data), 200)
    path = f"/v1/parity/weights/uploads/{upload}/commit"
    clients = [Client(lab.server, token=lab.setup.token) for _ in range(2)]
    answers = in_parallel(*[lambda client=client: client.http.post(path) for client in clients])
    for answer in answers:
        lab.check_declared(answer)
        demand(answer, 200, 404, 409)
    if [_applied(answer) for answer in answers].count(True) != 1:
        raise Violation(f"applied by {[answer.text for answer in answers]}")
    note(case, *answers)


# Paused and resumed by hand.


@action
def by_hand(lab: Lab, case: Case) -> None:
    what, draft = case.scenario.row.what, good(lab, case)
    pause, resume = (lambda: demand(lab.post("/pause"), 204)), (lambda: _resume(lab))
    before = {
        "paused_before": [pause],
        "pause_in_upload": [],
        "resume_twice": [pause, resume, resume],
        "pause_twice": [pause, pause],
        "resume_first": [resume],
    }[what]
    for step in before:
        step()
    paused = what in {"paused_before", "pause_twice"}
    if what == "pause_in_upload" and case.transport == "http":
        upload = demand(lab.open_upload(draft, case.new), 201).json()["upload_id"]
        pause()
        demand(lab.put(upload, draft.data), 200)
        note(case, lab.commit(upload))
        paused = True
    else:
        note(case, lab.send(draft, case.new, case.transport))
    if (lab.client.status().state == "paused") is not paused:
        raise Violation("an update changed whether generation is paused by hand")
    resume()


def _resume(lab: Lab) -> None:
    demand(lab.post("/resume"), 204)


@action
def by_hand_while_applying(lab: Lab, case: Case) -> None:
    """Pausing and resuming are refused while an update is applied."""
    draft = good(lab, case)
    with lab.held(lambda: lab.send(draft, case.new, case.transport)) as (_, result):
        for path in ("/resume", "/pause", "/resume"):
            answer = Client(lab.server, token=lab.setup.token).http.post(f"/v1/parity{path}")
            demand(answer, 409)
        lab.hold.unlink()
        note(case, result.result())


@action
def paused_and_failing(lab: Lab, case: Case) -> None:
    """A load fails while generation is paused by hand, and it stays so."""
    demand(lab.post("/pause"), 204)
    with lab.faulty(after=case.rng.randint(0, 20)):
        note(case, lab.send(good(lab, case), case.new, case.transport))
    if lab.client.status().state != "paused":
        raise Violation("a failed update resumed what was paused by hand")
    _resume(lab)


# Callers that may not.

STRANGERS: dict[str, Callable[[str], dict[str, str]]] = {
    "forwarded": lambda token: {"x-forwarded-for": "127.0.0.1"},
    "via": lambda token: {"via": "1.1 proxy"},
    "real_ip": lambda token: {"x-real-ip": ""},
    "host": lambda token: {"host": "rebound.example:8000"},
    "origin": lambda token: {"origin": "http://localhost"},
    "no_token": lambda token: {},
    "wrong_token": lambda token: {TOKEN_HEADER: token[:-1] + "?"},
    "token_prefix": lambda token: {"authorization": f"Bearer {token[:-1]}"},
    "other_scheme": lambda token: {"authorization": f"Basic {token}"},
}


@contextlib.contextmanager
def stranger_client(lab: Lab, what: str) -> Iterator[httpx.Client]:
    headers = STRANGERS[what](lab.setup.token or "")
    with httpx.Client(base_url=f"{lab.server.url}/v1/parity", headers=headers) as client:
        yield client


@action
def stranger(lab: Lab, case: Case) -> None:
    """A good update from someone without a credential, and all that he could do beside it."""
    draft, path = good(lab, case), lab.directory / STAGED
    lab.register(case.version, case.new)
    path.write_bytes(draft.file())
    with stranger_client(lab, case.scenario.row.what) as client:
        update = ("/weights", {**draft.body(), "file": STAGED})
        target, body = update if case.transport == "file" else ("/weights/uploads", draft.body())
        answers = [
            client.post(target, json=body),
            client.post("/pause"),
            client.get("/status"),
            client.get("/weights"),
            client.post("/rollouts", json={"prompts": [[5]]}),
        ]
    path.unlink()
    for answer in answers:
        demand(answer, 401, 429)
    note(case, *answers)


@action
def stranger_at_upload(lab: Lab, case: Case) -> None:
    """He knows the id of somebody's upload, and it is of no use to him."""
    draft = good(lab, case)
    upload = demand(lab.open_upload(draft, case.new), 201).json()["upload_id"]
    demand(lab.put(upload, draft.data), 200)
    place = f"/weights/uploads/{upload}"
    ranges = {"content-range": f"bytes 0-3/{len(draft.data)}"}
    with stranger_client(lab, case.rng.choice(["no_token", "wrong_token"])) as client:
        for answer in (
            client.get(place),
            client.put(place, content=b"abcd", headers=ranges),
            client.delete(place),
            client.post(f"{place}/commit"),
        ):
            demand(answer, 401, 429)
    note(case, demand(lab.commit(upload), 200))


# Connections that break.


@contextlib.contextmanager
def raw_request(
    lab: Lab, path: str, body: dict[str, Any] | bytes, method: str = "POST", **headers: str
) -> Iterator[tuple[socket.socket, bytes]]:
    """A connection on which a request's headers were sent, and the body that is due."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    address = urlsplit(lab.server.url)
    lines = [
        f"{method} /v1/parity{path} HTTP/1.1",
        f"host: {address.netloc}",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *([f"{TOKEN_HEADER}: {lab.setup.token}"] if lab.setup.token else []),
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    with socket.create_connection((address.hostname, address.port), timeout=60) as wire:
        wire.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        yield wire, data


def status_line(wire: socket.socket) -> int:
    """Status of the answer."""
    with wire.makefile("rb") as file:
        return int(file.readline().split()[1])


def hang(wire: socket.socket, rng: random.Random) -> None:
    """Close a connection, politely or with a reset."""
    if rng.random() < 0.5:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()


@action
def hang_up(lab: Lab, case: Case) -> None:
    {
        "after_request": _hang_up_sent,
        "random": _hang_up_sent,
        "in_body": _hang_up_in_body,
        "while_applying": _hang_up_applying,
    }[case.scenario.row.what](lab, case)


def _hang_up_sent(lab: Lab, case: Case) -> None:
    draft, path = good(lab, case), lab.directory / STAGED
    path.write_bytes(draft.file())
    lab.register(case.version, case.new)
    with raw_request(lab, "/weights", {**draft.body(), "file": STAGED}) as (wire, body):
        wire.sendall(body)
        if case.scenario.row.what == "random":
            time.sleep(case.rng.uniform(0.0, 0.05))
        hang(wire, case.rng)
    lab.settle()
    path.unlink(missing_ok=True)


def _hang_up_in_body(lab: Lab, case: Case) -> None:
    draft = good(lab, case)
    if case.transport == "file":
        lab.register(case.version, case.new)
        request = raw_request(lab, "/weights", {**draft.body(), "file": STAGED})
    else:
        upload = demand(lab.open_upload(draft, case.new), 201).json()["upload_id"]
        request = raw_put(lab, upload, bytes(draft.data))
    with request as (wire, body):
        wire.sendall(body[: case.rng.randrange(len(body))])
        hang(wire, case.rng)


def raw_put(lab: Lab, upload: str, data: bytes) -> Any:
    """The PUT of a whole upload."""
    return raw_request(
        lab,
        f"/weights/uploads/{upload}",
        data,
        "PUT",
        content_range=f"bytes 0-{len(data) - 1}/{len(data)}",
    )


def _hang_up_applying(lab: Lab, case: Case) -> None:
    """The client is gone before the weights are loaded; the update comes to its end."""
    draft, path = good(lab, case), lab.directory / STAGED
    lab.register(case.version, case.new)
    if case.transport == "file":
        path.write_bytes(draft.file())
        request = raw_request(lab, "/weights", {**draft.body(), "file": STAGED})
    else:
        upload = demand(lab.open_upload(draft, case.new), 201).json()["upload_id"]
        demand(lab.put(upload, draft.data), 200)
        request = raw_request(lab, f"/weights/uploads/{upload}/commit", b"")
    here = lab.hold.with_suffix(".here")
    here.unlink(missing_ok=True)
    lab.hold.touch()
    with request as (wire, body):
        wire.sendall(body)
        lab.until(here.exists, "the update is applied")
        hang(wire, case.rng)
    lab.hold.unlink()
    lab.settle()
    path.unlink(missing_ok=True)


@action
def resumed_upload(lab: Lab, case: Case) -> None:
    """A PUT breaks off; the next one goes on where the server stands."""
    draft = good(lab, case)
    data = bytes(draft.data)
    upload = demand(lab.open_upload(draft, case.new), 201).json()["upload_id"]
    with raw_put(lab, upload, data) as (wire, body):
        wire.sendall(body[: case.rng.randrange(1, len(body))])
        hang(wire, case.rng)
    received = lab.request("GET", f"/weights/uploads/{upload}").json()["received"]
    demand(lab.put(upload, data[received:], received), 200)
    note(case, lab.commit(upload))


@action
def commit_hang_up(lab: Lab, case: Case) -> None:
    draft = good(lab, case)
    upload = demand(lab.open_upload(draft, case.new), 201).json()["upload_id"]
    demand(lab.put(upload, draft.data), 200)
    with raw_request(lab, f"/weights/uploads/{upload}/commit", b"") as (wire, _):
        time.sleep(case.rng.uniform(0.0, 0.03))
        hang(wire, case.rng)


# Loads that go wrong.


def fault_of(what: str) -> tuple[int | None, dict[str, Any]]:
    """``drop-k_proj-rank1`` as the rank and what the plugin of ``tests/faults.py`` reads."""
    how, which, *rest = what.split("-")
    fault: dict[str, Any] = {how: int(which) if how == "after" else which}
    if "always" in rest:
        fault["times"] = -1
    ranks = [int(word.removeprefix("rank")) for word in rest if word.startswith("rank")]
    return (ranks[0] if ranks else None), fault


@action
def load(lab: Lab, case: Case) -> None:
    """The worker fails while it loads, or loads something else than it was given."""
    rank, fault = fault_of(case.scenario.row.what)
    with lab.faulty(rank, **fault):
        note(case, lab.send(good(lab, case), case.new, case.transport))


@action
def failing_restore_then(lab: Lab, case: Case) -> None:
    """No complete policy is loaded, and only a complete one is taken."""
    times = -1 if lab.setup.rollback == "keep" else 1
    with lab.faulty(after=case.rng.randint(0, 20), times=times):
        note(case, lab.send(good(lab, case), case.new, case.transport))
    lab.examine_unhealthy()
    changed = lab.draft((*case.old, "changed:0"), case.version + 1)
    changed.manifest["base_version"] = case.served
    demand(lab.send(changed, (*case.old, "changed:0"), case.transport), 409)
    flipped = lab.draft(case.new, case.version + 2)
    flip_bit(flipped, case.rng)
    demand(lab.send(flipped, case.new, case.transport), 422)
    lab.examine_unhealthy()


# Engines that die.


def engine_processes(pid: int) -> dict[str, int]:
    """Names and ids of the processes below ``pid``, as vLLM names them."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        name = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0].decode()
        found[name] = int(child)
        found |= engine_processes(int(child))
    return found


@action
def kill_worker(lab: Lab, case: Case) -> None:
    """SIGKILL for the process that holds the weights."""
    what = case.scenario.row.what
    if what == "applying":
        draft = good(lab, case)
        with lab.held(lambda: told(lambda: lab.send_file(draft, case.new))) as (pid, result):
            os.kill(pid, signal.SIGKILL)
            if result.result() == 200:
                raise Violation("a dead engine took an update")
        return
    processes = engine_processes(lab.server.process.pid)
    mark = "Worker" if what == "one_rank" else "EngineCore"
    names = sorted(name for name in processes if mark in name)
    os.kill(processes[names[-1]], signal.SIGKILL)
