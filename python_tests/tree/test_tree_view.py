"""``DraftTree.render`` and ``DraftTree.plot``: the literal text, and the artists of the figure."""

from __future__ import annotations

import sys

import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from specdec_ext import DraftTree

# Row 0: root 7 -> 5 -> (8, 9), root -> 6, node 5 inactive. Row 1: the root alone.
TREE = DraftTree(
    torch.tensor([[7, 5, 6, 8, 9, 0], [3, 0, 0, 0, 0, 0]]),
    torch.tensor([[-1, 0, 0, 1, 1, -2], [-1, -2, -2, -2, -2, -2]]),
)


WORDS = ["zero", "one", "two", "three", "four", "five", "six\n", "seven", "eight", "nine"]


class Words:
    """A tokenizer of ten words."""

    def decode(self, ids):
        (token,) = ids
        return WORDS[token]


def test_rendered_text_is_literal():
    assert TREE.render() == "0: 7\n├─ 1: 5\n│  ├─ 3: 8\n│  └─ 4: 9\n└─ 2: 6"
    assert TREE.render(row=1) == "0: 3"


def test_rendered_text_may_show_words_and_the_accepted_path():
    drawn = TREE.render(Words(), path=torch.tensor([0, 1, 4, -1, -1, -1]))
    assert drawn.splitlines() == [
        "0: 'seven' ✓",
        "├─ 1: 'five' ✓",
        "│  ├─ 3: 'eight'",
        "│  └─ 4: 'nine' ✓",
        "└─ 2: 'six\\n'",
    ]


def test_lines_below_a_last_child_are_not_connected():
    chain = DraftTree.chain(torch.tensor([1]), torch.tensor([[2, 3]]))
    assert chain.render(path=[0]) == "0: 1 ✓\n└─ 1: 2\n   └─ 2: 3"


def drawn(**kwargs):
    (axes,) = TREE.plot(**kwargs).axes
    labels = {text.get_text(): text for text in axes.texts}
    edges = {
        (tuple(line.get_xdata()), tuple(line.get_ydata())): to_rgba(line.get_color())
        for line in axes.lines
    }
    return labels, edges


def test_plot_has_a_circle_per_node():
    labels, edges = drawn(path=[0, 1, 4])
    places = {token: text.get_position() for token, text in labels.items()}
    # leaves 8, 9, 6 one below the other, parents in the middle of their children
    assert places == {"8": (2, 0), "9": (2, 1), "6": (1, 2), "5": (1, 0.5), "7": (0, 1.25)}
    green, gray = to_rgba("tab:green"), to_rgba("lightgray")
    assert edges == {
        ((0, 1), (1.25, 0.5)): green,
        ((0, 1), (1.25, 2)): gray,
        ((1, 2), (0.5, 0)): gray,
        ((1, 2), (0.5, 1)): green,
    }
    colors = {token: text.get_bbox_patch().get_edgecolor() for token, text in labels.items()}
    assert colors == {"7": green, "5": green, "9": green, "6": gray, "8": gray}


def test_root_can_be_plotted_into_given_axes():
    labels, edges = drawn(row=1, tokenizer=Words())
    assert list(labels) == ["'three'"] and not edges
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert TREE.plot(ax=right) is figure
    assert not left.texts and len(right.texts) == 5


def test_plot_can_be_saved(tmp_path):
    TREE.plot(Words(), path=[0]).savefig(tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 1000


@pytest.mark.parametrize("draw", [TREE.render, TREE.plot])
def test_unknown_rows_and_paths_are_refused(draw):
    with pytest.raises(ValueError, match=r"row=2; the tree has rows 0 to 1"):
        draw(row=2)
    with pytest.raises(
        ValueError, match=r"path contains the nodes \[5, 9\], which row 0 does not have"
    ):
        draw(path=[0, 9, 5])


def test_missing_matplotlib_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib, .*DraftTree.render\(\) draws"):
        TREE.plot()
