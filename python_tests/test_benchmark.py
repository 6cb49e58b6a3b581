"""``specdec_ext.benchmark``: what tables and records are computed from, on hand-made results."""

import pytest
import torch

from specdec_ext import ComparedRuns, SpeculationStats
from specdec_ext.benchmark import Series, interleave, same_text, unique_ngram_fraction


def stats(*steps):
    made = SpeculationStats()
    for step in steps:
        made.count_step(*step)
    return made


def test_totals_over_calls_of_different_depth():
    calls = [stats((3, 3, 3, 4), (3, 3, 1, 2)), stats((1, 1, 0, 1), (0, 0, 0, 1))]
    series = Series("x", speculation=calls)
    assert series.total_per_position("proposed_per_position") == [3, 2, 2]
    assert series.total_per_position("accepted_per_position") == [2, 1, 1]
    assert series.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert series.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert series.emitted_per_step == pytest.approx(8 / 4)


def test_a_contestant_without_counters():
    series = Series("x")
    assert series.acceptance_per_position == []
    assert series.mean_acceptance_length is None and series.emitted_per_step is None


def test_verdicts_in_words():
    equal, tie = ComparedRuns(True, None, "equal"), ComparedRuns(False, 9, "near-tie", 0.1, 0.2)
    bug = ComparedRuns(False, 9, "bug", 3.0, 0.2)
    assert same_text([equal, equal]) == "2/2"
    assert same_text([tie, equal, tie]) == "1/3, 2 near-ties"
    assert same_text([tie, bug]) == "0/2, 1 near-tie, 1 bug"


def test_repetition():
    assert unique_ngram_fraction([[1] * 8]) == pytest.approx(1 / 5)
    assert unique_ngram_fraction([[1, 2, 3, 4, 5], [1] * 5]) == pytest.approx((1 + 1 / 2) / 2)
    assert unique_ngram_fraction([[1, 2]]) == 1.0  # too short to repeat anything


def test_interleaving_runs_everybody_on_everything_and_rotates_who_is_first():
    prompts = [torch.zeros(1, 3, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)]
    order = []

    def appending(count):
        return lambda ids: torch.cat([ids, ids.new_ones(len(ids), count)], dim=1)

    results = interleave({"a": appending(4), "b": appending(6)}, prompts, on_call=order.append)
    assert order == ["a", "b", "b", "a"]
    assert results["a"].new_tokens == [4, 8] and results["b"].new_tokens == [6, 12]
    assert results["a"].prompt_columns == [3, 5]
    assert results["b"].unique_4grams == pytest.approx(1 / 3)  # 1 of 3 in each of the three rows
