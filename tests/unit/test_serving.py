"""Starting a server from Python, with a stand-in for ``vllm serve``.

Properties:
- a path that is not there and a port that is taken are refused before anything starts;
- a server that ends, or never answers, is an error that shows why;
- the server's whole process group ends with the block, and nothing else does; it ends too when
  whoever started it is killed.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import eventually
from vllm_parity_plugin import serving
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.serving import check_model_path, check_port, serve

HEALTHY = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(monkeypatch: pytest.MonkeyPatch, directory: Path, source: str) -> None:
    """Make ``serve`` run this source instead of vLLM.

    Like vLLM it listens to SIGINT, which a job in the background inherits as ignored.
    """
    path = directory / "vllm"
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    path.write_text(f"#!{sys.executable}\n{listen}\n{source}")
    path.chmod(0o755)
    monkeypatch.setattr(serving, "_vllm", lambda: str(path))


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie, which waits for its parent, does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_server_and_its_children_end_with_the_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child of the server, as vLLM's engine process is one, is gone afterwards."""
    stand_in(monkeypatch, tmp_path, HEALTHY)
    with serve("a/hub-name") as server:
        child = int(server.log_text().split("child ")[1].split()[0])
        assert server.process.poll() is None
        assert alive(child)
    assert server.process.poll() is not None
    eventually(lambda: not alive(child))  # a killed process needs a moment to be gone


KILLED = """
import sys
from pathlib import Path
from vllm_parity_plugin import serving

serving._vllm = lambda: sys.argv[1]
with serving.serve("a/hub-name", log=Path(sys.argv[2])) as server:
    print("serving", flush=True)
    server.process.wait()
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_a_killed_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: signal.Signals
) -> None:
    """Which runs no ``finally``; the server's child, too. The same of vLLM, while it starts, is in
    tests/server/test_killed_parent.py."""
    stand_in(monkeypatch, tmp_path, HEALTHY)
    log = tmp_path / "log"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "vllm"), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout and parent.stdout.readline() == b"serving\n"
        child = int(log.read_text().split("child ")[1].split()[0])
        assert alive(child)
        parent.send_signal(end)
    eventually(lambda: not alive(child))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("line 1\nthe reason", "the reason"),
        ("ValueError: first cause\nRuntimeError: engine failed", "first cause"),
        ("(APIServer) WARNING can cause OSError: line 1\nValueError: it", "ValueError: it"),
        ("", "nothing"),
    ],
)
def test_a_server_that_ends_shows_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, shown: str
) -> None:
    """The status and the first error, else the last words, are in the message; the log is kept."""
    stand_in(monkeypatch, tmp_path, f"import sys\nprint({words!r})\nsys.exit(3)\n")
    log = tmp_path / "server.log"
    with pytest.raises(ParityError) as caught, serve("a/hub-name", log=log):
        pass
    assert "ended with status 3" in caught.value.found
    assert shown in caught.value.found
    assert "engine failed" not in caught.value.found and "line 1" not in caught.value.found
    assert str(log) in caught.value.fix
    assert log.read_text().strip() == words


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After the time allowed it is stopped and its last words are shown."""
    stand_in(monkeypatch, tmp_path, "import time\nprint('busy', flush=True)\ntime.sleep(600)\n")
    with (
        pytest.raises(ParityError, match="did not answer within 2 s") as caught,
        serve("a/hub-name", timeout=2.0),
    ):
        pass
    assert "busy" in caught.value.found


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "~/absent", "a/b/c"])
def test_paths_that_do_not_exist(model: str) -> None:
    """A path is never taken for a name on a hub."""
    with pytest.raises(ParityError, match="There is no model at"), serve(model):
        pass


def test_paths_and_names_that_pass(tmp_path: Path) -> None:
    check_model_path(str(tmp_path))
    check_model_path("Qwen/Qwen3-0.6B")
    check_model_path("s3://bucket/a/model")


def test_a_port_that_is_taken() -> None:
    """A listening port is refused, and free again afterwards."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ParityError, match=f"Port {port} on 127.0.0.1 cannot be used"):
            check_port(port)
    check_port(port)
