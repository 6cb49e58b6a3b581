"""Comparisons of servers: fake ones whose answers are known, and our own in this process."""

import json
from collections import Counter

import pytest
from helpers.fake_server import completion, fake_server

pytest.importorskip("httpx2", reason="httpx2 is not installed (extra: serve)")

from specdec_ext.evaluate.benchmark import served
from specdec_ext.evaluate.benchmark.client import Server
from specdec_ext.evaluate.benchmark.prompts import Conversation
from specdec_ext.evaluate.benchmark.reply import Reply
from specdec_ext.evaluate.benchmark.served import Turn, _answered, _of_turns, compare_servers
from specdec_ext.stats import SpeculationStats

TEXTS = [Conversation(str(number), (f"def f{number}(x):\n",), "code") for number in range(4)]


@pytest.fixture
def fakes():
    """Two servers, of which the second one claims to be ours."""
    with fake_server() as first, fake_server() as second:
        yield first, second


def compared(fakes, conversations=TEXTS, **options):
    servers = [Server(fake.url) for fake in fakes]
    try:
        return compare_servers(servers, conversations, **{"max_new_tokens": 2, **options})
    finally:
        for server in servers:
            server.__exit__()


def names(report):
    return list(report.series)


def name_of(fake):
    return fake.url  # its name beside other servers


# --- hand-made turns --------------------------------------------------------------------------------


def reply(began, ended, tokens=4, **fields):
    arrivals = [(began + 1.0, 1), (ended, tokens - 1)]
    return Reply(began, ended, arrivals, [1, 1], True, "text", tokens, 10, **fields)


def test_speed_is_that_of_the_request_with_the_median_time_times_the_streams():
    turns = [
        Turn([reply(0, 2), reply(0, 8, tokens=6)], 8.0),
        Turn([reply(0, 9), reply(0, 4)], 9.0),
        Turn([reply(0, 4), reply(0, 3)], 4.0),
    ]
    series = _of_turns("x", turns, [0, 1], 2)
    assert series.seconds == [2.0, 2.0]  # the medians, 4 and 4, shared by two streams
    assert series.new_tokens == [4, 4] and series.tokens_per_second == [2.0, 2.0]
    assert series.throughput == [10 / 8, 8 / 9, 8 / 4]
    assert len(series.latencies) == 6 and series.requests == 6  # the tail is that of all turns
    assert max(each.gaps[0] for each in series.latencies) == 8.0
    assert {each.rows for each in series.latencies} == {2}


def test_a_stream_that_is_never_busy_does_not_count():
    series = _of_turns("x", [Turn([reply(0, 2)], 2.0)], [0], 16)
    assert series.seconds == [2.0]


def test_questions_that_a_contestant_has_never_answered_are_left_out_of_all():
    failed = Reply(0.0, 1.0, error="status 500: gone")
    turns = {
        "x": [Turn([reply(0, 2), failed, reply(0, 6)], 8.0), Turn([failed] * 3, 1.0)],
        "y": [Turn([reply(0, 3)] * 3, 9.0)] * 2,
    }
    assert _answered(turns) == [0, 2]
    series = _of_turns("x", turns["x"], [0, 2], 1)
    assert series.seconds == [2.0, 6.0] and len(series.latencies) == 2
    assert Counter(series.failures) == {"status 500: gone": 4} and series.requests == 6


def test_statistics_are_added_by_question():
    told = SpeculationStats(drafter="server", drafts=2, accepted_tokens=3)
    told.accepted_per_position = [2, 1]
    turns = [Turn([reply(0, 2, stats=told)], 2.0)] * 2
    series = _of_turns("x", turns, [0], 1)
    assert len(series.speculation_stats) == 1 and series.total("drafts") == 4
    assert series.mean_acceptance_length == 2.5 and series.acceptance_per_position == [1.0, 0.5]


# --- fake servers -----------------------------------------------------------------------------------


