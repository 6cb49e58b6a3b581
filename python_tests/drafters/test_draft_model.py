"""``DraftModelDrafter`` beside other drafters.

Claim: after steps with any verified tree, also those of other drafters, its next draft is the draft model's
continuation of the whole text.
"""

from __future__ import annotations

import pytest
import torch
from helpers.models.tiny import generated, prompts, tiny_model, wrong

import specdec_ext
from specdec_ext import DraftModelDrafter, DraftTree
from specdec_ext.drafters import draft_cache

LENGTHS = (12, 3, 9, 5)


def greedy(model, drafter, lengths=LENGTHS, max_new_tokens=24, **kwargs):
    ids, mask = prompts(lengths)
    kwargs |= dict(attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    kwargs |= dict(drafter=drafter, return_dict_in_generate=True)
    return specdec_ext.generate(model, ids, **kwargs)


class Checked(DraftModelDrafter):
    """Checks that each draft is the text of the draft model."""

    def __init__(self, model, answers):
        super().__init__(model, num_draft_tokens=4)
        self.answers, self.asked = answers, 0

    def propose(self, context):
        tree = super().propose(context)
        self.asked += 1
        length = tree.num_nodes - 1
        for row, drafts in zip(context.rows, tree.tokens[:, 1:].tolist(), strict=True):
            text = torch.tensor([context.text(row)])
            if length:
                kwargs = dict(attention_mask=torch.ones_like(text), do_sample=False)
                written = self.model.generate(text, max_new_tokens=length, **kwargs)
                assert drafts == written[0, text.shape[1] :].tolist()
        return tree


class BesideOthers(Checked):
    """The verified tree has its chain as the last branch, as the first, or not at all."""

    def propose(self, context):
        own = super().propose(context).tokens[:, 1:].tolist()
        paths = []
        for row, drafts in zip(context.rows, own, strict=True):
            right = self.answers[row][len(context.generated[row]) :][:6]
            wrongs = [[wrong(token) for token in right[:3]], [*right[:1], *map(wrong, right[1:3])]]
            shape = self.asked + row
            chosen = [[*wrongs, drafts], [drafts, *wrongs], [right], wrongs, [right[:2]]]
            paths.append(chosen[shape % len(chosen)])
        return DraftTree.from_paths(context.roots, paths)


class InSomeSteps(Checked):
    """In every third step another right or wrong chain is verified, and the draft model does not draft."""

    def propose(self, context):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 3:
            return super().propose(context)
        paths = []
        for row in context.rows:
            right = self.answers[row][len(context.generated[row]) :][:6]
            paths.append([right if row % 2 else [*right[:2], *map(wrong, right[2:])]])
        return DraftTree.from_paths(context.roots, paths)


@pytest.mark.parametrize("draft_model", ["llama", "qwen3"], ids=["right", "wrong"])
@pytest.mark.parametrize("drafter", [Checked, BesideOthers, InSomeSteps])
def test_drafts_continue_the_text_after_any_verified_tree(drafter, draft_model):
    model = tiny_model("llama")
    expected = greedy(model, None).sequences
    made = drafter(tiny_model(draft_model), generated(expected, max(LENGTHS)))
    assert torch.equal(greedy(model, made).sequences, expected)
    assert made.asked > 3


def test_missed_tokens_are_read_in_blocks(monkeypatch):
    """Rows that are 20 and 9 tokens behind read 4 tokens at a time."""
    monkeypatch.setattr(draft_cache, "BLOCK_TOKENS", 4)
    model = tiny_model("llama")
    expected = greedy(model, None, max_new_tokens=40).sequences
    answers = generated(expected, max(LENGTHS))

    class Late(Checked):
        def propose(self, context):
            lengths = [len(context.generated[row]) for row in context.rows]
            if max(lengths) > 20:
                return super().propose(context)
            paths = [
                [answers[row][done : done + (6 if row == 2 else 1)]]
                for row, done in zip(context.rows, lengths, strict=True)
            ]
            return DraftTree.from_paths(context.roots, paths)

    made = Late(model, answers)
    assert torch.equal(greedy(model, made, max_new_tokens=40).sequences, expected)
    assert made.asked > 3


def test_drafts_end_at_the_last_position_of_the_draft_model():
    """Rejected drafts use no positions: with 32 of them the last draft of each row is of its 32nd token."""
    last_roots = {}

    class Watched(DraftModelDrafter):
        def propose(self, context):
            tree = super().propose(context)
            for row, root, depths in zip(
                context.rows, context.root_positions, tree.depths, strict=True
            ):
                if max(depths) > 0:
                    last_roots[row] = root
            return tree

    drafter = Watched(tiny_model("gpt2-short"))
    with pytest.warns(UserWarning, match="has 32 positions, and the text is longer"):
        greedy(tiny_model("gpt2"), drafter, max_new_tokens=40, speculation="fixed")
    assert last_roots == dict.fromkeys(range(len(LENGTHS)), 30)
