"""``specdec bench`` on the bundled model and on servers: what it measures, writes, shows and refuses."""

from __future__ import annotations

import csv
import json
import re
import sys

import pytest
import torch
from helpers.command_line import run, words
from helpers.fake_server import completion, fake_server
from helpers.models.folders import shared_folder

from specdec_ext import NgramDrafter
from specdec_ext.cli import app  # noqa: F401  (the command's module is found below)

PROMPT = "import unittest\n\n\nclass TestList(unittest.TestCase):\n\n    def test_append(self):\n"
# Texts must be equal in float32; the default is the dtype of the checkpoint.
FLOAT32 = ("--dtype", "float32")
QUICK = ("--max-new-tokens", "4", "--repeats", "1")


def prompts_file(folder, count):
    texts = [PROMPT, "import", "def f(x):\n"][:count]
    (folder / "prompts.json").write_text(json.dumps(texts))
    return str(folder / "prompts.json")


def bench(*arguments, **options):
    result = run("bench", *arguments, **options)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments):
    result = run("bench", *arguments, columns=300)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return words(result.output)


# --- a model ----------------------------------------------------------------------------------------


def test_bench_measures_and_records(tmp_path):
    record, chart = tmp_path / "record.json", tmp_path / "chart.png"
    shown = bench(
        "--prompts", prompts_file(tmp_path, 2), "--drafter", "ngram", "--drafter", "none",
        "--assisted", "draft", "--max-new-tokens", "8", "--repeats", "1",
        "--drafter", "head", "--draft-length", "2", "--speculation", "fixed",
        "-o", record, "--plot", chart, "--breakdown", *FLOAT32,
    )  # fmt: skip
    ours = ["specdec none", "specdec ngram", "specdec head"]
    names = ["HF generate", "HF prompt lookup", "HF assisted", *ours]
    (found,) = json.loads(record.read_text())
    assert [row["name"] for row in found["rows"]] == names
    assert [row["same_text"] for row in found["rows"]] == ["", *["2/2"] * 5]
    assert [row["policy"] for row in found["rows"][-2:]] == ["fixed", "fixed"]
    assert all(len(row["acceptance_per_position"]) == 2 for row in found["rows"][-2:])
    assert found["settings"]["prompts"] == 2 and found["settings"]["max_new_tokens"] == 8
    for name in names:
        assert re.search(rf"{name}\W+\d+\.\d\W+\d+\.\d\dx \[", shown), name
    assert f"torch {torch.__version__}" in shown
    assert "same text as HF generate: 2/2 for every contestant" in shown
    assert shown.count("outside target forward and draft op") == 3  # plain, ngram, head
    assert all(len(each["parts"]) > 3 for each in found["breakdowns"])
    titles = [each["title"] for each in found["breakdowns"]]
    assert titles == ["none, float32", "ngram, float32", "head, float32"]
    for picture in (chart, tmp_path / "chart_breakdown.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_values_of_lists_are_measured_and_plain_decoding_always_is(tmp_path):
    rows = tmp_path / "rows.csv"
    shown = bench(
        "--prompts", prompts_file(tmp_path, 3), "--drafter", "head", "--no-transformers", "-o", rows,
        "--batch", "1,2", "--draft-length", "1,3", "--tree", "2x2x4", "--temperature", "0,0.8",
        "--speculation", "fixed,auto", *QUICK, *FLOAT32,
    )  # fmt: skip
    found = list(csv.DictReader(rows.open()))
    shapes = [
        f"specdec head, {shape}, {policy}"
        for shape in ("chain 1", "chain 3", "tree 2x2x4")
        for policy in ("fixed", "auto")
    ]
    cells = [(batch, sampled) for batch in "12" for sampled in ("False", "True")]
    assert [(row["settings.batch"], row["settings.do_sample"], row["name"]) for row in found] == [
        (*cell, name) for cell in cells for name in ["specdec none", *shapes]
    ]
    drafted = [row for row in found if row["name"].endswith("chain 3, fixed")]
    assert {len(row["acceptance_per_position"].split()) for row in drafted} <= {1, 2, 3}
    assert {row["policy"] for row in drafted} == {"fixed"}
    assert "1 of 3 prompts fill no batch of 2 and were left out" in shown
    assert "same text of specdec none in batches of 2 as of 1: 2/2" in shown
    assert "HF generate" not in shown and shown.count("ratio to specdec none") == 4


def test_each_draft_length_has_a_drafter_of_its_own(tmp_path):
    record = tmp_path / "record.json"
    bench(
        "--prompts", prompts_file(tmp_path, 1), "--drafter", "ngram", "--draft-length", "1,3",
        "--speculation", "fixed", "--no-transformers", "-o", record, "--max-new-tokens", "24",
        "--repeats", "1",
    )  # fmt: skip
    (found,) = json.loads(record.read_text())
    lengths = {row["name"]: len(row["acceptance_per_position"]) for row in found["rows"]}
    assert lengths == {"specdec none": 0, "specdec ngram, chain 1": 1, "specdec ngram, chain 3": 3}


def test_bench_of_a_batch_leaves_out_contestants_for_single_rows(tmp_path):
    shown = bench(
        "--prompts", prompts_file(tmp_path, 3), "--drafter", "none", "--batch", "2",
        "--temperature", "0.8", *QUICK,
    )  # fmt: skip
    left_out = "HF prompt lookup: left out, transformers supports it for batch size 1 only"
    assert left_out in shown
    assert "batch 2, prompts 1" in shown


def test_by_default_one_table_of_80_columns_and_details_on_demand(tmp_path):
    given = ("--prompts", prompts_file(tmp_path, 1), "--drafter", "ngram", *QUICK)
    short = bench(*given, columns=80)
    heading = next(line for line in short.splitlines() if "tokens/s" in line)
    assert heading.split() == [
        "tokens/s",
        "ratio",
        "[95",
        "%]",
        "accepted",
        "TTFT",
        "TPOT",
        "ITL",
        "p99",
    ]
    assert "chunk gap" not in short and "--details" in short
    whole = bench(*given, "--details", columns=80)
    assert all(name in whole for name in ("chunk gap", "prompt  generation", "to HF generate"))
    tables = [line for line in (short + whole).splitlines() if "─" in line or "█" in line]
    assert tables and max(map(len, tables)) <= 80


def test_a_model_of_the_users_runs_without_further_arguments(tmp_path):
    """The general prompts, by the chat template, with second turns after the model's own answers."""
    folder = shared_folder(tmp_path / "model")
    record = tmp_path / "record.json"
    shown = bench(
        folder, "--drafter", "ngram", "--no-transformers", "-o", record, "--details",
        "--category", "code", "--category", "writing", *QUICK,
    )  # fmt: skip
    (found,) = json.loads(record.read_text())
    assert [(each["category"], each["prompts"]) for each in found["categories"]] == [
        ("writing", 3),
        ("code", 3),
    ]
    assert found["settings"]["prompts"] == 6 and "by category, ratio to specdec none" in shown
    assert "questions are given by the chat template" in shown
    shown = bench(folder, "--drafter", "none", "--no-chat", "--count", 1, "--turns", 1, *QUICK)
    assert "prompts 1," in shown and "as texts to be continued, without a chat template" in shown


def test_files_keep_the_warning_about_a_busy_machine(tmp_path, monkeypatch):
    seconds = iter([(100.0, 50.0), (200.0, 60.0)])  # all, idle
    monkeypatch.setattr("specdec_ext.cli.shared.common._processor_seconds", lambda: next(seconds))
    record = tmp_path / "record.json"
    given = ("--prompts", prompts_file(tmp_path, 1), "--drafter", "none", "--no-transformers")
    shown = bench(*given, "-o", record, *QUICK)
    warning = "other processes use 90% of this machine: the numbers are not reliable"
    (found,) = json.loads(record.read_text())
    assert found["remarks"][-1].startswith(warning) and shown.startswith(warning)


def test_prompts_that_exceed_the_models_positions_are_left_out_and_told(tmp_path):
    path = tmp_path / "p.jsonl"
    long = "x = 1\n" * 2000
    talks = [{"turns": [long, "second"]}, {"turns": ["import os\n"]}]
    path.write_text("\n".join(map(json.dumps, talks)))
    shown = bench("--prompts", path, "--drafter", "none", "--no-transformers", *QUICK)
    expected = r"1 of 2 prompts with 4 new tokens exceed the \d+ positions .* they and 1 later turn"
    assert re.search(expected, shown) and "prompts 1," in shown
    path.write_text(json.dumps(talks[0]))
    assert "a batch of 1 needs 1 prompts, got 0" in refused("--prompts", path, *QUICK)


def test_values_that_are_given_twice_are_measured_once(tmp_path):
    given = ("--prompts", prompts_file(tmp_path, 1), "--drafter", "none", "--no-transformers")
    shown = bench(*given, "--batch", "1,1", "--temperature", "0,0.0", *QUICK)
    assert shown.count("tokens/s") == 1


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RuntimeError("no memory"), 1, "specdec ngram: failed, RuntimeError: no memory"),
        (KeyboardInterrupt(), 130, "interrupted after 1 of 3 prompts"),
    ],
    ids=["error", "ctrl-c"],
)
def test_what_was_measured_is_kept(error, code, told, tmp_path, monkeypatch):
    """Whether a drafter fails or the user has waited long enough: files, tables and the exit status."""
    calls = []
    propose = NgramDrafter.propose

    def failing(self, context):
        calls.append(context.input_ids.shape)
        if len(set(calls)) > 1:  # the second prompt
            raise error
        return propose(self, context)

    monkeypatch.setattr(NgramDrafter, "propose", failing)
    record = tmp_path / "record.json"
    result = run(
        "bench", "--prompts", prompts_file(tmp_path, 3), "--drafter", "ngram", "--speculation", "fixed",
        "--no-transformers", "-o", record, *QUICK, *FLOAT32, columns=200,
    )  # fmt: skip
    assert result.exit_code == code, result.output
    assert told in words(result.output)
    (found,) = json.loads(record.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["specdec none"]["tokens_per_second"] > 0
    if code == 1:
        assert rows["specdec ngram"] == {
            "name": "specdec ngram",
            "error": "RuntimeError: no memory",
        }
        assert found["settings"]["prompts"] == 3 and not found["is_interrupted"]
    else:
        assert rows["specdec ngram"]["tokens_per_second"] > 0
        assert found["settings"]["prompts"] == 1 and found["is_interrupted"]


def test_differences_of_texts_are_shown(tmp_path, monkeypatch):
    from specdec_ext import ComparedRuns

    def bug(model, first, second, prompt_length, **_):
        return ComparedRuns(False, prompt_length + 1, "bug", 3.0, 0.5)

    monkeypatch.setattr("specdec_ext.evaluate.benchmark.series.compare_runs", bug)
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"name": "seventh", "prompt": "import"}))
    shown = bench("--prompts", path, "--drafter", "none", *QUICK)
    assert "specdec none, prompt seventh: bug: the first difference is at token" in shown
    assert "same text as HF generate: 0/1, 1 bug for every contestant" in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--batch", "3"), "a batch of 3 needs 3 prompts, got 2"),
        (("--batch", "1,,2"), "--batch 1,,2: expected numbers with commas between them"),
        (("--batch", "0"), "--batch 0: expected numbers"),
        (("--batch", ""), "--batch is empty"),
        (("--temperature", "-1"), "--temperature -1: expected numbers"),
        (("--temperature", ""), "--temperature is empty"),
        (("--temperature", "nan"), "--temperature nan: expected numbers"),
        (("--speculation", "fixed,off"), "--speculation fixed,off: expected auto, fixed or fixed,auto"),
        (("--assisted", "ngram"), "--assisted ngram: expected a draft model"),
        (("--repeats", "0"), "repeats"),
        (("--draft-length", "1;3"), "--draft-length 1;3: expected numbers"),
        (("--tree", "6-10"), "--tree 6-10: expected DEPTHxTOP_KxNODES, such as 6x10x60"),
        (("--tree", "2x2x5,"), "--tree : expected DEPTHxTOP_KxNODES"),
        (("--tree", "2x2x5"), "--tree works with draft heads, not with --drafter auto"),
        (
            ("--drafter", "suffix", "--draft-length", "3"),
            "--draft-length works with ngram, draft models and draft heads, not with --drafter suffix",
        ),
        (("--category", "poems"), "--category poems: no prompt has it; categories are none"),
        (("--chat",), "--chat: the model's tokenizer has no chat template"),
        (("--timeout", "3"), "--timeout is for servers; it needs --url"),
        (("-o", "x.txt"), "--out x.txt: the name must end with one of .json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_bench_refuses(arguments, message, tmp_path):
    assert message in refused("--prompts", prompts_file(tmp_path, 2), *arguments)


# --- servers ----------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    pytest.importorskip("httpx2", reason="httpx2 is not installed (extra: serve)")
    monkeypatch.setattr(
        sys.modules["specdec_ext.cli.bench"],
        "load_target",
        lambda *_, **__: pytest.fail("a model was loaded"),
    )
    with fake_server() as running:
        running.answer = lambda body: completion("a", "b", tokens=[1, 1])
        yield running


def test_a_server_is_measured(fake, tmp_path):
    rows = tmp_path / "rows.jsonl"
    shown = bench(
        "--url", fake.url, "--batch", "1,2", "--count", "3", "--turns", "1", "-o", rows,
        "--max-new-tokens", "2", "--repeats", "2", "--api-key", "secret",
    )  # fmt: skip
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["settings"]["streams"] for row in found] == [1, 2]
    assert all(row["requests"] == 6 and row["failed"] == 0 for row in found)
    assert all(row["settings"]["url"] == fake.url for row in found)
    assert "client: " in found[0]["machine"]
    assert {body["key"] for body in fake.bodies} == {"Bearer secret"}
    assert "requests are chat completions" in shown and "secret" not in shown
    assert "no contestant is known to decode without drafts" in shown


