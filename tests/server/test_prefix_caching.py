"""The prefix cache keyed by policy (``prefix_caching=versioned``), on a real server.

vLLM's blocks have 128 tokens on the CPU, so a prompt of 200 tokens has one block that can be found,
and every test first sees that it is. The control, stock caching under new weights, is
``test_w1_control_stock_prefix_cache_is_stale``.

Properties:
- the completions of one prompt share its prefill, in one step and later, and are those of a server
  that caches nothing;
- after an update no prompt finds what was cached before it (W1), also after one that was taken back
  and for a request that waited during it;
- a request that ran on over an update (kv=keep) leaves nothing that a later one finds; one that was
  computed again (kv=recompute) does, and it is the new policy's;
- the table, the attestation and the handshake tell it from a cache that is not keyed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client import Client, sequences
from tests.faults import install_faults
from tests.models import Kind, noisy, weights_of
from tests.reference import reference
from tests.servers import LONG
from vllm_parity_plugin.cli.app import violations
from vllm_parity_plugin.rollout_wire import Rollout
from vllm_parity_plugin.serving import Server, serve

BLOCK, TOKENS, GROUP = 128, 24, 8
SAME, APART = 0.05, 0.3
"""Largest distance from the policy's own logprobs, and least from another's."""
ROUNDING = 1e-5
"""Batches of other sizes round otherwise; 0 to 5e-7 was measured."""


def prompt(number: int) -> list[int]:
    """200 tokens; those of two numbers differ from the first on."""
    return [(7 * i + 31 * number) % 500 + 3 for i in range(200)]


class Cached:
    """A server whose prefix cache is keyed, its model, and a policy that changes every matrix."""

    def __init__(self, server: Server, path: Path, faults: dict[str, str]) -> None:
        self.server, self.path = server, path
        self.client = Client(server)
        self.fault, self.brake, self.added = (
            Path(faults[f"PARITY_TEST_{name}"]) for name in ("FAULT", "BRAKE", "ADDED")
        )
        self.old = weights_of(path)
        self.new = noisy(self.old, seed=13)

    def ask(self, ids: list[int], **sampling: Any) -> Rollout:
        """One completion."""
        sampling = {"max_tokens": TOKENS, "ignore_eos": True, **sampling}
        return Client(self.server).rollout([ids], seeds=[0], **sampling)

    def warm(self, ids: list[int]) -> None:
        """Have a prompt cached, and see that it is."""
        self.ask(ids)
        assert self.ask(ids).cached_tokens.tolist() == [BLOCK]

    def update(self, weights: dict[str, Any], expected: int = 200, **body: Any) -> None:
        answer = self.client.update(weights, **body)
        assert answer.status_code == expected, answer.text

    def distance(self, ids: list[int], found: Rollout, weights: dict[str, Any]) -> float:
        """From what a fresh model with these weights says of the same tokens."""
        expected = reference(self.path, [ids], sequences(found), weights=weights)
        return float(np.abs(found.logprobs - expected).max())

    def serves(self, ids: list[int], found: Rollout, right: Any, wrong: Any) -> None:
        """The completion is of one policy, and not of the other."""
        assert self.distance(ids, found, right) < SAME
        assert self.distance(ids, found, wrong) > APART


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install_faults(tmp_path_factory.mktemp("cached-faults"))


@pytest.fixture(scope="module")
def versioned_server(
    tiny_model: Callable[[Kind], Path], faults: dict[str, str]
) -> Iterator[Server]:
    env = {**faults, "VLLM_PARITY_PREFIX_CACHING": "versioned"}
    with serve(tiny_model("untied"), *LONG, env=env) as running:
        yield running


@pytest.fixture
def cached(
    versioned_server: Server, tiny_model: Callable[[Kind], Path], faults: dict[str, str]
) -> Iterator[Cached]:
    subject = Cached(versioned_server, tiny_model("untied"), faults)
    yield subject
    subject.brake.unlink(missing_ok=True)
    subject.client.http.post("/v1/parity/resume")
    subject.update(subject.old)


def test_it_is_shown_and_accepted(versioned_server: Server) -> None:
    """The table says what is enforced, the attestation tells it from vLLM's own cache."""
    (row,) = [
        line
        for line in versioned_server.log_text().splitlines()
        if " enable_prefix_caching " in line
    ]
    assert "True" in row and "keyed by policy" in row
    status = Client(versioned_server).status()
    assert [worker.prefix_caching for worker in status.workers] == ["versioned"]
    assert violations(status) == []


