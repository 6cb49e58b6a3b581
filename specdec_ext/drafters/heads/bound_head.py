"""``BoundHead``: a draft head on a target's device and in its dtype, with the weights that both share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext import ops
from specdec_ext.drafters.heads.head_cache import HeadCache
from specdec_ext.heads.config import DraftHead
from specdec_ext.models.tensor_parallel import is_tensor_parallel
from specdec_ext.ops.draft_limits import default_weights
from specdec_ext.reference.draft_head import draft_head
from specdec_ext.tree.config import TreeConfig


@dataclass(frozen=True)
class BoundHead:
    """A head that is ready to draft for one target.

    Attributes:
        head: the head, on ``device`` and in ``dtype``. Tensors that are not there already are converted when
            they are read, so that only the packed copies stay in memory.
        device: device of the target.
        dtype: dtype in which the head computes.
        shared: the target's embedding and lm_head, None where the head has its own. For a tensor-parallel
            target, these are whole tensors, gathered from all processes.
        weights: format of the matrices, as for :meth:`specdec_ext.ops.PackedHead.pack`.
    """

    head: DraftHead
    device: torch.device
    dtype: torch.dtype
    shared: tuple[Tensor | None, Tensor | None]
    weights: str = "same"

    @classmethod
    def bind(cls, head: DraftHead, model: PreTrainedModel, weights: str = "same") -> BoundHead:
        """Give a head the target's device and dtype.

        Args:
            head: the head.
            model: the target.
            weights: format of the matrices; "auto" for :func:`specdec_ext.ops.draft_limits.default_weights`.

        Raises:
            ValueError: the head shares a weight that the target does not have as a floating-point tensor.
        """
        device, dtype = draft_home(model)
        shared = _shared_weights(head, model)
        if weights == "auto":
            weights = default_weights(device, dtype)
        return cls(head.to(device, dtype, keep=False), device, dtype, shared, weights)

    @property
    def embedding(self) -> Tensor:
        """``[vocab, hidden]``, on ``device`` and in ``dtype``."""
        return self._either(self.shared[0], "embed_tokens.weight")

    @property
    def lm_head(self) -> Tensor:
        """``[draft_vocab, hidden]``, on ``device`` and in ``dtype``."""
        return self._either(self.shared[1], "lm_head.weight")

    def _either(self, shared: Tensor | None, name: str) -> Tensor:
        if shared is None:
            return self.head.tensors[name]
        return shared.detach().to(self.device, self.dtype)

    @cached_property
    def _packed(self) -> ops.PackedHead:
        lm_head = None if self.shared[1] is None else self.lm_head
        return ops.PackedHead.pack(self.head, self.embedding, lm_head, self.weights)

    @cached_property
    def _of_stream(self) -> dict[int, ops.PackedHead]:
        return {}

    def _on_this_stream(self) -> ops.PackedHead:
        """The packed head with the sync buffer of the current stream.

        Several drafters may share a bound head; those that are loaded by name do. Launches on different
        streams can run at the same time, so each stream needs its own sync buffer.
        """
        if self._packed.sync is None:
            return self._packed
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if stream not in self._of_stream:
            self._of_stream.setdefault(stream, self._packed.with_own_sync())
        return self._of_stream[stream]

    @cached_property
    def _caches(self) -> WeakSet[HeadCache]:
        return WeakSet()

    def cache_for(self, owner: object, num_rows: int) -> HeadCache:
        """Return a cache for a call: one that a recording has kept and nothing uses, or a new one.

        Args:
            owner: what uses the cache as long as it lives, or until it asks for another one.
            num_rows: number of rows.
        """
        with _caches_lock:
            caches = [each for each in self._caches if each.num_rows == num_rows]
            cache = next((each for each in caches if each.owner() in (None, owner)), None)
            if cache is None:
                cache = HeadCache(self.head.config, num_rows, self.device, self.dtype)
                self._caches.add(cache)
            cache.owner = ref(owner)
        return cache

    @cached_property
    def _in_memory(self) -> tuple[DraftHead, Tensor, Tensor]:
        """Head, embedding and lm_head, the first arguments of the specification; all tensors in memory."""
        kept = replace(self, head=replace(self.head, tensors=dict(self.head.tensors)))
        return kept.head, kept.embedding, kept.lm_head

    @cached_property
    def refusal(self) -> Callable[[TreeConfig, int], str | None]:
        """``refusal(tree, num_rows)``: why the op can't draft such trees, so that the specification must.

        None if the op can. The op is asked once per shape and batch size.
        """
        config, device, dtype = self.head.config, self.device, self.dtype
        weights = self.weights
        return cache(
            lambda tree, num_rows: ops.draft_head_refusal(
                config, device, dtype, tree, num_rows, weights
            )
        )

    def draft(
        self, tree: TreeConfig, *inputs: Tensor, noise: ops.DraftNoise | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft with the op, or with its specification and a warning if there is a :meth:`refusal`.

        Args:
            tree: the shape to draft.
            inputs: the arguments of the op between head and tree.
            noise: of the rows, or None.

        Raises:
            ValueError: as :meth:`check`.
        """
        roots = inputs[-1]
        return self._function(tree, len(roots))(*inputs, tree, noise)

    def check(self, tree: TreeConfig, num_rows: int) -> str | None:
        """Return the :meth:`refusal`, if the specification can draft instead.

        Raises:
            ValueError: there is a refusal, and only the op supports this format of ``weights``.
        """
        reason = self.refusal(tree, num_rows)
        if reason is not None and self.weights != "same":
            raise ValueError(
                f"weights={self.weights!r} needs the op draft_head, which can't draft this: {reason}; pass "
                "weights='same'"
            )
        return reason

    def _function(
        self, tree: TreeConfig, num_rows: int
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        reason = self.check(tree, num_rows)
        if reason is None:
            return partial(ops.draft_head, self._on_this_stream())
        warnings.warn(
            f"{self.head.source} drafts in PyTorch, many times slower than the op draft_head, which can't "
            f"draft this: {reason}",
            stacklevel=2,
        )
        return partial(draft_head, *self._in_memory)

    def serves(self, model: PreTrainedModel) -> bool:
        """Whether binding to this target would give the same result."""
        weights = _shared_weights(self.head, model)
        same = all(mine is theirs for mine, theirs in zip(self.shared, weights, strict=True))
        return same and (self.device, self.dtype) == draft_home(model)


def draft_home(model: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """Device and dtype in which a head computes."""
    return model.device, draft_dtype(model.device, model.dtype)


def draft_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a head computes: that of the target, but float32 for float16 on the CPU."""
    slow = device.type == "cpu" and dtype == torch.float16
    return torch.float32 if slow else dtype


def _shared_weights(head: DraftHead, model: PreTrainedModel) -> tuple[Tensor | None, Tensor | None]:
    config = head.config
    return (
        None if config.own_embedding else _weight("embedding", model.get_input_embeddings(), head),
        None if config.own_lm_head else _weight("lm_head", model.get_output_embeddings(), head),
    )


_caches_lock = Lock()
# Module -> (its weight, of which this process has a part, the whole weight).
_wholes: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def _whole(module: nn.Module, weight: Any) -> Tensor:
    """The whole of a tensor-parallel weight, gathered from all processes once per weight.

    All processes must take part, which they do because they make the same calls with the same heads.
    """
    kept = _wholes.get(module)
    if kept is None or kept[0] is not weight:
        kept = _wholes[module] = weight, weight.detach().full_tensor()
    return kept[1]


def _weight(name: str, module: nn.Module | None, head: DraftHead) -> Tensor:
    weight: Any = getattr(module, "weight", None)
    if module is not None and is_tensor_parallel(weight):
        weight = _whole(module, weight)
    plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()
    if not plain or weight.is_meta:
        found = f"a {type(weight).__name__}"
        if isinstance(weight, Tensor):
            found += f" of {weight.dtype} on {weight.device}"
        raise ValueError(
            f"{head.source} has no {name} of its own, and the target's is {found}; expected a plain "
            f"floating-point tensor. Exclude {name} from quantisation and offloading, or use a head with its "
            f"own {name}"
        )
    tensor: Tensor = weight
    return tensor
