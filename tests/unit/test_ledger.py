"""The patch ledger, against a small module.

Properties:
- a patch applies once, is marked, and keeps the original's name;
- a missing symbol, a missing parent and a taken name are errors that name the symbol and the cost;
- a row of the real table has every column, and names are unique.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.install import PATCHES
from vllm_parity_plugin.ledger import Patch

MODULE = "a_module_to_patch"


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """``Base.method`` and ``Child(Base)``, importable by name."""
    created = types.ModuleType(MODULE)

    class Base:
        def method(self) -> str:
            """The original."""
            return "original"

        @staticmethod
        def static(word: str) -> str:
            return word

    created.Base = Base
    created.Child = type("Child", (Base,), {})
    sys.modules[MODULE] = created
    yield created
    del sys.modules[MODULE]


def patch(attribute: str, wrap: Callable[[Any], Any], **more: Any) -> Patch:
    text = {"why": "x drifts", "versions": "1", "upstream": "none", "delete_when": "never"}
    return Patch(name="test", module=MODULE, attribute=attribute, wrap=wrap, **text, **more)


def louder(original: Any) -> Any:
    def replacement(self: Any) -> str:
        return original(self) + "!"

    return replacement


def test_a_static_method_stays_one(module: Any) -> None:
    """Called through an instance it gets no self, and the second time nothing happens."""
    row = patch("Base.static", lambda original: lambda word: original(word) + "!")
    assert (row.apply(), row.apply()) == (True, False)
    assert module.Base().static("a") == module.Base.static("a") == "a!"


def test_a_patch_applies_once(module: Any) -> None:
    """Idempotent: the second time reports False and does not wrap again."""
    row = patch("Base.method", louder)
    assert row.apply() is True
    assert row.apply() is False
    assert module.Base().method() == "original!"
    assert module.Base.method.__doc__ == "The original."


@pytest.mark.parametrize("attribute", ["Base.renamed", "Gone.method", "Child.method"])
def test_h6_a_missing_symbol(module: Any, attribute: str) -> None:
    """H6: renamed, gone with its class, or only inherited: an error, and nothing is changed."""
    with pytest.raises(ParityError) as caught:
        patch(attribute, louder).apply()
    assert f"{MODULE}.{attribute} (test)" in str(caught.value)
    assert "Without this patch x drifts." in str(caught.value)
    assert module.Child().method() == "original"


def test_h6_a_taken_name(module: Any) -> None:
    """H6: a method that the plugin adds must not exist; an inherited one does not count."""
    with pytest.raises(ParityError, match="already exists"):
        patch("Base.method", lambda original: print, adds=True).apply()
    added = patch("Child.method", lambda original: lambda self: "ours", adds=True)
    assert added.apply() is True
    assert added.apply() is False
    assert (module.Child().method(), module.Base().method()) == ("ours", "original")


def test_rows_are_complete() -> None:
    """Every row of the real ledger fills every column."""
    assert len({row.name for row in PATCHES}) == len(PATCHES)
    for row in PATCHES:
        assert all((row.module, row.attribute, row.why, row.upstream, row.delete_when)), row.name
        assert row.versions[:2] == "0.", row.name