def test_servers_take_turns_and_warm_ups_do_not_count(fakes):
    order = []
    for number, fake in enumerate(fakes):
        fake.answer = lambda body, number=number: order.append(number) or completion("a", "b")
    (report,) = compared(fakes, repeats=3)
    connected, warm_up = [0, 1], [0, 1]
    turns = [*[0] * 4, *[1] * 4], [*[1] * 4, *[0] * 4], [*[0] * 4, *[1] * 4]
    assert order == [*connected, *warm_up, *turns[0], *turns[1], *turns[2]]
    assert [row["requests"] for row in report.rows()] == [12, 12]
    assert report.baseline == name_of(fakes[0]) and report.plain is None
    assert "no contestant is known to decode without drafts" in "\n".join(report.remarks)


def test_a_report_for_each_number_of_streams_and_temperature(fakes):
    reports = compared(fakes[:1], streams=[1, 2], temperatures=[0.0, 0.8], repeats=1)
    settings = [(each.settings["streams"], each.settings["temperature"]) for each in reports]
    assert settings == [(1, 0.0), (1, 0.8), (2, 0.0), (2, 0.8)]
    assert fakes[0].most_at_once <= 2
    assert {body["temperature"] for body in fakes[0].bodies} == {0, 0.8}
    assert all(not each.same_text for each in reports[1::2])  # texts of unknown draws


def test_texts_that_differ_are_shown(fakes):
    """Also those of a later turn, and those of another number of streams."""
    seen = Counter()

    def answer(body):
        seen[body["prompt"]] += 1
        is_late = "f1" in body["prompt"] and seen[body["prompt"]] > 3
        return completion("a", "c" if is_late else "b")

    fakes[0].answer = answer
    fakes[1].answer = lambda body: completion("a", "x" if "f2" in body["prompt"] else "b")
    one, two = compared(fakes, repeats=2, streams=[1, 2])
    first, second = map(name_of, fakes)
    assert one.same_text[second] == "3/4" and two.same_text[first] == "3/4"
    expected = (
        f"{second}, prompt 2: differs at character 1 ('x' instead of 'b') from the text of {first}"
    )
    assert expected in one.differences and expected in "\n".join(one.notes())
    assert any(
        f"{first}, prompt 1: differs at character 1 ('c'" in each for each in two.differences
    )


def test_failed_requests_are_counted_and_shown(fakes):
    def answer(body):
        return (500, {"error": "gone"}) if "f3" in body["prompt"] else completion("a", "b")

    fakes[0].answer = answer
    (report,) = compared(fakes, repeats=2)
    rows = {row["name"]: row for row in report.rows()}
    assert [row["failed"] for row in rows.values()] == [2, 0]
    assert rows[name_of(fakes[0])]["failures"] == {"status 500: gone": 2}
    notes = "\n".join(report.notes())
    assert f"{name_of(fakes[0])}: 2 requests failed, status 500: gone" in notes
    assert "1 of 4 prompts are left out of all ratios" in notes
    assert [len(each.seconds) for each in report.series.values()] == [3, 3]
    (table,) = report.tables()
    assert table.headings[-1] == "failed" and table.rows[0][-1] == "2"


def test_a_setting_in_which_all_fails_does_not_take_the_others_with_it(fakes):
    fake, seen = fakes[0], Counter()

    def answer(body):
        seen[body["temperature"]] += 1
        is_late = body["temperature"] == 0.8 and seen[0.8] > 1  # after the warm-up
        return (503, b"busy") if is_late else completion("a", "b")

    fake.answer = answer
    good, lost = compared([fake], temperatures=[0.0, 0.8], repeats=1)
    assert good.settings["temperature"] == 0 and good.is_whole and names(good) == ["server"]
    assert lost.errors == {"server": "status 503: busy"} and not lost.is_whole
    assert lost.all_rows() == [{"name": "server", "error": "status 503: busy"}]
    seen[0.8] = 0
    with pytest.raises(ValueError, match="no prompt was answered by all contestants"):
        compared([fake], temperatures=[0.8], repeats=1)
    fake.answer = lambda body: (503, b"busy") if body["max_tokens"] == 2 else completion("a")
    with pytest.raises(ValueError, match=r"by all contestants. server: status 503: busy"):
        compared([fake], repeats=1)


