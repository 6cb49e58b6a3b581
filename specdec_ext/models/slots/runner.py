"""``PassRunner``: turns draft trees and the layout of the rows into one forward pass.

Four kinds of passes give the same result:

- *recorded*: a pass of fixed shape that is replayed, on CUDA as one graph (``graphs/``);
- *direct*: one op computes all layers of a decoder of a known family (``passes/direct``);
- *by modules with a block*: the model's own modules, with masks and attention for trees, ragged rows and
  padding (``passes/masks.py``, ``passes/attention.py``);
- *by modules alone*: plain decoding without padding, where transformers' own masks are correct.
"""

from __future__ import annotations

import math

from torch import Tensor

from specdec_ext import ops
from specdec_ext.models.base import TargetOutput
from specdec_ext.models.context_limit import has_fixed_rotations
from specdec_ext.models.graphs import GraphRunner
from specdec_ext.models.passes.attention import IMPLEMENTATION, TreeBlock
from specdec_ext.models.passes.direct.direct_pass import TREE, DirectPass, agrees, is_agreed
from specdec_ext.models.passes.modules import ModulePass
from specdec_ext.models.passes.visibility import SlotVisibility
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.models.slots.layout import RowLayout
from specdec_ext.tree.draft_tree import DraftTree


class PassRunner:
    """Scores draft trees after the text in the cache.

    Args:
        modules: the pass of the model's own modules.
        direct: the direct pass of the model, None if it has none or the call needs the modules.
        graphs: runs recorded passes; None if the call does not ask for them.

    Attributes:
        invariant_rows: the largest number of tokens in a pass for which linear layers sum in the order for
            few rows. Only with no limit are a token's bits the same in every pass; a draft model does not
            need that.
    """

    def __init__(
        self, modules: ModulePass, direct: DirectPass | None, graphs: GraphRunner | None = None
    ):
        self.modules, self._cache = modules, modules.cache
        self.graphs = graphs
        self.invariant_rows: float = math.inf
        implementation = modules.config._attn_implementation
        serves = direct and direct.serves(implementation, self._cache.cache.layers)
        self.direct = direct if serves else None
        if self.direct is not None and has_fixed_rotations(modules.config):
            self.direct = self.direct.with_tables()
        # Ops compute attention over slots: tree_attention, which replaces only this implementation, or all
        # layers.
        self._has_attention = bool(self._cache.layers) and (
            implementation == IMPLEMENTATION or self.direct is not None
        )
        self._compared = is_agreed(
            modules.model, TREE
        )  # whether both kinds of passes were compared

    def score(self, tree: DraftTree, rows: RowLayout) -> TargetOutput:
        """Run one pass over the nodes of ``tree``, whose roots follow the tokens in the cache."""
        # The op needs text without padding between its tokens.
        by_op = self._has_attention and rows.holes == 0
        if self.graphs is not None:
            if rows.holes:
                self.graphs.refuse("the prompt has padding between tokens or after the last one")
            if rows.position_shift is not None:
                self.graphs.refuse("positions of this prompt do not count its tokens")

            def unrecorded() -> TargetOutput:
                output = self._score_unrecorded(tree, rows, by_op)
                self._cache.set_length(rows.start, rows.slack)
                return output

            numbers, start = rows.packed_numbers, rows.start
            output = self.graphs.score(tree, numbers, start, self.invariant_rows, unrecorded)
            if output is not None:
                return output
        return self._score_unrecorded(tree, rows, by_op)

    def _score_unrecorded(self, tree: DraftTree, rows: RowLayout, by_op: bool) -> TargetOutput:
        numbers = rows.numbers
        if tree.num_nodes == 1 and rows.aligned and not (rows.padded or by_op):
            position_ids = rows.model_positions(numbers.root_positions[:, None])
            return self.modules(None, input_ids=tree.tokens, position_ids=position_ids)
        ancestors, _, positions, *_ = ops.tree_mask(tree.parents, numbers.root_positions)
        block = None
        if by_op:
            block = TreeBlock(
                ancestors,
                numbers.first_slots,
                numbers.lengths,
                numbers.block_starts,
                rows.start + tree.num_nodes,
            )
        if block is None or self.direct is None or tree.tokens.numel() > self.invariant_rows:
            return self._score_by_modules(tree, rows, block, ancestors, positions)
        if not self._compared:
            self._compared = self._passes_agree(tree, rows, block, positions)
            if not self._compared:
                self.direct = None
                return self._score_by_modules(tree, rows, block, ancestors, positions)
        return self._score_directly(tree, block, positions)

    def _passes_agree(
        self, tree: DraftTree, rows: RowLayout, block: TreeBlock, positions: Tensor
    ) -> bool:
        """Run this pass directly and by modules, and compare the logits; the cache stays as it was."""
        assert self.direct is not None
        by_modules = self._score_by_modules(tree, rows, block, block.ancestors, positions)
        self._cache.set_length(rows.start, rows.slack)
        directly = self._score_directly(tree, block, positions)
        self._cache.set_length(rows.start, rows.slack)
        active = tree.parents > -2  # what is computed for absent nodes depends on the attention
        logits = directly.logits[active], by_modules.logits[active]
        return agrees(self.modules.model, self.direct, TREE, *logits)

    def _score_directly(self, tree: DraftTree, block: TreeBlock, positions: Tensor) -> TargetOutput:
        """Run the pass with ``ops.decoder_layers`` instead of the model's modules."""
        assert self.direct is not None
        with inference_mode():
            logits, states = self.direct(tree.tokens, positions, block, self._cache.layers)
            return TargetOutput(logits, self.modules.recorder.chosen(*states))

    def _score_by_modules(
        self,
        tree: DraftTree,
        rows: RowLayout,
        block: TreeBlock | None,
        ancestors: Tensor,
        positions: Tensor,
    ) -> TargetOutput:
        """Run the pass with the model's modules, and with masks that show each node its own past."""
        visible = SlotVisibility(
            tree=block,
            ancestors=ancestors,
            query_positions=positions,
            start=rows.start,
            row_ends=rows.numbers.ends,
            aligned=rows.aligned,
            slot_valid=rows.slot_valid,
            slot_positions=rows.slot_positions,
            window=self._cache.window,
        )
        return self.modules(
            visible,
            self.invariant_rows,
            input_ids=tree.tokens,
            position_ids=rows.model_positions(positions),
        )
