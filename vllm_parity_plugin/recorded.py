"""What the front end asks the engine cores: which policy is served, and what they recorded.

The other side of `core_records.py`: for an API server (``mark_version``, ``take``) and for an
``LLM`` in this process (``take_colocated``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_parity_plugin.compat import call_core, call_every_core
from vllm_parity_plugin.core_records import Spans
from vllm_parity_plugin.errors import ParityError


@dataclass(frozen=True)
class Recorded:
    """What the core recorded about a sequence of T tokens.

    Attributes:
        spans: which policy sampled which tokens.
        ids: [T, 1 + K] int32, the sampled token first, then the head.
        logprobs: [T, 1 + K] float32.
    """

    spans: Spans
    ids: np.ndarray
    logprobs: np.ndarray

    def versions(self, tokens: int) -> np.ndarray:
        """[T] int32, the policy version of each of ``tokens`` tokens.

        Spans ``[[0, 4], [3, 5]]`` and 5 tokens give ``[4, 4, 4, 5, 5]``. A span from the last
        token on (the request ended during the update) is empty.
        """
        starts, versions = np.asarray(self.spans, dtype=np.int32).T
        return versions[np.searchsorted(starts, np.arange(tokens), side="right") - 1]


async def mark_version(engine: Any, version: int) -> None:
    """Tell every engine core that the weights are now ``version``; generation must be paused.

    Raises:
        ParityError: a core does not know the call.
    """
    await _ask(engine, "parity_mark_version", version)


async def take(engine: Any, request_ids: list[str]) -> dict[str, Recorded]:
    """Records of requests that have ended, from whichever core ran each; asked once only.

    Raises:
        ParityError: a core does not know the call, or no core knows a request.
    """
    merged: dict[str, Recorded] = {}
    for packed in await _ask(engine, "parity_take", request_ids):
        merged.update(_unpacked(packed))
    return _all_of(merged, request_ids)


def take_colocated(llm: Any, request_ids: list[str]) -> dict[str, Recorded]:
    """The same from the engine core of an ``LLM``.

    Raises:
        ParityError: see :func:`take`.
    """
    with _translated("parity_take"):
        packed = call_core(llm.llm_engine, "parity_take", request_ids)
    return _all_of(_unpacked(packed), request_ids)


def _unpacked(packed: dict[str, list[Any]]) -> dict[str, Recorded]:
    return {
        key: Recorded(
            spans,
            np.frombuffer(ids, dtype=np.int32).reshape(-1, width),
            np.frombuffer(logprobs, dtype=np.float32).reshape(-1, width),
        )
        for key, (spans, width, ids, logprobs) in packed.items()
    }


def _all_of(found: dict[str, Recorded], request_ids: list[str]) -> dict[str, Recorded]:
    if missing := len(request_ids) - len(found):
        raise inactive(f"{missing} of {len(request_ids)} requests are unknown to it")
    return found


async def _ask(engine: Any, method: str, *args: Any) -> list[Any]:
    with _translated(method):
        return await call_every_core(engine, method, *args)


@contextmanager
def _translated(method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # vLLM's text for a failed call names it; a dead engine's error is not ours to translate.
        if method not in str(error):
            raise
        raise inactive(str(error)) from error


def inactive(found: str) -> ParityError:
    """The engine core keeps no records, or no longer those of a request."""
    return ParityError(
        f"The engine core cannot tell which policy sampled the tokens ({found}).",
        "The plugin is not active in the engine core process, so importance ratios would be "
        "between unknown policies.",
        "install vllm-parity on every node, and include 'parity' in VLLM_PLUGINS if you set it.",
    )