def test_completions_of_one_prompt_share_its_prefill(cached: Cached, untied_server: Server) -> None:
    """In one request too: the first computes the block, the others of its step find it. Ids and
    logprobs are those of a server that caches nothing."""
    request = {
        "n": GROUP,
        "seeds": [11],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "head_size": 4,
    }
    found = cached.client.rollout([prompt(1)], **request)
    again = cached.client.rollout([prompt(1)], **request)
    plain = Client(untied_server).rollout([prompt(1)], **request)
    assert sorted(found.cached_tokens.tolist()) == [0, *[BLOCK] * (GROUP - 1)]
    assert again.cached_tokens.tolist() == [BLOCK] * GROUP
    assert plain.cached_tokens.tolist() == [0] * GROUP
    for other in (again, plain):
        assert sequences(found) == sequences(other)
        assert np.abs(found.logprobs - other.logprobs).max() < ROUNDING
        assert np.abs(found.head_logprobs - other.head_logprobs).max() < ROUNDING


def test_w1_an_update_ends_what_was_cached(cached: Cached) -> None:
    """W1: the next request computes its prompt with the new weights, and the one after finds it."""
    ids = prompt(2)
    cached.warm(ids)
    cached.update(cached.new)
    first, second = cached.ask(ids), cached.ask(ids)
    assert [r.cached_tokens.tolist() for r in (first, second)] == [[0], [BLOCK]]
    for found in (first, second):
        cached.serves(ids, found, cached.new, cached.old)


def test_w1_an_update_that_is_taken_back_ends_it_too(cached: Cached) -> None:
    """W1, W7: the old version is marked again, and nothing from before that is found."""
    ids, before = prompt(3), cached.client.status().policy_version
    cached.warm(ids)
    cached.fault.touch()
    cached.update(cached.new, expected=500)
    assert not cached.fault.exists()
    status = cached.client.status()
    assert (status.state, status.policy_version) == ("serving", before)
    found = cached.ask(ids)
    assert found.cached_tokens.tolist() == [0]
    cached.serves(ids, found, cached.old, cached.new)


def test_w1_a_request_that_waited_during_an_update(cached: Cached) -> None:
    """W1: its hashes were made under the old policy, and it finds none of its blocks."""
    ids = prompt(4)
    cached.warm(ids)
    assert cached.client.http.post("/v1/parity/pause").status_code == 204
    with ThreadPoolExecutor(1) as pool:
        scheduled = cached.added.read_text()
        waiting = pool.submit(cached.ask, ids)
        while cached.added.read_text() == scheduled:
            assert not waiting.done()
            time.sleep(0.05)
        cached.update(cached.new)
        assert cached.client.http.post("/v1/parity/resume").status_code == 204
        found = waiting.result(timeout=60)
    assert found.cached_tokens.tolist() == [0]
    cached.serves(ids, found, cached.new, cached.old)
    assert cached.ask(ids).cached_tokens.tolist() == [BLOCK]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_w1_blocks_of_a_request_that_ran_over_an_update(cached: Cached, kv: str) -> None:
    """W1: with ``keep`` its second block is computed by both policies, on the old one's first; no
    later prompt finds either. With ``recompute`` both are the new policy's, and shared."""
    ids = prompt(5 if kv == "keep" else 6)
    cached.warm(ids)
    cached.brake.touch()
    with ThreadPoolExecutor(1) as pool:
        target = cached.client.metric("vllm:generation_tokens_total") + 5
        flight = pool.submit(cached.ask, ids, max_tokens=80)
        while cached.client.metric("vllm:generation_tokens_total") < target:
            assert not flight.done()
            time.sleep(0.05)
        cached.update(cached.new, kv=kv)
        cached.brake.unlink()
        ran = flight.result(timeout=60)
    assert len(set(ran.policy_versions.tolist())) == 2
    longer = ids + sequences(ran)[0]
    assert len(longer) == 280
    kept = kv == "keep"
    assert cached.ask(ids).cached_tokens.tolist() == [0 if kept else BLOCK]
    # Now the new policy's first block is there in both cases; behind it only its own may be.
    for expected in (BLOCK if kept else 2 * BLOCK, 2 * BLOCK):
        found = cached.ask(longer)
        assert found.cached_tokens.tolist() == [expected]
        cached.serves(longer, found, cached.new, cached.old)
