"""Records that the engine core keeps of rollouts, on fake cores, schedulers and clients.

Properties:
- a request has one span until the weights change under it, and then one more per change;
- an update that follows another without a token in between replaces it, and one that is taken
  back leaves no trace;
- requests that began later, ended before, or are not ours are left alone;
- records are given out once, in types that vLLM's messages carry; those of a front end that died
  are dropped after a while, and those of running requests never;
- every row of logprobs is kept, bit for bit, cut to what the request asked for, and reaches the
  front end by no other way; other requests' outputs are as they were;
- calls reach every engine core, return every answer, and fail only when all have answered;
- spans become one version per token.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_parity_plugin import core_records
from vllm_parity_plugin.compat import call_every_core, rpc_every_worker
from vllm_parity_plugin.core_records import (
    ABANDONED_SECONDS,
    FIRST_ROWS,
    ID_LENGTH,
    SWEEP_SECONDS,
    new_request_id,
    parity_mark_version,
    parity_take,
    wrap_add_request,
    wrap_update_from_output,
)
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.recorded import Recorded, mark_version, take, take_colocated


class Scheduler:
    """Gives out what it is given, per client of the core."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def _outputs(self, *outputs: Any) -> dict[int, Any]:
        return {0: SimpleNamespace(outputs=list(outputs)), 1: SimpleNamespace(outputs=[])}

    update_from_output = wrap_update_from_output(_outputs)


