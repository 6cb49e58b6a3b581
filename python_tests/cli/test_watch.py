"""``specdec watch``: what it shows on terminals and in pipes, its exit status, and what it refuses."""

import json
import re

import pytest
from helpers.command_line import run, words
from helpers.fake_server import fake_server
from helpers.metrics_page import page
from helpers.serving import MODEL, PROMPT, serving

from specdec_ext.rollout.lock import LockedFiles, PairLock, ReferenceAcceptance
from specdec_ext.watch.judge import Verdict
from specdec_ext.watch.report import Report
from specdec_ext.watch.watcher import Watcher

WELL = dict(
    reached=(3000, 2400, 1800),
    accepted=(2400, 1800, 1260),
    drafts=3000,
    accepted_tokens=5460,
    generation_tokens=9000,
    timed_seconds=100,
    plain_seconds=170,
    steps=3500,
    step_tokens=8960,
    first_token=[("0.02", 50), ("0.04", 100), ("+Inf", 100)],
    running=2,
)
DEAD = dict(WELL, accepted=(20, 0, 0), accepted_tokens=20)
SLOW = dict(WELL, plain_seconds=90)


@pytest.fixture
def server():
    with fake_server() as fake:
        yield fake


def lock(folder, reference):
    files = LockedFiles("target", None, {"config.json": "0" * 64, "model.safetensors": "1" * 64})
    return PairLock(files, None, "NgramDrafter", reference=reference).save(folder / "pair.lock")


@pytest.mark.parametrize(
    ("counts", "status"), [(WELL, 0), (SLOW, 1), (DEAD, 3)], ids=["well", "slow", "dead"]
)
def test_the_exit_status_says_how_bad_it_is(server, counts, status):
    server.metrics = page(**counts)
    result = run("watch", server.url, "--once", columns=80)
    assert result.exit_code == status, result.output


def test_tables_of_one_look(server):
    server.metrics = page(**WELL)
    shown = run("watch", server.url, "--once", columns=80).output
    assert max(map(len, shown.splitlines())) <= 80
    rows = [line.split() for line in shown.splitlines()]
    for row in (
        ["gain", "well", "1.70x", "the", "estimated", "speed", "of", "plain", "decoding"],
        ["tokens", "per", "draft", "2.82"],
        ["tokens", "per", "step", "2.56"],
        ["first", "token", "p50,", "ms", "20.0"],
        ["running", "2"],
        ["1", "3,000", "0.800"],
        ["3", "1,800", "0.700"],
    ):
        assert row in rows, row


def test_a_lock_is_the_reference(server, tmp_path):
    server.metrics = page(**WELL)
    same = lock(tmp_path, ReferenceAcceptance(2000, 6000, (1600, 1200, 840), 2400, 6000))
    result = run("watch", server.url, "--once", "--lock", same)
    assert result.exit_code == 0 and "3 positions as in the reference" in result.output
    assert "pair unknown not verifiable: GET /pair: status 404" in words(result.output)
    # The second position is accepted less often than the first, here as in the reference.
    better = lock(tmp_path, ReferenceAcceptance(2000, 6000, (1600, 1500, 1050), 2400, 6000))
    result = run("watch", server.url, "--once", "--lock", better)
    assert result.exit_code == 1
    assert "position 2 accepted 75%, not 94%" in words(result.output)


def test_json_is_a_line_for_each_look(server):
    server.metrics = page(**WELL)
    result = run("watch", server.url, "--json", "--once", "--window", "0.2", "--interval", "0.1")
    (line,) = result.output.splitlines()
    found = json.loads(line)
    assert found["url"] == server.url and found["model"] == "m" and found["status"] == 0
    assert found["window"]["seconds"] == pytest.approx(0.2, abs=2)
    assert found["window"]["tokens"] == 0 and found["running"] == 2
    assert [each["check"] for each in found["verdicts"]] == [
        "server", "drafts", "head", "drift", "gain",
    ]  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["time"])


def interrupted(monkeypatch, *reports):
    def looks(self, interval, seconds=None):
        yield from reports
        raise KeyboardInterrupt

    monkeypatch.setattr(Watcher, "looks", looks)


