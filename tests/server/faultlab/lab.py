"""The laboratory: one real server, the weight sets it knows, and what must hold after a scenario.

Before anything goes wrong, the server is given every known weight set, complete and undisturbed,
and its greedy logprobs are recorded. Afterwards a server is right only if it answers with one of
these records, bit for bit but for 1e-6, and says itself which one that is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from tests.client import Client
from tests.faults import install_faults
from tests.models import Kind, tiny_qwen3, weights_of
from tests.server.faultlab.disk import Disk
from tests.server.faultlab.policies import (
    SCALING,
    SETS,
    Draft,
    Policy,
    Tensors,
    choose,
    kind_of,
    part,
    tensors_of,
)
from tests.server.faultlab.scenarios import Host, Outcome, Scenario, last, scenarios
from tests.server.faultlab.trainer import Trainers
from tests.servers import STANDARD, TOKEN
from vllm_parity_plugin.rollout_wire import Rollout
from vllm_parity_plugin.serving import Server, serve

T = TypeVar("T")

TOLERANCE = 1e-6
PROMPTS = ([5, 6, 7, 8], [9, 10, 11])
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "head_size": 8}
FLIGHT_PROMPT = [(7 * i) % 500 + 3 for i in range(40)]
FLIGHT_TOKENS, FIRST_TOKENS, BRAKE = 40, 2, 0.03
PATIENCE = 60.0
"""Seconds until something that must happen counts as hung."""
UPLOAD_TIMEOUT = 5.0
STAGED = "lab.safetensors"


class Violation(AssertionError):
    """What no fault may lead to."""


@dataclass(frozen=True)
class Setup:
    """How a server is started."""

    model: Kind
    rollback: str
    token: str | None = None
    arguments: tuple[str, ...] = ()


SETUPS: dict[Host, Setup] = {
    "keep": Setup("untied", "keep"),
    "none": Setup("tied", "none", TOKEN),
    "ranks": Setup("untied", "keep", None, ("--tensor-parallel-size", "2")),
}


@dataclass
class Print:
    """Greedy ids and logprobs under one weight set."""

    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray

    @classmethod
    def of(cls, rollouts: list[Rollout]) -> Print:
        """Sampled ids beside their heads', and logprobs likewise, [N, 1 + K] each."""
        ids = [np.c_[r.token_ids[:, None], r.head_ids] for r in rollouts]
        logprobs = [np.c_[r.logprobs[:, None], r.head_logprobs] for r in rollouts]
        versions = np.concatenate([r.policy_versions for r in rollouts])
        return cls(np.concatenate(ids), np.concatenate(logprobs), versions)

    def same(self, other: Print, tokens: int | None = None) -> bool:
        """Equal ids and logprobs, of the first ``tokens`` tokens."""
        ids, logprobs = self.ids[:tokens], self.logprobs[:tokens]
        return (
            np.array_equal(ids, other.ids[:tokens])
            and float(np.abs(logprobs - other.logprobs[:tokens]).max(initial=0.0)) <= TOLERANCE
        )


