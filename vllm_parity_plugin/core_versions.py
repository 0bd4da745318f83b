"""Which policy sampled each token of a rollout, kept where tokens are counted: the engine core.

The core hears of an update while it is paused, so it knows how many tokens every request had when
the weights changed. A front end could only guess: its copy of a request lags behind.

The wrapper and the two ``parity_*`` methods run in the engine core's process; ``mark_version`` and
``versions_of`` are their callers in the API server.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from vllm_parity_plugin.compat import call_every_core
from vllm_parity_plugin.errors import ParityError

ID_PREFIX = "parity-"
ID_LENGTH = len(ID_PREFIX) + 32
"""Characters of our request ids; vLLM appends a random suffix (`assign_request_id`)."""
LIMIT = 100_000
"""Most requests remembered. Those of a front end that died are never asked for."""
BOOK = "_parity_versions"
"""Attribute of the engine core: its :class:`VersionBook`, made at first use."""

Spans = list[list[int]]
"""``[[first token, version], ...]``: ``[[0, 4], [3, 5]]`` is three tokens of policy 4, then 5."""


def new_request_id() -> str:
    """An engine request id whose policy versions the core records."""
    return f"{ID_PREFIX}{uuid.uuid4().hex}"


class VersionBook:
    """Version spans of the requests that nobody has asked for yet, and the current version."""

    def __init__(self) -> None:
        self.current = 0
        self.spans: dict[str, Spans] = {}

    def add(self, request_id: str) -> None:
        """A request begins: the current policy samples from token 0. Others' ids are ignored."""
        if not request_id.startswith(ID_PREFIX):
            return
        self.spans[request_id[:ID_LENGTH]] = [[0, self.current]]
        while len(self.spans) > LIMIT:
            del self.spans[next(iter(self.spans))]

    def mark(self, request_id: str, tokens: int, version: int) -> None:
        """A request that has ``tokens`` tokens goes on with ``version``.

        ``[[0, 4]]`` marked at 3 tokens with 5 is ``[[0, 4], [3, 5]]``; marked again at 3 with 6 it
        is ``[[0, 4], [3, 6]]``: policy 5 sampled nothing. Marked with 4 (an update that was taken
        back) it is ``[[0, 4]]`` again.
        """
        spans = self.spans.get(request_id[:ID_LENGTH])
        if spans is None:
            return
        if spans[-1][0] == tokens:
            spans.pop()
        if not spans or spans[-1][1] != version:
            spans.append([tokens, version])

    def take(self, keys: Iterable[str]) -> dict[str, Spans]:
        """Remove and return the spans of ``keys``; unknown keys are left out."""
        return {key: self.spans.pop(key) for key in keys if key in self.spans}


def _book(core: Any) -> VersionBook:
    book = getattr(core, BOOK, None)
    if book is None:
        book = VersionBook()
        setattr(core, BOOK, book)
    return book


def wrap_add_request(original: Callable[..., None]) -> Callable[..., None]:
    """``EngineCore.add_request`` that opens the request's page in the book."""

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(self, request, *args, **kwargs)
        _book(self).add(request.request_id)

    return add_request


def parity_mark_version(self: Any, version: int) -> None:
    """``EngineCore.parity_mark_version``: tokens from here on are policy ``version``'s.

    Called while generation is paused. A pause ends only when vLLM's batch queue is empty, so
    ``output_token_ids`` holds every token that the old weights sampled (with async scheduling too,
    by reading ``EngineCoreProc.has_work``). A request still queued has none.
    """
    book = _book(self)
    for request_id, request in self.scheduler.requests.items():
        book.mark(request_id, len(request.output_token_ids), version)
    book.current = version


def parity_versions(self: Any, keys: list[str]) -> dict[str, Spans]:
    """``EngineCore.parity_versions``: spans of ``keys``, which the core then forgets."""
    return _book(self).take(keys)


async def mark_version(engine: Any, version: int) -> None:
    """Tell every engine core that the weights are now ``version``; generation must be paused.

    Raises:
        ParityError: a core does not know the call.
    """
    await _ask(engine, "parity_mark_version", version)


async def versions_of(engine: Any, request_ids: list[str]) -> dict[str, Spans]:
    """Spans of requests that have ended, from whichever core ran each; asked once only.

    Raises:
        ParityError: a core does not know the call.
    """
    merged: dict[str, Spans] = {}
    for spans in await _ask(engine, "parity_versions", request_ids):
        merged.update(spans)
    return merged


async def _ask(engine: Any, method: str, *args: Any) -> list[Any]:
    try:
        return await call_every_core(engine, method, *args)
    except Exception as error:
        # vLLM's text for a failed call names it; a dead engine's error is not ours to translate.
        if method not in str(error):
            raise
        raise inactive(str(error)) from error


def inactive(found: str) -> ParityError:
    """The engine core does not keep versions, or no longer those of a request."""
    return ParityError(
        f"The engine core cannot tell which policy sampled the tokens ({found}).",
        "The plugin is not active in the engine core process, so importance ratios would be "
        "between unknown policies.",
        "install vllm-parity on every node, and include 'parity' in VLLM_PLUGINS if you set it.",
    )
