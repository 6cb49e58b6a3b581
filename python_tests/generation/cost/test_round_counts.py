"""The copies of a round of ``generate`` between host and GPU are bounded."""

import pytest
from generation import count_round, cuda_like
from generation.trace import FROM_HOST, LAUNCH, TO_HOST, Trace, differences

DRAFTERS = count_round.DRAFTERS
HOST_DRAFTERS = ["none", "ngram", "head chain", "head tree"]


@pytest.fixture(scope="module")
def cases():
    """``(drafter, batch, text) -> numbers``."""
    found = count_round.run([count_round.bundled_world()], HOST_DRAFTERS, new_tokens=24)
    return {(case.drafter, case.batch, case.text): case.row() for case in found}


@pytest.mark.parametrize("text", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", ["1", "ragged 4"])
@pytest.mark.parametrize("drafter", HOST_DRAFTERS)
def test_round_has_at_most_three_copies(cases, drafter, batch, text):
    """One has the numbers of the round for the device, one the verdict, and one a tree drafted on the
    device."""
    case = cases[drafter, batch, text]
    assert case["rounds"] > 1
    assert case["most"][FROM_HOST] == 1, case["places"][FROM_HOST]
    expected = 2 if drafter.startswith("head") else 1
    assert case["most"][TO_HOST] == expected, case["places"][TO_HOST]


@pytest.mark.parametrize("drafter", HOST_DRAFTERS[1:])
def test_round_in_which_a_row_ends_has_few_more_copies(cases, drafter):
    """The rows to move, and where the row ended in its block, are known only after the verdict's copy."""
    ended = [case for (name, *_), case in cases.items() if name == drafter]
    ended = [case for case in ended if case["rounds in which a row ends"]]
    assert ended
    for case in ended:
        assert case["most then"][FROM_HOST] <= 3
        assert case["most then"][TO_HOST] <= 2


def test_plain_round_launches_four_kernels_beside_the_model(cases):
    """Three ops and the filling of one tensor; the model has 6 layers of 36 kernels, and 13 more."""
    assert cases["none", "1", "greedy"]["median"]["launch"] <= 236


# The last one drafts with an n-gram index and a head.
@pytest.mark.parametrize(
    "drafter",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS[:-1]), DRAFTERS[-1]],
)
@pytest.mark.parametrize(
    "engine",
    [pytest.param(False, id="call"), pytest.param(True, id="engine", marks=pytest.mark.slow)],
)
def test_recorded_round_is_one_launch_and_one_copy(monkeypatch, engine, drafter):
    """Draft, pass, verification and commit are one replay, whose result is copied to the host.

    No replay differs from the one before in a call, an address, a shape or a number, and none copies
    anything between host and device. The host waits for a round only after it has launched the next one, and
    repeats the shapes of that round. It reads trees, and writes them, only in rounds that are not started
    ahead: the first ones, and after a row has ended or joined.
    """
    original, calls = count_round.Counting.report, {}
    replays = {}  # graph -> the calls of its last run
    found = []

    def run(self, function):
        before, trace = replays.get(self), Trace()
        cuda_like._device.asked(LAUNCH, "graph launch")
        with cuda_like.reporting(trace.add):
            value = function()
        replays[self] = trace
        if before is not None:
            found.extend(map(str, differences(before, trace)))
        assert trace.count(TO_HOST) == trace.count(FROM_HOST) == 0
        return value

    monkeypatch.setattr(cuda_like.FakeGraph, "run", run)

    def report(self, call):
        if self.case is not None:
            calls.setdefault(id(self.case), []).append(call.name)
        original(self, call)

    monkeypatch.setattr(count_round.Counting, "report", report)
    world, options = count_round.bundled_world(), dict(graphs=True, engine=engine)
    cases = count_round.run([world], [drafter], new_tokens=80, **options)
    assert not found
    assert len(replays) > 3
    for case in cases:
        row, sites = case.row(), case.sites(LAUNCH)
        assert not [site for site in sites if site.startswith("transformers/")]
        assert row["median"][LAUNCH] == 2, (row, sites)
        assert row["median"][FROM_HOST] == 0 and row["most"][FROM_HOST] <= (10 if engine else 2)
        assert row["median"][TO_HOST] == 1, row["places"][TO_HOST]
        assert row["median"][count_round.NEW_SHAPE] == 0, row["places"][count_round.NEW_SHAPE]
        launches = waits = behind = 0
        for name in calls[id(case)]:
            launches += name == "graph launch"
            if name == "synchronize":
                waits += 1
                behind += launches > waits
        assert waits > 6 and behind > waits / 2, (waits, behind)
