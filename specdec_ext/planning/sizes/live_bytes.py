"""``LiveBytes``: how much memory the tensors of a computation take at most, without computing anything.

On the meta device, an operation only derives the shape of its result. The memory of all results that are
alive at the same time is therefore known without data, for any model that torch can run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all tensors that are created while it is entered, as long as they are alive.

    Args:
        known: tensors that exist already, such as weights; views of them are not counted.

    Attributes:
        peak: the largest sum so far.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self._live = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return results

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._live += self._sizes[key]
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key)