def test_a_contestant_that_fails_at_a_setting_is_a_row_and_the_others_are_measured(fakes):
    def answer(body):
        return (500, {"error": "out of memory"}) if body["temperature"] else completion("a", "b")

    fakes[0].answer = answer
    first, second = map(name_of, fakes)
    good, half = compared(fakes, temperatures=[0.0, 0.8], repeats=2)
    assert names(good) == [first, second] and good.is_whole
    assert names(half) == [second] and half.baseline == second
    assert half.errors == {first: "status 500: out of memory"}
    (table,) = half.tables()
    assert table.rows[-1][0] == first and table.rows[-1][-1] == "status 500"
    assert f"{first}: failed, status 500: out of memory" in half.notes()


def test_an_interrupt_keeps_the_turns_before_it(fakes, monkeypatch):
    turns = Counter()
    plain = served.ServedContestant.turn

    def turn(self, asked, streams, **options):
        turns[self.server.name, len(asked)] += 1
        if turns[self.server.name, 4] == 3 and self.server.name == name_of(fakes[1]):
            raise KeyboardInterrupt
        return plain(self, asked, streams, **options)

    monkeypatch.setattr(served.ServedContestant, "turn", turn)
    (report,) = compared(fakes, repeats=5)
    assert names(report) == [name_of(each) for each in fakes]
    assert report.is_interrupted and "interrupted after 2 of 5 turns" in report.remarks
    assert [row["requests"] for row in report.rows()] == [12, 8]
    turns.clear()
    monkeypatch.setattr(served.ServedContestant, "turn", lambda *_, **__: interrupt())
    with pytest.raises(KeyboardInterrupt):
        compared(fakes, repeats=5)


def interrupt():
    raise KeyboardInterrupt


def test_more_streams_than_prompts_are_told(fakes):
    (report,) = compared(fakes[:1], streams=[9], repeats=1)
    assert "only 4 requests at a time, because there are no more prompts" in report.remarks


def test_what_makes_numbers_better_or_fewer_is_told(fakes):
    details = {"prompt_tokens_details": {"cached_tokens": 4}}

    def answer(body):
        if "ignore_eos" in body:
            return 400, {"error": {"message": "ignore_eos is unknown"}}
        usage = {"prompt_tokens": 5, "completion_tokens": 7, **details}
        return [*completion("a", "b")[:-2], {"choices": [], "usage": usage}, b"data: [DONE]\n\n"]

    fakes[0].answer = answer
    (report,) = compared(fakes[:1], repeats=1)
    remarks = "\n".join(report.remarks)
    for expected in (
        "refuses ignore_eos: texts end where the model ends them",
        "80% of the prompt tokens came from its cache",
        "does not tell the tokens of each chunk, so ITL is not known",
        "answers have 7 to 7 tokens",
        "requests are completions",
    ):
        assert expected in remarks
    assert names(report) == ["server"] and fakes[0].url in report.title
    (row,) = report.rows()
    assert set(row["milliseconds"]) == {"ttft"}  # everything arrived at once
    assert (row["prompt_tokens"], row["cached_tokens"]) == (20, 16)


def test_nothing_of_that_is_told_of_a_server_without_faults(fakes):
    fakes[0].answer = lambda body: completion("a", "b", tokens=[1, 1])
    (report,) = compared(fakes[:1], repeats=1)
    assert [each.partition(";")[0] for each in report.remarks] == [
        "requests are completions",
        "no contestant is known to decode without drafts",
    ]


def test_second_turns_follow_the_answers_of_the_first_server(fakes):
    talks = [Conversation("81", ("one", "two"), "writing", True), Conversation("82", ("a", "b"))]
    for fake, text in zip(fakes, ("yes", "no"), strict=True):
        fake.answer = lambda body, text=text: (
            (500, {}) if body["prompt"] == "a" and body["ignore_eos"] is False else completion(text)
        )
    (report,) = compared(fakes, talks, repeats=1)
    prompts = [[body["prompt"] for body in fake.bodies[-3:]] for fake in fakes]
    assert prompts == [["one", "one\n\nyes\n\ntwo", "a"]] * 2
    assert "1 conversation without later turns, because an earlier one failed: 82" in "\n".join(
        report.remarks
    )


