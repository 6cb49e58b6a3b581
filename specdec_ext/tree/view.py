"""Drawings of one row of a :class:`~specdec_ext.DraftTree`: as text, as SVG for notebooks, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from specdec_ext.display.text import printable
from specdec_ext.preflight.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACCEPTED_MARK = "✓"
ACCEPTED_COLOR, DRAFT_COLOR = "tab:green", "lightgray"

MAX_NODES_DRAWN = 100  # of the SVG
# Pixels from one level to the next and from one leaf to the next, and of a character.
_LEVEL, _LEAF, _CHARACTER = 90, 22, 7


class TreeView:
    """The data that all drawings show.

    Args:
        tokens, parents, depths: token, parent and depth of every node of the row; an inactive node has
            depth -1.
        accepted: the nodes to mark.
        tokenizer: decodes ids to text; None shows the ids.

    Attributes:
        children: active node -> its children, in node order.
        labels: label of every node.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
        accepted: set[int],
        tokenizer: Any,
    ):
        self.depths, self.accepted = depths, accepted
        self.children: dict[int, list[int]] = {
            node: [] for node, depth in enumerate(depths) if depth >= 0
        }
        for node, parent in enumerate(parents):
            if node in self.children and parent >= 0:
                self.children[parent].append(node)
        self.labels = [str(t) if tokenizer is None else repr(tokenizer.decode([t])) for t in tokens]


def render(view: TreeView) -> str:
    """One line per node, with children indented below their parent and accepted nodes marked."""
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


def svg(view: TreeView) -> str:
    """Draw the levels from left to right, in the colour of the notebook's text, light or dark."""
    heights = _heights(view)
    width = _LEVEL * (1 + max(view.depths)) + _CHARACTER * max(map(len, view.labels))
    height = _LEAF * (1 + max(heights.values(), default=0.0))

    def place(node: int) -> tuple[float, float]:
        return _LEVEL * view.depths[node], _LEAF * (0.5 + heights[node])

    drawn = []
    for node, children in view.children.items():
        x, y = place(node)
        label = printable(view.labels[node])
        for child in children:
            end_x, end_y = place(child)
            begin = x + _CHARACTER * (1 + len(label))
            opacity = 1 if child in view.accepted else 0.4
            drawn.append(
                f'<line x1="{begin}" y1="{y}" x2="{end_x - 3}" y2="{end_y}" stroke="currentColor" '
                f'stroke-opacity="{opacity}"/>'
            )
        weight = "bold" if node in view.accepted else "normal"
        drawn.append(
            f'<text x="{x}" y="{y + 4}" font-weight="{weight}" fill="currentColor">{escape(label)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'font-family="monospace" font-size="12">{"".join(drawn)}</svg>'
    )


def plot(view: TreeView, ax: Axes | None = None) -> Figure:
    """Draw the levels from left to right, with a label per node and the accepted path in colour.

    Args:
        view: the tree.
        ax: the axes to draw into; None creates a figure that fits the tree.

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
    """Node -> vertical place: leaves in the order of ``render``, a parent in the middle of its children."""
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
