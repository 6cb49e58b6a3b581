"""Counters and derived metrics against hand-counted examples (definitions: ``specdec_ext/stats.py``)."""

import itertools
import warnings

import pytest
import torch
from checkpoint_cases import random_head
from tiny import ScriptedDrafter, adversary_chain, generated, prompts, tiny_model, wrong

import specdec_ext
from specdec_ext import DraftModelDrafter, DraftTree, SpeculationStats, assets
from specdec_ext.controller import forget
from specdec_ext.drafters.head import HeadDrafter
from specdec_ext.drafters.medusa import MedusaDrafter
from specdec_ext.stats import ALARM_WINDOW, NEVER_WINDOW, PairVerdict


def counted(*steps):
    stats = SpeculationStats()
    for step in steps:
        stats.count_step(*step)
    return stats


def test_nothing_counted_yet():
    stats = SpeculationStats()
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.emitted_per_step) == (
        0,
        1,
        1,
    )
    assert stats.acceptance_per_position == stats.conditional_acceptance == []


def test_a_worked_example():
    # (drafted nodes, depth, accepted, emitted): chains of 3 with 3, 1 and 0 accepted, one step without
    # a draft, one tree of 5 nodes and depth 2 with 2 accepted
    stats = counted((3, 3, 3, 4), (3, 3, 1, 2), (3, 3, 0, 1), (0, 0, 0, 1), (5, 2, 2, 3))
    assert (stats.steps, stats.drafts, stats.draft_tokens) == (5, 4, 14)
    assert (stats.accepted_tokens, stats.emitted_tokens) == (6, 11)
    assert stats.acceptance_rate == pytest.approx(6 / 14)
    assert stats.mean_acceptance_length == pytest.approx(1 + 6 / 4)
    assert stats.emitted_per_step == pytest.approx(11 / 5)
    assert stats.proposed_per_position == [4, 4, 3]
    assert stats.accepted_per_position == [3, 2, 1]
    assert stats.acceptance_per_position == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    # the tree ended at depth 2: of the two drafts accepted that far only one proposed a third token
    assert stats.reached_per_position == [4, 3, 1]
    assert stats.conditional_acceptance == pytest.approx([3 / 4, 2 / 3, 1 / 1])


def test_mean_acceptance_length_is_one_plus_the_sum_of_unconditional_acceptances():
    stats = counted(*[(4, 4, k, k + 1) for k in (0, 1, 1, 2, 4, 4, 3, 0)])
    assert stats.mean_acceptance_length == pytest.approx(1 + sum(stats.acceptance_per_position))


def test_a_draft_cut_by_the_end_of_the_text_has_no_bonus():
    # both drafted tokens accepted, the second one is the end of the text: two emitted, two from the draft
    stats = counted((2, 2, 2, 2))
    assert (stats.accepted_tokens, stats.emitted_tokens, stats.emitted_per_step) == (2, 2, 2)


# --- the verdict


def chains(drafts, right):
    """A proposal of three tokens for each row; of those that are right the first is the text's, 5."""
    drafts = [[5 if i < right else 6, 7, 7] for i in range(drafts)]
    return DraftTree.chain(torch.zeros(len(drafts), dtype=torch.long), torch.tensor(drafts))


def told(*steps, advice="Check it.", policy="fixed", verdict=None):
    """Messages after steps of ``(rows, rows with the right first token, kind of the proposals)``."""
    stats = SpeculationStats(drafter="ModelBased", policy=policy)
    verdict = verdict or PairVerdict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows, right, kind in steps:
            proposal = None if right is None else chains(rows, right)
            verdict.count(proposal, [kind] * rows, [[5]] * rows)
            verdict.check(stats, advice)
    return [str(warning.message) for warning in caught]


def test_what_is_never_accepted_is_told_once_and_soon():
    (message,) = told(*[(1, 0, "")] * 500)
    assert message.startswith("ModelBased: of the last 16 drafts 0 had their first token accepted")
    assert message.endswith("Check it.")
    assert not told(*[(1, 0, "")] * (NEVER_WINDOW - 1))
    assert not told(*[(1, 0, "")] * 500, advice="")
    assert not told()


def test_a_verdict_runs_over_calls():
    """``speculation="auto"`` gives a wrong head up after a few drafts, in every call anew."""
    verdict = PairVerdict()
    calls = [told(*[(1, 0, "")] * 4, *[(1, None, "")] * 60, verdict=verdict) for _ in range(8)]
    assert [len(call) for call in calls] == [0, 0, 0, 1, 0, 0, 0, 0]


