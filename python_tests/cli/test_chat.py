"""``specdec chat`` answers each turn as ``generate`` answers the whole conversation.

Claim: in float32 every answer is that of plain decoding without a cache, greedy and sampled with a seed, also
after interrupts and with templates that change earlier turns; and only what is new is read.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
import torch
from helpers.command_line import run, words
from helpers.models import zoo
from helpers.places import ROOT
from helpers.texts.chats import MARKED

import specdec_ext
from specdec_ext import assets
from specdec_ext.cli.chat.conversation import Conversation
from specdec_ext.cli.shared.stream import CLOSING, OPENING
from specdec_ext.models.compat import CACHE

QUESTIONS = ["def push(self, item):", "class Stack:", "import os"]
TOKENS = 16
# Earlier answers are shown otherwise than they were generated, as templates that drop reasoning do.
CHANGING = MARKED.replace(
    "{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}"
)


@pytest.fixture
def reused(monkeypatch) -> list[int]:
    """The number of cached tokens in each call of ``generate`` by the command."""
    found, generate = [], specdec_ext.generate

    def counted(*args, **kwargs):
        cache = kwargs.get(CACHE)
        found.append(0 if cache is None else cache.get_seq_length())
        return generate(*args, **kwargs)

    monkeypatch.setattr(specdec_ext, "generate", counted)
    return found


def rendered(messages, template=MARKED):
    tokenizer = assets.load_tokenizer()
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


def joined(messages):
    text = "".join(each["content"].removesuffix("\n") + "\n" for each in messages)
    return assets.load_tokenizer()(text, return_tensors="pt")["input_ids"]


def answers(questions, render=rendered, system=None, **kwargs):
    """The answers of plain decoding, each to the whole conversation without a cache."""
    messages, found = [{"role": "system", "content": system}] if system else [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        ids = render(messages)
        kwargs = {"drafter": None, "max_new_tokens": TOKENS, "do_sample": False, **kwargs}
        text = specdec_ext.generate(
            assets.load_target(), ids, attention_mask=torch.ones_like(ids), **kwargs
        )
        found.append(assets.load_tokenizer().decode(text[0, ids.shape[1] :], True))
        messages.append({"role": "assistant", "content": found[-1]})
    return found


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(MARKED)
    return path


def chat(lines, *options):
    fixed = ("--max-new-tokens", TOKENS, "--dtype", "float32")
    return run("chat", *fixed, *options, stdin="".join(f"{line}\n" for line in lines))


def said(texts):
    """Standard output: the answers, each followed by a line break."""
    return "".join(f"{text}\n" for text in texts)


# --- texts ------------------------------------------------------------------------------------------

SAMPLED = dict(do_sample=True, temperature=0.8, seed=3)


@pytest.mark.parametrize("drafter", ["auto", "draft"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_without_a_cache(drafter, sampling, template, reused):
    expected = answers(QUESTIONS, **sampling)
    reused.clear()
    options = ("--sample", "--temperature", 0.8, "--seed", 3) if sampling else ()
    result = chat(QUESTIONS, "--chat-template", template, "--drafter", drafter, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == said(expected)
    assert reused == [0, *lengths(expected)]


def lengths(texts):
    """The lengths of the first prompts and answers: what the cache holds after each answer but the last."""
    found, messages = [], []
    for question, text in zip(QUESTIONS, texts[:-1], strict=False):
        messages += [{"role": "user", "content": question}]
        prompt = rendered(messages).shape[1]
        found.append(prompt + TOKENS - 1)
        messages += [{"role": "assistant", "content": text}]
    return found


def test_templates_may_change_earlier_turns(tmp_path, reused):
    """The cache is cut to what the next prompt has in common with the last text."""
    path = tmp_path / "changing.jinja"
    path.write_text(CHANGING)
    expected = answers(QUESTIONS, lambda messages: rendered(messages, CHANGING))
    assert expected[0] != expected[0].upper()
    reused.clear()
    assert chat(QUESTIONS, "--chat-template", path).stdout == said(expected)
    first = rendered([{"role": "user", "content": QUESTIONS[0]}]).shape[1]
    assert first <= reused[1] < first + TOKENS - 1


def test_plain_turns_are_joined(reused):
    expected = answers(QUESTIONS, joined)
    reused.clear()
    result = chat(QUESTIONS, "--plain")
    assert result.stdout == said(expected) and result.stderr == ""
    assert 0 < reused[1] < reused[2]


def test_pipes_get_answers_without_marks(template):
    result = chat(["", *QUESTIONS, "  "], "--chat-template", template, "--speculation", "fixed")
    assert result.stdout == said(answers(QUESTIONS)) and result.stderr == ""
    assert not {OPENING, CLOSING, "\x1b"} & set(result.stdout)


# --- commands ---------------------------------------------------------------------------------------


def test_commands_change_the_following_answers(template):
    lines = [
        QUESTIONS[0], "/temperature 0.8", "/seed 3", QUESTIONS[1], "/temperature 0", QUESTIONS[2],
        "/reset", "/system You write Python.", QUESTIONS[0], "/reset", "/system", "//path",
        "/exit", "never asked",
    ]  # fmt: skip
    result = chat(lines, "--chat-template", template)
    assert result.exit_code == 0, result.output
    # Each turn with the sampling of its time: the answers before it are those of the conversation.
    turns: list[dict[str, str]] = []
    expected = []
    for question, sampling in zip(QUESTIONS, ({}, SAMPLED, {}), strict=True):
        turns.append({"role": "user", "content": question})
        history = list(turns)
        (text,) = answers([""], lambda _, history=history: rendered(history), **sampling)
        turns.append({"role": "assistant", "content": text})
        expected.append(text)
    expected += answers(QUESTIONS[:1], system="You write Python.")
    expected += answers(["/path"])
    assert result.stdout == said(expected)
    assert "The temperature is 0.8." in result.stderr and "Decoding is greedy." in result.stderr


def test_stats_show_the_last_answer_and_the_session(template):
    options = ("--chat-template", template, "--speculation", "fixed", "--drafter", "draft")
    result = chat([QUESTIONS[0], QUESTIONS[1], "/stats"], *options)
    assert result.stdout == said(answers(QUESTIONS[:2]))
    shown = words(result.stderr)
    assert "answers 1 2 prompt tokens" in shown and f"new tokens {TOKENS} {2 * TOKENS}" in shown
    last, session = map(int, re.search(r"of them from the cache (\d+) (\d+)", shown).groups())
    assert last == session > TOKENS
    accepted = re.search(r"draft tokens accepted (\d+) of \d+ (\d+) of \d+", shown)
    assert 0 < int(accepted[1]) < int(accepted[2])
    assert "DraftModelDrafter drafted in every step" in shown


def test_help_lists_every_command(template):
    shown = words(chat(["/help"], "--chat-template", template).stderr)
    for name in ("/stats", "/reset", "/system TEXT", "/seed N", "/temperature X", "/exit"):
        assert name in shown


@pytest.mark.parametrize(
    "line, message",
    [
        ("/quit", "/quit is no command; expected one of /stats"),
        ("/seed x", "/seed x: expected an integer"),
        ("/temperature", "expected a number"),
        ("/temperature -1", "expected 0 (greedy) or a positive number"),
        ("/temperature nan", "expected 0 (greedy) or a positive number"),
        ("/reset all", "/reset takes no argument, got 'all'"),
        ("/stats", "there is no finished answer yet"),
    ],
)
def test_wrong_commands_are_refused(line, message, template):
    result = chat([line, QUESTIONS[0]], "--chat-template", template)
    assert result.exit_code == 2 and message in words(result.output)
    assert result.stdout == ""


# --- templates --------------------------------------------------------------------------------------


def test_models_without_a_template_name_the_ways_out():
    result = chat(QUESTIONS)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "pass one with --chat-template FILE, or --plain" in words(result.output)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{% for %}", "can't render this conversation"),
        ("{{ raise_exception('only tools') }}", "can't render this conversation: only tools"),
    ],
)
def test_broken_templates_are_refused_at_once(tmp_path, content, message):
    path = tmp_path / "broken.jinja"
    path.write_text(content)
    result = chat([], "--chat-template", path)
    assert result.exit_code == 2 and message in words(result.output)


def test_templates_are_files_and_not_combined_with_plain(template, tmp_path):
    assert "is a folder" in words(chat([], "--chat-template", tmp_path).output)
    assert "pass one of them" in words(chat([], "--plain", "--chat-template", template).output)


def test_conversation_that_a_template_refuses_goes_on(tmp_path):
    """Like Gemma's first templates, which had no place for a system prompt."""
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = assets.load_tokenizer()

    def render(messages):
        if messages[0]["role"] == "system":
            raise ValueError("no system")
        return rendered(messages)

    talk, system = Conversation(assets.load_target(), render), "Be brief."
    ask(talk, QUESTIONS[0])
    talk.system = system
    with pytest.raises(ValueError, match="no system"):
        ask(talk, "lost")
    talk.system = None
    ask(talk, QUESTIONS[1])
    assert texts(talk) == answers(QUESTIONS[:2])
    path = tmp_path / "refusing.jinja"
    path.write_text(refusing + tokenizer.chat_template if tokenizer.chat_template else refusing)
    result = chat(["x"], "--chat-template", path, "--system", system)
    assert "the chat template can't render this conversation: no system" in words(result.output)


