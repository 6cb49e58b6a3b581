"""Counters and derived metrics against hand-counted examples (definitions: ``specdec_ext/stats.py``)."""

import warnings

import pytest
from helpers.models.tiny import (
    ScriptedDrafter,
    adversary_chain,
    generated,
    prompts,
    tiny_model,
    wrong,
)

import specdec_ext
from specdec_ext import DraftModelDrafter, SpeculationStats
from specdec_ext.drafters.heads.head import HeadDrafter
from specdec_ext.drafters.heads.medusa import MedusaDrafter
from specdec_ext.report import Report
from specdec_ext.stats import ALARM_WINDOW, DraftAlarm


def counted(*steps):
    stats = SpeculationStats()
    for step in steps:
        stats.count_step(*step)
    return stats


def test_rates_before_the_first_step():
    stats = SpeculationStats()
    rates = stats.acceptance_rate, stats.mean_acceptance_length, stats.emitted_per_step
    assert rates == (0, 1, 1)
    assert stats.acceptance_per_position == stats.conditional_acceptance == []


def test_worked_example():
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
    # Two drafts are accepted up to depth 2. One is the tree, which ends there; the other has a third token.
    assert stats.reached_per_position == [4, 3, 1]
    assert stats.conditional_acceptance == pytest.approx([3 / 4, 2 / 3, 1 / 1])


def test_draft_with_the_end_of_the_text_has_no_bonus():
    # Both drafted tokens are accepted, and the second one is the end of the text.
    stats = counted((2, 2, 2, 2))
    assert (stats.accepted_tokens, stats.emitted_tokens, stats.emitted_per_step) == (2, 2, 2)


def explained(stats):
    """The explanation on one line; the console wraps it."""
    return " ".join(stats.explain().split())


def test_steps_by_shape_and_why_most_of_them_had_no_draft():
    report = Report([], [], [("chain", [0.25], 8.0)], gain=1.5, low=1.4, high=1.6)
    stats = SpeculationStats("Drafter", policy="auto", report=report)
    stats.count_plain(3)
    assert "no draft was verified. Most steps were plain: 25% of first" in explained(stats)
    stats.count_draft("chain of 2", proposed=True, verified=True)
    stats.count_draft("chain of 2", proposed=True, verified=False)
    assert stats.shapes == {"plain": 3, "chain of 2": 1, "chain of 2, dropped": 1}
    assert "1.50x the estimated speed" in explained(stats)  # of the one step with a draft
    assert "Most steps were plain: 25% of first" in explained(stats)
    for _ in range(5):
        stats.count_draft("lookup", proposed=False, verified=False)
    assert stats.shapes["lookup, nothing proposed"] == 5
    assert (stats.dropped, stats.nothing_proposed) == (1, 5)
    assert "In most steps the drafter had nothing to propose" in explained(stats)
    for _ in range(20):
        stats.count_draft("chain of 2", proposed=True, verified=True)
    assert "most steps" not in explained(stats).lower()


# --- the alarm


def warned(accepted_firsts, advice="Check it."):
    """The warnings after drafts of three tokens, each accepted as a whole or not at all."""
    stats = SpeculationStats(drafter="ModelBased")
    alarm = DraftAlarm(stats, advice)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for accepted in accepted_firsts:
            stats.count_step(3, 3, 3 * accepted, 3 * accepted + 1)
            alarm.check()
    return [str(warning.message) for warning in caught]


def test_alarm_warns_once():
    (message,) = warned([0] * 5 * ALARM_WINDOW)
    assert message.startswith(
        "ModelBased: in the last 100 drafts, the first token was accepted 0 times"
    )
    assert message.endswith("Check it.")
    assert len(warned([1] + [0] * (ALARM_WINDOW - 1))) == 1


def test_alarm_does_not_warn_early():
    assert not warned([0] * (ALARM_WINDOW - 1))  # too few drafts
    assert not warned([1, 1] + [0] * (ALARM_WINDOW - 2))
    assert not warned([0] * 5 * ALARM_WINDOW, advice="")
    assert not warned([])


def test_alarm_warns_of_drafts_that_fail_later():
    assert len(warned([1] * ALARM_WINDOW + [0] * ALARM_WINDOW)) == 1


class WrongModel(DraftModelDrafter):
    """All its tokens are wrong by one, as if it had another vocabulary."""

    def propose(self, context):
        tree = super().propose(context)
        tree.tokens[:, 1:] = wrong(tree.tokens[:, 1:])
        return tree


def drafted(drafter):
    ids, mask = prompts((6,) * 8)
    kwargs = dict(attention_mask=mask, max_new_tokens=20, do_sample=False, speculation="fixed")
    return specdec_ext.generate(tiny_model("llama"), ids, drafter=drafter, **kwargs)


def test_call_with_a_wrong_draft_model_warns_once():
    with pytest.warns(UserWarning, match="WrongModel: in the last .* same tokenizer") as caught:
        drafted(WrongModel(tiny_model("llama")))
    assert len(caught) == 1
    assert "feature layers" in HeadDrafter.low_acceptance_hint
    assert "tokenizer" in MedusaDrafter.low_acceptance_hint


def test_call_with_other_drafters_does_not_warn():
    answers = generated(drafted(None), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafted(DraftModelDrafter(tiny_model("llama")))
        drafted(ScriptedDrafter(answers, adversary_chain))  # always wrong, but no model
