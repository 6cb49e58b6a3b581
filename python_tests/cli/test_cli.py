"""The output, errors and exit codes of the command line on the bundled model.

Texts must equal those of Hugging Face generate in float32, token for token.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from helpers.command_line import run, words
from helpers.models.tiny import tiny_model
from helpers.versions import before
from rich.console import Console

import specdec_ext
from specdec_ext import assets, keyword_table, load_draft
from specdec_ext.cli.demo import SAMPLED, STREAMED, STREAMED_TOKENS
from specdec_ext.cli.shared.common import read_prompts
from specdec_ext.cli.shared.stream import CLOSING, OPENING, IncrementalDecoder, TextStreamer, legend
from specdec_ext.evaluate import benchmark

PROMPT = "import unittest\n\n\nclass TestList(unittest.TestCase):\n\n    def test_append(self):\n"


# Texts must be equal in float32; the default is the dtype of the checkpoint.
FLOAT32 = ("--dtype", "float32")


def greedy_text(prompt: str, max_new_tokens: int) -> str:
    tokenizer, target = assets.load_tokenizer(), assets.load_target()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = target.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


# --- help and version -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "generate",
        "chat",
        "bench",
        "check",
        "serve",
        "inspect",
        "keywords",
        "train",
        "version",
        "export",
    ],
)
def test_every_command_is_listed_and_has_a_help_text(command):
    assert command in words(run("--help").output)
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"specdec {command}" in words(result.output)


@pytest.mark.parametrize("arguments", [("version",), ("--version",)])
def test_version_names_the_installed_packages(arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    assert f"specdec_ext {specdec_ext.__version__}" in result.output
    assert f"torch {torch.__version__}" in result.output
    assert re.search(r"CUDA kernels: (not )?built", result.output)


def test_keywords_prints_verdict_and_reason():
    shown = words(run("keywords", "beams").output)
    assert "num_beams refused beam search is not supported" in shown
    assert "temperature" not in shown
    assert run("keywords", "--markdown").output == keyword_table.markdown() + "\n"


# --- export -----------------------------------------------------------------------------------------


def test_export_writes_the_files_of_custom_generate(tmp_path):
    command = ("export", "custom-generate", tmp_path / "model", "--speculation", "fixed")
    result = run(*command, "--drafter", "ngram")
    assert result.exit_code == 0, result.output
    written = [Path(line) for line in result.stdout.splitlines()]
    assert [path.name for path in written] == ["requirements.txt", "generate.py"]
    made = "generate = generate_function(drafter='ngram', speculation='fixed')\n"
    assert written[1].read_text().endswith(made)
    again = run(*command)
    assert again.exit_code == 2 and "generate.py exist already" in words(again.output)
    assert written[1].read_text().endswith(made)
    assert run(*command, "--overwrite").exit_code == 0
    assert "drafter='auto'" in written[1].read_text()


def test_export_writes_a_head_for_another_engine(tmp_path):
    head = assets.FOLDER / "tiny-python-head"
    result = run("export", "head", head, tmp_path / "head", "--for", "vllm", columns=400)
    assert result.exit_code == 0, result.output
    assert "head: speculators layout" in result.stdout
    assert "vllm serve tiny-python-target --speculative-config" in result.stdout
    assert load_draft(tmp_path / "head").config == load_draft(head).config
    again = run("export", "head", head, tmp_path / "head", "--for", "sglang")
    assert again.exit_code == 2 and "pass overwrite=True (--overwrite)" in words(again.output)


# --- assets -----------------------------------------------------------------------------------------


def test_held_out_prompts_are_short_and_end_with_a_colon():
    tokenizer = assets.load_tokenizer()
    prompts = assets.held_out_prompts()
    assert len(prompts) >= 12
    assert len({each["name"] for each in prompts}) == len(prompts)
    for each in prompts:
        assert each["license"] in ("PSF-2.0", "BSD-3-Clause", "Apache-2.0", "MIT")
        assert 100 < len(tokenizer(each["prompt"])["input_ids"]) <= 350, each["name"]
        assert each["prompt"].endswith(":")
        assert re.search(r"^\s*(def|class) ", each["prompt"], re.MULTILINE), each["name"]
    assert (assets.FOLDER / "prompts.json").stat().st_size <= 60_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_load_in_the_requested_dtype_and_share_a_vocabulary(dtype):
    target, draft = assets.load_target(dtype), assets.load_draft(dtype)
    for model in (target, draft):
        assert model.dtype == dtype
        assert not model.training
    assert target.config.vocab_size == draft.config.vocab_size == len(assets.load_tokenizer())


def test_error_for_a_missing_model_names_the_script_that_makes_it(monkeypatch, tmp_path):
    monkeypatch.setattr(assets, "FOLDER", tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"tiny-python-target is missing .*bundled_models\.py"
    ):
        assets.load_target()


# --- streaming --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x\n", "é", "naïve — 🚨🚨 déjà", "a\ufffdb", ""]
)
def test_streamed_pieces_add_up_to_the_text(text):
    tokenizer = assets.load_tokenizer()
    decoder = IncrementalDecoder(tokenizer)
    tokens = tokenizer(text)["input_ids"]
    assert "".join([*map(decoder.feed, tokens), decoder.flush()]) == text


def test_partial_character_is_held_back_until_it_is_complete():
    tokenizer = assets.load_tokenizer()
    tokens = tokenizer("🜂")["input_ids"]
    assert len(tokens) > 1, "the test needs a character of several tokens"
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.feed(token) for token in tokens] == [""] * (len(tokens) - 1) + ["🜂"]
    assert decoder.feed(tokens[0]) == ""
    assert decoder.flush() == "\ufffd"


def stream(console: Console, mark_drafted: bool) -> None:
    tokenizer = assets.load_tokenizer()
    streamer = TextStreamer(console, tokenizer, mark_drafted)
    streamer.put(torch.tensor([tokenizer("never printed")["input_ids"]]))
    for text, drafted in (("a", False), ("b", True), ("c", True), ("d", False), ("e", True)):
        streamer.put_drafted(torch.tensor(tokenizer(text)["input_ids"]), torch.tensor([drafted]))
    streamer.end()


def test_accepted_drafts_are_in_brackets_without_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=False)
    stream(console, mark_drafted=True)
    assert console.file.getvalue() == f"a{OPENING}bc{CLOSING}d{OPENING}e{CLOSING}"
    assert OPENING in legend(console).plain


def test_brackets_enclose_words_without_surrounding_space():
    """Space before and after drafted words is outside the brackets; space between them is inside."""
    tokenizer = assets.load_tokenizer()
    console = Console(file=io.StringIO(), force_terminal=False)
    streamer = TextStreamer(console, tokenizer, mark_drafted=True)
    streamer.put(torch.zeros(1, 1, dtype=torch.long))
    pieces = [("\n    ", True), ("a", True), (" b", True), ("\n", False), ("c", True), (" ", True)]
    for text, drafted in pieces:
        for token in tokenizer(text)["input_ids"]:
            streamer.put_drafted(torch.tensor([token]), torch.tensor([drafted]))
    streamer.end()
    assert console.file.getvalue() == f"\n    {OPENING}a b{CLOSING}\n{OPENING}c{CLOSING} "


def test_accepted_drafts_are_styled_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    stream(console, mark_drafted=True)
    marked = re.findall(r"\x1b\[4;32m(\w)", console.file.getvalue())
    assert marked == ["b", "c", "e"]
    assert re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()) == "abcde"
    assert OPENING not in legend(console).plain


def test_nothing_is_marked_unless_asked():
    console = Console(file=io.StringIO(), force_terminal=False)
    stream(console, mark_drafted=False)
    assert console.file.getvalue() == "abcde"


def test_markup_in_the_text_is_printed_as_text():
    tokenizer = assets.load_tokenizer()
    console = Console(file=io.StringIO(), force_terminal=False, width=20)
    streamer = TextStreamer(console, tokenizer)
    streamer.put(torch.zeros(1, 1, dtype=torch.long))
    text = "x = y[bold]  # :smile: " + "and a line much wider than the console\n"
    for token in tokenizer(text)["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert console.file.getvalue() == text


# --- generate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft"])
def test_generate_prints_the_text_of_the_model_alone(drafter):
    result = run("generate", "-p", PROMPT, "--drafter", drafter, "--max-new-tokens", "40", *FLOAT32)
    assert result.exit_code == 0, result.output
    assert result.stdout == greedy_text(PROMPT, 40) + "\n"


def test_generate_reads_standard_input_and_marks_drafts():
    marked = ("--show-drafts", "--stats", "--max-new-tokens", "40", *FLOAT32)
    result = run("generate", *marked, stdin=PROMPT)
    assert result.exit_code == 0, result.output
    assert OPENING in result.stdout
    assert result.stdout.replace(OPENING, "").replace(CLOSING, "") == greedy_text(PROMPT, 40) + "\n"
    assert re.search(r"40 tokens in .* draft tokens accepted", result.stderr)


def test_one_seed_gives_one_text_with_every_drafter():
    sampled = ("--sample", "--seed", "5", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "50")
    command = ("generate", "-p", PROMPT, "--max-new-tokens", 30)
    texts = {run(*command, "--drafter", drafter, *sampled).stdout for drafter in ("none", "ngram")}
    assert len(texts) == 1
    assert run(*command, "--sample", "--seed", 6).stdout not in texts


def test_model_and_drafter_may_be_folders(tmp_path):
    """A random draft model slows decoding down, but the text is right."""
    tokenizer, target = assets.load_tokenizer(), assets.load_target()
    config = type(target.config)(**{**tiny_model("llama").config.to_dict(), "vocab_size": 4096})
    type(target)(config).save_pretrained(tmp_path / "draft")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    result = run(
        "generate", str(tmp_path / "target"), "-p", PROMPT, "--max-new-tokens", "12",
        "--drafter", str(tmp_path / "draft"), *FLOAT32,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == greedy_text(PROMPT, 12) + "\n"


# --- check ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_check_finds_no_bug(dtype, tmp_path):
    (tmp_path / "prompts.json").write_text(
        json.dumps([PROMPT, {"name": "second", "prompt": "import"}])
    )
    prompts = tmp_path / "prompts.json"
    result = run("check", "--prompts", prompts, "--max-new-tokens", 24, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert "second" in result.output
    assert re.search(r"2 prompts, \d pairs equal, \d near-ties, 0 bugs", result.output)
    assert "chain yes tree yes batch yes rollback compact" in words(result.output)
    if dtype == "float32":
        assert "4 pairs equal" in result.output
        for name in ("single step", "chain", "rollback", "tree", "batch"):
            assert re.search(rf"^{name} +exact ", result.output, re.MULTILINE), name


@pytest.mark.parametrize("verdict, exit_code", [("near-tie", 0), ("bug", 1)])
def test_check_reports_the_first_difference(monkeypatch, tmp_path, verdict, exit_code):
    def difference(model, first, second, prompt_length, **_):
        return specdec_ext.ComparedRuns(False, prompt_length + 3, verdict, 0.25, 0.5)

    monkeypatch.setattr(specdec_ext, "compare_runs", difference)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    result = run("check", "--prompts", str(tmp_path / "prompt.txt"), "--max-new-tokens", "4")
    assert result.exit_code == exit_code
    shown = "BUG" if verdict == "bug" else verdict
    assert f"{shown} at token 3: logit gap 0.25, bound 0.5" in words(result.output)


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("p.txt", "a\nb", [("0", "a\nb")]),
        ("p.json", '["a", {"name": "n", "prompt": "b"}]', [("0", "a"), ("n", "b")]),
        ("p.jsonl", '{"question_id": 81, "turns": ["a", "b"]}\n\n', [("81", "a")]),
        ("p.jsonl", '"one line\u2028of it"\n"two"', [("0", "one line\u2028of it"), ("1", "two")]),
    ],
)
def test_read_prompts(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    assert read_prompts(tmp_path / name) == expected


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.json", "[]", r"p\.json is empty; expected a list of prompts"),
        ("p.json", '{"prompt": "a"}', r"p\.json holds a dict; expected a list"),
        ("p.json", "[3]", "entry 1: expected a text or an object, got int"),
        ("p.jsonl", '{"turns": []}', "line 1: expected a text under 'prompt'"),
        ("p.jsonl", '"a"\n\n{"turns": 5}', "line 3: expected a text under 'prompt'"),
        ("p.jsonl", '{"turns": {}}', "line 1: expected a text under 'prompt'"),
        ("p.jsonl", '{"turns": [[]]}', "line 1: expected a text under 'prompt'"),
        ("p.jsonl", '"a"\n{"prompt"', r"p\.jsonl line 2 is not valid JSON"),
        ("p.json", "[" * 100_000, r"p\.json is not valid JSON"),
        ("p.json", '["\\ud800"]', "entry 1: the prompt is not text: .*surrogates not allowed"),
        ("p.txt", b"caf\xe9", r"p\.txt is not UTF-8 text"),
        ("p.txt", "", r"p\.txt: expected a text"),
    ],
)
def test_read_prompts_rejects(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


# --- demo -------------------------------------------------------------------------------------------


def sampled_text_of_the_demo(max_new_tokens: int) -> str:
    """The completion that the demo shows, generated without drafts."""
    (prompt,) = (each for each in assets.held_out_prompts() if each["name"] == STREAMED)
    tokenizer, target = assets.load_tokenizer(), assets.load_target()
    ids = tokenizer(prompt["prompt"], return_tensors="pt")["input_ids"]
    sampled = {**SAMPLED, "max_new_tokens": max_new_tokens}
    output = specdec_ext.generate(target, ids, drafter=None, **sampled)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_demo_text_does_not_repeat_itself():
    """The demo samples, because greedy text of the bundled model repeats itself."""
    ids = assets.load_tokenizer()(sampled_text_of_the_demo(STREAMED_TOKENS))["input_ids"]
    assert benchmark.unique_ngram_fraction([ids]) > 0.75


def test_demo_streams_measures_and_compares(tmp_path):
    picture = tmp_path / "demo.svg"
    result = run("demo", "--prompts", "2", "--max-new-tokens", "24", "--picture", str(picture))
    assert result.exit_code == 0, result.output
    assert f"The model continues {STREAMED}" in result.output
    assert OPENING in result.output
    shown = result.output.replace(OPENING, "").replace(CLOSING, "")
    assert sampled_text_of_the_demo(24) in shown
    drawn = picture.read_text("utf-8")
    assert drawn.startswith("<svg") and "text-decoration: underline" in drawn
    assert "@font-face" not in drawn and len(drawn) < 50_000
    assert f"torch {torch.__version__}" in result.output
    for name in (
        "HF generate",
        "HF prompt lookup (10)",
        "specdec, drafter=none",
        "specdec, drafter=ngram",
        "specdec, drafter=head",
        "specdec, drafter=auto",
    ):
        assert re.search(rf"{re.escape(name)}\W+\d+\.\d\W+\d+\.\d\dx", result.output), name
    # Up to transformers 5.14, prompt lookup may exceed max_new_tokens.
    assert result.output.count("2/2") == (4 if before("5.15") else 5)
    assert "acceptance by position" in result.output
    assert "unique 4-grams in the completions" in result.output


def test_demo_without_drafter_shows_plain_decoding():
    result = run(
        "demo", "--prompts", "1", "--max-new-tokens", "8", "--drafter", "none", "--no-stream"
    )
    assert result.exit_code == 0, result.output
    assert "acceptance by position" not in result.output
    assert "The model continues" not in result.output


def test_demo_fails_on_a_bug_and_names_it(monkeypatch):
    def bug(model, first, second, prompt_length, **_):
        return specdec_ext.ComparedRuns(False, prompt_length + 1, "bug", 3.0, 0.5)

    monkeypatch.setattr("specdec_ext.evaluate.benchmark.series.compare_runs", bug)
    result = run("demo", "--prompts", "1", "--max-new-tokens", "4", "--no-stream")
    assert result.exit_code == 1
    assert "0/1, 1 bug" in result.output
    name = assets.held_out_prompts()[0]["name"]
    assert f"specdec, drafter=ngram, {name}: BUG at token 1" in words(result.output)
