"""What the laboratory does to a server: a pure description, no server and no tensor in it."""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass
from typing import Literal

Host = Literal["keep", "none", "ranks"]
Outcome = Literal["refused", "repeated", "old", "new", "restored", "healed", "dead"]
"""What a scenario may end in.

refused: told so, the old weights serve. repeated: told that this version is served already. old:
nobody was told anything, the old weights serve. new: the new weights serve. restored: HTTP 500, the
old weights were loaded again. healed: no complete policy was loaded, every route said so, and a
full update healed it. dead: the engine process was killed, and no request is answered any more.
"""

FILE, HTTP = ("file",), ("http",)
BOTH = ("file", "http")
FULL, PARTIAL = ("full",), ("changed", "lora")
ALL = ("full", "changed", "lora")


@dataclass(frozen=True)
class Row:
    """A fault, and the ways in which it is tried.

    Attributes:
        family: rows of the published table.
        action: what happens; ``actions.py`` has it by this name.
        what: parameter of the action.
        allowed: the only outcomes that are right.
        count: scenarios, which go through transports x kinds in turn; 0 is one of each.
        flight: None lets the seed decide whether a request is in flight.
    """

    family: str
    action: str
    what: str
    allowed: tuple[Outcome, ...]
    transports: tuple[str, ...] = BOTH
    kinds: tuple[str, ...] = FULL
    count: int = 0
    flight: bool | None = None


@dataclass(frozen=True)
class Scenario:
    """One thing that goes wrong, reproducible from its name and seed."""

    host: Host
    row: Row
    transport: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        """How a failure is reported."""
        what = f"{self.row.action}-{self.row.what}" if self.row.what else self.row.action
        return f"{self.host}/{what}/{self.transport}/{self.kind}/seed{self.seed}"

    def rng(self) -> random.Random:
        """All that is random about it."""
        return random.Random(hashlib.sha256(self.name.encode()).digest())

    @property
    def kv(self) -> Literal["keep", "recompute"]:
        """What becomes of KV of requests in flight."""
        return "keep" if self.seed % 2 else "recompute"

    @property
    def flight(self) -> bool:
        """Whether a generation request is in flight while it happens."""
        if self.row.flight is not None:
            return self.row.flight
        return random.Random(f"{self.name} flight").random() < 0.2


def spoilt(
    names: str,
    allowed: tuple[Outcome, ...] = ("refused",),
    family: str = "spoilt bytes",
    transports: tuple[str, ...] = BOTH,
    kinds: tuple[str, ...] = FULL,
    count: int = 0,
) -> list[Row]:
    """Rows of updates that are spoilt before they are sent."""
    return [Row(family, "send", name, allowed, transports, kinds, count) for name in names.split()]


NEW: tuple[Outcome, ...] = ("new",)
REFUSED: tuple[Outcome, ...] = ("refused",)
EITHER: tuple[Outcome, ...] = ("old", "new")

