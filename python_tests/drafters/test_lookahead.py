"""``LookaheadDrafter``: its window, its pool, the tree of both, and lossless text."""

from __future__ import annotations

import pytest
import torch
from helpers.checks.lossless import check_same_text, every_decoding
from helpers.drafters.drafting_contexts import context_of, started
from helpers.models.tiny import VOCAB, counting_model, every_batch, prompts

import specdec_ext
from specdec_ext import LookaheadDrafter
from specdec_ext.context import Context
from specdec_ext.drafters.lookahead import NgramPool, Window
from specdec_ext.models import TargetOutput
from specdec_ext.tree.draft_tree import TreeBuilder

# ---------------------------------------------------------------- the window


def test_window_fills_and_then_moves():
    window = Window([7], columns=2, ngram=3)
    assert (window.levels, window.depth) == ([[7, 7, 7]], 3)
    assert window.advance([1, 2, 3]) == []
    assert (window.levels, window.depth) == ([[7, 7], [2, 3]], 3)
    assert window.advance([4, 5]) == [(7, 2, 4), (7, 3, 5)]
    assert (window.levels, window.depth) == ([[2, 3], [4, 5]], 3)


def test_tree_of_a_window_has_the_mask_of_the_paper():
    """Element j of a level sees the root, elements 0 to j of level 0 and the elements above it."""
    window = Window([0], columns=3, ngram=4)
    window.levels = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    tree = TreeBuilder(0)
    assert window.add_to(tree) == [7, 8, 9]
    assert tree.tokens == list(range(10))
    for level in range(3):
        for column in range(3):
            node, seen = 1 + 3 * level + column, set()
            while node:
                node = tree.parents[node]
                seen.add(node)
            columns_of_level_0 = range(column if level == 0 else column + 1)
            above = {1 + 3 * upper + column for upper in range(1, level)}
            assert seen == {0, *(1 + j for j in columns_of_level_0), *above}


def test_elements_with_equal_paths_are_one_node():
    window = Window([0], columns=2, ngram=3)
    window.levels = [[1, 2], [2, 4]]  # the child 2 of 1 is in both levels
    tree = TreeBuilder(0)
    tree.add([1, 2, 9])
    assert window.add_to(tree) == [2, 4]
    assert (tree.tokens, tree.parents) == ([0, 1, 2, 9, 4], [-1, 0, 1, 2, 2])


# ---------------------------------------------------------------- the pool


def test_pool_keeps_the_latest_n_grams():
    pool = NgramPool(ngram=3, size=2)
    pool.add_text([1, 2, 3, 1, 2, 4])
    assert pool.guesses(1) == [(2, 4), (2, 3)]
    assert pool.guesses(4) == pool.guesses(9) == []
    pool.add((1, 2, 3))
    assert pool.guesses(1) == [(2, 3), (2, 4)]
    pool.add((1, 5, 5))
    assert pool.guesses(1) == [(5, 5), (2, 3)]


# ---------------------------------------------------------------- proposals


def reading(drafter: LookaheadDrafter, context: Context) -> LookaheadDrafter:
    """The drafter with windows and pools of all rows."""
    started(drafter, context)
    for row in context.rows:
        drafter._learn(context, row)
    return drafter


def test_guesses_and_window_make_one_tree():
    context = context_of([[3, 5, 6, 3, 5, 7, 3]])
    drafter = reading(LookaheadDrafter(window=2, ngram=3, guesses=4), context)
    drafter._windows[0].levels = [[5, 8], [7, 9]]
    tree = drafter.propose(context)
    # The guesses are 5 7 and 5 6. In the window 5 and 8 are below the root, 7 is below 5, 9 below 8.
    assert tree.tokens.tolist() == [[3, 5, 7, 6, 8, 9]]
    assert tree.parents.tolist() == [[-1, 0, 1, 1, 1, 4]]
    # The window reads the target's tokens at nodes 2 and 5.
    logits = torch.zeros(1, 6, VOCAB)
    logits[0, 2, 11] = logits[0, 5, 12] = logits[0, 0, 90] = 1
    drafter.commit(context, None, TargetOutput(logits))
    assert drafter._windows[0].levels == [[7, 9], [11, 12]]
    assert drafter._pools[0].guesses(5) == [(7, 11), (7, 3), (6, 3)]
    assert drafter._pools[0].guesses(8) == [(9, 12)]