def test_acceptance_by_vllms_counters(fakes):
    (fake, _), drafts = fakes, [0]

    def answer(body):
        drafts[0] += 2
        page = "".join(
            f"# TYPE vllm:spec_decode_{name} counter\nvllm:spec_decode_{name}_total{labels} {count}\n"
            for name, labels, count in (
                ("num_drafts", "", drafts[0]),
                ("num_draft_tokens", "", 3 * drafts[0]),
                ("num_accepted_tokens", "", 1.5 * drafts[0]),
                ("num_accepted_tokens_per_pos", '{position="0"}', drafts[0]),
                ("num_accepted_tokens_per_pos", '{position="1"}', drafts[0] / 2),
            )
        )
        fake.metrics = page
        return completion("a", "b")

    fake.answer = answer
    (report,) = compared([fake], repeats=2)
    (series,) = report.series.values()
    assert series.total("drafts") == 16  # of two turns over four prompts; no warm-up is counted
    assert series.mean_acceptance_length == 2.5 and series.acceptance_per_position == [1.0, 0.5]
    (row,) = report.by_category()
    assert row["contestants"][series.name]["acceptance_length"] is None  # counters have no category


def test_speculation_is_for_our_servers(fakes):
    with pytest.raises(ValueError, match=r"--speculation: http://127\S+ is not specdec serve"):
        compared(fakes, speculation=["fixed"])


def test_only_our_servers_are_asked_for_plain_decoding(fakes):
    fakes[1].models = [{"id": "b", "owned_by": "specdec_ext"}]
    (report,) = compared(fakes, repeats=1)
    foreign, ours = map(name_of, fakes)
    assert names(report) == [foreign, f"{ours}, plain", ours]
    assert report.plain == report.baseline == f"{ours}, plain"
    assert not any("speculation" in body for body in fakes[0].bodies)
    asked = Counter(body.get("speculation") for body in fakes[1].bodies[1:])
    assert asked == {"none": 5, None: 5}


# --- our own server ---------------------------------------------------------------------------------


def test_our_server_with_and_without_drafts():
    from helpers.serving import serving

    with serving() as served, Server(served.url) as server:
        reports = compare_servers(
            [server],
            TEXTS,
            streams=[1, 3],
            temperatures=[0.0, 0.8],
            max_new_tokens=12,
            repeats=1,
            speculation=["fixed"],
        )
    plain, fixed = "plain", "fixed"
    for report in reports:
        assert names(report) == [plain, fixed] and report.plain == plain
        assert report.same_text == {plain: "4/4", fixed: "4/4"} and not report.differences
        rows = {row["name"]: row for row in report.rows()}
        assert rows[plain]["mean_acceptance_length"] is None
        assert rows[fixed]["mean_acceptance_length"] > 1 and rows[fixed]["failed"] == 0
        for row in rows.values():
            assert set(row["milliseconds"]) == {"ttft", "tpot", "itl", "chunk_gap"}
            assert row["throughput"] > 0 and row["prompt_tokens"] > 0
        assert all(each.tokens == 12 for each in report.series[fixed].latencies)
        gaps = sum(len(each.gaps) for each in report.series[fixed].latencies)
        assert gaps < 4 * 11  # some chunks have several tokens
        assert json.loads(json.dumps(report.record()))["categories"][0]["category"] == "code"


def test_our_server_refuses_another_policy_by_name():
    from helpers.serving import serving

    with serving() as ours, Server(ours.url) as server:
        (report,) = compare_servers([server], TEXTS[:1], repeats=1, speculation=["auto"])
    assert names(report) == ["plain"]
    assert "status 400" in report.errors["auto"] and "speculation" in report.errors["auto"]
