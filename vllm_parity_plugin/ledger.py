"""How the plugin patches vLLM: one row per patch, marked, idempotent, and loud when it misses.

``PATCHES`` in ``install.py`` holds the rows; ``vllm-parity ledger`` prints them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_parity_plugin.errors import ParityError

MARK = "__vllm_parity__"


@dataclass(frozen=True)
class Patch:
    """One change to a vLLM symbol.

    Attributes:
        name: short name, shown in messages.
        module, attribute: the symbol; ``attribute`` may be dotted (``Class.method``).
        wrap: original (None when ``adds``) -> replacement.
        why: what goes wrong without it.
        versions: releases in which the symbol was read.
        upstream: issue or pull request it relates to.
        delete_when: when this row can go.
        adds: the symbol must *not* exist yet (a new method) instead of being wrapped.
    """

    name: str
    module: str
    attribute: str
    wrap: Callable[[Any], Any]
    why: str
    versions: str
    upstream: str
    delete_when: str
    adds: bool = False

    def apply(self) -> bool:
        """Install the patch; False when it already was.

        Raises:
            ParityError: the symbol is not there (or, for ``adds``, is taken): this vLLM differs
                from those the patch was written for, and going on would protect nothing.
        """
        owner, name = self._owner()
        # The class's own dictionary, not getattr: an inherited or delegated attribute is not ours.
        found = vars(owner).get(name)
        static = isinstance(found, staticmethod)
        current = found.__func__ if static else found
        if getattr(current, MARK, None) == self.name:
            return False
        if (current is not None) if self.adds else (current is None):
            raise ParityError(
                f"vllm-parity cannot patch {self.module}.{self.attribute} ({self.name}): the "
                f"symbol {'already exists' if self.adds else 'is missing'} in this vLLM.",
                f"Without this patch {self.why}.",
                "install a supported vLLM (see the table of versions in the README), or set "
                "VLLM_PARITY_MODE=off to run unprotected.",
            )
        replacement = self.wrap(current)
        if not self.adds:
            functools.update_wrapper(replacement, current)
        setattr(replacement, MARK, self.name)
        setattr(owner, name, staticmethod(replacement) if static else replacement)
        return True

    def _owner(self) -> tuple[Any, str]:
        owner: Any = importlib.import_module(self.module)
        *parents, name = self.attribute.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
            if owner is None:
                raise ParityError(
                    f"vllm-parity cannot find {self.module}.{self.attribute} ({self.name}).",
                    f"Without this patch {self.why}.",
                    "install a supported vLLM, or set VLLM_PARITY_MODE=off.",
                )
        return owner, name