class Core:
    """An engine core: a scheduler with requests, the plugin's methods and one worker RPC."""

    def __init__(self, workers: int = 1) -> None:
        self.scheduler = Scheduler()
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=False)
        )
        self.workers = workers

    def _add(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def collective_rpc(self, method: str, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        assert (timeout, kwargs) == (None, None)
        return [(method, *args, rank) for rank in range(self.workers)]

    add_request = wrap_add_request(_add)
    parity_mark_version = parity_mark_version
    parity_take = parity_take

    def spans(self, keys: list[str]) -> dict[str, Any]:
        """The spans of what is taken."""
        return {key: packed[0] for key, packed in self.parity_take(keys).items()}

    def begin(self, key: str | None = None, logprobs: int | None = 0) -> str:
        """Admit a request; its id gets a random suffix, as ``AsyncLLM`` gives it."""
        key = key or new_request_id()
        request = SimpleNamespace(
            request_id=f"{key}-a1b2c3d4",
            output_token_ids=[],
            sampling_params=SimpleNamespace(num_logprobs=logprobs),
        )
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
    assert core.spans([key]) == {key: [[0, 0], [3, 4], [5, 5]]}
    assert core.spans([key]) == {}


@pytest.mark.parametrize("tokens", [0, 3])
def test_an_update_that_sampled_nothing_leaves_no_span(tokens: int) -> None:
    """Two updates in one pause; with 0 tokens the request was still queued."""
    core = Core()
    key = core.begin()
    core.sample(key, tokens)
    for version in (4, 5):
        core.parity_mark_version(version)
    old = [[0, 0]] if tokens else []
    assert core.spans([key]) == {key: [*old, [tokens, 5]]}


def test_an_update_that_is_taken_back_leaves_no_trace() -> None:
    """The version before the failed update is marked again, at the same token."""
    core = Core()
    key = core.begin()
    core.sample(key, 3)
    core.parity_mark_version(4)
    core.parity_mark_version(0)
    assert core.spans([key]) == {key: [[0, 0]]}


def test_other_requests_are_left_alone() -> None:
    """One ended before the update, one began after it, one is not ours."""
    core = Core()
    ended, foreign = core.begin(), core.begin("cmpl-1")
    core.sample(ended, 2)
    core.end(ended)
    core.parity_mark_version(4)
    began = core.begin()
    assert core.spans([ended, began, foreign, "unknown"]) == {
        ended: [[0, 0]],
        began: [[0, 4]],
    }


def test_what_a_dead_front_end_left_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has ended and that nobody asks for goes; a running one stays."""
    clock = [0.0]
    monkeypatch.setattr(core_records, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    core = Core()
    running, ended = core.begin(), core.begin()
    core.end(ended)
    for seconds in (SWEEP_SECONDS + 1, ABANDONED_SECONDS, SWEEP_SECONDS):
        clock[0] += seconds
        core.begin()
    core.parity_mark_version(1)
    assert core.spans([running, ended]) == {running: [[0, 1]]}


def output(key: str, rows: int = 1, width: int = 3, first: int = 0) -> Any:
    """One request's share of a step: ids count up from ``first``, logprobs are their negatives."""
    ids = np.arange(first, first + rows * width, dtype=np.int32).reshape(rows, width)
    logprobs = -ids.astype(np.float32) / 3
    return SimpleNamespace(request_id=f"{key}-a1b2c3d4", new_logprobs=(ids, logprobs, None, None))


def test_rows_are_kept_and_leave_the_output() -> None:
    """More rows than the first array holds, in steps of one and of several tokens."""
    core = Core()
    key = core.begin(logprobs=2)
    steps = [
        output(key, rows, first=1000 * rows) for rows in [1] * FIRST_ROWS + [3, 2 * FIRST_ROWS]
    ]
    expected = [step.new_logprobs for step in steps]
    for step in steps:
        assert core.scheduler.update_from_output(step)[0].outputs == [step]
        assert step.new_logprobs is None
    found = asyncio.run(take(engine(core), [key]))[key]
    assert np.array_equal(found.ids, np.concatenate([ids for ids, *_ in expected]))
    assert np.array_equal(found.logprobs, np.concatenate([lp for _, lp, *_ in expected]))
    assert (found.ids.dtype, found.logprobs.dtype) == ("int32", "float32")


def test_rows_are_cut_to_what_was_asked_for() -> None:
    """Another request of the batch asked for a larger head; one that asked for none has none."""
    core = Core()
    narrow, plain = core.begin(logprobs=1), core.begin(logprobs=None)
    core.scheduler.update_from_output(output(narrow, width=9), output(plain, width=9))
    found = asyncio.run(take(engine(core), [narrow, plain]))
    assert found[narrow].ids.tolist() == [[0, 1]]
    assert found[plain].ids.tolist() == [[0]]


def test_rows_that_are_too_narrow_are_not_made_up() -> None:
    """The record stays short, which whoever takes it refuses."""
    core = Core()
    key = core.begin(logprobs=4)
    core.scheduler.update_from_output(output(key, width=3))
    assert asyncio.run(take(engine(core), [key]))[key].ids.shape == (0, 5)


def test_outputs_of_others_are_left_alone() -> None:
    """A stock request keeps its logprobs, and so does one that the book does not know."""
    core = Core()
    core.begin("cmpl-1", logprobs=2)
    others = [output("cmpl-1"), output(new_request_id())]
    core.scheduler.update_from_output(*others)
    assert all(other.new_logprobs is not None for other in others)


def test_records_pass_vllms_messages() -> None:
    """Without pickle: spans, width and two byte strings, over vLLM's own encoder."""
    serial_utils = pytest.importorskip("vllm.v1.serial_utils")
    core = Core()
    key = core.begin(logprobs=2)
    core.scheduler.update_from_output(output(key, 5))
    encoded = serial_utils.MsgpackEncoder().encode(
        serial_utils.UtilityResult(core.parity_take([key]))
    )
    decoded = serial_utils.MsgpackDecoder(serial_utils.UtilityResult).decode(encoded)
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(
            engine_core=SimpleNamespace(call_utility=lambda method, keys: decoded.result)
        )
    )
    assert take_colocated(llm, [key])[key].ids.tolist() == np.arange(15).reshape(5, 3).tolist()


def test_every_core_is_told_and_asked() -> None:
    """Data parallelism: each request is known to one core, and versions come from both."""
    one, two = Core(), Core()
    both = engine(one, two)
    first, second = one.begin(), two.begin()
    one.sample(first, 3)
    asyncio.run(mark_version(both, 4))
    found = asyncio.run(take(both, [first, second]))
    assert found[first].spans == [[0, 0], [3, 4]]
    assert found[second].spans == [[0, 4]]


def test_answers_of_all_workers_are_one_list() -> None:
    """Cores of two and one worker: three answers, in rank order."""
    answers = asyncio.run(rpc_every_worker(engine(Core(2), Core(1)), "load", "a path", 5))
    assert answers == [("load", "a path", 5, 0), ("load", "a path", 5, 1), ("load", "a path", 5, 0)]


def test_an_engine_in_this_process_is_called_directly() -> None:
    core = Core()
    inner = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    key = core.begin()
    [packed] = asyncio.run(call_every_core(inner, "parity_take", [key]))
    assert packed[key][0] == [[0, 0]]


def test_a_failure_waits_for_the_other_cores() -> None:
    """Nobody may go on while a core is still loading weights."""
    broken = engine(RuntimeError("no memory"), Core(), Core())
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(rpc_every_worker(broken, "load"))
    assert broken.engine_core.answered == 2


def test_a_core_without_the_plugin_is_named() -> None:
    """vLLM's own text for an unknown utility becomes a refusal; a dead engine's error does not."""
    text = "Call to parity_take method failed: 'EngineCoreProc' object has no attribute"
    with pytest.raises(ParityError, match="not active in the engine core process"):
        asyncio.run(take(engine(Core(), Exception(text)), ["key"]))
    with pytest.raises(ConnectionError, match="died"):
        asyncio.run(take(engine(ConnectionError("died")), ["key"]))


def test_a_request_that_no_core_knows_is_refused() -> None:
    core = Core()
    known = core.begin()
    with pytest.raises(ParityError, match="1 of 2 requests are unknown to it"):
        asyncio.run(take(engine(core), [known, new_request_id()]))


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
    nothing = np.empty((0, 1))
    found = Recorded(spans, nothing, nothing).versions(tokens)
    assert (found.dtype, found.tolist()) == ("int32", versions)