def test_our_server_is_measured_with_and_without_drafts(tmp_path):
    from helpers.serving import serving

    record = tmp_path / "record.json"
    with serving() as served:
        shown = bench(
            "--url", served.url, "--no-chat", "--prompts", prompts_file(tmp_path, 2), "-o", record,
            "--details", *QUICK,
        )  # fmt: skip
    (found,) = json.loads(record.read_text())
    assert [row["name"] for row in found["rows"]] == ["plain", "server"]
    assert [row["same_text"] for row in found["rows"]] == ["2/2", "2/2"]
    assert found["rows"][1]["ratio_to_plain"] > 0
    assert "acceptance by position in the draft, server" in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--drafter", "ngram"), "--drafter is for a model; a server generates as it was started"),
        (("--draft-length", "3"), "--draft-length is for a model"),
        (("--no-transformers",), "--transformers is for a model"),
        (("--dtype", "float32"), "--dtype is for a model"),
        (("--breakdown",), "--breakdown is for a model"),
        (("other",), "serves no model other; it serves fake"),
        (("--speculation", "fixed"), "is not specdec serve and drafts as it was started"),
        (("--url", "localhost"), "--url localhost: expected an address such as"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bench_of_a_server_refuses(fake, arguments, message):
    assert message in refused("--url", fake.url, *arguments, "--count", "1")


def test_a_server_is_not_compared_with_itself(fake):
    assert "--url names a server twice" in refused("--url", fake.url, "--url", fake.url)


def test_a_package_for_servers_that_is_missing_is_told_with_the_extra(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx2", None)
    assert "--url needs httpx2, which is not installed" in refused("--url", fake.url)
