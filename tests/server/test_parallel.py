"""Weight updates on servers of several API-server processes, engines and ranks.

Properties:
- an update through any process reaches every rank of every engine, and every process says so;
- tensor parallel: tied heads and padded vocabularies are served right, and a rank that fails takes
  all ranks back, bitwise, without confusing whose answer is whose afterwards;
- data parallel: an engine that fails takes all engines back; pausing reaches all engines; the
  policy version of every token is exact on each of them;
- processes act as one server: one of two concurrent updates wins, an upload goes on through
  another process, what makes one unhealthy makes all so, their metrics add up (W18);
- the private weights directory goes with the last process, and not before;
- experts: a full update and one of a single expert give that policy's logprobs, where vLLM's own
  reload on CPU would compute with unpacked weights (W8).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.client import Client, sequences, top_logprobs
from tests.faults import install_faults
from tests.models import Kind, noisy, weights_of
from tests.offline import IN_PROCESS, run_jobs
from tests.reference import reference
from tests.server.test_policy_versions import TOKENS, Sky, runs
from tests.servers import LONG
from vllm_parity_plugin.serving import Server, serve
from vllm_parity_plugin.weights.errors import UnknownUpload, UpdateInProgress
from vllm_parity_plugin.weights.verify import checksum

Tensors = dict[str, torch.Tensor]
PROMPTS = [[5 + i, 6 + 2 * i, 7 + 3 * i, 8 + i] for i in range(8)]
SAME, FACTOR = 0.02, 5.0
UNSTEADY = 1e-5
"""vLLM's experts on CPU add in no fixed order: the same request differs by an ulp now and then,
without any update."""
START = 900.0
"""Seconds to wait for eight processes on a busy machine of two cores."""
ENGINE_HEADER = "X-data-parallel-rank"


class PinnedClient(Client):
    """A client whose one connection stays open, so that one API-server process answers it."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.http.close()
        self.http = httpx.Client(
            base_url=server.url,
            timeout=120.0,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=None),
        )
        with self.http.stream("GET", "/v1/parity/status") as answer:
            stream = answer.extensions["network_stream"]
            self.port = int(stream.get_extra_info("client_addr")[1])
            answer.read()
        self.pid = self._served_by()

    def _served_by(self) -> int:
        """The server process at the other end of the connection."""
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.raddr and connection.raddr.port == self.port:
                    return int(process.pid)
        raise AssertionError(f"no process has the connection from port {self.port}")


def one_of_each(server: Server, processes: int = 2) -> list[PinnedClient]:
    """A client of every API-server process: the kernel gives connections to either."""
    found: dict[int, PinnedClient] = {}
    for _ in range(100):
        client = PinnedClient(server)
        if found.setdefault(client.pid, client) is not client:
            client.http.close()
        if len(found) == processes:
            return list(found.values())
    raise AssertionError(f"{len(found)} of {processes} processes answered 100 connections")


class Cluster:
    """A server, a client of each of its API-server processes, and the weights it began with."""

    def __init__(self, server: Server, path: Path, fault: dict[str, str]) -> None:
        self.server, self.path = server, path
        self.fault, self.hold = Path(fault["PARITY_TEST_FAULT"]), Path(fault["PARITY_TEST_HOLD"])
        self.brake = Path(fault["PARITY_TEST_BRAKE"])
        self.clients = one_of_each(server)
        self.original = weights_of(path)
        self.directory = Path(self.clients[0].weights_info().directory)

    def versions(self) -> set[int]:
        """Policy versions that any worker holds, by the word of any process."""
        statuses = [client.status() for client in self.clients]
        return {worker.policy_version for status in statuses for worker in status.workers}

    def serves(self, new: Tensors, old: Tensors) -> None:
        """Assert that every process serves ``new``, which is far from ``old``, as one version."""
        version = self.clients[0].status().policy_version
        assert self.versions() == {version}
        for client in self.clients:
            found = client.rollout(
                PROMPTS, seeds=list(range(len(PROMPTS))), max_tokens=16, ignore_eos=True
            )
            assert set(found.policy_versions.tolist()) == {version}
            right, wrong = (
                float(np.abs(found.logprobs - expected).mean())
                for expected in (
                    reference(self.path, PROMPTS, sequences(found), weights=weights)
                    for weights in (new, old)
                )
            )
            assert right <= SAME
            assert wrong > FACTOR * right

    def fingerprint(self, engines: int = 1) -> list[Any]:
        """What every engine says through every process, one request at a time: batches round."""
        found = []
        for client in self.clients:
            for engine in range(engines):
                client.http.headers[ENGINE_HEADER] = str(engine)
                for prompt in PROMPTS[:3]:
                    (choice,) = client.completions(
                        prompt, max_tokens=8, temperature=0.0, logprobs=4, ignore_eos=True
                    )
                    found.append((choice["token_ids"], top_logprobs(choice)))
            client.http.headers.pop(ENGINE_HEADER)
        return found