@pytest.mark.parametrize(("room", "nodes"), [(4, 5), (3, 1)])
def test_window_is_left_out_if_it_would_be_cut(room, nodes):
    """Its last elements are at depth 3, so the row must have room for four tokens."""
    context = context_of([[4, 5]], max_length=2 + room)
    drafter = reading(LookaheadDrafter(window=2, ngram=3), context)
    drafter._windows[0].levels = [[6, 7], [8, 9]]
    tree = drafter.propose(context)
    assert context.remaining == [room] and tree.num_nodes == nodes
    assert tree.pruned([room - 1]).num_nodes == nodes


def test_window_does_not_move_in_a_step_of_another_drafter():
    """The verified tree does not have the nodes of its last proposal."""
    context = context_of([[3, 5, 6]])
    drafter = reading(LookaheadDrafter(window=4, ngram=3), context)
    other = TargetOutput(torch.zeros(1, 1, VOCAB))  # for a tree of one node
    drafter.commit(context, None, other)
    tree = drafter.propose(context)
    drafter.commit(context, None, TargetOutput(torch.zeros(1, tree.num_nodes, VOCAB)))
    levels = list(drafter._windows[0].levels)
    context.emit([0], [5])
    drafter.commit(context, None, other)
    assert drafter._windows[0].levels == levels
    assert drafter.propose(context).num_nodes > 1


def test_n_grams_of_the_generated_text_are_guessed():
    context = context_of([[1, 2, 3]])
    drafter = reading(LookaheadDrafter(window=0, ngram=3), context)
    for token in (1, 4, 1, 2):
        drafter.propose(context)
        context.emit([0], [token])
    assert drafter.propose(context).tokens.tolist() == [[2, 3, 1]]
    context.emit([0], [1])
    tree = drafter.propose(context)  # of 1 2 1, 1 4 1 and 1 2 3
    assert tree.tokens.tolist() == [[1, 2, 1, 4, 1, 3]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 3, 1]]


def test_drafts_of_a_row_do_not_depend_on_the_others():
    lengths, steps = (9, 3, 6), 5
    rows = prompts((9,) * 3)[0]
    texts = [row[-length:].tolist() for row, length in zip(rows, lengths, strict=True)]

    def trees(texts: list[list[int]]) -> list[list[tuple[list[int], list[int]]]]:
        context = context_of(texts)
        drafter = reading(LookaheadDrafter(), context)
        found: list = [[] for _ in texts]
        for step in range(steps):
            tree = drafter.propose(context)
            logits = torch.nn.functional.one_hot((tree.tokens * 7 + step) % VOCAB, VOCAB).float()
            drafter.commit(context, None, TargetOutput(logits))
            context.emit(context.rows, ((tree.tokens[:, 0] * 3 + step) % VOCAB).tolist())
            for row, (tokens, parents) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
                active = parents != -2
                found[row].append((tokens[active].tolist(), parents[active].tolist()))
        return found

    assert trees(texts) == [trees([text])[0] for text in texts]


# ---------------------------------------------------------------- lossless


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(window=3, ngram=2, guesses=1), dict(window=0, ngram=5), dict(window=8, ngram=6)],
    ids=["default", "bigrams", "no window", "large"],
)
@every_batch
@every_decoding
def test_text_is_that_of_plain_decoding(batch, decoding, settings):
    stats = check_same_text(LookaheadDrafter(**settings), batch, decoding)
    assert settings.get("window", 5) == 0 or stats.draft_tokens > 0


def count(prompt: list[int], window: int, new_tokens: int):
    """(text, counters) of the counting model after a prompt."""
    kwargs = dict(max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
    kwargs |= dict(drafter=LookaheadDrafter(window=window, ngram=4), speculation="fixed")
    output = specdec_ext.generate(counting_model(), torch.tensor([prompt]), **kwargs)
    return output.sequences[0, len(prompt) :].tolist(), output.speculation_stats


def test_window_finds_n_grams_that_the_text_does_not_have():
    """A column that begins with 20 counts from there, and its n-grams are ready when the text reaches 20.

    Three guesses are right to their end, each with a bonus token. Then the text has overtaken the column.
    """
    (text, without), (same_text, with_window) = (count([20, 10], window, 40) for window in (0, 5))
    assert text == same_text == list(range(11, 51))
    assert (without.steps, without.accepted_tokens) == (39, 0)
    assert (with_window.steps, with_window.accepted_tokens) == (30, 9)


def test_n_grams_of_the_prompt_are_guessed():
    """After 30, eight steps accept a guess of three tokens and emit one more."""
    text, stats = count([*range(30, 70), 29], 0, 33)
    assert text == list(range(30, 63))
    assert (stats.steps, stats.accepted_tokens) == (8, 24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": -1}, "window must be at least 0, got -1"),
        ({"ngram": 1}, "ngram must be at least 2, got 1"),
        ({"guesses": 0}, "guesses must be at least 1, got 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LookaheadDrafter(**arguments)
