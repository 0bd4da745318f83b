"""The salt that keys vLLM's prefix cache by policy, on fake requests and a fake pool.

Properties:
- requests of one policy share their hashes, and requests before and after a commit none, also when
  the version is the same again;
- users' own salts go on to keep requests apart;
- at a commit, requests that hold no KV get the new salt, and those that hold some keep theirs;
- what a request that ran on computes after a commit is found by no later request; without the salt
  it is (the control);
- where the cache is off, or not ours to key, nothing is touched.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_parity_plugin.core_prefix import new_salt, prefix_caching, salt_request

BLOCK = 4
PROMPT = list(range(3 * BLOCK))


class Request:
    """vLLM's request: the hash of a block is of its tokens and of all before; of the first one the
    salt is a part."""

    def __init__(self, user_salt: str | None = None) -> None:
        self.tokens = list(PROMPT)
        self.cache_salt = user_salt
        self.num_computed_tokens = 0
        self.status = SimpleNamespace(name="WAITING")
        self.block_hashes: list[int] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        for end in range((len(self.block_hashes) + 1) * BLOCK, len(self.tokens) + 1, BLOCK):
            before = self.block_hashes[-1] if self.block_hashes else self.cache_salt
            self.block_hashes.append(hash((before, *self.tokens[end - BLOCK : end])))

    def grow(self) -> None:
        """A block of output."""
        self.tokens += range(BLOCK)
        self.update_block_hashes()

    def at(self, status: str, computed: int) -> None:
        self.status, self.num_computed_tokens = SimpleNamespace(name=status), computed


def config(
    cache: bool = True, mode: str = "enforce", setting: str = "versioned", runner: str = "generate"
) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=cache),
        model_config=SimpleNamespace(runner_type=runner),
        additional_config={"parity": {"mode": mode, "prefix_caching": setting}},
    )


class Core:
    """An engine core with requests, and the hashes of the blocks in its cache."""

    def __init__(self, **settings: Any) -> None:
        self.vllm_config = config(**settings)
        self.scheduler = SimpleNamespace(requests={})
        self.pool: set[int] = set()

    def admit(self, user_salt: str | None = None) -> Request:
        """A request that waits; its hashes were made before it came here."""
        request = Request(user_salt)
        salt_request(self, request)
        self.scheduler.requests[id(request)] = request
        return request

    def commit(self, version: int = 1) -> None:
        new_salt(self, version)

    def run(self, request: Request, tokens: int = len(PROMPT)) -> None:
        """Compute a request up to so many tokens; its full blocks are cached."""
        request.at("RUNNING", tokens)
        self.pool.update(request.block_hashes[: tokens // BLOCK])

    def finds(self, request: Request) -> int:
        """Blocks that a request would take from the cache."""
        return len(list(itertools.takewhile(self.pool.__contains__, request.block_hashes)))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "versioned"),
        ({"mode": "strict"}, "versioned"),
        # The rules would have turned it off: a process that lost the variable keys it all the same.
        ({"setting": "off"}, "versioned"),
        ({"mode": "observe"}, "on"),
        ({"mode": "off"}, "on"),
        ({"runner": "pooling"}, "on"),
        ({"cache": False}, "off"),
        ({"cache": False, "mode": "observe"}, "off"),
    ],
)
def test_the_kind_of_cache(settings: dict[str, Any], kind: str) -> None:
    """Keyed exactly where the rules are enforced and the cache is on."""
    assert prefix_caching(config(**settings)) == kind
    core = Core(**settings)
    plain, found = Request(), core.admit()
    core.commit()
    assert (found.block_hashes != plain.block_hashes) == (kind == "versioned")
    assert (found.cache_salt is not None) == (kind == "versioned")


def test_one_policy_shares_and_two_do_not() -> None:
    """W1: every block's hash differs after a commit, not only the first's; after one of the same
    version (an update that was taken back) too; and another core's are others'."""
    core = Core()
    first, second = core.admit(), core.admit()
    assert first.block_hashes == second.block_hashes and len(first.block_hashes) == 3
    seen = set(first.block_hashes)
    for version in (1, 1, 0):
        core.commit(version)
        core.scheduler.requests.clear()
        hashes = core.admit().block_hashes
        assert hashes == core.admit().block_hashes
        assert not seen & set(hashes)
        seen |= set(hashes)
    assert not seen & set(Core().admit().block_hashes)


def test_users_salts_keep_requests_apart() -> None:
    """Before and after a commit; a salt that looks like ours is not taken for it."""
    core = Core()
    plain = core.admit()
    requests = [plain, *map(core.admit, ("a", "b", plain.cache_salt))]
    for _ in range(2):
        assert len({request.block_hashes[0] for request in requests}) == 4
        assert requests[1].block_hashes == core.admit("a").block_hashes
        core.commit()


def test_requests_without_kv_follow_the_policy() -> None:
    """W1: queued and preempted ones, as often as the policy changes; their hashes grow on."""
    core = Core()
    queued, preempted = core.admit(), core.admit()
    core.run(preempted)
    preempted.at("PREEMPTED", 0)
    preempted.grow()
    for version in range(2):
        core.commit(version)
        fresh = core.admit()
        assert queued.block_hashes == fresh.block_hashes
        assert preempted.block_hashes[:3] == fresh.block_hashes
        assert len(preempted.block_hashes) == 4
        assert [core.finds(request) for request in (queued, preempted, fresh)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("status", "computed"),
    [
        ("RUNNING", BLOCK + 1),
        ("RUNNING", 0),
        ("WAITING_FOR_REMOTE_KVS", 0),
        ("WAITING", BLOCK + 1),  # a session between two inputs
    ],
)
def test_requests_with_kv_keep_their_chain(status: str, computed: int) -> None:
    """W1: a block that is begun by one policy and ended by another is found by no later request;
    the request itself finds it again."""
    core = Core()
    request = core.admit()
    core.run(request, BLOCK + 1)
    before = list(request.block_hashes)
    request.at(status, computed)
    core.commit()
    assert request.block_hashes == before
    core.run(request)
    assert core.finds(core.admit()) == 0
    assert core.finds(request) == 3


@pytest.mark.parametrize("keyed", [True, False])
def test_control_without_the_salt_old_blocks_are_found(keyed: bool) -> None:
    """W1 control: the same steps on a cache that is not keyed."""
    core = Core(mode="enforce" if keyed else "observe")
    core.run(core.admit())
    assert core.finds(core.admit()) == 3
    core.commit()
    assert core.finds(core.admit()) == (0 if keyed else 3)
