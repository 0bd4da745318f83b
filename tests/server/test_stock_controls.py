"""The controls: stock vLLM's update session really does what the transaction is there to prevent.

Properties, each of stock vLLM with the plugin off (a control that stops failing means that vLLM
changed, and that the matching protection may go):
- a pause with the cache cleared, and the default pause, change or cut requests in flight (W3, W4);
- a shard that never came leaves memory that nobody wrote, without an error (W8);
- a trainer that dies after start leaves a session that the next trainer cannot open (W16);
- none of the routes asks for the API key (X2);
- a request that runs in the middle of an update ends the engine (W7).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file

from tests.client import Client
from tests.faults import install_faults
from tests.models import Kind, noisy, weights_of
from tests.servers import API_KEY, LONG
from tests.stock_weights import ARGS, StockSession, install_stock_engine
from vllm_parity_plugin.serving import Server, serve

PROMPT = [(7 * i) % 500 + 3 for i in range(140)]
TOKENS = 200
SHARDS = [f"model.layers.0.self_attn.{part}_proj.weight" for part in ("k", "v")]


@pytest.fixture(scope="module")
def brake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install_faults(tmp_path_factory.mktemp("stock-faults"))


@pytest.fixture(scope="module")
def stock(
    tiny_model: Callable[[Kind], Path],
    tmp_path_factory: pytest.TempPathFactory,
    brake: dict[str, str],
) -> Iterator[Server]:
    """Plugin off, vLLM's own weight routes on, an API key that they do not ask for."""
    directory = tmp_path_factory.mktemp("stock-engine")
    env = {
        **brake,
        **install_stock_engine(directory),
        "PYTHONPATH": f"{directory}:{brake['PYTHONPATH']}",
    }
    args = (*LONG, *ARGS, "--no-async-scheduling", "--api-key", API_KEY)
    with serve(tiny_model("untied"), *args, env=env) as running:
        yield running


@pytest.fixture
def session(stock: Server) -> StockSession:
    return StockSession(stock.url)


def ask(server: Server, **body: Any) -> dict[str, Any]:
    """One completion with its logprobs."""
    sampling = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, "seed": 0}
    client = Client(server, api_key=API_KEY)
    return client.completions(PROMPT, **(sampling | body))[0]


def greedy(server: Server) -> Any:
    """Token ids and logprobs of a greedy completion, or vLLM's word that they are not numbers."""
    body = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0, "temperature": 0.0}
    answer = Client(server, api_key=API_KEY).ask_completions(PROMPT, **body)
    if answer.status_code == 400 and "Out of range float values" in answer.text:
        return answer.text
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


class Flight:
    """A long request that has produced its first tokens; the brake keeps its steps long."""

    def __init__(self, server: Server, brake: dict[str, str]) -> None:
        metrics = Client(server, api_key=API_KEY)
        self._brake = Path(brake["PARITY_TEST_BRAKE"])
        produced = metrics.metric("vllm:generation_tokens_total")
        self._brake.touch()
        self._pool = ThreadPoolExecutor(1)
        self._result: Future[dict[str, Any]] = self._pool.submit(ask, server)
        while metrics.metric("vllm:generation_tokens_total") < produced + 5:
            assert not self._result.done()
            time.sleep(0.05)

    def land(self) -> dict[str, Any]:
        self._brake.unlink(missing_ok=True)
        with self._pool:
            return self._result.result(timeout=100)


def test_w3_keep_with_a_cleared_cache_recomputes(
    stock: Server, session: StockSession, brake: dict[str, str]
) -> None:
    """W3 control: mode keep and vLLM's default clear_cache preempt the request."""
    metrics = Client(stock, api_key=API_KEY)
    preempted = metrics.metric("vllm:num_preemptions_total")
    flight = Flight(stock, brake)
    session.pause(mode="keep")
    session.resume()
    assert len(flight.land()["token_ids"]) == TOKENS
    assert metrics.metric("vllm:num_preemptions_total") == preempted + 1


def test_w4_the_default_pause_cuts_requests_short(
    stock: Server, session: StockSession, brake: dict[str, str]
) -> None:
    """W4 control: the request ends with what it had, and a 200."""
    flight = Flight(stock, brake)
    session.pause()
    session.resume()
    fragment = flight.land()
    assert fragment["finish_reason"] == "abort"
    assert 5 <= len(fragment["token_ids"]) < TOKENS


def test_w8_a_missing_shard_is_garbage_without_an_error(
    stock: Server, session: StockSession, tiny_model: Callable[[Kind], Path], tmp_path: Path
) -> None:
    """W8 control: every call answers 200, and neither the old nor the new policy is served.

    The plugin refuses this update with 422 (test_weight_updates, BAD_FILES "missing tensor")."""
    old = weights_of(tiny_model("untied"))

    def update(seed: int, left_out: Sequence[str] = ()) -> Any:
        policy = noisy(old, seed=seed)
        path = tmp_path / f"{seed}.safetensors"
        save_file(policy, path)
        session.pause(mode="keep", clear_cache=True)
        session.start()
        session.update(path, [name for name in policy if name not in left_out])
        session.finish()
        session.resume()
        return greedy(stock)

    before = greedy(stock)
    first = update(seed=1)
    # Of another policy than the first: memory that is used again may still hold that one's shard.
    broken = update(seed=2, left_out=SHARDS)
    if isinstance(broken, str):  # not even numbers: nobody's policy, and they stay in the KV cache
        return
    second = update(seed=2)
    assert len({str(served) for served in (before, first, second)}) == 3
    assert broken not in (before, first, second)
    assert update(seed=2) == second


def test_w16_a_dead_trainer_blocks_the_next_one(session: StockSession) -> None:
    """W16 control: after start and a death, the next trainer's start fails for good."""
    session.start()
    for _ in range(2):
        answer = StockSession(str(session.http.base_url)).post("/start_weight_update")
        assert answer.status_code == 500
        assert "already" in answer.text or "Internal" in answer.text
    session.finish()


@pytest.mark.parametrize("path", ["/pause", "/resume", "/start_weight_update"])
def test_x2_the_routes_ask_nobody(stock: Server, path: str) -> None:
    """X2 control: with --api-key set, a stranger pauses, resumes and opens a session."""
    assert httpx.post(f"{stock.url}/v1/completions", json={}).status_code == 401
    assert httpx.post(stock.url + path).status_code == 200
    if path == "/pause":
        httpx.post(f"{stock.url}/resume")
    if path == "/start_weight_update":
        httpx.post(f"{stock.url}/finish_weight_update", json={})


def test_w7_a_request_in_the_middle_ends_the_engine(stock: Server, session: StockSession) -> None:
    """W7 control, last because nothing answers after it: start, no pause, a request."""
    session.start()
    with pytest.raises((AssertionError, httpx.HTTPError)):
        ask(stock, max_tokens=4)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{stock.url}/health").status_code != 200:
                return
        except httpx.HTTPError:
            return
        time.sleep(0.2)
    pytest.fail("the engine survived a request between start and finish")
