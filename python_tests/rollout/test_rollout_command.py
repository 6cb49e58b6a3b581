"""``specdec rollout`` on servers: exit status, files, and what it refuses."""

from __future__ import annotations

import json
from functools import partial

import pytest
from helpers.command_line import run, words
from helpers.drafters.checkpoint_cases import random_head
from helpers.fake_server import completion, fake_server
from helpers.serving import serving, target

from specdec_ext import PairLock, save_draft

TEXTS = [f"def area_{i}(width, height):\n" for i in range(8)]
QUICK = ("--max-new-tokens", "12", "--repeats", "1")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt": text, "category": "code"} for text in TEXTS]))
    return path


@pytest.fixture
def fakes():
    with fake_server() as baseline, fake_server() as candidate:
        yield baseline, candidate


def rolled_out(prompts, *arguments, baseline="none", candidate="auto"):
    return run(
        *("rollout", "--baseline", baseline, "--candidate", candidate),
        *("--prompts", prompts, *QUICK, *arguments),
        columns=300,
    )


def of_fakes(fakes, prompts, *arguments):
    urls = [fake.url for fake in fakes]
    return rolled_out(prompts, *arguments, baseline=urls[0], candidate=urls[1])


# --- our own server ------------------------------------------------------------------------------------


def test_a_candidate_that_passes_leaves_a_report_and_a_lock(prompts, tmp_path):
    page, record, lock = (tmp_path / f"result{suffix}" for suffix in (".html", ".json", ".lock"))
    pair = partial(PairLock.of, target(), "head", speculation="fixed")
    with serving({"drafter": "head"}, pair=pair) as server:
        result = rolled_out(
            prompts,
            *("--gate", "equal>=1.0,acceptance>=1.1", "--concurrency", "1,2"),
            *("-o", page, "-o", record, "-o", lock),
            candidate=server.url,
        )
    assert result.exit_code == 0, result.output
    shown = words(result.output)
    assert "PASS: every gate, streams 1, 2" in shown
    assert "recommended speculation" in shown
    found = json.loads(record.read_text())
    assert found["outcome"] == "PASS" and [each["streams"] for each in found["stages"]] == [1, 2]
    gates = [each["gate"] for each in found["stages"][0]["gates"]]
    assert gates == ["equal>=1", "acceptance>=1.1", "failed<=0"]
    text = page.read_text()
    assert "<h1>Rollout: PASS</h1>" in text and "<svg" in text
    assert "acceptance by position in the draft, candidate" in text and "by category" in text
    for reference in ("src=", "href=", "@import", "url(http"):  # nothing is loaded
        assert reference not in text.replace('xlink:href="#', "").replace("url(#", "")
    locked = PairLock.load(lock)
    locked.verify(target(), "head", "fixed")
    assert locked.sampling == {"temperature": 0.0, "max_new_tokens": 12, "prompts": 8}
    assert locked.reference.emitted_tokens == 2 * len(TEXTS) * 11
    assert locked.reference.steps >= locked.reference.drafts > 0
    assert locked.reference.reached_per_position[0] == locked.reference.drafts
    assert found["reference"]["accepted_per_position"] == [*locked.reference.accepted_per_position]


def test_a_random_head_fails_the_acceptance_gate_by_name(prompts, tmp_path):
    sizes = dict(hidden_size=256, target_hidden_size=256, vocab_size=4096)
    head = random_head("eagle3", **sizes, draft_vocab_size=4096, feature_layers=(2, 3, 4))
    lock = tmp_path / "pair.lock"
    result = rolled_out(
        prompts,
        *("--drafter", save_draft(head, tmp_path / "head"), "--speculation", "fixed"),
        *("--gate", "acceptance>=1.5,equal>=1.0", "--concurrency", "1,4", "-o", lock),
    )
    assert result.exit_code == 2, result.output
    shown = words(result.output)
    assert "FAIL: acceptance>=1.5 with 1 stream" in shown
    assert "Not run after that: stages with 4 streams" in shown
    assert f"{lock} is not written" in shown and not lock.exists()


