"""``DraftModelDrafter`` beside other drafters, and what its cache holds.

Claim: whatever tree the loop verifies in a step, and whether or not the draft model was asked, its next
draft is what the draft model would write after the text from scratch.
"""

from __future__ import annotations

import pytest
import torch
from tiny import generated, prompts, tiny_model, wrong

import specdec_ext
from specdec_ext import DraftModelDrafter, DraftTree
from specdec_ext.drafters import draft_model

LENGTHS = (12, 3, 9, 5)


def greedy(model, drafter, lengths=LENGTHS, max_new_tokens=24, **kwargs):
    ids, mask = prompts(lengths)
    return specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        **kwargs,
    )


class Checked(DraftModelDrafter):
    """Every draft must be what the draft model itself would write."""

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
                written = self.model.generate(
                    text,
                    attention_mask=torch.ones_like(text),  # token 0 is a word here
                    do_sample=False,
                    max_new_tokens=length,
                )
                assert drafts == written[0, text.shape[1] :].tolist()
        return tree


class BesideOthers(Checked):
    """Verified is a tree that has the own chain as its last branch, as its first, or not at all."""

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


class NotAlwaysAsked(Checked):
    """Every third step another drafter's right or wrong chain is verified and this one is not asked."""

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
@pytest.mark.parametrize("drafter", [Checked, BesideOthers, NotAlwaysAsked])
def test_drafts_go_on_from_the_text_whatever_was_verified(drafter, draft_model):
    model = tiny_model("llama")
    expected = greedy(model, None).sequences
    made = drafter(tiny_model(draft_model), generated(expected, max(LENGTHS)))
    assert torch.equal(greedy(model, made).sequences, expected)
    assert made.asked > 3


def test_a_long_pause_is_caught_up_in_blocks(monkeypatch):
    """Rows that are 20 and 9 tokens behind, read 4 at a time."""
    monkeypatch.setattr(draft_model, "BLOCK_TOKENS", 4)
    model = tiny_model("llama")
    expected = greedy(model, None, max_new_tokens=40).sequences
    answers = generated(expected, max(LENGTHS))

    class AskedLate(Checked):
        def propose(self, context):
            lengths = [len(context.generated[row]) for row in context.rows]
            if max(lengths) > 20:
                return super().propose(context)
            paths = [
                [answers[row][done : done + (6 if row == 2 else 1)]]
                for row, done in zip(context.rows, lengths, strict=True)
            ]
            return DraftTree.from_paths(context.roots, paths)

    made = AskedLate(model, answers)
    assert torch.equal(greedy(model, made, max_new_tokens=40).sequences, expected)
    assert made.asked > 3


def test_drafts_end_where_the_draft_models_positions_end():
    """Rejected drafts take no positions: with 32 of them the last draft is of the 32nd token."""
    roots_of_drafts = []

    class Watched(DraftModelDrafter):
        def propose(self, context):
            tree = super().propose(context)
            if tree.num_nodes > 1:
                roots_of_drafts.append(max(context.root_positions))
            return tree

    drafter = Watched(tiny_model("gpt2-short"))
    with pytest.warns(UserWarning, match="has 32 positions, and the text is longer"):
        greedy(tiny_model("gpt2"), drafter, max_new_tokens=40, speculation="fixed")
    assert roots_of_drafts[-1] == 30
