"""Counters and derived metrics against hand-counted examples (definitions: ``specdec_ext/stats.py``)."""

import pytest

from specdec_ext import SpeculationStats


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
