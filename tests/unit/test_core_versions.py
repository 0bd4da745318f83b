"""Policy versions kept in the engine core, on fake cores, schedulers and clients.

Properties:
- a request has one span until the weights change under it, and then one more per change;
- an update that follows another without a token in between replaces it, and one that is taken
  back leaves no trace;
- requests that began later, ended before, or are not ours are left alone;
- versions are given out once, as plain lists; the book is bounded, oldest out first;
- calls reach every engine core, return every answer, and fail only when all have answered;
- spans become one version per token, in the order of the completions.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_parity_plugin import core_versions
from vllm_parity_plugin.compat import call_every_core, rpc_every_worker
from vllm_parity_plugin.core_versions import (
    ID_LENGTH,
    mark_version,
    new_request_id,
    parity_mark_version,
    parity_versions,
    versions_of,
    wrap_add_request,
)
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.server.rollouts import _spans, token_versions


class Core:
    """An engine core: a scheduler with requests, the plugin's methods and one worker RPC."""

    def __init__(self, workers: int = 1) -> None:
        self.scheduler = SimpleNamespace(requests={})
        self.workers = workers

    def _add(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def collective_rpc(self, method: str, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        assert (timeout, kwargs) == (None, None)
        return [(method, *args, rank) for rank in range(self.workers)]

    add_request = wrap_add_request(_add)
    parity_mark_version = parity_mark_version
    parity_versions = parity_versions

    def begin(self, key: str | None = None) -> str:
        """Admit a request; its id gets a random suffix, as ``AsyncLLM`` gives it."""
        key = key or new_request_id()
        request = SimpleNamespace(request_id=f"{key}-a1b2c3d4", output_token_ids=[])
        self.add_request(request, request_wave=3)
        return key

    def sample(self, key: str, tokens: int) -> None:
        self.scheduler.requests[f"{key}-a1b2c3d4"].output_token_ids += [7] * tokens

    def end(self, key: str) -> None:
        del self.scheduler.requests[f"{key}-a1b2c3d4"]


class Client:
    """vLLM's asynchronous client of some cores; a core that is an exception fails its calls."""

    def __init__(self, *cores: Any) -> None:
        self.core_engines = [bytes([rank]) for rank in range(len(cores))]
        self._cores = dict(zip(self.core_engines, cores, strict=True))
        self.answered = 0

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        core = self._cores[engine]
        if isinstance(core, Exception):
            raise core
        await asyncio.sleep(0.01)
        self.answered += 1
        return getattr(core, method)(*args)


def engine(*cores: Any) -> Any:
    return SimpleNamespace(engine_core=Client(*cores))


def test_ids_have_the_length_that_is_the_key() -> None:
    assert len(new_request_id()) == ID_LENGTH == 39


def test_spans_follow_the_updates() -> None:
    """Three tokens of policy 0, two of policy 4, the rest of policy 5; taken once."""
    core = Core()
    key = core.begin()
    core.sample(key, 3)
    core.parity_mark_version(4)
    core.sample(key, 2)
    core.parity_mark_version(5)
    assert core.parity_versions([key]) == {key: [[0, 0], [3, 4], [5, 5]]}
    assert core.parity_versions([key]) == {}


@pytest.mark.parametrize("tokens", [0, 3])
def test_an_update_that_sampled_nothing_leaves_no_span(tokens: int) -> None:
    """Two updates in one pause; with 0 tokens the request was still queued."""
    core = Core()
    key = core.begin()
    core.sample(key, tokens)
    for version in (4, 5):
        core.parity_mark_version(version)
    old = [[0, 0]] if tokens else []
    assert core.parity_versions([key]) == {key: [*old, [tokens, 5]]}


def test_an_update_that_is_taken_back_leaves_no_trace() -> None:
    """The version before the failed update is marked again, at the same token."""
    core = Core()
    key = core.begin()
    core.sample(key, 3)
    core.parity_mark_version(4)
    core.parity_mark_version(0)
    assert core.parity_versions([key]) == {key: [[0, 0]]}


def test_other_requests_are_left_alone() -> None:
    """One ended before the update, one began after it, one is not ours."""
    core = Core()
    ended, foreign = core.begin(), core.begin("cmpl-1")
    core.sample(ended, 2)
    core.end(ended)
    core.parity_mark_version(4)
    began = core.begin()
    assert core.parity_versions([ended, began, foreign, "unknown"]) == {
        ended: [[0, 0]],
        began: [[0, 4]],
    }


def test_the_book_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first, and an update is safe for those that are gone."""
    monkeypatch.setattr(core_versions, "LIMIT", 2)
    core = Core()
    keys = [core.begin() for _ in range(3)]
    core.parity_mark_version(1)
    assert list(core.parity_versions(keys)) == keys[1:]


def test_every_core_is_told_and_asked() -> None:
    """Data parallelism: each request is known to one core, and versions come from both."""
    one, two = Core(), Core()
    both = engine(one, two)
    first, second = one.begin(), two.begin()
    one.sample(first, 3)
    asyncio.run(mark_version(both, 4))
    assert asyncio.run(versions_of(both, [first, second])) == {
        first: [[0, 0], [3, 4]],
        second: [[0, 4]],
    }


def test_answers_of_all_workers_are_one_list() -> None:
    """Cores of two and one worker: three answers, in rank order."""
    answers = asyncio.run(rpc_every_worker(engine(Core(2), Core(1)), "load", "a path", 5))
    assert answers == [("load", "a path", 5, 0), ("load", "a path", 5, 1), ("load", "a path", 5, 0)]


def test_an_engine_in_this_process_is_called_directly() -> None:
    core = Core()
    inner = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    key = core.begin()
    assert asyncio.run(call_every_core(inner, "parity_versions", [key])) == [{key: [[0, 0]]}]


def test_a_failure_waits_for_the_other_cores() -> None:
    """Nobody may go on while a core is still loading weights."""
    broken = engine(RuntimeError("no memory"), Core(), Core())
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(rpc_every_worker(broken, "load"))
    assert broken.engine_core.answered == 2


def test_a_core_without_the_plugin_is_named() -> None:
    """vLLM's own text for an unknown utility becomes a refusal; a dead engine's error does not."""
    text = "Call to parity_versions method failed: 'EngineCoreProc' object has no attribute"
    with pytest.raises(ParityError, match="not active in the engine core process"):
        asyncio.run(versions_of(engine(Core(), Exception(text)), ["key"]))
    with pytest.raises(ConnectionError, match="died"):
        asyncio.run(versions_of(engine(ConnectionError("died")), ["key"]))


def test_a_request_that_no_core_knows_is_refused() -> None:
    core = Core()
    known = core.begin()
    with pytest.raises(ParityError, match="1 of 2 requests are unknown to it"):
        asyncio.run(_spans(engine(core), [known, new_request_id()]))


def test_spans_come_in_the_order_of_the_requests() -> None:
    one, two = Core(), Core()
    keys = [core.begin() for core in (one, two, one)]
    two.sample(keys[1], 1)
    asyncio.run(mark_version(engine(one, two), 4))
    assert asyncio.run(_spans(engine(one, two), keys)) == [[[0, 4]], [[0, 0], [1, 4]], [[0, 4]]]


@pytest.mark.parametrize(
    ("spans", "tokens", "versions"),
    [
        ([[0, 4], [3, 5]], 5, [4, 4, 4, 5, 5]),
        ([[0, 4], [1, 5], [2, 9]], 3, [4, 5, 9]),
        ([[0, 4], [3, 5]], 3, [4, 4, 4]),
        ([[0, 4]], 0, []),
    ],
)
def test_spans_become_one_version_per_token(
    spans: list[list[int]], tokens: int, versions: list[int]
) -> None:
    """The last span may be empty, and so may an aborted request."""
    found = token_versions(spans, tokens)
    assert (found.dtype, found.tolist()) == ("int32", versions)