def test_a_drafter_that_was_right_once_is_given_more_time():
    assert not told((1, 1, ""), *[(1, 0, "")] * (ALARM_WINDOW - 2))
    assert len(told((1, 1, ""), *[(1, 0, "")] * (ALARM_WINDOW - 1))) == 1
    assert not told((2, 2, ""), *[(1, 0, "")] * (ALARM_WINDOW - 2))


def test_a_head_that_dies_later_is_told():
    assert len(told((ALARM_WINDOW, ALARM_WINDOW, ""), *[(1, 0, "")] * ALARM_WINDOW)) == 1


def test_copies_do_not_speak_for_the_model_behind_them():
    """A wrong head behind n-gram copies that are right: nine steps of ten looked well."""
    (message,) = told(*[(9, 9, "match of 8"), (1, 0, "")] * NEVER_WINDOW)
    assert "of the last 16 drafts 0" in message
    assert not told(*[(1, 0, "match of 8")] * 500)


def test_what_never_pays_is_told_once():
    few = [*[(4, None, "")] * 99, (4, 4, "")]
    (message,) = told(*few * 30, policy="auto")
    assert "in 256 steps it was asked 2 times" in message and "drafter=None" in message
    assert not told(*few * 2, policy="auto")
    assert not told(*few * 30, policy="fixed")
    assert not told(*[*[(1, None, "")] * 9, (1, 1, "")] * 300, policy="auto")
    assert not told(*[(1, 1, "match of 8")] * 3000, policy="auto")


def test_what_was_given_up_at_once_is_told_why():
    """After two drafts that were wrong, "auto" hardly asks again."""
    (message,) = told(*[(1, 0, "")] * 2, *[(1, None, "")] * 3000, policy="auto")
    assert "of the last 2 drafts 0 had their first token accepted" in message


class DeadModel(DraftModelDrafter):
    """Everything it drafts is wrong by one, as from another vocabulary."""

    def propose(self, context):
        tree = super().propose(context)
        tree.tokens[:, 1:] = wrong(tree.tokens[:, 1:])
        return tree


def drafted(drafter):
    ids, mask = prompts((6,) * 8)
    kwargs = dict(attention_mask=mask, max_new_tokens=20, do_sample=False)
    return specdec_ext.generate(tiny_model("llama"), ids, drafter=drafter, **kwargs)


def test_a_call_with_a_dead_draft_model_warns_once():
    forget(tiny_model("llama"))
    with pytest.warns(UserWarning, match="DeadModel: of the last .* same tokenizer") as caught:
        drafted(DeadModel(tiny_model("llama")))
        drafted(DeadModel(tiny_model("llama")))
    assert len(caught) == 1
    assert "tapped layers" in HeadDrafter.dead_draft_advice
    assert "tokenizer" in MedusaDrafter.dead_draft_advice


def test_a_call_with_other_drafters_does_not_warn():
    answers = generated(drafted(None), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafted(DraftModelDrafter(tiny_model("llama")))
        drafted(ScriptedDrafter(answers, adversary_chain))  # always wrong, not made of a model


@pytest.mark.auto
def test_a_wrong_head_is_told_under_the_default():
    """One of another model with the same sizes: "auto" gives it up at once, and nobody was told."""
    target, tokenizer = assets.load_target(), assets.load_tokenizer()
    sizes = {"hidden_size": 256, "target_hidden_size": 256, "vocab_size": 4096}
    head = random_head(**sizes, draft_vocab_size=4096, feature_layers=(1, 3, 6), seed=3)
    drafter = specdec_ext.CombinedDrafter(specdec_ext.NgramDrafter(), HeadDrafter(head))
    ids = tokenizer(assets.held_out_prompts()[0]["prompt"], return_tensors="pt")["input_ids"]
    # By this clock a draft takes as long as a pass, so that the machine has no say.
    settings = specdec_ext.Speculation(clock=itertools.count().__next__)
    call = {"drafter": drafter, "speculation": settings, "max_new_tokens": 48}
    with pytest.warns(
        UserWarning, match="CombinedDrafter: of the last .* 0 had .*tapped"
    ) as caught:
        for _ in range(12):
            specdec_ext.generate(target, ids[:, :100], **call)
    assert len(caught) == 1
