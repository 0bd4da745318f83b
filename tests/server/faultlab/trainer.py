"""A trainer in its own process that stops where it is told, to be killed there.

It is the real ``WeightSync`` with the real ``ParityClient``; only hooks are added, on requests and
answers and on the writing of tensors, that report "here" and then wait to be killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file

import vllm_parity_plugin.client as client_module
import vllm_parity_plugin.weights.writer as writer_module
from trl_callbacks.weight_sync import WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.weights.manifest import LORA_A, LORA_B

UPDATE, UPLOADS = "/v1/parity/weights", "/v1/parity/weights/uploads"
MOMENTS: dict[str, tuple[str, str, str]] = {
    "unsent": ("before", "POST", UPDATE),
    "sent": ("sent", "POST", UPDATE),
    "answered": ("after", "POST", UPDATE),
    "unopened": ("before", "POST", UPLOADS),
    "open-sent": ("sent", "POST", UPLOADS),
    "opened": ("after", "POST", UPLOADS),
    "put": ("after", "PUT", ""),
    "commit-sent": ("sent", "POST", "/commit"),
    "committed": ("after", "POST", "/commit"),
}
"""Phase -> (when, method, how the path ends). Others: ``ready``, ``writing``, ``mid-put``,
``done``."""
WAIT = 60.0
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Job:
    """What a trainer does, and where it stops."""

    url: str
    token: str | None
    transport: str
    kind: str
    kv: str
    scaling: float
    payload: str
    phase: str


def train(job: Job) -> int:
    """Push one update, or stop on the way.

    Returns:
        the policy version that is served then.
    """

    def stop() -> None:
        tell("here")
        while True:  # until SIGKILL
            signal.pause()

    client = ParityClient(job.url, token=job.token, timeout=WAIT)
    sync = WeightSync(client, transport=job.transport)
    _watch(client, job.phase, stop)
    if job.phase == "ready":
        stop()
    return _push(sync, job).policy_version


def _push(sync: WeightSync, job: Job) -> Any:
    tensors = load_file(job.payload)
    kv: Any = job.kv
    if job.kind == "full":
        return sync.push(tensors.items(), kv=kv)
    if job.kind == "changed":
        return sync.push_changed(tensors, kv=kv)
    bases = {name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)}
    pairs = {base: (tensors[base + LORA_A], tensors[base + LORA_B]) for base in bases}
    return sync.push_adapter(pairs, scaling=job.scaling, kv=kv)


def _watch(client: ParityClient, phase: str, stop: Callable[[], None]) -> None:
    if phase == "writing":
        writer_module._fill = _half_filled(writer_module._fill, stop)
    elif phase == "mid-put":
        client_module._pieces = _half(stop)
    elif phase in MOMENTS:
        _hook(client, *MOMENTS[phase], stop)


def _half_filled(fill: Callable[..., Any], stop: Callable[[], None]) -> Callable[..., Any]:
    def some(tensors: Iterable[Any]) -> Iterator[Any]:
        known = list(tensors)
        yield from known[: len(known) // 2]
        stop()

    def stopping(path: Path, start: int, tensors: Iterable[Any], entries: Any) -> Any:
        return fill(path, start, some(tensors), entries)

    return stopping


def _half(stop: Callable[[], None]) -> Callable[[memoryview], Iterator[bytes]]:
    def pieces(data: memoryview) -> Iterator[bytes]:
        yield bytes(data[: len(data) // 2])
        stop()

    return pieces


def _hook(
    client: ParityClient, when: str, method: str, suffix: str, stop: Callable[[], None]
) -> None:
    def matches(request: httpx.Request) -> bool:
        return request.method == method and request.url.path.endswith(suffix)

    def trace(event: str, info: Any) -> None:
        if event == "http11.receive_response_headers.started":
            stop()

    def on_request(request: httpx.Request) -> None:
        if matches(request) and when == "before":
            stop()
        if matches(request) and when == "sent":
            request.extensions["trace"] = trace

    def on_response(response: httpx.Response) -> None:
        if matches(response.request) and when == "after":
            stop()

    client._http.event_hooks = {"request": [on_request], "response": [on_response]}


class Trainers:
    """Starts trainers as forks of one process that has imported everything."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._unread = b""

    def run_until(self, job: Job) -> Any:
        """Let a trainer reach its phase, then kill it.

        Returns:
            ``here`` when it was killed at its phase, the policy version when it ended before,
            None when it failed.
        """
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        self._parent.stdin.flush()
        pid = self._read()
        try:
            return self._read()
        finally:
            os.kill(pid, signal.SIGKILL)  # not reaped before it is read below
            self._read()

    def close(self) -> None:
        """End the parent of all trainers."""
        self._parent.kill()
        self._parent.wait()

    def _read(self) -> Any:
        assert self._parent.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([self._parent.stdout], [], [], WAIT)[0]:
                raise TimeoutError("a trainer never reached its phase")
            self._unread += os.read(self._parent.stdout.fileno(), 4096)
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def tell(value: Any) -> None:
    """One line to whoever waits for the trainer."""
    os.write(1, json.dumps(value).encode() + b"\n")


def main() -> None:
    """Fork a trainer for every job that comes in, tell its id, and reap it."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(Job(**json.loads(line)))
        tell(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        tell("gone")
        os.waitpid(pid, 0)


def _child(job: Job) -> None:
    try:
        tell(train(job))
    except BaseException:
        traceback.print_exc()
        tell(None)
    while True:  # until SIGKILL, as at every other phase
        signal.pause()


if __name__ == "__main__":
    main()