def test_a_server_that_does_not_start_is_an_error_with_its_log(prompts, tmp_path):
    result = rolled_out(prompts, "--drafter", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "specdec serve has ended by itself" in words(result.output)
    assert "nothing" in words(result.output) and "Traceback" not in result.output


# --- texts ---------------------------------------------------------------------------------------------


def writes(second, gap=None, rounding=0.0):
    """A server that writes two tokens; with a gap, it tells log probabilities.

    Args:
        second: the second token, ``"b"`` or ``"c"``.
        gap: how much more probable it is than the other one.
        rounding: error of its log probabilities.
    """

    def answer(body):
        if body.get("stream"):
            return completion("a", second, tokens=[1, 1])
        if gap is None:
            return (200, {"choices": [{"text": f"a{second}"}]})
        other = {"b": "c", "c": "b"}[second]
        top = {second: -0.5 + rounding, other: -0.5 + rounding - gap}
        logprobs = {
            "tokens": ["a", second],
            "token_logprobs": [-1 + rounding, top[second]],
            "top_logprobs": [{"a": -1 + rounding}, top],
        }
        return (200, {"choices": [{"text": f"a{second}", "logprobs": logprobs}]})

    return answer


@pytest.mark.parametrize(
    ("expected", "written", "status", "told"),
    [
        (writes("b"), writes("b"), 0, "PASS"),
        (writes("b", 0.01), writes("c", 0.01, 0.01), 0, "0/8 equal, near-tie: 8"),
        (writes("b", 2.0), writes("c", 2.0, 0.01), 2, "0/8 equal, other text: 8"),
        (writes("b", 0.01), writes("c", 0.01, 0.9), 2, "more than rounding explains"),
        (writes("b"), writes("c"), 1, "0/8 equal, unknown: 8"),
    ],
    ids=["equal", "near-ties", "other texts", "other weights", "no log probabilities"],
)
def test_texts_that_differ(fakes, prompts, expected, written, status, told):
    fakes[0].answer, fakes[1].answer = expected, written
    result = of_fakes(fakes, prompts, "--gate", "equal>=1.0")
    assert result.exit_code == status, result.output
    assert told in words(result.output)
    if status:
        assert "equal>=1 with 1 stream" in words(result.output)


def test_a_baseline_of_several_texts_expects_any_of_them(fakes, prompts):
    """Some servers do not always write the same greedy text."""
    asked = []

    def changing(body):
        asked.append(body["prompt"])
        return completion("a", "cb"[asked.count(body["prompt"]) % 2], tokens=[1, 1])

    fakes[0].answer, fakes[1].answer = changing, writes("c")
    assert of_fakes(fakes, prompts, "--gate", "equal>=1.0", "--repeats", 2).exit_code == 0


# --- requests that fail --------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["status", "interrupted"])
def test_failed_requests_fail_by_name(fakes, prompts, failure, tmp_path):
    def answer(body):
        if TEXTS[3] in body["prompt"]:
            return (500, {"error": "out of memory"}) if failure == "status" else completion("a")[:1]
        return completion("a", "b", tokens=[1, 1])

    fakes[0].answer, fakes[1].answer = writes("b"), answer
    result = of_fakes(
        fakes, prompts, "--gate", "equal>=1.0", "--concurrency", "2,4", "-o", tmp_path / "r.html"
    )
    assert result.exit_code == 2, result.output
    assert "FAIL: failed<=0 with 2 streams" in words(result.output)
    reason = {"status": "out of memory", "interrupted": "the stream ended before the text did"}
    assert reason[failure] in (tmp_path / "r.html").read_text()
    allowed = of_fakes(fakes, prompts, "--gate", "equal>=1.0,failed<=0.2")
    assert allowed.exit_code == 0, allowed.output


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gate", "speed>=1"), "--gate speed>=1: 'speed' is not known; did you mean 'speedup'"),
        (("--concurrency", "0"), "--concurrency 0: expected numbers"),
        (("-o", "result.txt"), "the name must end with one of .json, .lock, .html"),
        (("--candidate", "none"), "--candidate none: expected the address of a server"),
        (("--candidate", "http://h:1", "--drafter", "head"), "--drafter is for a server that is"),
        (("--candidate", "nowhere"), "--candidate nowhere: expected an address"),
        (("--baseline", "nowhere", "--candidate", "http://h:1"), "--baseline nowhere: expected an"),
    ],
)
def test_options_are_refused_before_anything_is_started(arguments, message, prompts):
    result = run("rollout", "--prompts", prompts, *arguments, columns=300)
    assert result.exit_code == 2 and message in words(result.output), result.output


def test_servers_that_can_not_be_judged_are_refused(fakes, prompts, tmp_path):
    url = fakes[1].url
    alone = rolled_out(prompts, candidate=url)
    assert alone.exit_code == 2
    assert "is not specdec serve, so it can't be asked to decode without" in words(alone.output)
    locked = of_fakes(fakes, prompts, "-o", tmp_path / "pair.lock")
    assert locked.exit_code == 2
    assert "a lock needs the files of the candidate's pair" in words(locked.output)
    sampled = of_fakes(fakes, prompts, "--temperature", "0.7")
    assert sampled.exit_code == 2 and "the same text for the same seed" in words(sampled.output)
    fakes[1].models = [{"id": "fake", "owned_by": "specdec_ext"}]
    ratio = rolled_out(prompts, "--gate", "acceptance>=0.9x", candidate=url)
    assert ratio.exit_code == 2 and "the drafts of the baseline, which has none" in words(
        ratio.output
    )


def test_a_bad_lock_of_a_server_is_refused(fakes, prompts, tmp_path):
    """What a server tells is not trusted."""
    fakes[1].models = [{"id": "fake", "owned_by": "specdec_ext"}]
    result = rolled_out(prompts, "-o", tmp_path / "pair.lock", candidate=fakes[1].url)
    assert result.exit_code == 2 and "/pair: status 404" in words(result.output)
