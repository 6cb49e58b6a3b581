"""Gates: what is understood, what is refused and why, and the verdicts on intervals."""

from __future__ import annotations

import pytest

from specdec_ext.rollout.gates import DEFAULT_GATES, FAIL, HOLD, METRICS, PASS, Gate, parse_gates
from specdec_ext.rollout.intervals import Interval


def test_gates_are_read_and_failures_are_always_one():
    gates = parse_gates(
        "speedup>=1.1x, p99_itl<=1.05x,p50_ttft <= 200ms,acceptance>=0.9x,equal>=1.0"
    )
    assert [gate.name for gate in gates] == [
        "speedup>=1.1",
        "p99_itl<=1.05x",
        "p50_ttft<=200ms",
        "acceptance>=0.9x",
        "equal>=1",
        "failed<=0",
    ]
    assert [gate.name for gate in parse_gates("failed<=0.01")] == ["failed<=0.01"]
    assert len(parse_gates(DEFAULT_GATES)) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--gate is empty; expected gates such as speedup>=1.1"),
        (" , ", "--gate is empty"),
        ("speedup>=1.1,", "--gate '': expected METRIC>=NUMBER"),
        ("speedup", "--gate 'speedup': expected METRIC>=NUMBER"),
        ("speedup>1.1", "expected METRIC>=NUMBER"),
        ("speedup>=fast", "expected METRIC>=NUMBER"),
        ("speedup>=-1", "expected METRIC>=NUMBER"),
        ("speedup>=1e99", "expected METRIC>=NUMBER"),
        ("speedup>=nan", "expected METRIC>=NUMBER"),
        ("sped_up>=1.1", "'sped_up' is not known; did you mean 'speedup'"),
        ("p98_itl<=1.05x", r"'p98_itl' is not known; did you mean 'p9\d_itl'"),
        ("zzz>=1", "'zzz' is not known; metrics are speedup, acceptance"),
        ("speedup<=1.1", r"larger is better here; expected speedup>=1.1"),
        ("p99_itl>=1.05x", r"smaller is better here; expected p99_itl<=1.05x"),
        ("p99_itl<=1.05", r"a bound of p99_itl has x or ms .*, got no unit"),
        ("speedup>=11ms", r"a bound of speedup has no unit or x .*, got the unit ms"),
        ("equal>=1x", "a bound of equal has no unit .*, got the unit x"),
        ("equal>=99", "equal is a share; expected a number from 0 to 1"),
        ("speedup>=1.1,speedup>=1.2x", "--gate bounds speedup twice"),
    ],
)
def test_bad_gates_are_refused_with_the_reason(text, message):
    with pytest.raises(ValueError, match=message):
        parse_gates(text)


def test_a_latency_may_have_two_bounds():
    assert len(parse_gates("p99_itl<=1.05x,p99_itl<=40ms")) == 3
    assert {"p50_ttft", "p90_tpot", "p99_chunk_gap"} <= set(METRICS)


@pytest.mark.parametrize(
    ("gate", "low", "high", "outcome"),
    [
        ("speedup>=1.1", 1.1, 1.3, PASS),
        ("speedup>=1.1", 1.09, 1.3, HOLD),
        ("speedup>=1.1", 0.9, 1.1, HOLD),
        ("speedup>=1.1", 0.9, 1.09, FAIL),
        ("p99_itl<=1.05x", 0.9, 1.05, PASS),
        ("p99_itl<=1.05x", 0.9, 1.06, HOLD),
        ("p99_itl<=1.05x", 1.06, 1.2, FAIL),
        ("p99_itl<=30ms", 29.0, 30.0, PASS),
        ("failed<=0", 0.0, 0.0, PASS),
        ("failed<=0", 0.01, 0.01, FAIL),
        ("equal>=1", 1.0, 1.0, PASS),
        ("equal>=1", 0.99, 0.99, FAIL),
        ("equal>=1", 0.99, 1.0, HOLD),
    ],
)
def test_verdicts_on_intervals(monkeypatch, gate, low, high, outcome):
    measured = Interval((low + high) / 2, low, high)
    monkeypatch.setattr(Gate, "_measure", lambda self, _: measured)
    verdict = parse_gates(gate)[0].judge(None)
    assert verdict.outcome == outcome
    assert verdict.summary().startswith(f"{gate} {outcome}: ")


def test_what_is_not_known_holds(monkeypatch):
    monkeypatch.setattr(Gate, "_measure", lambda self, _: Interval.unknown("nothing was told"))
    for gate in parse_gates("speedup>=0.1,p99_itl<=9x"):
        verdict = gate.judge(None)
        assert verdict.outcome == HOLD and verdict.shown == "nothing was told"
