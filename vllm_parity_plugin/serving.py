"""Start and stop a real ``vllm serve`` from Python: for demos, tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from vllm_parity_plugin.errors import ParityError

WATCH = """
trap '' TERM
read -r _
kill -TERM "$1"
for _ in $(seq 100); do kill -0 "$1" && sleep 0.1 || break; done
kill -KILL 0
"""
"""Waits for its standard input to close, which it does when this process ends, however it ends;
then gives the server 10 s, and ends its process group."""
FIRST_ERROR = re.compile(r"\b\w+(?:Error|Exception): .+")
"""An exception's last line, behind whatever prefix vLLM's processes put before it."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def log_text(self) -> str:
        """Everything the server has printed so far."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def serve(
    model: str | Path,
    *args: str,
    port: int = 0,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
    log: Path | None = None,
) -> Iterator[Server]:
    """Run ``vllm serve MODEL ARGS`` on loopback until the block ends.

    Args:
        model: model directory or hub name.
        args: further command-line arguments of ``vllm serve``.
        port: 0 takes a free one.
        env: environment variables on top of this process's.
        timeout: seconds to wait until it answers.
        log: file for its output; by default a temporary one, removed unless something fails.

    Raises:
        ParityError: the model directory does not exist, the port is taken, or the server ended
            or did not answer in time (with the end of its log).
    """
    check_model_path(str(model))
    port = port or free_port()
    check_port(port)
    temporary = log is None
    path = _new_log() if log is None else log
    command = [_vllm(), "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *args]
    process, watcher = _start(command, {**os.environ, **(env or {})}, path)
    server = Server(f"http://127.0.0.1:{port}", process, path)
    try:
        _wait_until_healthy(server, timeout)
        yield server
        if temporary:  # a log that explains a failure is kept
            path.unlink(missing_ok=True)
    finally:
        _stop(process)
        watcher.communicate()


def _new_log() -> Path:
    with tempfile.NamedTemporaryFile(prefix="vllm-parity-", suffix=".log", delete=False) as file:
        return Path(file.name)


def _start(
    command: list[str], env: Mapping[str, str], log: Path
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """The server as leader of a process group, and in that group what ends it after this process.

    A killed process runs no ``finally``, and vLLM ends neither with its parent nor, while it
    starts, on SIGTERM. A group with a member keeps its number, so no other can be hit.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            process_group=0,
        )
    try:
        watcher = subprocess.Popen(
            ["sh", "-c", WATCH, "watch", str(process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=process.pid,
        )
    except OSError:
        _stop(process)
        raise
    return process, watcher


def check_model_path(model: str) -> None:
    """Refuse a path that does not exist before anything tries to read it as a hub name.

    Raises:
        ParityError: ``model`` is spelt as a path and there is no such directory.
    """
    # A hub name has one slash; `repository/file.gguf` and bucket URLs have more.
    many_parts = model.count("/") > 1 and "://" not in model and not model.endswith(".gguf")
    spelt_as_path = model.startswith((".", "/", "~")) or many_parts
    if spelt_as_path and not Path(model).expanduser().exists():
        raise ParityError(
            f"There is no model at {model!r}.",
            "It would be taken for a name on the Hugging Face hub and fail later with another "
            "message.",
            "pass an existing model directory (one with a config.json), or a hub name such as "
            "Qwen/Qwen3-0.6B.",
        )


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Refuse a port that something else listens on.

    Raises:
        ParityError: the port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ParityError(
                f"Port {port} on {host} cannot be used ({error.strerror}).",
                "The server would end, or the trainer would talk to whatever listens there.",
                "stop that process, or choose another port with --port.",
            ) from None


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _vllm() -> str:
    beside_python = Path(sys.executable).parent / "vllm"
    return str(beside_python) if beside_python.exists() else "vllm"


def _wait_until_healthy(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ParityError(
                f"vllm serve ended with status {server.process.returncode} before it answered: "
                f"{_cause(server.log_text())}",
                "Nothing can be trained against a server that does not run.",
                f"act on that message (whole log: {server.log}).",
            )
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=2.0).status_code == 200:
                return
        time.sleep(0.25)
    raise ParityError(
        f"vllm serve did not answer within {timeout:.0f} s; it last said: "
        f"{_cause(server.log_text())}",
        "Nothing can be trained against a server that does not answer.",
        f"look at its log ({server.log}), or allow more time.",
    )


def _cause(log: str) -> str:
    """The first error in a server's log: later ones only say that a process ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # vLLM warns about errors that may come ("... can cause OSError: ..."): no cause of anything.
    serious = [line for line in lines if " WARNING " not in line]
    errors = [match[0] for line in serious if (match := FIRST_ERROR.search(line))]
    return errors[0] if errors else (lines[-1] if lines else "nothing")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and what it started (its process group), and no other."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