# --- interrupts -------------------------------------------------------------------------------------


class Pieces:
    """A streamer that collects the text, and is interrupted at one of its tokens.

    Args:
        interrupt: the token at which it raises KeyboardInterrupt, 0 for the prompt; None: at none.
    """

    def __init__(self, interrupt: int | None = None):
        self._left, self._ids = interrupt, []

    def put(self, tokens):
        self._count()

    def put_drafted(self, tokens, drafted):
        self._ids += tokens.tolist()
        self._count()

    def end(self):
        pass

    @property
    def text(self):
        return assets.load_tokenizer().decode(self._ids, skip_special_tokens=True)

    def _count(self):
        if self._left == 0:
            raise KeyboardInterrupt
        self._left = None if self._left is None else self._left - 1


def ask(talk, question, interrupt=None):
    kwargs = dict(max_new_tokens=TOKENS, do_sample=False, drafter="head", speculation="fixed")
    talk.ask(question, Pieces(interrupt), **kwargs)


def texts(talk):
    return [each["content"] for each in talk.turns if each["role"] == "assistant"]


@pytest.mark.parametrize("interrupt", [0, 1, 7])
def test_interrupted_answer_stays_as_far_as_it_came(interrupt):
    talk = Conversation(assets.load_target(), rendered)
    ask(talk, QUESTIONS[0])
    first = texts(talk)[0]
    with pytest.raises(KeyboardInterrupt):
        ask(talk, QUESTIONS[1], interrupt)
    roles = [each["role"] for each in talk.turns]
    assert roles == ["user", "assistant"] * (1 if interrupt == 0 else 2)
    whole = answers(QUESTIONS[:2])
    assert first == whole[0]
    if interrupt:
        partial = texts(talk)[1]
        assert partial and partial != whole[1] and whole[1].startswith(partial)
    history = list(talk.turns)
    ask(talk, QUESTIONS[2])
    ids = rendered([*history, {"role": "user", "content": QUESTIONS[2]}])
    (expected,) = answers([""], lambda _: ids)
    assert texts(talk)[-1] == expected
    ask(talk, QUESTIONS[0])  # the cache after an interrupt is used again
    assert talk.last.reused_tokens == ids.shape[1] + TOKENS - 1


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_cache_that_can_not_be_cut_is_left_and_padding_tokens_are_text(name):
    """Recurrent states can't be cut; and transformers would mask a padding token in the middle."""
    model = zoo.build(name)
    prompts = [torch.tensor([[5, 6, 0, 7, 8]]), torch.tensor([[5, 6, 0, 9, 4, 3, 2]])]
    talk = Conversation(model, lambda messages: prompts[len(messages) // 2])
    kwargs = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    for ids in prompts:
        talk.ask("", Pieces(), **kwargs)
        mask = torch.ones_like(ids)
        expected = specdec_ext.generate(model, ids, attention_mask=mask, drafter=None, **kwargs)
        assert torch.equal(talk._cached, expected[0, :-1])
    assert talk.last.reused_tokens == (3 if name == "llama" else 0)


# --- a terminal -------------------------------------------------------------------------------------


def _take_terminal() -> None:
    """Let ^C send a signal, also if the tests run in the background, where it is ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The command in a process of its own, with a terminal."""

    def __init__(self, *options: object):
        self._ours, theirs = os.openpty()
        self.shown = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specdec_ext.cli", "chat", *map(str, options)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"},
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Return what was shown up to a pattern, since the last call."""
        limit = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self._ours], [], [], max(0, limit - time.monotonic()))
            assert ready, f"{pattern!r} was not shown: {self.shown!r}"
            try:
                self.shown += os.read(self._ours, 65536).decode("utf-8", "replace")
            except OSError as error:  # the process has ended
                raise AssertionError(f"{pattern!r} was not shown: {self.shown!r}") from error
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def close(self) -> int:
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()
            os.close(self._ours)


def test_terminal_marks_drafts_and_keeps_the_session_after_ctrl_c():
    terminal = Terminal("--plain", "--max-new-tokens", 400, "--speculation", "fixed")
    assert "accepted drafts" in terminal.wait_for("> ")
    terminal.type("class Stack:\n")
    terminal.wait_for(r"\x1b\[4;32m")  # underlined green
    terminal.type("\x03")
    assert "Traceback" not in terminal.wait_for(r"Stopped\.[^>]*> ")
    terminal.type("/stats\n")
    terminal.wait_for(r"there is no finished answer yet[^>]*> ")
    terminal.type("\x03")
    # CPython may note a signal just before readline waits; then the interrupt comes with the next key.
    time.sleep(0.5)
    terminal.type("\n")
    terminal.wait_for(r"/exit or Ctrl-D leaves\.[^>]*> ")
    terminal.type("/temperature 0\n")
    terminal.wait_for(r"Decoding is greedy\.[^>]*> ")
    terminal.type("/exit\n")
    assert terminal.close() == 0
