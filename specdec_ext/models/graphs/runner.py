"""``GraphRunner``: which passes of a call are recorded, and the state of the model that they belong to."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from specdec_ext.models import compat
from specdec_ext.models.base import FixedDraft, TargetOutput
from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.graphs.arena import SLOTS, Arena, lender_of, take_back
from specdec_ext.models.graphs.graph import NotRecordableError
from specdec_ext.models.graphs.recorded import fixed_pass
from specdec_ext.models.passes.agreement import TOLERANCE, relative_difference
from specdec_ext.models.passes.attention import IMPLEMENTATION
from specdec_ext.models.passes.known_code import is_untouched
from specdec_ext.models.passes.modules import ModulePass
from specdec_ext.models.passes.visibility import BlockVisibility
from specdec_ext.models.patching.changes import joined_changes
from specdec_ext.tree.draft_tree import DraftTree

if TYPE_CHECKING:
    from specdec_ext.models.slots.round_state import RoundState

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Numbers of nodes for which a pass is recorded; a tree is filled up with inactive nodes to the next one.
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
# A shape is recorded when it is needed for this time, because a recording takes as long as many passes.
RECORDED_AT = 3
# Slots after the text for which a new arena has room, because max_length is rarely reached.
SPARE_SLOTS = 2048


class GraphRunner:
    """Scores draft trees by recorded passes, and runs whole rounds as recordings, as far as this is possible.

    Args:
        modules: runs the model.
        max_slots: the most cache slots that the call may need.
        required: raise an error where a pass can't be recorded, instead of running it without a recording.

    Attributes:
        reason: a clause that says why passes of this call are not recorded; "" if they are.
        round_reason: a clause that says why no further round of this call is recorded as a whole; "" if
            rounds are, as far as they ask for it.
        least_nodes: a tree with drafts is filled up to at least this number of nodes, that of the shape which
            was asked for last.

    Raises:
        ValueError: recordings are required, but impossible for this model or call.
    """

    def __init__(self, modules: ModulePass, max_slots: int, required: bool):
        self._modules, self._max_slots, self._required = modules, max_slots, required
        self._lender = lender_of(modules.model)
        self._token = object()
        self._arena: Arena | None = None
        self._is_in_round = False  # whether passes are parts of a recorded round now
        self.least_nodes = 1
        self.reason = self.round_reason = ""
        self._told: set[str] = set()
        if reason := _obstacle(modules):
            self.refuse(reason)

    @property
    def _layers(self) -> Sequence[RollbackLayer]:
        return self._modules.cache.layers

    def score(
        self,
        tree: DraftTree,
        numbers: Tensor,
        start: int,
        invariant_rows: float,
        unrecorded: Callable[[], TargetOutput],
    ) -> TargetOutput | None:
        """Run one pass over the nodes of ``tree``, or return None if this pass is not recorded.

        Args:
            tree: ``[rows, nodes]``.
            numbers: ``[5, rows]``, the ``RowNumbers`` of this step.
            start: the slot of the roots.
            invariant_rows: see :class:`specdec_ext.models.slots.runner.PassRunner`.
            unrecorded: runs the same pass without a recording, and leaves the length of the cache as it was.
                The first pass of a recording is compared with it.
        """
        nodes = _filled(max(tree.num_nodes, self.least_nodes if tree.num_nodes > 1 else 1))
        if self.reason or nodes is None:
            return None

        def forward(tokens: Tensor, positions: Tensor, block: BlockVisibility) -> TargetOutput:
            return self._modules(block, invariant_rows, input_ids=tokens, position_ids=positions)

        if self._is_in_round:
            assert self._arena is not None
            slots, filled = self._arena.slots, tree.filled(nodes)
            output = fixed_pass(filled, numbers, self._layers, slots, forward)
            return output.of_nodes(tree.num_nodes)
        arena = self._arena_with(start + nodes)
        if arena is None:
            return None
        key = self._key(tree.num_rows, nodes, invariant_rows)
        recorded, expected = arena.passes.get(key), None
        if recorded is None:
            arena.uses[key] = arena.uses.get(key, 0) + 1
            if arena.uses[key] < RECORDED_AT and not self._required:
                return None
            expected = unrecorded().logits
            recorded = arena.new_pass(tree.num_rows, nodes)
        try:
            output = recorded(tree, numbers, self._layers, forward)
        except NotRecordableError as refusal:
            self.refuse(str(refusal))
            return None
        if expected is not None:
            error = relative_difference(output.logits, expected)
            if not error <= TOLERANCE[expected.dtype]:
                if math.isfinite(error):  # else drafts have spoilt the pass, which proves nothing
                    self.refuse(
                        f"its logits differ by {error:.2g} (relative) from those without it"
                    )
                return None
            arena.passes[key] = recorded
        return output

    def run_round(
        self,
        rows: int,
        num_nodes: int,
        invariant_rows: float,
        fixed: FixedDraft,
        compute: Callable[[], T],
    ) -> T:
        """Compute a round whose pass is recorded (:meth:`has_recorded`), as one recording if possible.

        Args:
            rows, num_nodes: the shape of its trees.
            invariant_rows: as in :meth:`score`.
            fixed: what the round depends on, besides the contents of tensors and the arena.
            compute: as in :meth:`specdec_ext.models.base.Target.run_round`.
        """
        arena, nodes = self._arena, _filled(num_nodes)
        assert arena is not None and nodes is not None
        if self.round_reason:
            return compute()
        key = self._key(rows, nodes, invariant_rows), num_nodes, fixed.key
        recorded = arena.rounds.get(key)
        if recorded is not None and recorded.uses(fixed.memory):
            with self._in_round():
                return recorded.run(compute)
        arena.uses[key] = arena.uses.get(key, 0) + 1
        if arena.uses[key] < RECORDED_AT and not self._required:
            return compute()
        arena.uses[key] = 0  # if its memory moves, the round is recorded anew
        arena.rounds.pop(key, None)
        recorded = arena.new_round(fixed.memory)
        try:
            with self._in_round():
                value = recorded.run(compute)
        except NotRecordableError as refusal:
            # Only the commit, after which nothing fails, changes what later work reads.
            self._refuse_rounds(str(refusal))
            return compute()
        try:
            with self._in_round():
                recorded.record(compute)
            arena.rounds[key] = recorded
        except NotRecordableError as refusal:
            self._refuse_rounds(str(refusal))
        return value

    @contextmanager
    def _in_round(self) -> Iterator[None]:
        """Run passes inside of this context as parts of a recorded round."""
        self._is_in_round = True
        try:
            yield
        finally:
            self._is_in_round = False

    def _refuse_rounds(self, reason: str) -> None:
        """Record passes, but no further whole round of this call; ``reason`` is a clause."""
        self.round_reason = reason
        self.tell_round_reason(reason)

    def tell_round_reason(self, reason: str) -> None:
        """Log why some rounds of this call are not recorded as a whole; ``reason`` is a clause."""
        if not self.reason and reason not in self._told:
            self._told.add(reason)
            model = type(self._modules.model).__name__
            _log.info("passes of %s are recorded, whole rounds are not: %s", model, reason)

    def _key(self, rows: int, nodes: int, invariant_rows: float) -> Hashable:
        return rows, nodes, invariant_rows, self._modules.recorder.layers

    def has_recorded(self, rows: int, num_nodes: int, stop: int, invariant_rows: float) -> bool:
        """Whether the pass of such trees is recorded. If not, drafts are filled up so that it will be.

        Args:
            rows, num_nodes: the shape of the trees.
            stop: number of slots that the pass needs, without those that fill up the trees.
            invariant_rows: as in :meth:`score`.
        """
        arena, nodes = self._arena, _filled(num_nodes)
        if self.reason or arena is None or nodes is None:
            return False
        self.least_nodes = nodes if nodes > 1 else self.least_nodes
        has_room = stop - num_nodes + nodes <= arena.slots and arena.lends_to(self._layers)
        return has_room and self._key(rows, nodes, invariant_rows) in arena.passes

    def _arena_with(self, slots: int) -> Arena | None:
        """Return the model's arena with room for ``slots`` slots, or None if another call uses it."""
        arena, layers = self._arena, self._layers
        if arena is not None and arena.slots >= slots and arena.lends_to(layers):
            return arena
        if not all(layer.is_initialized for layer in layers):
            self.refuse("a layer has not written to its cache")
            return None
        lender = self._lender
        if not self._borrows():
            return None
        fingerprint = _fingerprint(self._modules)
        arena = lender.arena
        if arena is None or arena.fingerprint != fingerprint or not arena.fits(layers, slots):
            lender.arena = None  # its memory is free before the new one is made
            room = max(slots, min(self._max_slots, slots + SPARE_SLOTS))
            arena = lender.arena = Arena(layers, room, fingerprint)
        arena.lend(layers)
        self._arena = arena
        return arena

    def _borrows(self) -> bool:
        """Whether this call has what the model lends, now and until its end."""
        lock = self._lender.lock
        with joined_changes() as changes:
            release = partial(lock.release, self._token)
            changes.make(self._token, [(partial(lock.try_acquire, self._token), release)])
        return lock.try_acquire(self._token)

    def state_with(self, rows: int, columns: int, make: Callable[..., RoundState]) -> RoundState:
        """Return the model's round state with room for the text of a call, or a new one if others use it.

        Args:
            rows, columns: of the text.
            make: is called with rows, columns and the device.
        """
        lender, device = self._lender, self._modules.model.device
        if not self._borrows():
            return make(rows, columns, device)
        if lender.state is None or not lender.state.has_room(rows, columns):
            lender.state = make(rows, -(-columns // SLOTS) * SLOTS, device)
        return lender.state

    def finish(self) -> None:
        """Give the cache layers buffers of their own; the call may return the cache to its caller."""
        if self._arena is not None and self._arena.lends_to(self._layers):
            take_back(self._layers)
        self._arena = None
        self._lender.lock.release(self._token)

    def refuse(self, reason: str) -> None:
        """Record no further pass of this call; ``reason`` is a clause.

        Raises:
            ValueError: recordings are required.
        """
        if self.reason:
            return
        model = type(self._modules.model).__name__
        if self._required:
            raise ValueError(
                f"graphs=True, but passes of {model} can't be recorded: {reason}. Use graphs='auto', which "
                "runs them without a recording"
            )
        self.reason = reason
        _log.info("passes of %s are not recorded: %s", model, reason)


def _filled(num_nodes: int) -> int | None:
    """The number of nodes up to which a tree of ``num_nodes`` is filled; None if it is too large."""
    return next((count for count in NODES if count >= num_nodes), None)


def _obstacle(modules: ModulePass) -> str:
    """Return why no pass of this call can be recorded, or "" if nothing is known."""
    recorded = [
        name for name, value in modules.forward_kwargs.items() if value and "output" in name
    ]
    devices = {tensor.device for tensor in modules.model.parameters()}
    if compat.NEEDS_MASK:
        return "this version of transformers passes a mask of changing length to the model"
    if recorded:
        return f"the call asks for {' and '.join(recorded)}"
    if (attention := modules.config._attn_implementation) != IMPLEMENTATION:
        return f"its attention implementation is {attention!r}; expected {IMPLEMENTATION!r}"
    if modules.parts.patches:
        return "layers of this model look at the text, and are replaced for drafts"
    if modules.cache.states:
        return "the model has recurrent states"
    if not modules.cache.layers or any(type(x) is not RollbackLayer for x in modules.cache.layers):
        return "the model has cache layers of its own"
    if "position_ids" not in modules.parts.parameters:
        return "the model computes positions itself"
    if len(devices) != 1:
        return f"the model is spread over {len(devices)} devices"
    if not is_untouched(modules.model):
        return "a module is in training mode, compiled, or has a hook or a replaced forward"
    return ""


def _fingerprint(modules: ModulePass) -> Hashable:
    """Identify everything outside of the inputs that a recording depends on.

    A recording keeps the addresses of weights and the effect of Python code. If a module, the address of a
    weight or a mode changes, the passes are recorded anew.
    """
    model: Any = modules.model
    parts: list[Hashable] = [
        torch.is_autocast_enabled(model.device.type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    ]
    for module in model.modules():
        own = vars(module)
        parts.append(
            (
                id(module),
                str(own.get("_active_adapter", "")),
                *(each.data_ptr() for each in own["_parameters"].values() if each is not None),
                *(each.data_ptr() for each in own["_buffers"].values() if each is not None),
            )
        )
    return tuple(parts)
