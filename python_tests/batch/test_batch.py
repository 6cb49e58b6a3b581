"""``run_batch`` and ``specdec batch``: order, both formats, wrong lines, and runs that were killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tracemalloc

import pytest
from helpers.command_line import run, words
from helpers.places import ROOT
from helpers.serving import MODEL, TEMPLATE, openai, target, text_alone, tokenizer, until

from specdec_ext.batch import BatchFiles, run_batch
from specdec_ext.batch import run as runs
from specdec_ext.batch.lines import read_lines
from specdec_ext.batch.output import OutputFile
from specdec_ext.display import progress
from specdec_ext.engine import Engine
from specdec_ext.serve.service import Settings

SETTINGS = Settings(MODEL, chat_template=TEMPLATE)
GREEDY = {"max_tokens": 8, "temperature": 0}
PROMPTS = ["import os\n", "def read(path):\n", "class Queue:\n", "import re\n", "x = [\n"]


@pytest.fixture
def engine():
    with Engine(target(), tokenizer=tokenizer(), speculation="fixed", max_rows=3) as running:
        yield running


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path, *lines):
    """Lines that are bytes are written as they are, others as JSON."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(custom_id, url="/v1/completions", method="POST", **body):
    return {"custom_id": custom_id, "method": method, "url": url, "body": {**GREEDY, **body}}


def batch(engine, files, **options):
    return run_batch(engine, *files, SETTINGS, **{"defaults": GREEDY, **options})


# --- texts and their order --------------------------------------------------------------------------


def test_plain_prompts_have_their_own_texts_in_their_order(engine, files):
    """The first one takes longest, so that the others wait for its record."""
    lines = [
        {"prompt": PROMPTS[0], "max_tokens": 60},
        *PROMPTS[1:],
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": tokenizer()(PROMPTS[0])["input_ids"]},
    ]
    write(files[0], lines[0], b"", *lines[1:])
    report = batch(engine, files)
    assert (report.answered, report.failed, report.kept) == (7, 0, 0)
    assert str(report) == "7 lines: 7 answered, 0 with an error"
    records = read(files[1])
    assert [record["line"] for record in records] == [1, 3, 4, 5, 6, 7, 8]
    assert records[0]["text"] == text_alone(PROMPTS[0], max_new_tokens=60)
    assert records[0]["usage"]["completion_tokens"] == 60
    for prompt, record in zip(PROMPTS[1:], records[1:5], strict=True):
        assert record["text"] == text_alone(prompt, max_new_tokens=8)
        assert record["finish_reason"] == "length"
    assert records[5]["message"]["content"] == text_alone("# user: hello\n", max_new_tokens=8)
    assert records[6]["text"] == text_alone(PROMPTS[0], max_new_tokens=8)


def test_each_line_has_a_seed_of_its_own_and_fields_of_a_line_come_first(engine, files):
    write(
        files[0],
        PROMPTS[0],
        PROMPTS[0],
        {"prompt": PROMPTS[0], "seed": 40},
        {"prompt": PROMPTS[0], "temperature": 0, "max_completion_tokens": 5, "seed": None},
    )
    batch(engine, files, defaults={"max_tokens": 12, "temperature": 1.0}, seed=7)
    texts = [record["text"] for record in read(files[1])]
    sampled = dict(max_new_tokens=12, do_sample=True, top_k=0)
    assert texts[:3] == [text_alone(PROMPTS[0], seed=seed, **sampled) for seed in (7, 8, 40)]
    assert texts[3] == text_alone(PROMPTS[0], max_new_tokens=5)


