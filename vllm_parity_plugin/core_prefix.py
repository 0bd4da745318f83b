"""The prefix cache, keyed by policy: what an engine core computes under one policy is never found
by a request that another policy computes.

vLLM's block hashes form a chain from a request's first block on, and its cache salt is part of that
block. In the engine core's own thread, between two steps, every request gets a salt that is drawn
anew at every commit. So requests of one policy share their prefixes, and after a commit no block
from before it can be found. Nothing is cleared: old blocks leave the cache as the oldest do.

The salt is random, not only the version: an update that is taken back marks the old version again,
and a store of KV that several engines share must not mix theirs.
"""

from __future__ import annotations

import secrets
from typing import Any

from vllm_parity_plugin.settings import load_settings
from vllm_parity_plugin.wire import PrefixCaching

SALT = "_parity_salt"
"""Attribute of the scheduler: the salt of requests that begin now; empty where there is none."""
USER_SALT = "_parity_user_salt"
"""Attribute of a request: the salt that it came with, or None."""
HOLDING = {"RUNNING", "WAITING_FOR_REMOTE_KVS"}
"""Statuses of a request that holds KV, whatever its count of computed tokens says."""


def prefix_caching(vllm_config: Any) -> PrefixCaching:
    """What a resolved ``VllmConfig`` does with prefixes.

    The rules turn the cache off, or on for the setting ``versioned``. So where they are enforced,
    a cache that is on is keyed, also in a process that does not have the setting's variable.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        return "off"
    enforced = load_settings(vllm_config.additional_config).mode in {"enforce", "strict"}
    return "versioned" if enforced and _generates(vllm_config) else "on"


def _generates(vllm_config: Any) -> bool:
    return bool(vllm_config.model_config.runner_type == "generate")


def salt_request(core: Any, request: Any) -> None:
    """Key a request that the scheduler is about to get.

    Its hashes were made in vLLM's input thread, to which an update is nothing: they are made again.
    """
    if salt := _salt(core):
        _key(request, salt)


def new_salt(core: Any, version: int) -> None:
    """From here on policy ``version`` computes; called at every commit, while generation is paused.

    A request without KV (queued, or preempted) gets the new salt: its old one would lead it to KV
    of the old policy. One that holds KV keeps its own: what it computes from here on stands on old
    KV, so it may be found only by requests of its own time. They are those that ``kv="keep"`` let
    run on; one of them that is preempted later finds the mixture again that it had. With
    ``kv="recompute"`` the pause, which comes before this call, has preempted them all.
    """
    if not _salt(core):
        return
    salt = _fresh(version)
    setattr(core.scheduler, SALT, salt)
    for request in core.scheduler.requests.values():
        if request.num_computed_tokens == 0 and request.status.name not in HOLDING:
            _key(request, salt)


def _salt(core: Any) -> str:
    scheduler = core.scheduler
    if not hasattr(scheduler, SALT):
        versioned = prefix_caching(core.vllm_config) == "versioned"
        setattr(scheduler, SALT, _fresh(0) if versioned else "")
    salt: str = getattr(scheduler, SALT)
    return salt


def _fresh(version: int) -> str:
    return f"parity-{version}-{secrets.token_hex(8)}"


def _key(request: Any, salt: str) -> None:
    """Give a request this salt, in front of its own."""
    user = vars(request).setdefault(USER_SALT, request.cache_salt)
    request.cache_salt = salt if user is None else f"{salt}:{user}"
    request.block_hashes.clear()
    request.update_block_hashes()