UPDATES = [
    *spoilt("nothing", NEW, "good update", kinds=ALL),
    *spoilt("reorder as_float32 upper_checksum skipping", NEW, "good update"),
    *spoilt("no_manifest no_checksum", NEW, "good update", transports=FILE, kinds=ALL, count=2),
    *spoilt("flip_bit flip_bits", kinds=ALL),
    *spoilt("flip_header", transports=FILE, kinds=ALL, count=6),
    *spoilt("zero_page swap_data"),
    *spoilt("truncate_data", kinds=ALL, count=4),
    *spoilt("truncate_header empty_file append_bytes", transports=FILE, count=2),
    *spoilt("not_finite", kinds=ALL),
    *spoilt("overflow", count=2),
]
TENSORS = [
    *spoilt("drop_tensor rename_tensor", family="tensors"),
    *spoilt("add_tensor", family="tensors", kinds=("full", "changed"), count=3),
    *spoilt("drop_from_manifest", family="tensors", count=2),
    *spoilt("drop_from_file swap_names", family="tensors", transports=FILE, count=2),
    *spoilt("share_bytes", family="tensors", count=2),
    *spoilt("duplicate_name", family="tensors", transports=FILE),
    *spoilt("reorder_entries", family="tensors", transports=HTTP),
    *spoilt("transpose flatten resize wrong_dtype", family="tensors", kinds=("full", "changed")),
    *spoilt("unknown_dtype", family="tensors"),
    *spoilt("half_pair other_target swapped_pair", family="tensors", kinds=("lora",)),
    *spoilt("endless_scaling", ("refused", "restored"), "tensors", kinds=("lora",), count=4),
    *spoilt("huge_adapter", ("restored",), "tensors", kinds=("lora",)),
]
MANIFESTS = [
    *spoilt("wrong_checksum wrong_offsets wrong_model", family="manifest"),
    *spoilt("no_manifest no_checksum", family="manifest", transports=HTTP),
    *spoilt("wrong_header_offsets", family="manifest", transports=FILE, count=2),
    *spoilt("older", family="manifest", kinds=ALL, count=4),
    *spoilt("repeated", ("repeated",), family="manifest", transports=FILE, count=2),
    *spoilt("repeated", family="manifest", transports=HTTP),
    *spoilt("impossible_version unknown_field", family="manifest", count=2),
    *spoilt("wrong_base no_base", family="manifest", kinds=PARTIAL),
    *spoilt("base_of_full", family="manifest"),
]


def killed(
    phases: str,
    transport: str,
    allowed: tuple[Outcome, ...],
    count: int = 3,
    kinds: tuple[str, ...] = ALL,
) -> list[Row]:
    """Rows of trainers that are killed at a phase."""
    return [
        Row("trainer killed", "kill_trainer", phase, allowed, (transport,), kinds, count)
        for phase in phases.split()
    ]


