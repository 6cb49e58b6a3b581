"""``GET /pair`` of a watched server beside a lock: what differs is named, and what is not told is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.fake_server import fake_server
from helpers.metrics_page import page

from specdec_ext.rollout.lock import LockedFiles, PairLock
from specdec_ext.watch.watcher import Watcher


def files(name: str, digit: str, revision: str | None = None) -> LockedFiles:
    return LockedFiles(name, revision, {"config.json": digit * 64, "model.safetensors": digit * 64})


LOCK = PairLock(files("org/target", "1", "a" * 40), files("org/head", "2"), "HeadDrafter", "fixed")


@pytest.fixture
def server():
    with fake_server() as fake:
        fake.metrics = page()
        yield fake


def look(server, **options):
    """The verdict on the pair, and the report."""
    with Watcher(server.url, lock=LOCK, **options) as looking:
        report = looking.look_at_all()
    (verdict,) = (each for each in report.verdicts if each.check == "pair")
    return verdict, report


def test_the_locked_pair_is_well(server):
    server.pair = LOCK.record()
    verdict, report = look(server)
    assert (verdict.state, verdict.reason) == ("well", "target and draft are those of the lock")
    assert report.status == 0 and report.record()["verdicts"][1]["check"] == "pair"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            replace(LOCK, target=files("org/target", "3", "b" * 40)),
            f"target org/target, revision {'b' * 40}: config.json has SHA-256 {'3' * 16}..., that of "
            f"org/target, revision {'a' * 40} has {'1' * 16}...",
        ),
        (replace(LOCK, draft=files("org/head", "4")), "draft org/head: config.json has SHA-256"),
        (replace(LOCK, draft=None), "there is no draft with files, such as org/head"),
        (replace(LOCK, drafter="NgramDrafter"), "the drafter is NgramDrafter, not HeadDrafter"),
        (replace(LOCK, speculation="auto"), "speculation is auto, not fixed"),
        (
            replace(LOCK, target=files("t", "3"), draft=files("d", "4")),
            "; and 1 other difference",
        ),
    ],
    ids=["target", "draft", "no draft", "drafter", "policy", "many"],
)
def test_another_pair_is_broken_and_named(server, found, told):
    server.pair = found.record()
    verdict, report = look(server)
    assert verdict.state == "critical" and told in verdict.reason
    assert report.status == 3 and "pair critical: " in report.summary()


def test_the_same_files_under_another_name_and_revision_are_the_pair(server):
    server.pair = replace(LOCK, target=replace(LOCK.target, revision="c" * 40)).record()
    verdict, _ = look(server)
    assert verdict.state == "well"
    assert f"the target is called org/target, revision {'c' * 40}, not org/target" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "not verifiable: GET /pair: status 404, {}; only specdec serve has this page"),
        (
            (401, {"error": {"message": "no key"}}),
            "status 401, no key; pass the server's --api-key",
        ),
        ((500, {"error": {"message": "no\x1b[2J disk"}}), r"status 500, no\x1b[2J disk"),
        ({"pair_lock": 9}, "/pair: pair_lock is 9; expected"),
        ([1], "the server sent [1]; expected an object"),
        ({"pair_lock": 2, "speculation": "auto"}, "/pair: target has 0 files"),
    ],
    ids=["no page", "no key", "failure", "later format", "no object", "no files"],
)
def test_a_server_that_does_not_tell_its_pair_is_not_verifiable(server, answer, told):
    server.pair = answer
    verdict, report = look(server)
    assert verdict.state == "unknown" and told in verdict.reason
    assert report.status == 0 and "not judged: pair" in report.summary()


def test_a_pair_that_takes_too_long_is_not_verifiable(server, monkeypatch):
    server.pair = LOCK.record()
    get = Watcher._get

    def slow(self, page):
        if page.endswith("/pair"):
            raise ConnectionError("no complete page within 10 seconds")
        return get(self, page)

    monkeypatch.setattr(Watcher, "_get", slow)
    verdict, _ = look(server)
    assert (
        verdict.state == "unknown" and "within 10 seconds; the first answer takes" in verdict.reason
    )


def test_a_pair_that_is_exchanged_is_seen_at_the_next_look(server):
    server.pair = LOCK.record()
    with Watcher(server.url, lock=LOCK) as looking:
        assert looking.look().status == 0
        server.pair = replace(LOCK, draft=None).record()
        assert looking.look().status == 3


def test_without_a_lock_nothing_is_asked(server):
    server.pair = replace(LOCK, draft=None).record()
    with Watcher(server.url) as looking:
        report = looking.look_at_all()
    assert "pair" not in {each.check for each in report.verdicts}


def test_the_page_is_beside_that_of_the_metrics(server):
    with Watcher(f"{server.url}/metrics", lock=LOCK) as looking:
        server.pair = LOCK.record()
        assert looking.look_at_all().verdicts[1].state == "well"
