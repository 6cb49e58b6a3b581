"""``DraftTree``: construction, refused trees, and cuts to the remaining tokens of a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ext import DraftTree, TreeConfig

ROOTS = torch.tensor([7, 8])


def tree(tokens, parents):
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


def test_paths_share_prefixes():
    made = DraftTree.from_paths(ROOTS, [[[1, 2, 3], [1, 4], [5]], [[6]]])
    assert made.tokens.tolist() == [[7, 1, 2, 3, 4, 5], [8, 6, 0, 0, 0, 0]]
    assert made.parents.tolist() == [[-1, 0, 1, 2, 1, 0], [-1, 0, -2, -2, -2, -2]]
    assert not made.is_chain


def test_paths_are_cut_at_the_node_budget():
    made = DraftTree.from_paths(ROOTS[:1], [[[1, 2, 3], [4]]], max_nodes=3)
    assert made.tokens.tolist() == [[7, 1, 2]]


def test_merged_trees_share_equal_paths():
    first = tree([[7, 1, 2, 5], [8, 1, 9, 9]], [[-1, 0, 1, 0], [-1, 0, -2, -2]])
    second = tree([[7, 9, 1, 2, 4], [8, 9, 3, 4, 9]], [[-1, -2, 0, 2, 2], [-1, -2, 1, 0, -2]])
    made = DraftTree.merged([first, second])
    # 3 of row 1 hangs below an inactive node
    assert made.tokens.tolist() == [[7, 1, 2, 5, 4], [8, 1, 4, 0, 0]]
    assert made.parents.tolist() == [[-1, 0, 1, 0, 1], [-1, 0, 0, -2, -2]]
    cut = DraftTree.merged([first, second], max_nodes=3)
    assert cut.tokens.tolist() == [[7, 1, 2], [8, 1, 4]]
    assert DraftTree.merged([first]).tokens.tolist() == [[7, 1, 2, 5], [8, 1, 0, 0]]


def test_nodes_below_a_cut_node_are_cut():
    first = tree([[7, 1, 2]], [[-1, 0, 1]])
    second = tree([[7, 3, 1, 2, 5]], [[-1, 0, 0, 2, 1]])
    assert DraftTree.merged([first, second], max_nodes=3).tokens.tolist() == [[7, 1, 2]]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=5), min_size=1, max_size=3)
)
def test_merged_trees_have_all_paths_once(paths):
    trees = [DraftTree.from_paths(ROOTS[:1], [each]) for each in paths]
    made = DraftTree.merged(trees).validated(ROOTS[:1].tolist(), 8, "test")
    found = [()]
    for token, parent in zip(
        made.tokens[0, 1:].tolist(), made.parents[0, 1:].tolist(), strict=True
    ):
        found.append((*found[parent], token))
    prefixes = {tuple(path[:i]) for each in paths for path in each for i in range(len(path) + 1)}
    assert sorted(found) == sorted(prefixes | {()})


def test_trees_of_other_rows_are_not_merged():
    with pytest.raises(ValueError, match="the root 8 in row 0; expected 7"):
        DraftTree.merged([DraftTree.root(ROOTS), DraftTree.root(ROOTS.flip(0))])


def test_tree_without_paths_is_a_root():
    made = DraftTree.from_paths(ROOTS, [[], [[]]])
    assert made.tokens.tolist() == [[7], [8]] and made.parents.tolist() == [[-1], [-1]]


def test_chains_may_have_counts():
    made = DraftTree.chain(ROOTS, torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 1]))
    assert made.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -2, -2]]
    assert made.is_chain


def test_batch_may_be_empty():
    empty = torch.empty(0, dtype=torch.long)
    assert DraftTree.root(empty).tokens.shape == (0, 1)
    assert DraftTree.from_paths(empty, []).tokens.shape == (0, 1)


def test_depths_count_links_to_the_root():
    made = tree([[7, 1, 2, 3, 4], [8, 1, 2, 3, 4]], [[-1, 0, 1, 0, -2], [-1, -2, 1, 0, 3]])
    assert made.depths == [[0, 1, 2, 1, -1], [0, -1, -1, 1, 2]]


def test_branches_are_paths_to_leaves():
    rows = tree(
        [[7, 1, 2, 3, 4, 5], [8, 9, 9, 9, 9, 9], [8, 9, 1, 9, 9, 9]],
        [[-1, 0, 1, 0, 1, 3], [-1, -2, -2, -2, -2, -2], [-1, -2, 0, 1, -2, -2]],
    )
    assert rows.branches == [[[0, 1, 2], [0, 1, 4], [0, 3, 5]], [[0]], [[0, 2]]]


def test_pruning_cuts_depth_and_unused_columns():
    made = DraftTree.from_paths(ROOTS, [[[1, 2, 3], [4, 5]], [[6, 9]]])
    cut = made.pruned([1, 0])
    assert cut.tokens.tolist() == [[7, 1, 0, 0, 4], [8, 0, 0, 0, 0]]
    assert cut.parents.tolist() == [[-1, 0, -2, -2, 0], [-1, -2, -2, -2, -2]]
    assert made.pruned([0, 0]).num_nodes == 1
    assert made.pruned([9, 9]).tokens.tolist() == made.tokens.tolist()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (tree([[7, 1], [8, 1]], [[-1, 1], [-1, 0]]), r"parents\[0, 1\] = 1"),
        (tree([[7, 1], [8, 1]], [[-1, 0], [-1, -1]]), r"parents\[1, 1\] = -1"),
        (tree([[7, 1], [8, 1]], [[-1, 0], [-2, -2]]), r"parents\[1, 0\] = -2"),
        (tree([[7, 1], [8, 1]], [[-1, -3], [-1, 0]]), r"parents\[0, 1\] = -3"),
        (tree([[7, 10], [8, 1]], [[-1, 0], [-1, 0]]), r"drafted token 10 \(row 0, node 1\)"),
        (tree([[7, -1], [8, 1]], [[-1, 0], [-1, 0]]), "drafted token -1"),
        (tree([[9, 1], [8, 1]], [[-1, 0], [-1, 0]]), "node 0 must be the last committed token"),
        (tree([[7, 1]], [[-1, 0]]), "one row per active row"),
        (tree([[7, 1], [8, 1]], [[-1], [-1]]), "expected equal shapes"),
        (tree([[7.0, 1.0], [8.0, 1.0]], [[-1, 0], [-1, 0]]), "torch.float32"),
        (tree([[7, 1], [8, 1]], [[0, 0], [-1, 0]]), r"parents\[0, 0\] = 0; expected -1"),
        (tree([[7, 1, 2], [8, 1, 2]], [[-1, 2, 0], [-1, 0, 0]]), r"parents\[0, 1\] = 2"),
        (tree([7, 8], [-1, -1]), r"tokens are torch.int64 \(2,\)"),
        (DraftTree(*torch.empty(2, 2, 0).long()), "with at least the root"),
    ],
)
def test_invalid_trees_are_refused(made, message):
    with pytest.raises(ValueError, match=message) as error:
        made.validated(ROOTS.tolist(), vocab_size=10, source="MyDrafter")
    assert "MyDrafter" in str(error.value)


def test_inactive_node_may_have_any_token():
    made = tree([[7, 99], [8, 1]], [[-1, -2], [-1, 0]])
    assert made.validated(ROOTS.tolist(), 10, "x").pruned([5, 5]).tokens.tolist() == [
        [7, 0],
        [8, 1],
    ]


def test_tree_configs_describe_their_trees():
    assert TreeConfig(depth=4).num_nodes == 5
    assert TreeConfig(depth=4).num_candidates == 4
    dynamic = TreeConfig(depth=5, top_k=6, num_nodes=26)
    assert (dynamic.num_nodes, dynamic.num_candidates) == (26, 6 + 4 * 36)
    static = TreeConfig(choices=[(0, 0), (1,), (0,), (0, 2), (0,)])
    assert static.choices == ((0,), (1,), (0, 0), (0, 2))
    assert (static.depth, static.top_k, static.num_nodes, static.num_candidates) == (2, 3, 5, 4)
    shortened = TreeConfig(depth=4, num_nodes=3)
    assert [each.levels for each in (dynamic, static, shortened)] == [5, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"num_nodes": 1}, "counts the root and must be at least 2, got 1"),
        ({"depth": 3, "top_k": 60}, "181 nodes chosen from 7260 candidates exceeds 1024 nodes"),
        ({"depth": 5, "top_k": 10, "num_nodes": 5000}, "5000 nodes .* smaller depth, top_k"),
        ({"depth": 1024}, "1025 nodes"),
        ({"choices": ()}, "expected non-empty paths"),
        ({"choices": ((0,), (0, -1))}, "ranks, which start at 0"),
        ({"choices": ((0,), (1, 0))}, r"the path \(1, 0\) but not its parent \(1,\)"),
    ],
)
def test_invalid_tree_configs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TreeConfig(**arguments)