class Flight:
    """A generation request that is in flight while something happens."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.old = lab.client.status().policy_version
        produced = lab.client.metric("vllm:generation_tokens_total")
        lab.brake.write_text(str(BRAKE))
        self._pool = ThreadPoolExecutor(1)
        self._result: Future[Rollout] = self._pool.submit(lab.fly)
        lab.until(
            lambda: lab.client.metric("vllm:generation_tokens_total") >= produced + FIRST_TOKENS,
            "the request in flight produces tokens",
        )

    def land(self) -> Rollout:
        """Its completion; whatever happened, it comes."""
        self._lab.brake.unlink(missing_ok=True)
        with self._pool:
            return self._result.result(timeout=2 * PATIENCE)

    def crash(self) -> None:
        """It is told that the engine died, unless it had landed before."""
        try:
            self.land()
        except httpx.TimeoutException as error:
            raise Violation(f"a request hangs: {error!r}") from error
        except (httpx.HTTPError, AssertionError):
            return
        self.check(kept_kv=True, served=self.old)

    def check(self, kept_kv: bool, served: int) -> None:
        """Complete, and every token from a policy that was served then.

        Tokens of the old policy are those of an undisturbed request, unless the KV that they
        attend to was computed again (by an update that was then taken back).
        """
        found = Print.of([self.land()])
        versions = found.versions.tolist()
        if len(versions) != FLIGHT_TOKENS:
            raise Violation(f"a request lost tokens: {len(versions)} of {FLIGHT_TOKENS}")
        possible = {v for v in self._lab.versions if self.old <= v <= served}
        if versions != sorted(versions) or not set(versions) <= possible:
            raise Violation(f"tokens of versions {versions}, served {self.old}, then {served}")
        old = versions.count(self.old)
        undisturbed = self._lab.flights[self._lab.versions[self.old]]
        if (kept_kv or served != self.old) and not found.same(undisturbed, old):
            raise Violation("tokens of the old version are not the old policy's")


@dataclass
class Case:
    """A scenario on its way."""

    scenario: Scenario
    rng: random.Random
    old: Policy
    new: Policy
    version: int
    """That an update would have."""
    served: int
    news: set[Policy] = field(default_factory=set)
    """Other policies that an update of this scenario may make."""
    codes: list[int] = field(default_factory=list)
    """HTTP status of the answers that decide; empty when nobody got one."""

    @property
    def transport(self) -> str:
        return self.scenario.transport

    @property
    def others(self) -> list[Policy]:
        """Full sets that are neither the old nor the new one."""
        full: list[Policy] = [(f"full:{i}",) for i in range(SETS)]
        return [policy for policy in full if policy not in (self.old, self.new)]


class Lab:
    """One server and everything that is known about it."""

    def __init__(
        self, host: Host, server: Server, model: Path, faults: dict[str, str], disk: Disk
    ) -> None:
        self.host, self.server, self.disk = host, server, disk
        self.setup = SETUPS[host]
        self.client = self._connect()
        self.scratch = model.parent
        self.fault = Path(faults["PARITY_TEST_FAULT"])
        self.brake = Path(faults["PARITY_TEST_BRAKE"])
        self.hold = Path(faults["PARITY_TEST_HOLD"])
        self.original = weights_of(model)
        info = self.client.weights_info()
        self.directory, self.model = Path(info.directory), info.model
        if "lm_head.weight" not in info.tensors:
            self.original.pop("lm_head.weight", None)
        self.versions: dict[int, Policy] = {info.policy_version: ("full:0",)}
        self.prints: dict[Policy, Print] = {}
        self.flights: dict[Policy, Print] = {}
        self.intact = False
        """Whether the files of the served stack are what they were."""
        self.trainers = Trainers()

    def _connect(self) -> Client:
        client = Client(self.server, token=self.setup.token)
        client.http.timeout = httpx.Timeout(PATIENCE)
        return client

    # Weight sets.

    def learn(self, policies: set[Policy]) -> None:
        """Record weight sets, each pushed complete; all are different."""
        for policy in sorted(policies):
            self.push_full(policy)
            self.prints[policy] = self.fingerprint()
            if len(policy) == 1:
                self.flights[policy] = Print.of([self.fly()])
        distinct = {found.logprobs.tobytes() for found in self.prints.values()}
        assert len(distinct) == len(self.prints), "two weight sets cannot be told apart"

    def push_full(self, policy: Policy) -> None:
        """Serve a policy by one complete update."""
        tensors = tensors_of(policy, self.original)
        self._accept(Draft.of(tensors, version=self.next_version(), model=self.model), policy)

    def place(self, policy: Policy) -> None:
        """Serve a policy as the stack that its name says."""
        if self.intact and self.versions.get(self.served_version()) == policy:
            return
        for length in range(1, len(policy) + 1):
            self._accept(self.draft(policy[:length], self.next_version()), policy[:length])
        self.intact = True

    def _accept(self, draft: Draft, policy: Policy) -> None:
        answer = self.send_file(draft, policy)
        if answer.status_code != 200 or not answer.json()["applied"]:
            raise Violation(f"a good update got {answer.status_code}: {answer.text}")

    def draft(self, policy: Policy, version: int, kv: str = "keep") -> Draft:
        """The update that makes ``policy`` of the one before its last part."""
        kind = kind_of(policy)
        fields: dict[str, Any] = {"version": version, "kind": kind, "kv": kv, "model": self.model}
        if kind != "full":
            fields["base_version"] = self.served_version()
        if kind == "lora":
            fields["scaling"] = SCALING
        return Draft.of(self.part(policy[-1]), **fields)

    def part(self, name: str) -> Tensors:
        """Tensors that one part of a policy carries."""
        return part(name, self.original)

    def register(self, version: Any, policy: Policy) -> None:
        """Remember what a version is, before it is sent."""
        if isinstance(version, int) and version > max(self.versions):
            self.versions[version] = policy

    def served_version(self) -> int:
        return self.client.status().policy_version

    def next_version(self) -> int:
        return max(self.served_version(), *self.versions) + 1

    # Requests.

    def send(self, draft: Draft, policy: Policy, transport: str) -> httpx.Response:
        """Send an update; the answer that decided about it."""
        return (self.send_file if transport == "file" else self.send_http)(draft, policy)

    def send_file(self, draft: Draft, policy: Policy, name: str = STAGED) -> httpx.Response:
        path = self.directory / name
        path.write_bytes(draft.file())
        try:
            return self.post_file(draft, policy, name)
        finally:
            with contextlib.suppress(OSError):  # the server took it over
                path.unlink()

    def post_file(self, draft: Draft, policy: Policy, name: str = STAGED) -> httpx.Response:
        self.register(draft.manifest["version"], policy)
        return self.post("/weights", {**draft.body(), "file": name})

    def send_http(self, draft: Draft, policy: Policy) -> httpx.Response:
        opened = self.open_upload(draft, policy)
        if opened.status_code != 201:
            return opened
        upload = opened.json()["upload_id"]
        answer = self.put(upload, draft.data)
        if answer.status_code == 200:
            answer = self.commit(upload)
        if answer.status_code != 200:
            self.drop(upload)
        return answer

    def open_upload(self, draft: Draft, policy: Policy) -> httpx.Response:
        self.register(draft.manifest["version"], policy)
        return self.post("/weights/uploads", draft.body())

    def put(self, upload: str, data: bytes, begin: int = 0) -> httpx.Response:
        total = begin + len(data)
        return self.request(
            "PUT",
            f"/weights/uploads/{upload}",
            content=bytes(data),
            headers={"content-range": f"bytes {begin}-{total - 1}/{total}"},
        )

    def commit(self, upload: str) -> httpx.Response:
        """Commit, and wait for whoever else holds the server, as trainers do."""
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self.post(f"/weights/uploads/{upload}/commit")
            busy = answer.status_code == 409 and "UpdateInProgress" in answer.text
            if not busy or time.monotonic() > deadline:
                return answer
            time.sleep(0.02)

    def drop(self, upload: str) -> None:
        self.request("DELETE", f"/weights/uploads/{upload}")

    def post(self, path: str, body: Any = None) -> httpx.Response:
        if body is None:
            return self.request("POST", path)
        # Not httpx's own JSON, which refuses NaN.
        return self.request(
            "POST", path, content=json.dumps(body), headers={"content-type": "application/json"}
        )

    def request(self, method: str, path: str, **parts: Any) -> httpx.Response:
        """Ask; an answer that our routes do not declare is a violation."""
        answer = self.client.http.request(method, f"/v1/parity{path}", **parts)
        self.check_declared(answer)
        return answer

    def check_declared(self, answer: httpx.Response) -> None:
        """500 is a failed load and nothing else."""
        if answer.status_code == 500 and answer.json()["error"]["type"] != "ApplyError":
            raise Violation(f"undeclared answer 500: {answer.text}")

    # Generation.

    def fingerprint(self) -> Print:
        """Greedy logprobs, one request at a time: batches round."""
        return Print.of([self.client.rollout([prompt], **GREEDY) for prompt in PROMPTS])

    def fly(self) -> Rollout:
        """A longer greedy request."""
        client = Client(self.server, token=self.setup.token)
        sampling = {**GREEDY, "max_tokens": FLIGHT_TOKENS}
        return client.rollout([FLIGHT_PROMPT], **sampling)

    # Faults.

    @contextlib.contextmanager
    def faulty(self, rank: int | None = None, **fault: Any) -> Iterator[None]:
        """Loads go wrong meanwhile."""
        path = self.fault if rank is None else Path(f"{self.fault}.{rank}")
        path.write_text(json.dumps(fault))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def held(self, ask: Callable[[], T]) -> Iterator[tuple[int, Future[T]]]:
        """Meanwhile the request of ``ask`` waits between verification and loading.

        Yields:
            process id of a worker that waits, and the request's result.
        """
        here = self.hold.with_suffix(".here")
        here.unlink(missing_ok=True)
        self.hold.touch()
        with ThreadPoolExecutor(1) as pool:
            try:
                result = pool.submit(ask)
                self.until(lambda: here.exists() or result.done(), "the update is applied")
                if result.done():
                    raise Violation(f"it was never applied: {result.result()}")
                yield int(here.read_text()), result
            finally:
                self.hold.unlink(missing_ok=True)

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait for what must happen."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > deadline:
                raise Violation(f"did not happen in {PATIENCE:.0f} s: {what}")
            time.sleep(0.01)

    def age_upload(self) -> None:
        """Let the time pass that a silent upload has."""
        with contextlib.suppress(FileNotFoundError):
            long_ago = time.time() - 100 * UPLOAD_TIMEOUT
            os.utime(self.directory / ".upload.json", (long_ago, long_ago))

    def own_sets(self) -> list[Path]:
        """Files that the server has taken over."""
        return sorted(self.directory.glob(".set-*"))

    # What must hold.

    def settle(self) -> None:
        """No update is on its way any more."""

        def quiet() -> bool:
            progress = self.client.status().in_progress
            if progress is not None and progress.phase == "upload":
                self.age_upload()
            return progress is None

        self.until(quiet, "the update ends")

    def examine(self) -> Policy:
        """The one policy that is served; the server tells which, and its logprobs agree.

        Raises:
            Violation: it serves anything else.
        """
        for _ in range(100):
            before, found, after = self.client.status(), self.fingerprint(), self.client.status()
            one = {before.policy_version, after.policy_version, *found.versions.tolist()}
            if len(one) == 1 and not before.in_progress and not after.in_progress:
                break
        else:
            raise Violation("the server never comes to rest")
        self._check_healthy(after)
        version = after.policy_version
        policy = self.versions[version]
        if not found.same(self.prints[policy]):
            known = [p for p, record in self.prints.items() if found.same(record)]
            raise Violation(
                f"status says version {version}, which is {policy}; the logprobs are those of "
                f"{known or 'no known weight set'}"
            )
        return policy

    def _check_healthy(self, status: Any) -> None:
        problems = {
            "state": status.state != "serving",
            "failure": status.failure is not None,
            "weights": any(worker.weights != "committed" for worker in status.workers),
            "versions": len({worker.policy_version for worker in status.workers}) != 1,
            "health": self.client.http.get("/health").status_code != 200,
            "info": self.client.weights_info().policy_version != status.policy_version,
        }
        if any(problems.values()):
            found = [name for name, wrong in problems.items() if wrong]
            raise Violation(f"it serves, and these disagree: {found}; {status}")

    def check_directory(self, policy: Policy) -> None:
        """The staging directory holds what the served stack needs, and nothing else of ours."""
        sets = len(self.own_sets())
        kept = 0 if self.setup.rollback == "none" else len(policy)
        left = [p.name for p in self.directory.glob(".upload*")] + [
            p.name for p in self.directory.glob(".failure*")
        ]
        if left or (self.intact and sets > kept):
            raise Violation(f"{sets} sets for {kept} layers, and {left} lie in the directory")

    def examine_unhealthy(self) -> None:
        """No complete policy is loaded, every route says so, and nothing is generated."""
        client, status = self.client, self.client.status()
        asked = {
            "/health": client.http.get("/health"),
            "/ping": client.http.get("/ping"),
            "rollouts": client.ask_rollout([PROMPTS[0]], max_tokens=1),
            "completions": client.http.post("/v1/completions", json={"prompt": "a"}),
        }
        answers = {name: answer.status_code for name, answer in asked.items()}
        resume = client.http.post("/v1/parity/resume").status_code
        told = status.state == "unhealthy" and status.failure is not None
        if not told or set(answers.values()) != {503} or resume != 409:
            raise Violation(f"unhealthy, and {answers}, resume {resume}, status {status}")

    def conclude(self, case: Case, flight: Flight | None) -> Outcome:
        """Check everything after a scenario, and tell how it ended."""
        self.settle()
        healed = self.client.status().state == "unhealthy"
        if healed:
            self.examine_unhealthy()
            self.heal(case)
        if flight is not None:
            kept = case.scenario.kv == "keep" or 500 not in case.codes
            flight.check(kept, self.served_version())
        policy = self.examine()
        self.check_directory(policy)
        if healed:
            return "healed"
        if policy == case.old:
            return _old(case.codes)
        if policy not in {case.new, *case.news}:
            raise Violation(f"{policy} is served, neither {case.old} nor {case.new}")
        return "new"

    def heal(self, case: Case) -> None:
        """Send a full update the way that the scenario sends, which must succeed."""
        policy = case.rng.choice(case.others)
        draft = self.draft(policy, self.next_version())
        answer = self.send(draft, policy, case.transport)
        if answer.status_code != 200:
            raise Violation(f"it cannot be healed: {answer.status_code} {answer.text}")
        self.intact = True

    def recover(self) -> None:
        """After a violation: make the server fit for the next scenario, if that is possible."""
        for path in (self.hold, self.brake, self.fault):
            path.unlink(missing_ok=True)
        # A server that failed to answer has closed the connection.
        self.client = self._connect()
        self.settle()
        self.intact = False
        if self.client.status().state == "paused":
            self.client.http.post("/v1/parity/resume")
        self.push_full(("full:0",))
        self.examine()

    # One scenario.

    def run(self, scenario: Scenario) -> Outcome:
        """Let it happen and check what must hold.

        Raises:
            Violation: with the scenario's name.
        """
        from tests.server.faultlab.actions import ACTIONS

        rng = scenario.rng()
        old, new = choose(rng, scenario.kind)
        try:
            self.place(old)
            # Versions are never used again, so a refused one leaves a gap.
            case = Case(scenario, rng, old, new, self.next_version(), self.served_version())
            flight = Flight(self) if scenario.flight else None
            try:
                ACTIONS[scenario.row.action](self, case)
                outcome = (
                    self.conclude(case, flight)
                    if scenario.row.action != "kill_worker"
                    else self.examine_dead(flight)
                )
            finally:
                self.brake.unlink(missing_ok=True)
        except Violation as violation:
            raise Violation(f"{scenario.name}: {violation}") from violation
        except Exception as error:
            raise Violation(f"{scenario.name}: {type(error).__name__}: {error}") from error
        if outcome not in scenario.row.allowed:
            raise Violation(
                f"{scenario.name}: ended {outcome} with answers {case.codes}, allowed "
                f"{scenario.row.allowed}"
            )
        return outcome

    def examine_dead(self, flight: Flight | None) -> Outcome:
        """The engine is gone: nothing is answered but errors, and nothing hangs."""
        if flight is not None:
            flight.crash()
        health = lambda: told(lambda: self.client.http.get("/health"))  # noqa: E731
        self.until(lambda: health() in {0, 503}, "/health tells that the engine is dead")
        answers = [
            told(lambda: self.client.ask_rollout([PROMPTS[0]], max_tokens=1)),
            told(lambda: self.client.http.get("/v1/parity/status")),
        ]
        if not set(answers) <= {0, 503}:
            raise Violation(f"a dead engine answers {answers}")
        ended = lambda: self.server.process.poll() is not None  # noqa: E731
        self.until(ended, "a server without an engine ends, so that it can be started again")
        return "dead"


def told(ask: Callable[[], httpx.Response]) -> int:
    """Status of an answer, 0 when the connection broke.

    Raises:
        Violation: there is no answer and no end of it.
    """
    try:
        return ask().status_code
    except httpx.TimeoutException as error:
        raise Violation(f"a request hangs: {error!r}") from error
    except httpx.HTTPError:
        return 0


def _old(codes: list[int]) -> Outcome:
    if 500 in codes:
        return "restored"
    if any(400 <= code < 500 or code == 507 for code in codes):
        return "refused"
    return "repeated" if 200 in codes else "old"


@contextlib.contextmanager
def laboratory(host: Host, repeats: int = 1, mount: bool = True) -> Iterator[Lab]:
    """A server that has learnt every weight set its scenarios need.

    Args:
        mount: try to give it a small tmpfs; else its disk gets full by a limit on file sizes.
    """
    with tempfile.TemporaryDirectory(prefix="lab-") as scratch:
        root = Path(scratch)
        faults, weights = root / "faults", root / "weights"
        faults.mkdir()
        disk, setup = Disk(weights, mount), SETUPS[host]
        environment = {**install_faults(faults), **_environment(setup, weights)}
        model = tiny_qwen3(root / "model", setup.model)
        try:
            with serve(model, *STANDARD, *setup.arguments, env=environment) as server:
                lab = Lab(host, server, model, environment, disk)
                lab.learn(_needed(host, repeats))
                try:
                    yield lab
                finally:
                    lab.trainers.close()
        finally:
            disk.close()


def _environment(setup: Setup, weights: Path) -> dict[str, str]:
    environment = {
        "VLLM_PARITY_WEIGHTS_DIR": str(weights),
        "VLLM_PARITY_ROLLBACK": setup.rollback,
        "VLLM_PARITY_UPLOAD_TIMEOUT": str(UPLOAD_TIMEOUT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    return environment | ({"VLLM_PARITY_TOKEN": setup.token} if setup.token else {})


def _needed(host: Host, repeats: int) -> set[Policy]:
    """Every policy that a scenario of this server starts from or makes."""
    pairs = [choose(s.rng(), s.kind) for s in scenarios(host, repeats=repeats) + last(host)]
    full: set[Policy] = {(f"full:{i}",) for i in range(SETS)}
    return full | {policy for pair in pairs for policy in pair}


def in_parallel(*jobs: Callable[[], T]) -> list[T]:
    """Results of functions that begin at the same moment."""
    barrier = threading.Barrier(len(jobs))

    def start(job: Callable[[], T]) -> T:
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(start, jobs))
