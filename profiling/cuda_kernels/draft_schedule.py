"""The work plan of the CUDA op ``draft_head``: phases, matrices, and the bytes of a draft.

Phases and tiles come from ``csrc/include/specdec/draft_head/plan.h`` itself, through the host module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from specdec_ext import _host
from specdec_ext.heads.config import HeadConfig
from specdec_ext.ops.draft_head import tree_arguments
from specdec_ext.tree.config import TreeConfig

WEIGHT_BYTES = {"same": 2, "int8": 1, "float8": 1}  # per weight of a 16-bit head
SCALE_BYTES = 4  # per output of an 8-bit matrix


def slice_bytes(weights: str) -> int:
    """Bytes of a weight row in a stage; half for 8-bit weights, whose products need more registers."""
    return _host.DRAFT_SLICE_BYTES // (1 if weights == "same" else 2)


@dataclass(frozen=True)
class Phase:
    """One phase of one pass; the grid synchronises after each phase.

    Attributes:
        kind: kind of the pass, "new", "kept" or "frontier".
        level: depth of the nodes of a frontier, else 0.
        op: operation, as in ``DraftOp``.
        layer: decoder layer.
        first_row, num_rows: rows of the pass, among all rows of its kind and level.
    """

    kind: str
    level: int
    op: str
    layer: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Matrix:
    """A weight matrix, and how the blocks of a launch share its rows.

    Attributes:
        outs, ins: rows and columns.
        is_paired: whether it consists of the gate matrix above the up matrix.
    """

    outs: int
    ins: int
    is_paired: bool = False

    def tiles(self, num_blocks: int) -> np.ndarray:
        """int64 ``[tiles, 3]``: block, first row, rows."""
        return _host.draft_tiles(self.outs, num_blocks, is_paired=self.is_paired)

    def rows(self, num_blocks: int) -> np.ndarray:
        """Number of rows that each block streams."""
        blocks, _, rows = self.tiles(num_blocks).T
        return np.bincount(blocks, rows, minlength=num_blocks)

    def panels(self, num_blocks: int) -> int:
        """Number of times that all blocks together read one row of inputs."""
        tiles = np.bincount(self.tiles(num_blocks)[:, 0], minlength=num_blocks)
        return int((-(-tiles // _host.DRAFT_PANEL_TILES)).sum())

    def slices(self, weights: str = "same") -> int:
        """Number of stages of the ring that a tile takes; from sm_90 on each is one bulk copy."""
        return -(-self.ins * WEIGHT_BYTES[weights] // slice_bytes(weights))

    def stages(self, weights: str = "same") -> int:
        """Number of stages of all blocks together."""
        return len(self.tiles(1)) * self.slices(weights)

    def size(self, weights: str = "same") -> int:
        """Bytes, scales included."""
        scales = 0 if weights == "same" else SCALE_BYTES * self.outs
        return self.outs * self.ins * WEIGHT_BYTES[weights] + scales


def matrices(config: HeadConfig) -> dict[tuple[str, int], Matrix]:
    """The matrices, by the operation and layer of the phases that stream them.

    In the last layer, a pass over new elements that are not the last of their row needs only the keys and
    values of the projections; here it counts as if it needed all of them.
    """
    hidden, feeds_fc = config.hidden_size, config.feeds_fc
    queries = config.num_heads * config.head_dim
    found = {}
    if config.has_fc:
        found["fc", 0] = Matrix(hidden, config.feature_width + (hidden if feeds_fc else 0))
    for layer in range(config.num_layers):
        attended = hidden if feeds_fc or layer else 2 * hidden
        projected = queries + 2 * config.num_kv_heads * config.head_dim
        found["projections", layer] = Matrix(projected, attended)
        found["output", layer] = Matrix(hidden, queries)
        found["gate_up", layer] = Matrix(2 * config.intermediate_size, hidden, is_paired=True)
        found["down", layer] = Matrix(hidden, config.intermediate_size)
    found["logits", 0] = Matrix(config.draft_vocab_size, hidden)
    return found


def widths(tree: TreeConfig) -> list[int]:
    """For each level below the root, the number of nodes that are expanded for it."""
    static: list[int] = tree_arguments(tree, torch.device("cpu"))[-1]
    return static or [1] + [tree.top_k] * (tree.depth - 1)


def phases(config: HeadConfig, tree: TreeConfig, num_new: int, batch: int = 1) -> list[Phase]:
    """The phases of a draft, with ``num_new`` new elements in all rows together."""
    found = _host.draft_phases(
        config.num_layers,
        widths(tree),
        num_new,
        batch=batch,
        gathers=config.fc_norm or config.norm_before_fc,
        has_fc=config.has_fc,
        feeds_fc=config.feeds_fc,
        is_parallel=config.mask_token_id is not None,
    )
    return [Phase(*phase) for phase in found]


def levels(order: list[Phase]) -> Iterator[list[Phase]]:
    """The phases of each level; those of new and kept elements are level 0."""
    for level in range(order[-1].level + 1):
        yield [phase for phase in order if phase.level == level]


def needed_bytes(config: HeadConfig, tree: TreeConfig, weights: str = "same") -> int:
    """Bytes of weights that a draft has to read at least: each level reads them once."""
    sizes = {op: matrix.size(weights) for op, matrix in matrices(config).items()}
    rereads = 1 if config.mask_token_id is not None else len(widths(tree))
    fc = sizes.pop(("fc", 0), 0)
    return fc * (rereads if config.feeds_fc else 1) + rereads * sum(sizes.values())


def cache_bytes(config: HeadConfig, slots: int) -> int:
    """Bytes of the 16-bit keys and values of one row."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * slots * 2
