"""``specdec_ext.evaluate.measuring``: calls take turns. No time is measured."""

import pytest

from specdec_ext.evaluate import measuring
from specdec_ext.evaluate.measuring import take_turns


@pytest.mark.parametrize("first, order", [(0, "abc"), (1, "bca"), (5, "cab")])
def test_every_call_is_measured_once_per_turn(first, order):
    log = []
    calls = {name: (lambda name=name: log.append(name)) for name in "abc"}

    def measure(name, call):
        call()
        return len(log)

    measured = take_turns(calls, 2, measure, first=first)
    assert "".join(log) == 2 * order
    assert [*measured] == [*"abc"]
    assert measured["a"] == [order.index("a") + 1, order.index("a") + 4]


def test_measuring_stops_when_the_time_is_up_but_not_before_five_turns(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])

    def a_second(name, call):
        now[0] += 1

    assert len(take_turns({"a": int}, 20, a_second, seconds=7.5)["a"]) == 8
    assert len(take_turns({"a": int}, 20, a_second, seconds=0)["a"]) == 5
    assert len(take_turns({"a": int}, 20, a_second)["a"]) == 20
