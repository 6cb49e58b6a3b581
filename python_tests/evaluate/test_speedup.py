"""``specdec_ext.evaluate.speedup``: ratios of averages and their intervals."""

import numpy as np
import pytest

from specdec_ext.evaluate.speedup import bootstrap


def test_ratios_of_medians_and_of_means():
    assert bootstrap([10.0, 20.0, 90.0], [10.0, 10.0, 70.0]).value == 2
    assert bootstrap([30.0, 90.0], [10.0, 50.0], np.mean).value == 2  # and not (3 + 1.8) / 2


def test_an_interval_of_prompts_that_agree_has_no_width():
    """Slow and fast prompts, each twice as fast: differences between prompts do not widen the interval."""
    baseline = [10.0, 35.0, 80.0, 21.0]
    speedup = bootstrap([2 * rate for rate in baseline], baseline)
    assert (speedup.value, speedup.low, speedup.high) == (2, 2, 2)
    assert str(speedup) == "2.00x [2.00, 2.00]"


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """For 200 samples of 20 prompts whose means have the ratio 2, about 190 intervals contain 2."""
    drawn = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        rates, baseline = drawn.normal(2, 0.4, 20), drawn.normal(1, 0.1, 20)
        found = bootstrap(rates.tolist(), baseline.tolist(), np.mean, seed)
        assert found.low < found.value < found.high
        covered += found.low <= 2 <= found.high
    assert 175 <= covered <= 198


def test_a_bootstrap_needs_pairs():
    with pytest.raises(
        ValueError, match="expected one rate per prompt from both, got 2 and 1 rates"
    ):
        bootstrap([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="got 0 and 0"):
        bootstrap([], [])