def test_openai_format_is_answered_as_a_server_does(engine, files):
    write(
        files[0],
        asked("b", prompt=PROMPTS[0]),
        asked("a", "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], n=2),
        asked("c", prompt=PROMPTS[0], temperature=-1),
        asked("d", prompt=PROMPTS[0], model="gpt-5"),
    )
    report = batch(engine, files, defaults={"max_tokens": 1})
    assert (report.answered, report.failed) == (2, 2)
    records = read(files[1])
    assert [record["custom_id"] for record in records] == ["b", "a", "c", "d"]
    assert all(record["error"] is None for record in records)
    responses = [record["response"] for record in records]
    assert [each["status_code"] for each in responses] == [200, 200, 400, 404]
    text = openai.types.Completion.model_validate(responses[0]["body"])
    assert text.choices[0].text == text_alone(PROMPTS[0], max_new_tokens=8)
    assert responses[0]["request_id"] == text.id
    chat = openai.types.chat.ChatCompletion.model_validate(responses[1]["body"])
    assert [each.message.content for each in chat.choices] == [
        text_alone("# user: hello\n", max_new_tokens=8)
    ] * 2
    assert responses[2]["body"]["error"]["param"] == "temperature"
    assert len({record["id"] for record in records}) == 4


def test_only_so_many_lines_are_in_memory(engine, files, monkeypatch):
    """Lines behind one that takes long wait unread, and none of their answers is lost."""
    first, begun = asyncio.Event(), []

    async def answer(app, request):
        begun.append(request.body["prompt"])
        if request.body["prompt"] == "0":
            await asyncio.wait_for(first.wait(), 30)
        elif len(begun) == runs.LINES_PER_ROW * engine.max_rows:
            await asyncio.sleep(0.1)
            assert len(begun) == runs.LINES_PER_ROW * engine.max_rows
            first.set()
        return runs.BatchAnswer(200, "", {"choices": [{"index": 0, "text": ""}], "usage": {}})

    monkeypatch.setattr(runs, "_answer", answer)
    write(files[0], *[str(number) for number in range(50)])
    assert batch(engine, files).answered == 50
    assert [record["line"] for record in read(files[1])] == [*range(1, 51)]


# --- lines that are wrong ----------------------------------------------------------------------------

PLAIN_ERRORS = {
    "not JSON": (b"{'prompt': 'a'}", "the line is not valid JSON"),
    "half of an object": (b'{"prompt": "a', "the line is not valid JSON"),
    "deep": (b"[" * 100_000, "the line is not valid JSON"),
    "long number": (b'{"prompt": ' + b"1" * 5000 + b"}", "the line is not valid JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "the line is not UTF-8 text"),
    "too long": (json.dumps("a" * 200_000).encode(), "the line has more than 150000 bytes"),
    "number": (b"1", "expected a text, or an object with either"),
    "no prompt": (b"{}", "expected a text, or an object with either"),
    "two prompts": ({"prompt": "a", "messages": []}, "expected a text, or an object with either"),
    "empty text": (b'""', "prompt.0: expected a text or a list of token ids that is not empty"),
    "number as a prompt": ({"prompt": 1}, "prompt: "),
    "null as a prompt": ({"prompt": None}, "prompt: this field is required"),
    "several": ({"prompt": ["a", "b"]}, "expected one prompt and n=1"),
    "two texts": ({"prompt": "a", "n": 2}, "expected one prompt and n=1"),
    "stream": ({"prompt": "a", "stream": True}, "stream: answers are written as a whole"),
    "unknown field": ({"prompt": "a", "x": 1}, "x: this field is not known"),
    "wrong type": ({"prompt": "a", "max_tokens": "8"}, "max_tokens: "),
    "infinity": (b'{"prompt": "a", "temperature": Infinity}', "temperature: "),
    "half a character": (b'{"prompt": "\\ud800"}', "prompt"),
    "unknown token": ({"prompt": [10**6]}, "prompt: expected token ids in"),
    "too many tokens": ({"prompt": "a", "max_tokens": 10**6}, "prompt: a text may have"),
}


@pytest.mark.parametrize("name", PLAIN_ERRORS)
def test_a_plain_line_that_is_wrong_gets_an_error_and_the_others_a_text(engine, files, name):
    raw, message = PLAIN_ERRORS[name]
    write(files[0], PROMPTS[0], raw, PROMPTS[1])
    settings = Settings(MODEL, max_body_bytes=150_000)
    report = run_batch(engine, *files, settings, defaults=GREEDY)
    assert (report.answered, report.failed) == (2, 1)
    first, wrong, last = read(files[1])
    assert wrong["line"] == 2 and wrong["error"]["message"].startswith(message), wrong
    assert [first["text"], last["text"]] == [text_alone(p, max_new_tokens=8) for p in PROMPTS[:2]]


OPENAI_ERRORS = {
    "text": ("import os", "expected an object, got 'import os'"),
    "plain": ({"prompt": "a"}, "the field 'prompt' is not known"),
    "unknown field": (
        {**asked("x", prompt="a"), "priority": 1},
        "the field 'priority' is not known",
    ),
    "no id": (
        {"method": "POST", "url": "/v1/completions", "body": {}},
        "custom_id: expected a text",
    ),
    "number as id": (asked(7, prompt="a"), "custom_id: expected a text, got 7"),
    "empty id": (asked("", prompt="a"), "custom_id: expected a text, got ''"),
    "list as id": (asked(["a"], prompt="a"), "custom_id: expected a text"),
    "used id": (asked("first", prompt="a"), "custom_id: line 1 has 'first' too"),
    "GET": (asked("x", method="GET"), "method: expected 'POST', got 'GET'"),
    "unknown url": (asked("x", "/v1/embeddings"), "url: expected one of"),
    "url of the server": (asked("x", "/metrics"), "url: expected one of"),
    "list as url": (asked("x", ["/v1/completions"]), "url: expected one of"),
    "body": ({**asked("x"), "body": "a"}, "body: expected an object, got 'a'"),
    "stream": (asked("x", prompt="a", stream=True), "stream: answers are written as a whole"),
    "not JSON": (b"{", "the line is not valid JSON"),
}


@pytest.mark.parametrize("name", OPENAI_ERRORS)
def test_a_line_of_openai_that_is_wrong_gets_an_error_with_its_number(engine, files, name):
    line, message = OPENAI_ERRORS[name]
    write(files[0], asked("first", prompt=PROMPTS[0]), line, asked("last", prompt=PROMPTS[1]))
    assert batch(engine, files).failed == 1
    _, wrong, last = read(files[1])
    assert wrong["response"] is None
    assert wrong["error"]["message"].startswith(f"line 2: {message}"), wrong
    body = last["response"]["body"]
    assert body["choices"][0]["text"] == text_alone(PROMPTS[1], max_new_tokens=8)


def test_a_first_line_that_is_wrong_does_not_decide_the_format(engine, files):
    write(files[0], b"{", b"\xff", asked("a", prompt=PROMPTS[0]))
    assert batch(engine, files).failed == 2
    assert [record["custom_id"] for record in read(files[1])] == [None, None, "a"]


def test_a_long_line_is_never_held(files):
    files[0].write_bytes(b'"' + b"a" * 30_000_000 + b'"\n"short"')
    tracemalloc.start()
    first, second = read_lines(files[0], 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first.problem is not None and second.content == "short" and second.number == 2
    assert peak < 1_000_000


@pytest.mark.parametrize("excess", [0, 1])
def test_the_limit_of_a_line_counts_its_bytes_without_the_end(files, excess):
    text = json.dumps("a" * 98).encode()
    for end in (b"", b"\n", b"\n\n1"):
        files[0].write_bytes(text + end)
        first = next(read_lines(files[0], 100 - excess))
        assert (first.problem is None) == (not excess)


def test_a_line_at_the_limit_is_answered(engine, files):
    """As the body of a request it would be longer: "é" in two bytes, or in six."""
    text = "é" * 40
    write(files[0], json.dumps(text, ensure_ascii=False).encode())
    settings = Settings(MODEL, max_body_bytes=files[0].stat().st_size - 1)
    assert run_batch(engine, *files, settings, defaults=GREEDY).answered == 1


def test_a_mark_of_the_order_of_bytes_is_no_part_of_the_first_line(files):
    files[0].write_bytes(b'\xef\xbb\xbf"a"\r\n"b"\r\n')
    assert [line.content for line in read_lines(files[0], 100)] == ["a", "b"]


# --- runs that were killed ---------------------------------------------------------------------------


def cuts(raw: bytes):
    """Ends of a file at which a run may have been killed."""
    lines = [i + 1 for i, byte in enumerate(raw) if byte == ord("\n")]
    return [0, 1, 5, 30, lines[0] - 1, *lines, lines[0] + 1, lines[1] + 25, len(raw) - 2]


@pytest.mark.parametrize("kind", ["plain", "openai"])
def test_a_run_goes_on_wherever_it_was_killed(engine, files, kind, monkeypatch):
    lines = {
        "plain": [*PROMPTS[:3], {"x": 1}],
        "openai": [*[asked(p, prompt=p) for p in PROMPTS[:3]], asked(PROMPTS[0], prompt="a")],
    }[kind]
    write(files[0], *lines)
    whole = batch(engine, files)
    raw, records = files[1].read_bytes(), read(files[1])
    submitted = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *a, **k: submitted.append(a) or submit(*a, **k))
    for cut in cuts(raw):
        files[1].write_bytes(raw[:cut])
        kept = raw[:cut].count(b"\n")
        submitted.clear()
        report = batch(engine, files)
        assert (report.answered, report.failed, report.kept) == (3, 1, kept) != whole
        assert len(submitted) == 3 - min(kept, 3)
        again = read(files[1])
        for before, after in zip(records, again, strict=True):
            if kind == "plain":
                assert {**before, "usage": 0} == {**after, "usage": 0}
            elif before["response"] is not None:
                texts = [each["response"]["body"]["choices"][0]["text"] for each in (before, after)]
                assert texts[0] == texts[1]
            assert before.get("error") == after.get("error")
        assert files[1].read_bytes().startswith(raw[:cut][: raw[:cut].rfind(b"\n") + 1])


@pytest.mark.slow
def test_a_process_that_is_killed_is_gone_on_with(engine, files):
    write(files[0], *[{"prompt": PROMPTS[i % 5], "max_tokens": 40 + i} for i in range(200)])
    command = [sys.executable, "-m", "specdec_ext.cli", "batch", *map(str, files), "bundled"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--dtype", "float32", "--max-rows", "2"], env=environment)
    until(lambda: files[1].exists() and files[1].read_bytes().count(b"\n") > 4, 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = files[1].read_bytes()
    kept = before.count(b"\n")
    write(files[0], *[{"prompt": PROMPTS[i % 5], "max_tokens": 40 + i} for i in range(kept + 4)])
    as_the_command = {"model": "bundled", "max_tokens": 128, "temperature": 0.0}
    report = run_batch(engine, *files, Settings("bundled"), defaults=as_the_command)
    assert report.kept == kept and report.answered == kept + 4
    assert files[1].read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    for i, record in enumerate(read(files[1])):
        if i > kept - 3:
            assert record["text"] == text_alone(PROMPTS[i % 5], max_new_tokens=40 + i)


@pytest.mark.parametrize(
    "content",
    [
        b"a diary\n",
        b"a diary without an end of its line",
        b'{"line": 2, "text": "of another file"}\n',
        b'{"line": 1}\n{"line": 2}\n{"line": 3}\n',
        b'{"custom_id": "a", "response": {}, "error": null}\n',
        b"\xff\n",
        b"[]\n",
    ],
    ids=["text", "half a line", "another order", "too many", "no status", "not UTF-8", "list"],
)
@pytest.mark.parametrize("kind", ["plain", "openai"])
def test_the_file_of_another_run_is_refused_and_stays(engine, files, content, kind):
    write(files[0], *(["a", "b"] if kind == "plain" else [asked("a"), asked("b")]))
    files[1].write_bytes(content)
    with pytest.raises(ValueError, match=r"out\.jsonl line \d is not the answer to its line of IN"):
        batch(engine, files)
    assert files[1].read_bytes() == content
    batch(engine, files, overwrite=True)
    assert len(read(files[1])) == 2


@pytest.mark.parametrize("kind", ["plain", "openai"])
def test_answers_to_another_request_are_refused(engine, files, kind):
    """The same numbers and names of lines, but another prompt, other options or another seed."""
    lines = lines_of(kind, *PROMPTS[:2])
    write(files[0], *lines)
    batch(engine, files, seed=3)
    before = files[1].read_bytes()
    assert batch(engine, files, seed=3).kept == 2
    write(files[0], lines[0], lines_of(kind, PROMPTS[0], PROMPTS[3])[1])
    with pytest.raises(ValueError, match=r"line 2 is not the answer to its line of IN with these"):
        batch(engine, files, seed=3)
    write(files[0], *lines)
    changes = [dict(seed=4), dict(seed=3, defaults={**GREEDY, "top_p": 0.5})]
    for change in changes if kind == "plain" else []:  # a body of OpenAI's format is as it is
        with pytest.raises(ValueError, match=r"line 1 is not the answer to its line of IN"):
            batch(engine, files, **change)
    assert files[1].read_bytes() == before


# --- errors that are tried again ----------------------------------------------------------------------


def errors(path, kind):
    """Whether each record has an error."""
    if kind == "plain":
        return ["error" in record for record in read(path)]
    return [(record["response"] or {}).get("status_code") != 200 for record in read(path)]


def lines_of(kind, *prompts, tokens=8):
    """Requests; prompts that are bytes are lines as they are."""
    made = {"plain": lambda i, p: {"prompt": p, "max_tokens": tokens}}
    made["openai"] = lambda i, p: asked(f"id {i}", prompt=p, max_tokens=tokens)
    return [p if isinstance(p, bytes) else made[kind](i, p) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("kind", ["plain", "openai"])
def test_errors_are_tried_again_in_their_places(engine, files, kind, monkeypatch):
    """After the lines were mended: an empty prompt, and one that is no JSON."""
    bad = lines_of(kind, PROMPTS[0], "", PROMPTS[2], b"{", PROMPTS[4])
    write(files[0], *bad[:4])
    assert batch(engine, files).failed == 2
    before = files[1].read_bytes().splitlines()
    assert errors(files[1], kind) == [False, True, False, True]
    good = lines_of(kind, *PROMPTS)
    write(files[0], *good[:3], b"{", good[4])
    submitted = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *a, **k: submitted.append(a) or submit(*a, **k))
    report = batch(engine, files, retry_errors=True)
    assert (report.answered, report.failed, report.kept, report.retried) == (4, 1, 2, 2)
    assert str(report).endswith("2 of them by earlier runs; 2 errors tried again")
    assert len(submitted) == 2  # line 2 again, and line 5
    assert errors(files[1], kind) == [False, False, False, True, False]
    after = files[1].read_bytes().splitlines()
    assert [after[0], after[2]] == [before[0], before[2]]
    write(files[0], *good)
    report = batch(engine, files, retry_errors=True)
    assert (report.answered, report.failed, report.kept, report.retried) == (5, 0, 4, 1)
    if kind == "plain":
        assert [record["line"] for record in read(files[1])] == [1, 2, 3, 4, 5]
    else:
        assert [record["custom_id"] for record in read(files[1])] == [f"id {i}" for i in range(5)]
    assert not list(files[1].parent.glob("*.retry"))


def test_without_the_option_errors_stay(engine, files):
    write(files[0], "", PROMPTS[0])
    batch(engine, files)
    before = files[1].read_bytes()
    write(files[0], PROMPTS[1], PROMPTS[0])
    report = batch(engine, files)
    assert (report.answered, report.failed, report.kept, report.retried) == (1, 1, 2, 0)
    assert files[1].read_bytes() == before
    assert batch(engine, files, retry_errors=True).answered == 2
    assert batch(engine, files, retry_errors=True).retried == 0  # nothing to try again


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["error", "ctrl-c"])
def test_a_retry_that_ends_early_loses_no_record(engine, files, error, monkeypatch):
    write(files[0], PROMPTS[0], "", *PROMPTS[1:])
    batch(engine, files)
    before = files[1].read_bytes()
    (files[1].parent / "out.jsonl.retry").write_text("half a re")  # of a run that was killed
    append = OutputFile.append

    def breaking(self, record):
        if record["line"] == 4:
            raise error("no space left")
        append(self, record)

    monkeypatch.setattr(OutputFile, "append", breaking)
    with pytest.raises(error):
        batch(engine, files, retry_errors=True)
    assert files[1].read_bytes() == before
    monkeypatch.setattr(OutputFile, "append", append)
    assert batch(engine, files, retry_errors=True).kept == 5
    assert [record["line"] for record in read(files[1])] == [1, 2, 3, 4, 5, 6]


def test_the_answers_stay_those_of_this_run_while_errors_are_tried_again(engine, files, tmp_path):
    """Also behind a link, which stays one."""
    (tmp_path / "there").mkdir()
    files[1].symlink_to(tmp_path / "there" / "answers.jsonl")
    write(files[0], "", PROMPTS[0])
    batch(engine, files)
    with BatchFiles(*files, 10_000, GREEDY, retry_errors=True) as run:
        assert run.answer(engine, SETTINGS).retried == 1
        with pytest.raises(OSError, match="another run writes this file"):
            batch(engine, files)
    assert files[1].is_symlink() and len(read(files[1])) == 2


def test_the_requests_are_not_overwritten(engine, files):
    write(files[0], "a")
    before = files[0].read_bytes()
    files[1].symlink_to(files[0])
    with pytest.raises(ValueError, match="is the file of the requests"):
        batch(engine, files, overwrite=True)
    assert files[0].read_bytes() == before


def test_an_engine_that_refuses_requests_is_refused(files):
    write(files[0], "a")
    with (
        Engine(target(), tokenizer=tokenizer(), max_waiting=3) as engine,
        pytest.raises(ValueError, match="max_waiting=3 wait, and a file has more"),
    ):
        batch(engine, files)


def test_two_runs_do_not_write_one_file(engine, files):
    write(files[0], "a")
    with (
        OutputFile(files[1], b"{"),
        pytest.raises(OSError, match="another run writes this file"),
    ):
        batch(engine, files)
    assert batch(engine, files).answered == 1


def test_an_engine_that_has_ended_ends_the_run_and_not_its_lines(engine, files):
    write(files[0], *PROMPTS)
    engine.shutdown()
    with pytest.raises(RuntimeError, match="line 1: the engine has ended"):
        batch(engine, files)
    assert files[1].read_bytes() == b""


# --- the command ---------------------------------------------------------------------------------------


def test_command_answers_prompts_greedily_and_goes_on(files, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    write(files[0], PROMPTS[0], PROMPTS[1])
    options = ["bundled", "--dtype", "float32", "--max-new-tokens", 6, "--max-rows", 2]
    first = run("batch", *files, *options)
    assert first.exit_code == 0, first.output
    assert "answering: 1 of 2 lines" in first.stderr and "left" in first.stderr
    assert "2 lines: 2 answered, 0 with an error" in words(first.stdout)
    expected = [text_alone(prompt, max_new_tokens=6) for prompt in PROMPTS[:2]]
    assert [record["text"] for record in read(files[1])] == expected
    with files[0].open("a") as file:
        file.write("{}\n")
    second = run("batch", *files, *options)
    assert second.exit_code == 1
    assert "3 lines: 2 answered, 1 with an error; 2 of them by earlier runs" in words(second.stdout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--seed", "1"], "--seed needs --sample"),
        (["--max-line-bytes", "0"], "greater than or equal to 1"),
        (["--chat-template", "missing.jinja"], "does not exist"),
    ],
)
def test_command_refuses_wrong_options(files, change, message):
    write(files[0], "a")
    result = run("batch", *files, "bundled", *change)
    assert result.exit_code == 2 and message in words(result.output)
    assert not files[1].exists()


def test_command_checks_the_answers_before_it_loads_a_model(files, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(sys.modules["specdec_ext.cli.batch"], "load_target", load)
    write(files[0], "a", "b")
    files[1].write_text('{"line": 2, "text": "of another file"}\n')
    before = files[1].read_bytes()
    for options in ([], ["--retry-errors"]):
        result = run("batch", *files, "bundled", *options)
        assert result.exit_code == 2 and "is of another run" in words(result.output)
    with OutputFile(files[1], b"{"):
        result = run("batch", *files, "bundled", "--overwrite")
    assert result.exit_code == 2 and "another run writes this file" in words(result.output)
    result = run("batch", *files, "bundled", "--overwrite")
    assert isinstance(result.exception, AssertionError)
    assert files[1].read_bytes() == before  # nothing is removed before the model is loaded
    write(files[0], PROMPTS[0])
    files[1].unlink()
    monkeypatch.undo()
    assert run("batch", *files, "bundled", "--max-new-tokens", 2).exit_code == 0
    result = run("batch", *files, "bundled", "--max-new-tokens", 3)
    assert result.exit_code == 2 and "the options of that run" in words(result.output)
    result = run("batch", *files, "bundled", "--overwrite", "--retry-errors")
    assert result.exit_code == 2 and "leave out --retry-errors" in words(result.output)


def test_command_tries_errors_again(files):
    write(files[0], "", PROMPTS[0])
    options = ["bundled", "--dtype", "float32", "--max-new-tokens", 4]
    assert run("batch", *files, *options).exit_code == 1
    write(files[0], PROMPTS[1], PROMPTS[0])
    assert run("batch", *files, *options).exit_code == 1
    last = run("batch", *files, *options, "--retry-errors")
    assert last.exit_code == 0 and "1 error tried again" in words(last.stdout)


def test_command_refuses_an_output_without_a_folder(files):
    write(files[0], "a")
    result = run("batch", files[0], files[1].parent / "missing" / "out.jsonl", "bundled")
    assert result.exit_code == 2 and "does not exist; create it first" in words(result.output)
