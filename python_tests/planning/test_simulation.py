"""``simulate``: as many passes as the real loop, means as the formula gives them, and the tail."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from helpers.models.tiny import VOCAB, prompts, tiny_model

import specdec_ext
from specdec_ext import DraftTree
from specdec_ext.drafters.base import Drafter
from specdec_ext.evaluate.synthetic import SyntheticDrafter
from specdec_ext.planning.costs import StepCosts
from specdec_ext.planning.simulation import simulate
from specdec_ext.planning.traffic import TextKind, Traffic

ACCEPTANCE = (0.9, 0.7, 0.6, 0.4, 0.5)
TOKENS = 200


class Chains(Drafter):
    """Proposes chains of zeros, and counts its steps by the number of active rows."""

    def __init__(self, depth: int):
        self.depth, self.steps = depth, Counter()

    def propose(self, context):
        self.steps[len(context.rows)] += 1
        return DraftTree.from_paths(context.roots, [[[0] * self.depth] for _ in context.rows])


class RandomDraws(SyntheticDrafter):
    """Draws at random what the base class draws evenly, so that rows end as far apart as real ones do."""

    def _chain(self, row: int, done: int, length: int) -> list[int]:
        self._draws[row] = self._random.random()
        return super()._chain(row, done, length)

    def start(self, context, model, output):
        super().start(context, model, output)
        self._random = random.Random(self._seed)


def real_steps(rows: int, length: int, calls: int) -> Counter:
    """Steps by active rows, over all calls with the prescribed acceptance."""
    ids, mask = prompts(tuple(range(4, 4 + rows)))
    model = tiny_model("llama")
    call = dict(attention_mask=mask, max_new_tokens=TOKENS, eos_token_id=None)
    plain = specdec_ext.generate(model, ids, drafter=None, **call)[:, ids.shape[1] :].tolist()
    chains = Chains(length)
    for seed in range(calls):
        drafter = RandomDraws(chains, plain, ACCEPTANCE, VOCAB, seed)
        specdec_ext.generate(model, ids, drafter=drafter, speculation="fixed", **call)
    return chains.steps


@pytest.mark.parametrize(("rows", "length"), [(1, 3), (4, 5), (8, 2)])
def test_the_real_loop_needs_as_many_passes(rows, length):
    """Steps of rows and passes of the batch, which needs as many as its slowest row, agree within 5 %."""
    calls = 10
    costs, traffic = StepCosts.relative(0.0, rows=range(1, rows + 1)), Traffic.uniform(ACCEPTANCE)
    real = real_steps(rows, length, calls)
    simulated: Counter = Counter()
    for seed in range(10 * calls):
        found = simulate(costs, traffic, length, rows, new_tokens=TOKENS, requests=rows, seed=seed)
        assert found.tokens == rows * (TOKENS - 1)
        simulated += Counter(found.steps)
    assert simulated.total() / 10 == pytest.approx(real.total(), rel=0.05)
    of_rows = [sum(n * count for n, count in each.items()) for each in (simulated, real)]
    assert of_rows[0] / 10 == pytest.approx(of_rows[1], rel=0.05)


def test_means_are_those_of_the_formula():
    costs, traffic = StepCosts.relative(0.05, 0.01), Traffic.uniform([0.8])
    found = simulate(costs, traffic, 4, new_tokens=2000, requests=40)
    expected = costs.ratio(1, 4) / traffic.acceptance_length(4)
    assert found.tail.itl_mean == pytest.approx(expected, rel=0.02)
    assert found.plain.itl == (1.0, 1.0, 1.0) and found.plain.per_token == pytest.approx(1)


def test_kinds_of_text_have_their_shares():
    """The blended speed is the harmonic mean: 2.39 tokens per step, not 2.43."""
    traffic = Traffic((TextKind(0.7, (0.7,)), TextKind(0.3, (0.4,))))
    found = simulate(StepCosts.relative(0.0), traffic, 5, new_tokens=3000, requests=100)
    assert 1 / found.tail.itl_mean == pytest.approx(2.39, abs=0.015)


def test_mean_falls_and_99th_percentile_rises():
    """The exercise: after roll-out, mean ITL is lower and p99 is higher. A rejected draft costs two passes,
    the drafter's and a wider one of the target, but not two of the target."""
    costs = StepCosts.relative(0.1, 0.02)
    found = simulate(costs, Traffic.uniform([0.8]), 4)
    assert found.mean_falls_and_tail_rises
    assert found.tail.itl_mean < 1 < found.tail.itl[-1] == pytest.approx(costs.ratio(1, 4))
    assert found.tail.itl[-1] < 2  # the correction comes from the pass that rejects
    assert set(found.tail.chunk_gap) == {costs.ratio(1, 4)}
    text = " ".join(found.explain().split())
    assert "The mean falls and the tail rises" in text
    assert "It does not wait for a second pass of the target" in text
    # 0.2 of the steps emit one token, and a step emits 3.36 tokens.
    assert found.alone == pytest.approx(0.2 / 3.36, rel=0.1)
    free = simulate(StepCosts.relative(0.0), Traffic.uniform([0.8]), 4)
    assert not free.mean_falls_and_tail_rises and free.tail.itl[-1] == 1


def test_a_new_request_takes_the_place_of_one_that_ends():
    costs = StepCosts.relative(0.1, rows=(1, 2, 3))
    found = simulate(costs, Traffic.uniform([0.0]), 2, rows=3, new_tokens=5, requests=7)
    assert found.steps == {3: 8, 1: 4}  # two full batches of 4 steps, then the last request
    assert found.tokens == 28 and found.alone == 1


def test_the_same_seed_gives_the_same_simulation():
    costs, traffic = StepCosts.relative(0.1), Traffic.uniform([0.5])
    runs = [simulate(costs, traffic, 3, seed=seed).record() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "wrong", [dict(length=0), dict(rows=0), dict(new_tokens=1), dict(requests=0)], ids=str
)
def test_too_small_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="expected at least 1, 1, 1 and 2"):
        simulate(StepCosts.relative(0.1), Traffic.uniform([0.5]), **{"length": 1, **wrong})
