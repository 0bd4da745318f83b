"""How much memory a computation takes on a CPU, to the byte."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made under it and that are alive, and their peak.

    Under it ``x = torch.ones(4); del x; torch.ones(2)`` has a peak of 16. What an operation
    needs inside itself is not seen, and a view or an in-place result is not counted again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and count what it made."""
        out = func(*args, **(kwargs or {}))
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in self._known | given:
                storage = tensor.untyped_storage()
                self._known.add(_key(tensor))
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, _key(tensor), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
