"""A real ``vllm serve`` whose starter is killed.

Property: nothing of it is left, although vLLM is deaf to SIGTERM while its engine starts, and
although its engine core outlives a killed API server.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.servers import STANDARD
from tests.waiting import eventually

STARTER = """
import sys
from pathlib import Path
from vllm_parity_plugin.serving import serve

model, log, *args = sys.argv[1:]
with serve(model, *args, log=Path(log)) as server:
    server.process.wait()
"""


def members(group: int) -> list[str]:
    """Names of the processes of a group; not of those that only wait for their parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition(" (")[2].rpartition(") ")
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            found.append(name)
    return found


def test_nothing_is_left_of_a_server_that_was_starting(model_path: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", STARTER, str(model_path), str(log), *STANDARD]
    with subprocess.Popen(command) as starter:
        eventually(lambda: log.exists() and "(EngineCore pid=" in log.read_text(), 120.0)
        (group,) = set(map(int, re.findall(r"\(APIServer pid=(\d+)\)", log.read_text())))
        # The API server, the engine core, and what ends them.
        assert len(members(group)) >= 3
        assert "Application startup complete" not in log.read_text()
        starter.kill()
    eventually(lambda: not members(group))