FINE = Report("http://x", [Verdict("server", "well", "answers")], "m")
BROKEN = Report("http://x", [Verdict("server", "critical", "no metrics: refused\x1b[2J")], "m")


def test_a_pipe_gets_a_line_for_each_look_and_ctrl_c_ends_it(monkeypatch, server):
    interrupted(monkeypatch, FINE, BROKEN)
    result = run("watch", server.url, columns=20)
    assert result.exit_code == 3
    first, second = result.output.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d well", first)
    assert second.endswith(r" server critical: no metrics: refused\x1b[2J")


def test_a_terminal_shows_tables_that_replace_each_other(monkeypatch, server):
    monkeypatch.setenv("FORCE_COLOR", "1")
    interrupted(monkeypatch, FINE, BROKEN, FINE)
    result = run("watch", server.url, columns=80)
    assert result.exit_code == 0
    assert "\x1b[2J" not in result.output and r"refused\x1b[2J" in result.output
    assert "\x1b[1A" in result.output  # the cursor moves up to the last table
    assert "check" in words(result.output)


def test_interrupted_before_the_first_look(monkeypatch, server):
    interrupted(monkeypatch)
    assert run("watch", server.url).exit_code == 0


@pytest.mark.parametrize(
    ("metrics", "arguments", "message"),
    [
        ("", ("--once",), "/metrics: none of its 0 metrics is one of speculation"),
        ("<html>", ("--once",), "/metrics: this is no page of metrics"),
        (None, ("--once",), "/metrics: status 404; expected a page of metrics"),
        (page(), ("--once", "--model", "other"), "it serves m, not other"),
        (page(), ("--window", "1"), "--window 1 is shorter than --interval 5"),
    ],
    ids=["empty", "a web page", "not found", "another model", "window"],
)
def test_what_is_refused(server, metrics, arguments, message):
    server.metrics = metrics
    result = run("watch", server.url, *arguments, columns=300)
    assert result.exit_code == 2 and message in words(result.output)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://x", "http://", "http://[::1", "http://x:99999", "http://xn--€..x"],
)
def test_addresses_that_are_refused(url):
    result = run("watch", url, "--once", columns=300)
    assert result.exit_code == 2, result.output
    assert url in words(result.output) and "Traceback" not in result.output


def test_a_password_is_not_shown(server):
    url = server.url.replace("://", "://me:secret@")
    for metrics in (None, "", page(**WELL)):
        server.metrics = metrics
        assert "secret" not in run("watch", url, "--once").output


def test_a_lock_without_acceptance_is_refused(server, tmp_path):
    empty = lock(tmp_path, None)
    result = run("watch", server.url, "--lock", empty, columns=300)
    assert result.exit_code == 2 and "has no acceptance, because its pair was not" in words(
        result.output
    )


def test_no_answer_is_a_broken_server_and_no_wrong_call():
    result = run("watch", "http://127.0.0.1:1", "--once", columns=300)
    assert result.exit_code == 3
    assert "server critical no metrics: ConnectError" in words(result.output)


def test_a_running_server_is_watched():
    """From requests to verdicts, with the acceptance in a lock that is far from that of the drafts."""
    reference = ReferenceAcceptance(9000, 27000, (8990, 8980, 8970), 9000, 36000)
    with serving({"drafter": "head"}, reference=reference) as server:
        for seed in range(12):
            server.post(
                "/v1/completions",
                model=MODEL,
                prompt=PROMPT,
                max_tokens=200,
                seed=seed,
                ignore_eos=True,
            )
        result = run("watch", server.url, "--once", "--json")
        stats = server.engine.stats()
    found = json.loads(result.output)
    states = {each["check"]: each["state"] for each in found["verdicts"]}
    assert stats.drafts > 400 and states == {
        "server": "well", "drafts": "well", "head": "well", "drift": "warning", "gain": "unknown",
    }  # fmt: skip
    assert result.exit_code == 1
    assert found["window"]["drafts"] == stats.drafts and found["window"]["tokens"] == 2400
    shown = [each["acceptance"] for each in found["positions"]][: len(stats.accepted_per_position)]
    assert shown[:3] == stats.conditional_acceptance[:3]
