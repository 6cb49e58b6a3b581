"""A watcher and a server: what it sees as counters grow, the server vanishes, and begins again."""

import pytest
from helpers.fake_server import fake_server
from helpers.metrics_page import page

from specdec_ext.watch.judge import Reference
from specdec_ext.watch.limits import Limits
from specdec_ext.watch.watcher import Watcher


class Clock:
    """A clock that only moves as somebody sleeps, and what happens then."""

    def __init__(self):
        self.now, self.events = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.events:
            self.events.pop(0)()


@pytest.fixture
def server():
    with fake_server() as fake:
        yield fake


@pytest.fixture
def clock():
    return Clock()


def watcher(server, clock, **options):
    return Watcher(server.url, clock=clock, sleep=clock.sleep, **options)


def states(report):
    return {each.check: each.state for each in report.verdicts}


def counts(times: int) -> str:
    """The page of a server after some windows of 500 drafts, of which 400 and 300 were accepted."""
    return page(
        reached=(500 * times, 400 * times),
        accepted=(400 * times, 300 * times),
        drafts=500 * times,
        accepted_tokens=700 * times,
        generation_tokens=1300 * times,
        timed_seconds=20 * times,
        plain_seconds=30 * times,
        first_token=[("0.1", 4 * times), ("+Inf", 4 * times)],
        running=3,
    )


def test_the_first_look_compares_nothing(server, clock):
    server.metrics = counts(9)
    with watcher(server, clock) as looking:
        report = looking.look()
    assert states(report) == {"server": "well"} and report.growth is None
    assert report.status == 0 and report.summary() == "well"


def test_a_window_is_judged_by_what_was_counted_in_it(server, clock):
    server.metrics = counts(1)
    clock.events = [lambda: setattr(server, "metrics", counts(3))]
    with watcher(server, clock) as looking:
        _, report = looking.looks(5.0, 5.0)
    assert report.growth.seconds == 5 and report.growth.tokens_per_second == 520
    assert states(report) == {
        "server": "well",
        "drafts": "well",
        "head": "well",
        "drift": "unknown",
        "gain": "well",
    }
    assert report.summary() == (
        "well, 520 tokens/s, 2.40 tokens per draft, 1.50x plain decoding, not judged: drift"
    )
    assert [each.acceptance for each in report.positions] == [0.8, 0.75]
    assert report.growth.quantile("vllm:time_to_first_token_seconds", 0.5) == pytest.approx(0.05)


def test_all_that_was_counted_can_be_judged_at_once(server, clock):
    server.metrics = counts(2)
    with watcher(server, clock) as looking:
        report = looking.look_at_all()
    assert report.growth.seconds is None and report.growth.count("vllm:generation_tokens") == 2600
    assert states(report)["gain"] == "well"


def test_the_reference_is_that_of_the_server_unless_another_is_given(server, clock):
    high = (2000, 1600), (1900, 1500)  # 0.95, 0.94
    reached, accepted = (4000, 3200), (3200, 2400)  # 0.8, 0.75
    server.metrics = page(reached=reached, accepted=accepted, drafts=4000, reference=high)
    with watcher(server, clock) as looking:
        drift = looking.look_at_all().verdicts[3]
    assert (drift.state, drift.reason) == (
        "warning",
        "position 1 accepted 80%, not 95%; position 2 accepted 75%, not 94%",
    )
    with watcher(server, clock, reference=Reference(reached, accepted)) as looking:
        assert looking.look_at_all().verdicts[3].state == "well"


def test_a_server_that_vanishes_and_begins_again(server, clock):
    """Nothing negative is seen, and what was counted before is left out."""
    pages = [counts(2), None, "<html>starting</html>", counts(1), counts(2)]
    server.metrics = counts(1)
    clock.events = [lambda each=each: setattr(server, "metrics", each) for each in pages]
    with watcher(server, clock) as looking:
        seen = list(looking.looks(10.0, 50.0))
    assert [report.status for report in seen] == [0, 0, 3, 3, 0, 0]
    assert "no metrics: " in seen[2].summary() and "status 404" in seen[2].summary()
    assert "this is no page of metrics" in seen[3].summary()
    assert seen[4].growth is None and seen[4].restarts == 1
    assert seen[5].growth.seconds == 10 and seen[5].growth.count("vllm:generation_tokens") == 1300
    assert "started again 1 time" in seen[5].explain()


def test_the_window_slides(server, clock):
    server.metrics = counts(0)
    clock.events = [lambda n=n: setattr(server, "metrics", counts(n)) for n in (10, 20, 21, 22, 23)]
    with watcher(server, clock, limits=Limits(window_seconds=20)) as looking:
        *_, report = looking.looks(10.0, 50.0)
    assert report.growth.seconds == 20 and report.recent.seconds == 10
    assert report.growth.count("vllm:generation_tokens") == 2 * 1300


def test_a_page_that_never_ends_is_not_read(server, clock, monkeypatch):
    monkeypatch.setattr("specdec_ext.watch.watcher.MAX_BYTES", 100)
    server.metrics = counts(1)
    with watcher(server, clock) as looking:
        assert looking.look().summary().endswith("the page is longer than 100 bytes")


def test_a_page_that_takes_too_long_is_not_awaited(server, clock):
    server.metrics = counts(1)
    with watcher(server, clock, timeout=1e-9) as looking:
        (verdict,) = looking.look().verdicts
    assert verdict.state == "critical"


def test_a_page_behind_a_path(server, clock):
    server.metrics = counts(1)
    for path in ("", "/", "/v1", "/metrics"):
        with Watcher(server.url + path, clock=clock) as looking:
            assert looking.look().status == 0
    with (
        Watcher(f"{server.url}/other/metrics", clock=clock) as looking,
        pytest.raises(ValueError, match=r"/other/metrics: status 404; expected a page of metrics"),
    ):
        looking.look()
