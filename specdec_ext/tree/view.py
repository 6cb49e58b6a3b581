"""One row of a ``DraftTree`` as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specdec_ext.preflight.extras import require
from specdec_ext.tree.draft_tree import DraftTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Path = Sequence[int] | Tensor

ACCEPTED_MARK = "✓"
ACCEPTED_COLOR, DRAFT_COLOR = "tab:green", "lightgray"


class TreeView:
    """What both drawings show of one row.

    Args:
        tree: any tree.
        tokenizer: turns ids into texts; None shows the ids.
        row: which row of the tree.
        path: nodes that were accepted, the root included, -1 for none (``Accepted.path[row]``,
            ``ops.verify_match``); None marks nothing.

    Attributes:
        children: of every active node its children, in node order.
        accepted: the nodes of ``path``.
        labels: of every node.

    Raises:
        ValueError: for a row or a node that the tree does not have.
    """

    def __init__(self, tree: DraftTree, tokenizer: Any, row: int, path: Path | None):
        if not 0 <= row < tree.num_rows:
            raise ValueError(f"row={row}; the tree has rows 0 to {tree.num_rows - 1}")
        self.depths = tree.depths[row]
        self.children: dict[int, list[int]] = {
            node: [] for node, depth in enumerate(self.depths) if depth >= 0
        }
        for node, parent in enumerate(tree.parents[row].tolist()):
            if node in self.children and parent >= 0:
                self.children[parent].append(node)
        nodes = [] if path is None else path.tolist() if isinstance(path, Tensor) else list(path)
        self.accepted = {node for node in nodes if node >= 0}
        unknown = sorted(self.accepted - self.children.keys())
        if unknown:
            raise ValueError(f"path names the nodes {unknown}, which row {row} does not have")
        tokens = tree.tokens[row].tolist()
        self.labels = [str(t) if tokenizer is None else repr(tokenizer.decode([t])) for t in tokens]


def render(view: TreeView) -> str:
    """A line per node, children indented below their parent, accepted nodes marked."""
    lines: list[str] = []

    def draw(node: int, first: str, rest: str) -> None:
        mark = f" {ACCEPTED_MARK}" if node in view.accepted else ""
        lines.append(f"{first}{node}: {view.labels[node]}{mark}")
        for child in view.children[node]:
            last = child == view.children[node][-1]
            draw(child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))

    if view.children:
        draw(0, "", "")
    return "\n".join(lines)


def plot(view: TreeView, ax: Axes | None = None) -> Figure:
    """Levels from left to right, a label per node, the accepted path in colour.

    Args:
        view: what to draw.
        ax: where; None makes a figure of the size that the tree needs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    otherwise = "DraftTree.render() draws the tree as text"
    figures = require("matplotlib.figure", "DraftTree.plot", otherwise)
    heights = _heights(view)
    if ax is None:
        size = (1.5 + 1.5 * max(view.depths), 1 + 0.4 * max(heights.values(), default=0.0))
        ax = figures.Figure(figsize=size, layout="constrained").subplots()
    for node, children in view.children.items():
        for child in children:
            taken = child in view.accepted
            ax.plot(
                [view.depths[node], view.depths[child]],
                [heights[node], heights[child]],
                color=ACCEPTED_COLOR if taken else DRAFT_COLOR,
                linewidth=2.5 if taken else 1.0,
                zorder=1,
            )
    for node, height in heights.items():
        color = ACCEPTED_COLOR if node in view.accepted else DRAFT_COLOR
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": color}
        ax.text(view.depths[node], height, view.labels[node], ha="center", va="center", bbox=box)
    ax.set_xlim(-0.5, max(view.depths) + 0.5)
    ax.set_ylim(max(heights.values(), default=0.0) + 0.5, -0.5)  # the first child on top
    ax.set_axis_off()
    figure = ax.get_figure(root=True)
    assert figure is not None, "axes without a figure"
    return figure


def _heights(view: TreeView) -> dict[int, float]:
    """Leaves one below the other, in the order of ``render``; a parent in the middle of its children."""
    heights: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        below = [place(child) for child in view.children[node]]
        if not below:
            below = [float(leaves)]
            leaves += 1
        heights[node] = (below[0] + below[-1]) / 2
        return heights[node]

    if view.children:
        place(0)
    return heights
