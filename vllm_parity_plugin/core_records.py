"""What the engine core records about each sequence of a rollout: its logprobs, and which policy
sampled each token.

Both are kept where they arise. The core hears of an update while it is paused, so it knows how
many tokens every request had when the weights changed; a front end's copy of a request lags
behind. And the logprobs of a step arrive in the core as arrays: vLLM would send every token's row
to the front end on its own, which makes Python objects of them. Here they are appended to one
array per sequence, which is fetched once, when the sequence has ended.

All of this runs in the engine core's process; `recorded.py` has the callers of the two
``parity_*`` methods.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np

from vllm_parity_plugin.core_prefix import new_salt, salt_request

ID_PREFIX = "parity-"
ID_LENGTH = len(ID_PREFIX) + 32
"""Characters of our request ids; vLLM appends a random suffix (`assign_request_id`)."""
SWEEP_SECONDS = 60.0
ABANDONED_SECONDS = 600.0
"""After this long a sequence that has ended was asked for by nobody: its front end died."""
BOOK = "_parity_records"
"""Attribute of the scheduler: its :class:`Book`, made at first use."""
FIRST_ROWS = 64

Spans = list[list[int]]
"""``[[first token, version], ...]``: ``[[0, 4], [3, 5]]`` is three tokens of policy 4, then 5."""


def new_request_id() -> str:
    """An engine request id of which the core keeps a record."""
    return f"{ID_PREFIX}{uuid.uuid4().hex}"


class Record:
    """One sequence: version spans, and a row of ids and logprobs for every token.

    Args:
        request_id: the engine's id.
        version: of the policy that samples from token 0 on.
        width: entries of a row: the sampled token's, then the head's.
    """

    def __init__(self, request_id: str, version: int, width: int) -> None:
        self.request_id = request_id
        self.spans: Spans = [[0, version]]
        self.rows = 0
        self.ended: float | None = None
        """When it was first seen that the engine no longer has the request."""
        self._ids = np.empty((FIRST_ROWS, width), dtype=np.int32)
        self._logprobs = np.empty((FIRST_ROWS, width), dtype=np.float32)

    def mark(self, tokens: int, version: int) -> None:
        """A request that has ``tokens`` tokens goes on with ``version``.

        ``[[0, 4]]`` marked at 3 tokens with 5 is ``[[0, 4], [3, 5]]``; marked again at 3 with 6 it
        is ``[[0, 4], [3, 6]]``: policy 5 sampled nothing. Marked with 4 (an update that was taken
        back) it is ``[[0, 4]]`` again.
        """
        if self.spans[-1][0] == tokens:
            self.spans.pop()
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append([tokens, version])

    def append(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Rows of new tokens; columns past this request's own (another asked for more) are cut.

        Rows that are too narrow are left out: whoever takes the record finds that it is short.
        """
        count, width = len(ids), self._ids.shape[1]
        if ids.shape[1] < width:
            return
        needed = self.rows + count
        if needed > len(self._ids):
            self._ids, self._logprobs = (
                np.concatenate([old, np.empty((max(count, len(old)), width), old.dtype)])
                for old in (self._ids, self._logprobs)
            )
        self._ids[self.rows : needed] = ids[:, :width]
        self._logprobs[self.rows : needed] = logprobs[:, :width]
        self.rows = needed

    def packed(self) -> list[Any]:
        """Spans, width, ids and logprobs, as types that vLLM's messages carry without pickle."""
        arrays: list[Any] = [self._ids[: self.rows], self._logprobs[: self.rows]]
        views = [memoryview(array.reshape(-1)).cast("B") for array in arrays]
        return [self.spans, self._ids.shape[1], *views]


class Book:
    """Records of the sequences that nobody has asked for yet, and the current policy version."""

    def __init__(self) -> None:
        self.current = 0
        self.records: dict[str, Record] = {}
        self._swept = time.monotonic()

    def open(self, request_id: str, width: int) -> None:
        """A request begins: the current policy samples from token 0. Others' ids are ignored."""
        if request_id.startswith(ID_PREFIX):
            self.records[request_id[:ID_LENGTH]] = Record(request_id, self.current, width)

    def find(self, request_id: str) -> Record | None:
        """The record of an engine request, if it is a rollout's."""
        return self.records.get(request_id[:ID_LENGTH])

    def mark(self, request_id: str, tokens: int, version: int) -> None:
        """See :meth:`Record.mark`; others' ids are ignored."""
        if (record := self.find(request_id)) is not None:
            record.mark(tokens, version)

    def take(self, keys: Iterable[str]) -> dict[str, Record]:
        """Remove and return the records of ``keys``; unknown keys are left out."""
        return {key: self.records.pop(key) for key in keys if key in self.records}

    def sweep(self, alive: Container[str]) -> None:
        """Drop, now and then, records of ended requests whose front end never asked for them."""
        now = time.monotonic()
        if now - self._swept < SWEEP_SECONDS:
            return
        self._swept = now
        for key, record in list(self.records.items()):
            if record.request_id in alive:
                record.ended = None
            elif record.ended is None:
                record.ended = now
            elif now - record.ended > ABANDONED_SECONDS:
                del self.records[key]


def _book(scheduler: Any) -> Book:
    book = getattr(scheduler, BOOK, None)
    if book is None:
        book = Book()
        setattr(scheduler, BOOK, book)
    return book


def wrap_add_request(original: Callable[..., None]) -> Callable[..., None]:
    """``EngineCore.add_request`` that keys the request's prefix and opens its record."""

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        salt_request(self, request)
        original(self, request, *args, **kwargs)
        book = _book(self.scheduler)
        params = request.sampling_params
        book.open(request.request_id, 1 + (getattr(params, "num_logprobs", None) or 0))
        book.sweep(self.scheduler.requests)

    return add_request


def wrap_update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.update_from_output`` that keeps the logprobs of rollouts here.

    The outputs of other requests are as they were.
    """

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        book = _book(self)
        for client in outputs.values():
            for output in client.outputs:
                if output.new_logprobs is None:
                    continue
                if (record := book.find(output.request_id)) is not None:
                    record.append(output.new_logprobs[0], output.new_logprobs[1])
                    output.new_logprobs = None
        return outputs

    return update_from_output


def parity_mark_version(self: Any, version: int) -> None:
    """``EngineCore.parity_mark_version``: tokens from here on are policy ``version``'s.

    Called while generation is paused. A pause ends only when vLLM's batch queue is empty, so
    ``output_token_ids`` holds every token that the old weights sampled (with async scheduling too,
    by reading ``EngineCoreProc.has_work``). A request still queued has none.
    """
    book = _book(self.scheduler)
    for request_id, request in self.scheduler.requests.items():
        book.mark(request_id, len(request.output_token_ids), version)
    book.current = version
    new_salt(self, version)


def parity_take(self: Any, keys: list[str]) -> dict[str, list[Any]]:
    """``EngineCore.parity_take``: the records of ``keys``, which the core then forgets."""
    taken = _book(self.scheduler).take(keys)
    return {key: record.packed() for key, record in taken.items()}
