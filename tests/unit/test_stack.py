"""What a server's weights are made of.

Properties:
- a full update replaces everything, an adapter replaces an adapter, a change lies on top (W8);
- a partial update fits exactly one base, and only where its base can be read again (W7, W18);
- the number of kept files is bounded;
- whole decoder layers are loaded together, experts included, and nothing else.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from vllm_parity_plugin.weights.errors import ConflictError
from vllm_parity_plugin.weights.messages import Manifest
from vllm_parity_plugin.weights.stack import (
    CHECKPOINT,
    MAX_LAYERS,
    Layer,
    Stack,
    adapter_base,
    check_base,
    extend,
    group,
    losing_adapter,
    together,
)


def layer(version: int, kind: str, file: str | None = "kept") -> Layer:
    return Layer(version=version, kind=kind, file=file)


def update(kind: str, base: int | None, version: int = 99) -> Manifest:
    return Manifest(version=version, kind=kind, base_version=base)


def stack_of(*kinds: str) -> Stack:
    """The checkpoint, then updates 1, 2, ... of these kinds."""
    stack = CHECKPOINT
    for version, kind in enumerate(kinds, start=1):
        stack = extend(stack, layer(version, kind))
    return stack


def shape(stack: Stack) -> list[tuple[int, str]]:
    return [(part.version, part.kind) for part in stack]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], [(0, "checkpoint")]),
        (["full"], [(1, "full")]),
        (["changed", "full"], [(2, "full")]),
        (["lora"], [(0, "checkpoint"), (1, "lora")]),
        (["full", "changed", "changed"], [(1, "full"), (2, "changed"), (3, "changed")]),
        (["full", "lora", "lora"], [(1, "full"), (3, "lora")]),
        (["full", "lora", "changed"], [(1, "full"), (2, "lora"), (3, "changed")]),
        (
            ["full", "lora", "changed", "lora", "lora"],
            [(1, "full"), (2, "lora"), (3, "changed"), (5, "lora")],
        ),
    ],
)
def test_what_lies_on_what(kinds: list[str], expected: list[tuple[int, str]]) -> None:
    assert shape(stack_of(*kinds)) == expected


@given(st.lists(st.sampled_from(["full", "changed", "lora"]), max_size=12))
def test_algebra(kinds: list[str]) -> None:
    """Whatever came: one base below, versions rise, no adapter on an adapter, the newest on top."""
    stack = stack_of(*kinds)
    assert [part.kind in {"full", "checkpoint"} for part in stack] == [True] + [False] * (
        len(stack) - 1
    )
    versions = [part.version for part in stack]
    assert versions == sorted(set(versions)) and versions[-1] == len(kinds)
    assert not any(a.kind == b.kind == "lora" for a, b in pairwise(stack))
    assert adapter_base(stack) <= versions[-1]
    assert (adapter_base(stack) == versions[-1]) == (stack[-1].kind != "lora")


@given(
    st.lists(st.sampled_from(["full", "changed", "lora"]), max_size=6),
    st.sampled_from(["changed", "lora"]),
    st.integers(0, 8),
)
def test_one_base_fits(kinds: list[str], kind: str, base: int) -> None:
    """W18: a change builds on what is served, an adapter on what lies under the served adapter."""
    stack = stack_of(*kinds)
    right = stack[-1].version if kind == "changed" else adapter_base(stack)
    if base == right:
        check_base(stack, update(kind, base))
    else:
        with pytest.raises(ConflictError, match=f"builds on policy version {base}"):
            check_base(stack, update(kind, base))


def test_a_full_update_fits_anything() -> None:
    forgotten = (layer(3, "full", file=None),)
    for stack in (CHECKPOINT, forgotten, stack_of("full", *["changed"] * 20)):
        check_base(stack, update("full", None))


@pytest.mark.parametrize("kind", ["changed", "lora"])
def test_a_base_that_was_not_kept(kind: str) -> None:
    """Rollback none: a fused weight cannot be put together from its changed part alone. The
    checkpoint can always be read again."""
    with pytest.raises(ConflictError, match="keeps no copy"):
        check_base((layer(3, "full", file=None),), update(kind, 3))
    check_base(CHECKPOINT, update(kind, 0))


def test_files_are_bounded() -> None:
    """Fifteen updates on top of a base fit, one more does not; a full one starts over."""
    kinds = ["full"] + ["changed"] * (MAX_LAYERS - 2)
    check_base(stack_of(*kinds), update("changed", len(kinds)))
    full = stack_of(*kinds, "changed")
    assert len(full) == MAX_LAYERS
    for kind in ("changed", "lora"):
        with pytest.raises(ConflictError, match="15 partial updates"):
            check_base(full, update(kind, len(kinds) + 1))
    assert len(extend(full, layer(99, "full"))) == 1


def test_an_adapter_that_replaces_one_needs_no_room() -> None:
    """At the bound, the next adapter takes the place of the last: as many files as before."""
    kinds = ["full"] + ["changed"] * (MAX_LAYERS - 2) + ["lora"]
    stack = stack_of(*kinds)
    assert len(stack) == MAX_LAYERS
    check_base(stack, update("lora", adapter_base(stack)))
    assert len(extend(stack, layer(99, "lora"))) == MAX_LAYERS


def test_what_loses_its_adapter(tmp_path: Path) -> None:
    """The targets of the adapter that is replaced, however few the next one has; under a change
    an adapter stays, and over a full update everything is loaded anyway."""
    pairs = {f"{base}.lora_{part}": np.zeros((1, 1)) for base in ("b.q", "a.v") for part in "AB"}
    save_file(pairs, tmp_path / "adapter")
    below = stack_of("full")
    served = extend(below, layer(2, "lora", str(tmp_path / "adapter")))
    assert sorted(losing_adapter(served, "lora")) == ["a.v.weight", "b.q.weight"]
    assert losing_adapter(served, "changed") == losing_adapter(served, "full") == []
    changed = extend(served, layer(3, "changed"))
    assert losing_adapter(changed, "lora") == losing_adapter(below, "lora") == []


EXPERT = "model.layers.3.mlp.experts.7.gate_proj.weight"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
        (EXPERT, "model.layers.3"),
        ("model.layers.31.mlp.gate.weight", "model.layers.31"),
        ("transformer.h.0.attn.c_attn.weight", "transformer.h.0"),
        ("visual.blocks.2.attn.qkv.weight", "visual.blocks.2"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers3.weight", "model.layers3.weight"),
    ],
)
def test_groups(name: str, expected: str) -> None:
    """A decoder layer is one group: its experts are fused into one weight, over their numbers."""
    assert group(name) == expected


def test_together() -> None:
    """One expert of layer 3 brings all of layer 3, and not layer 31; the head brings itself."""
    names = [
        "model.embed_tokens.weight",
        "model.layers.3.self_attn.q_proj.weight",
        *(
            f"model.layers.3.mlp.experts.{e}.{p}_proj.weight"
            for e in (0, 7)
            for p in ("up", "gate")
        ),
        "model.layers.31.mlp.experts.7.gate_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert together([EXPERT], names) == {name for name in names if "layers.3." in name}
    assert together(["lm_head.weight"], names) == {"lm_head.weight"}
    assert together([], names) == set()
    assert together(names, names) == set(names)