KILLED = [
    *killed("ready writing unsent", "file", ("old",)),
    *killed("sent", "file", EITHER, 6),
    *killed("answered", "file", NEW),
    *killed("ready writing unopened", "http", ("old",)),
    *killed("open-sent opened mid-put put", "http", ("old",)),
    *killed("commit-sent", "http", EITHER, 6),
    *killed("committed done", "http", NEW),
    Row("trainer killed", "kill_trainer", "mid-put-timeout", ("old",), HTTP, FULL),
    Row("trainer killed", "reclaim", "", ("old",), FILE, ALL, 1),
]
NOT_A_FILE = ("missing", "directory", "symlink", "dangling", "fifo", "socket")
MISPLACED = (*NOT_A_FILE, "hidden", "parent", "absolute")
STAGED = [
    *[
        Row("staged file", "misplaced", what, REFUSED, FILE)
        for what in [
            "missing",
            "directory",
            "symlink",
            "dangling",
            "fifo",
            "socket",
            "hidden",
            "parent",
            "absolute",
        ]
    ],
    Row("staged file", "rewritten_in_request", "", REFUSED, FILE, count=2),
    *[
        Row("staged file", "tampered_before_load", what, ("restored",), FILE, ALL, 2)
        for what in ["write", "truncate", "delete", "symlink", "replace"]
    ],
    Row("staged file", "kept_set_lost", "delete", ("healed",), BOTH),
    Row("staged file", "kept_set_lost", "write", ("healed",), BOTH),
    Row("staged file", "kept_set_lost", "truncate", ("healed",), FILE),
    Row("staged file", "base_lost", "delete", REFUSED, BOTH, PARTIAL, 2),
    Row("staged file", "base_lost", "write", REFUSED, BOTH, PARTIAL, 2),
]
DISK = [
    Row("disk full", "disk_full", "before_write", REFUSED, FILE, ALL, 2),
    Row("disk full", "disk_full", "before_request", ("refused", "new"), FILE, ALL, 2),
    Row("disk full", "disk_full", "before_open", REFUSED, HTTP, ALL, 2),
    Row("disk full", "disk_full", "room_for_data_only", REFUSED, HTTP),
    Row("disk full", "disk_full", "before_put", ("refused", "new"), HTTP),
    Row("disk full", "disk_full", "before_commit", ("refused", "new"), HTTP, ALL, 2),
    Row("disk full", "disk_full", "server_limit_open", REFUSED, HTTP),
    Row("disk full", "disk_full_failing", "restored", ("restored",), FILE),
    Row("disk full", "disk_full_failing", "healed", ("healed",), FILE),
    Row("permission lost", "read_only", "before_request", REFUSED, FILE, ALL, 2),
    Row("permission lost", "read_only", "before_open", REFUSED, HTTP),
    Row("permission lost", "read_only", "before_put", REFUSED, HTTP),
    Row("permission lost", "read_only", "before_commit", REFUSED, HTTP),
    Row("permission lost", "read_only", "while_loading", ("new",), BOTH, count=2),
]
CONCURRENT = [
    Row("concurrent updates", "race", "versions", NEW, BOTH, count=4),
    Row("concurrent updates", "race", "same_version", NEW, BOTH, count=4),
    Row("concurrent updates", "race", "mixed", NEW, BOTH, count=4),
    Row("concurrent updates", "rival_of_upload", "", NEW, HTTP, ALL, 2),
    Row("concurrent updates", "commit_twice", "", NEW, HTTP, count=2),
]
BY_HAND = ("paused_before", "pause_in_upload", "resume_twice", "pause_twice", "resume_first")
LIFECYCLE = [
    *[
        Row("pause and resume", "by_hand", what, NEW, BOTH, ALL, 2)
        for what in [
            "paused_before",
            "pause_in_upload",
            "resume_twice",
            "pause_twice",
            "resume_first",
        ]
    ],
    Row("pause and resume", "by_hand_while_applying", "", NEW, BOTH, ALL, 3),
    Row("pause and resume", "paused_and_failing", "", ("restored",), BOTH),
]
CALLERS = [
    *[
        Row("wrong caller", "stranger", what, REFUSED, BOTH)
        for what in ["forwarded", "via", "real_ip", "host", "origin"]
    ],
]
TOKENS = [
    *[
        Row("wrong caller", "stranger", what, REFUSED, BOTH)
        for what in ["no_token", "wrong_token", "token_prefix", "other_scheme", "forwarded"]
    ],
    Row("wrong caller", "stranger_at_upload", "", NEW, HTTP, count=2),
]
DISCONNECTS = [
    Row("disconnect", "hang_up", "after_request", EITHER, FILE, ALL, 3),
    Row("disconnect", "hang_up", "in_body", ("old",), BOTH, count=2),
    Row("disconnect", "hang_up", "random", EITHER, FILE, ALL, 5),
    Row("disconnect", "hang_up", "while_applying", NEW, BOTH, ALL, 3),
    Row("disconnect", "resumed_upload", "", NEW, HTTP, ALL, 3),
    Row("disconnect", "commit_hang_up", "", EITHER, HTTP, ALL, 3),
]


def loads(allowed: Outcome, names: str, kinds: tuple[str, ...] = FULL, count: int = 1) -> list[Row]:
    """Rows of loads that go wrong in the worker."""
    return [
        Row("failed load", "load", name, (allowed,), BOTH, kinds, count) for name in names.split()
    ]


