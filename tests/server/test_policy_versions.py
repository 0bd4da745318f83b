"""Which policy sampled each token, on a real server, against both policies' own logprobs.

The two policies differ in the sign of the head, so a token that one finds likely is one that the
other finds absurd, and only one of them can have sampled it. With the same body, KV from before an
update is right after it too: the reference is exact for both ``kv`` modes.

Properties:
- a request in flight over one or two updates has the old version up to the token at which the
  weights changed and the new one from there, proven by the logprobs of every token (W4);
- a request that ended before is wholly old; one that was queued is wholly new.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.client import Client, sequences
from tests.models import Kind, weights_of
from tests.reference import reference
from vllm_parity_plugin.rollout_wire import Rollout
from vllm_parity_plugin.serving import Server

Tensors = dict[str, torch.Tensor]
PROMPT = [(7 * i) % 500 + 3 for i in range(60)]
TOKENS, STEP = 120, 10
SHARP = 0.1
"""Temperature at which no token is likely under both policies."""
SAME, APART = 1.0, 10.0
"""Largest and smallest distance of a token's logprob from its own policy's and from the other's;
0.26 and 20 were measured."""


class Sky:
    """A server whose requests stay in flight, and its two policies."""

    def __init__(self, server: Server, path: Path, brake: Path) -> None:
        self.server, self.path, self._brake = server, path, brake
        self.client = Client(server)
        self.plus = weights_of(path)
        self.minus = self.plus | {"lm_head.weight": -self.plus["lm_head.weight"]}
        self._pool = ThreadPoolExecutor(4)

    def launch(self, seed: int = 0) -> Future[Rollout]:
        """A request of ``TOKENS`` tokens, in a thread of its own."""
        return self._pool.submit(
            Client(self.server).rollout,
            [PROMPT],
            seeds=[seed],
            max_tokens=TOKENS,
            temperature=SHARP,
            ignore_eos=True,
        )

    def wait(self, flight: Future[Rollout], tokens: int = STEP) -> None:
        """Until the server has produced this many more tokens."""
        target = self.client.metric("vllm:generation_tokens_total") + tokens
        while self.client.metric("vllm:generation_tokens_total") < target:
            assert not flight.done()
            time.sleep(0.05)

    def update(self, weights: Tensors, **body: Any) -> int:
        """Change the policy; the version it has now."""
        answer = self.client.update(weights, **body)
        assert answer.status_code == 200, answer.text
        version: int = answer.json()["policy_version"]
        return version

    def land(self, *flights: Future[Rollout]) -> list[Rollout]:
        self._brake.unlink()
        return [flight.result(timeout=100) for flight in flights]

    def close(self) -> None:
        self._brake.unlink(missing_ok=True)
        self.client.http.post("/v1/parity/resume")
        self._pool.shutdown()
        self.update(self.plus)

    def proves(self, found: Rollout, policies: dict[int, Tensors]) -> None:
        """Every token has its version's logprob, and no other policy's."""
        logprobs = {
            version: reference(
                self.path, [PROMPT], sequences(found), temperature=SHARP, weights=weights
            )
            for version, weights in policies.items()
        }
        versions = found.policy_versions.tolist()
        own = [logprobs[version][i] for i, version in enumerate(versions)]
        assert np.abs(found.logprobs - own).max() <= SAME
        for policy, expected in logprobs.items():
            other = [policies[version] is not policies[policy] for version in versions]
            assert (np.abs(found.logprobs - expected)[other] >= APART).all()


@pytest.fixture
def sky(
    untied_server: Server, tiny_model: Callable[[Kind], Path], fault: dict[str, str]
) -> Iterator[Sky]:
    """In flight: every step takes long until the flights land."""
    brake = Path(fault["PARITY_TEST_BRAKE"])
    sky = Sky(untied_server, tiny_model("gc"), brake)
    brake.touch()
    yield sky
    sky.close()


def runs(versions: np.ndarray) -> list[tuple[int, int]]:
    """(version, tokens) of every stretch of one version."""
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1), len(versions)]
    return [(int(versions[a]), int(b - a)) for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_w4_versions_over_one_update(sky: Sky, kv: str) -> None:
    """W4: two requests that are not equally far each change at their own token."""
    old = sky.client.status().policy_version
    first = sky.launch()
    sky.wait(first)
    second = sky.launch(seed=1)
    sky.wait(second)
    new = sky.update(sky.minus, kv=kv)
    lengths = []
    for found in sky.land(first, second):
        (before, length), (after, rest) = runs(found.policy_versions)
        assert (before, after, length + rest) == (old, new, TOKENS)
        sky.proves(found, {old: sky.plus, new: sky.minus})
        lengths.append(length)
    assert lengths[0] - STEP // 2 >= lengths[1] > 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_w4_versions_over_two_updates(sky: Sky, kv: str) -> None:
    """W4: three stretches; the first policy comes back under a new version."""
    old = sky.client.status().policy_version
    flight = sky.launch()
    sky.wait(flight)
    middle = sky.update(sky.minus, kv=kv)
    sky.wait(flight)
    new = sky.update(sky.plus, kv=kv)
    (found,) = sky.land(flight)
    assert [version for version, _ in runs(found.policy_versions)] == [old, middle, new]
    assert min(length for _, length in runs(found.policy_versions)) >= STEP // 2
    sky.proves(found, {old: sky.plus, middle: sky.minus, new: sky.plus})


def test_requests_that_ended_before_or_were_queued(sky: Sky) -> None:
    """Wholly old, and wholly new; the queued one has no token when the weights change."""
    old = sky.client.status().policy_version
    ended = sky.client.rollout([PROMPT], seeds=[0], max_tokens=STEP, temperature=SHARP)
    assert sky.client.http.post("/v1/parity/pause").status_code == 204
    queued = sky.launch()
    time.sleep(1.0)
    assert not queued.done()
    new = sky.update(sky.minus)
    assert sky.client.http.post("/v1/parity/resume").status_code == 204
    (begun,) = sky.land(queued)
    policies = {old: sky.plus, new: sky.minus}
    for found, version, tokens in ((ended, old, STEP), (begun, new, TOKENS)):
        assert runs(found.policy_versions) == [(version, tokens)]
        sky.proves(found, policies)