def accepted(answer: httpx.Response) -> int:
    """The version that is served now."""
    assert answer.status_code == 200, answer.text
    assert answer.json()["applied"] is True
    return int(answer.json()["policy_version"])


def running(path: Path, fault: dict[str, str], *args: str, **env: str) -> Iterator[Cluster]:
    env = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600", **fault, **env}
    with serve(path, *LONG, *args, env=env, timeout=START) as server:
        yield Cluster(server, path, fault)


@pytest.fixture(scope="class")
def ranks(
    tiny_model: Callable[[Kind], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two ranks and two API-server processes; a tied head with a padded vocabulary."""
    fault = install_faults(tmp_path_factory.mktemp("rank-faults"))
    args = ("--tensor-parallel-size", "2", "--api-server-count", "2")
    yield from running(tiny_model("tied-odd"), fault, *args)


@pytest.fixture(scope="class")
def engines(
    tiny_model: Callable[[Kind], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two engines, for which vLLM starts two API-server processes by itself."""
    fault = install_faults(tmp_path_factory.mktemp("engine-faults"))
    yield from running(tiny_model("gc"), fault, "--data-parallel-size", "2")


class TestTensorParallel:
    def test_every_process_sees_every_rank(self, ranks: Cluster) -> None:
        """Both name both ranks, the same server and the same directory."""
        first, second = (client.status() for client in ranks.clients)
        assert [worker.rank for worker in first.workers] == [0, 1]
        assert first == second
        infos = [client.weights_info() for client in ranks.clients]
        assert infos[0] == infos[1]
        assert "lm_head.weight" not in infos[0].tensors

    def test_w8_identity_changes_no_bit(self, ranks: Cluster) -> None:
        """W8a over two ranks: sharded, tied and padded weights are what they were."""
        before = ranks.fingerprint()
        accepted(ranks.clients[1].update(ranks.original))
        assert ranks.fingerprint() == before

    def test_w8_update_reaches_every_rank(self, ranks: Cluster) -> None:
        """W8b, W11: through either process, all matrices or only the tied embedding change."""
        old = ranks.original
        for seed, client in enumerate(ranks.clients):
            new = noisy(ranks.original, seed=seed + 1, only="embed_tokens" if seed else "")
            version = accepted(client.update(new))
            assert ranks.versions() == {version}
            ranks.serves(new, old)
            old = new

    @pytest.mark.parametrize("rank", [0, 1])
    def test_w8_a_failing_rank_takes_all_back(self, ranks: Cluster, rank: int) -> None:
        """Bitwise the old policy on both ranks, and the next answers belong to their questions."""
        before, version = ranks.fingerprint(), ranks.clients[0].status().policy_version
        fault = ranks.fault.with_name(f"{ranks.fault.name}.{rank}")
        fault.touch()
        answer = ranks.clients[rank].update(noisy(ranks.original, seed=11 + rank))
        assert not fault.exists()
        assert answer.status_code == 500
        assert f"Rank {rank} of 2: injected fault" in answer.text
        assert "are served" in answer.text
        for client in ranks.clients:
            status = client.status()
            assert status.state == "serving"
            assert [w.rank for w in status.workers] == [0, 1]
            assert {(w.policy_version, w.weights) for w in status.workers} == {
                (version, "committed")
            }
        assert ranks.fingerprint() == before
        new = noisy(ranks.original, seed=21 + rank)
        accepted(ranks.clients[1 - rank].update(new))
        ranks.serves(new, ranks.original)

    def test_w18_one_of_two_concurrent_updates_wins(self, ranks: Cluster) -> None:
        """While one process applies an update, the other answers 409 and names it."""
        winner, loser = ranks.clients
        version = winner.weights_info().policy_version + 1
        new = noisy(ranks.original, seed=31)
        path = winner.stage(noisy(ranks.original, seed=32), "late.safetensors")
        ranks.hold.touch()
        with ThreadPoolExecutor(1) as pool:
            won = pool.submit(winner.update, new, version)
            here = ranks.hold.with_suffix(".here")
            while not here.exists():
                assert not won.done(), won.result().text
                time.sleep(0.05)
            lost = loser.post_weights(version=version + 1, file=path.name)
            paused = loser.http.post("/v1/parity/pause")
            ranks.hold.unlink()
            assert accepted(won.result()) == version
        here.unlink()
        for answer in (lost, paused):
            assert answer.status_code == 409
            assert answer.json()["error"]["type"] == UpdateInProgress.__name__
            assert f"policy version {version}" in answer.text
        assert path.exists()
        path.unlink()
        ranks.serves(new, ranks.original)

    def test_an_upload_goes_on_through_another_process(self, ranks: Cluster) -> None:
        """Opened, filled and committed through either in turn; then neither knows it any more."""
        first, second = ranks.clients
        new = noisy(ranks.original, seed=41)
        entries, data = packed(new)
        body = {
            "version": first.weights_info().policy_version + 1,
            "tensors": entries,
        }
        opened = first.http.post("/v1/parity/weights/uploads", json=body)
        assert opened.status_code == 201, opened.text
        place = f"/v1/parity/weights/uploads/{opened.json()['upload_id']}"
        half = len(data) // 2
        for client, begin, end in ((second, 0, half), (first, half, len(data))):
            assert client.http.get(place).json()["received"] == begin
            span = {"content-range": f"bytes {begin}-{end - 1}/{len(data)}"}
            sent = client.http.put(place, content=data[begin:end], headers=span)
            assert sent.status_code == 200, sent.text
        for client in ranks.clients:
            progress = client.status().in_progress
            assert progress is not None
            assert (progress.version, progress.phase) == (body["version"], "upload")
        accepted(second.http.post(f"{place}/commit"))
        for client in ranks.clients:
            answer = client.http.get(place)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == UnknownUpload.__name__
            assert client.status().in_progress is None
        ranks.serves(new, ranks.original)

    def test_w7_unhealthy_everywhere(self, ranks: Cluster) -> None:
        """W7: a rank that cannot go back makes every process refuse, and an update through either
        heals all."""
        rank = ranks.fault.with_name(f"{ranks.fault.name}.1")
        rank.write_text(json.dumps({"times": 2}))
        failed = ranks.clients[0].update(noisy(ranks.original, seed=51))
        assert not rank.exists()
        assert failed.status_code == 500
        assert "generation stays paused" in failed.text
        for client in ranks.clients:
            assert client.status().state == "unhealthy"
            assert client.http.get("/health").status_code == 503
            assert client.http.get("/ping").status_code == 503
            assert client.ask_completions(PROMPTS[0], max_tokens=1).status_code == 503
            assert client.ask_rollout(PROMPTS[:1]).status_code == 503
            assert client.http.post("/v1/parity/resume").status_code == 409
        new = noisy(ranks.original, seed=52)
        version = ranks.clients[1].weights_info().policy_version + 1
        accepted(ranks.clients[1].update(new, version))
        for client in ranks.clients:
            assert client.status().state == "serving"
            assert client.http.get("/health").status_code == 200
        ranks.serves(new, ranks.original)

    def test_metrics_add_up(self, ranks: Cluster) -> None:
        """Counters are the sum over the processes, and gauges those of the last update, whichever
        process is asked."""
        names = ("vllm_parity:weight_updates_total", "vllm_parity:weight_update_bytes_total")
        before = [ranks.clients[0].metric(name) for name in names]
        sent = sum(t.nbytes for t in ranks.original.values())
        for client in ranks.clients:
            version = accepted(client.update(ranks.original))
        for client in ranks.clients:
            updates, bytes_ = (client.metric(name) for name in names)
            assert updates - before[0] == 2
            assert 2 * sent <= bytes_ - before[1] <= 2 * sent + 2**14
            assert client.metric("vllm_parity:policy_version") == version
            assert client.metric("vllm_parity:weight_update_pause_seconds_count") >= 2

    def test_the_directory_goes_with_a_server_that_lost_a_process(self, ranks: Cluster) -> None:
        """vLLM ends with any of its API-server processes; the kept weights do not stay behind."""
        assert ranks.directory.is_dir()
        os.kill(ranks.clients[0].pid, signal.SIGKILL)
        ranks.server.process.wait(timeout=60)
        assert not ranks.directory.exists()


def packed(tensors: Tensors) -> tuple[dict[str, Any], bytes]:
    """Manifest entries of an upload, and its data section."""
    entries, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        entries[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
            "checksum": checksum(memoryview(raw)),
        }
        data += raw
    return entries, data


@pytest.fixture
def sky(engines: Cluster) -> Iterator[Sky]:
    """In flight: every step takes long until the flights land."""
    sky = Sky(engines.server, engines.path, engines.brake)
    sky.update(sky.plus)
    engines.brake.touch()
    yield sky
    sky.close()


class TestDataParallel:
    def test_every_process_sees_every_engine(self, engines: Cluster) -> None:
        """Both have asked a worker of each engine."""
        first, second = (client.status() for client in engines.clients)
        assert len(first.workers) == 2
        assert first == second

    def test_w8_update_reaches_every_engine(self, engines: Cluster) -> None:
        """W8b: through either process; requests of both processes spread over both engines."""
        old = engines.original
        for seed, client in enumerate(engines.clients):
            new = noisy(engines.original, seed=seed + 1)
            version = accepted(client.update(new))
            assert engines.versions() == {version}
            before = produced(client)
            engines.serves(new, old)
            assert all(produced(client)[engine] > n for engine, n in before.items())
            old = new

    @pytest.mark.parametrize("engine", [0, 1])
    def test_w8_a_failing_engine_takes_all_back(self, engines: Cluster, engine: int) -> None:
        """Bitwise the old policy on both engines, and the next update reaches both."""
        before, version = engines.fingerprint(engines=2), engines.clients[0].status().policy_version
        fault = engines.fault.with_name(f"{engines.fault.name}.dp{engine}")
        fault.touch()
        answer = engines.clients[engine].update(noisy(engines.original, seed=11 + engine))
        assert not fault.exists()
        assert answer.status_code == 500
        assert "injected fault" in answer.text and "are served" in answer.text
        assert engines.versions() == {version}
        for client in engines.clients:
            assert client.status().state == "serving"
        assert engines.fingerprint(engines=2) == before
        new = noisy(engines.original, seed=21 + engine)
        accepted(engines.clients[1 - engine].update(new))
        engines.serves(new, engines.original)

    def test_pausing_reaches_every_engine(self, engines: Cluster) -> None:
        """Requests that were queued through both processes are wholly of the policy that came
        while generation was paused by hand, and the pause outlasts the update."""
        first, second = engines.clients
        assert first.http.post("/v1/parity/pause").status_code == 204
        assert second.status().state == "paused"
        with ThreadPoolExecutor(2) as pool:
            flights = [pool.submit(Client(engines.server).rollout, PROMPTS) for _ in range(2)]
            time.sleep(1.0)
            version = accepted(first.update(noisy(engines.original, seed=31)))
            assert second.status().state == "paused"
            assert not any(flight.done() for flight in flights)
            assert second.http.post("/v1/parity/resume").status_code == 204
            assert first.status().state == "serving"
            for flight in flights:
                assert set(flight.result().policy_versions.tolist()) == {version}

    def test_w4_versions_of_tokens_on_every_engine(self, sky: Sky, engines: Cluster) -> None:
        """W4: requests of both engines in flight over an update change version at the token at
        which the weights changed, proven by every token's logprob."""
        old = sky.client.status().policy_version
        flights = []
        before = produced(sky.client)
        for seed in range(4):
            flights.append(sky.launch(seed=seed))
            sky.wait(flights[-1])
        while not all(produced(sky.client)[engine] > n for engine, n in before.items()):
            time.sleep(0.05)
        new = sky.update(sky.minus)
        across = 0
        for found in sky.land(*flights):
            stretches = runs(found.policy_versions)
            assert [version for version, _ in stretches] in ([old, new], [new])
            assert sum(length for _, length in stretches) == TOKENS
            across += len(stretches) == 2
            sky.proves(found, {old: sky.plus, new: sky.minus})
        assert across >= 3

    def test_the_directory_goes_with_the_server(self, engines: Cluster) -> None:
        """vLLM kills its API-server processes at once; the kept weights do not stay behind."""
        assert engines.directory.is_dir()
        engines.server.process.send_signal(signal.SIGINT)
        engines.server.process.wait(timeout=60)
        assert not engines.directory.exists()


def produced(client: Client) -> dict[str, float]:
    """Tokens that each engine has sampled."""
    text = client.http.get("/metrics").text
    pattern = r'^vllm:generation_tokens_total{.*engine="(\d+)".*} (\S+)$'
    found = {engine: float(value) for engine, value in re.findall(pattern, text, re.M)}
    assert len(found) == 2
    return found


HELD = """
import sys
from vllm_parity_plugin.weights.staging import Staging
staging = Staging(None, sys.argv[1])
print(staging.path, flush=True)
sys.stdin.read()
"""


def test_the_directory_outlives_one_of_two_processes() -> None:
    """Of two processes of one server, the first to end leaves the directory to the other."""
    command = [sys.executable, "-c", HELD, f"test-{os.getpid()}"]
    first, second = (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    assert first.stdout is not None and second.stdout is not None
    path = Path(first.stdout.readline().strip())
    assert path == Path(second.stdout.readline().strip())
    first.communicate()
    assert path.is_dir()
    second.communicate()
    assert not path.exists()


def test_w8_experts(tiny_model: Callable[[Kind], Path], tmp_path: Path) -> None:
    """W8: the same experts again change nothing; a new model's, and one new expert on top of the
    checkpoint, give those policies' logprobs."""
    path = tiny_model("moe")
    original = weights_of(path)
    expert = "model.layers.0.mlp.experts.1."
    policies = {
        "identity": original,
        "full": noisy(original, seed=1),
        "changed": original | noisy(original, seed=2, sd=2.0, only=expert),
    }
    steps: list[dict[str, Any]] = []
    ask = {"op": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": 16, "seed": 0}}
    ask["sampling"] |= {"ignore_eos": True}
    for version, (name, weights) in enumerate(policies.items(), 1):
        sent = {n: t for n, t in weights.items() if name != "changed" or n.startswith(expert)}
        save_file(sent, tmp_path / f"{name}.safetensors")
        kind = "changed" if name == "changed" else "full"
        apply = {"op": "apply", "path": str(tmp_path / f"{name}.safetensors"), "kind": kind}
        steps += [ask, apply | {"version": version}]
    args = {"model": str(path), "max_model_len": 256}
    job = {"kind": "llm", "args": args, "steps": [*steps, ask], "env": IN_PROCESS}
    (result,) = run_jobs([job], tmp_path)
    assert result["error"] is None
    first, *after = result["steps"][::2]
    for again, once in zip(after[0], first, strict=True):
        assert again["token_ids"] == once["token_ids"]
        assert again["logprobs"] == pytest.approx(once["logprobs"], rel=0, abs=UNSTEADY)
    for found, name in zip(after, policies, strict=True):
        right = expert_mismatch(path, policies[name], found, tmp_path / name)
        assert right <= SAME
        for other in policies.keys() - {name, "identity"}:
            assert expert_mismatch(path, policies[other], found, tmp_path / other) > FACTOR * right


def expert_mismatch(path: Path, weights: Tensors, found: list[Any], directory: Path) -> float:
    """Mean |engine - reference|; Transformers fuses experts when it loads a directory."""
    if not directory.exists():
        directory.mkdir()
        for file in path.glob("*.json"):
            (directory / file.name).write_bytes(file.read_bytes())
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    completions = [choice["token_ids"] for choice in found]
    expected = reference(directory, PROMPTS, completions)
    logprobs = np.concatenate([choice["logprobs"] for choice in found])
    return float(np.abs(logprobs - expected).mean())