LOADS = [
    *loads("restored", "after-0 after-1 after-4 after-9 after-17 after-22 after-1000", ALL, 2),
    *loads("restored", "drop-k_proj drop-up_proj drop-o_proj drop-embed drop-lm_head drop-norm"),
    *loads("restored", "drop-layers.1.mlp.down_proj drop-q_norm drop-layers.0"),
    *loads("restored", "drop-layers.1", ("changed",)),
    *loads("healed", "after-3-always after-20-always", ALL, 2),
    Row("failed load", "failing_restore_then", "everything", ("healed",), BOTH, count=2),
]
NONE = [
    *spoilt("nothing", NEW, "good update"),
    *spoilt("flip_bit drop_tensor not_finite wrong_checksum older", count=2),
    *[Row("partial without a copy", "send", "nothing", REFUSED, BOTH, (kind,)) for kind in PARTIAL],
    *loads("healed", "after-0 after-5 after-18 after-1000 drop-v_proj drop-embed", count=2),
    Row("failed load", "failing_restore_then", "everything", ("healed",), BOTH, count=2),
    Row("disk full", "disk_full_failing", "healed", ("healed",), FILE),
    Row("disconnect", "hang_up", "while_applying", NEW, BOTH, count=2),
    *killed("writing", "file", ("old",), 1, FULL),
    *killed("sent", "file", EITHER, 1, FULL),
    *killed("answered", "file", NEW, 1, FULL),
    *killed("opened", "http", ("old",), 1, FULL),
    *killed("commit-sent", "http", EITHER, 1, FULL),
]
RANKS = [
    *spoilt("nothing", NEW, "good update", kinds=ALL),
    *[
        Row("failed load", "load", f"after-{k}-rank{rank}", ("restored",), BOTH, ALL, 2)
        for k, rank in itertools.product((0, 9, 1000), (0, 1))
    ],
    *loads("restored", "drop-k_proj-rank0 drop-gate_proj-rank1 drop-lm_head-rank1"),
    *loads("healed", "after-5-always-rank0 after-12-always-rank1"),
    Row("concurrent updates", "race", "versions", NEW, BOTH, count=2),
    *killed("sent", "file", EITHER, 1),
]
ENGINE: dict[Host, list[Row]] = {
    "keep": [Row("worker killed", "kill_worker", "applying", ("dead",), FILE, flight=True)],
    "none": [Row("worker killed", "kill_worker", "idle", ("dead",), HTTP, flight=True)],
    "ranks": [Row("worker killed", "kill_worker", "one_rank", ("dead",), FILE, flight=True)],
}
"""The last of every server."""

GROUPS: dict[Host, dict[str, list[Row]]] = {
    "keep": {
        "updates": UPDATES,
        "tensors": TENSORS,
        "manifests": MANIFESTS,
        "killed trainers": KILLED,
        "staged files": STAGED,
        "disk": DISK,
        "concurrency": CONCURRENT,
        "pause and resume": LIFECYCLE,
        "callers": CALLERS,
        "disconnects": DISCONNECTS,
        "loads": LOADS,
    },
    "none": {"tokens": TOKENS, "no copy": NONE},
    "ranks": {"two ranks": RANKS},
}


def expand(host: Host, row: Row, repeat: int = 0) -> list[Scenario]:
    """The scenarios of a row; ``repeat`` gives others of the same kind."""
    ways = list(itertools.product(row.kinds, row.transports))
    count = row.count or len(ways)
    if count < len(ways):  # some of them, and not always the first
        random.Random(f"{host} {row.action} {row.what} {repeat}").shuffle(ways)
    return [
        Scenario(host, row, *ways[i % len(ways)][::-1], seed=repeat * 1000 + i)
        for i in range(count)
    ]


def scenarios(host: Host, group: str | None = None, repeats: int = 1) -> list[Scenario]:
    """All scenarios of one server, or of one of its groups; the deadly one is not among them."""
    groups = GROUPS[host] if group is None else {group: GROUPS[host][group]}
    rows = [row for rows in groups.values() for row in rows]
    return [s for repeat in range(repeats) for row in rows for s in expand(host, row, repeat)]


def last(host: Host) -> list[Scenario]:
    """What kills the server's engine."""
    return [scenario for row in ENGINE[host] for scenario in expand(host, row)]
