"""Progress of long work: silent unless enabled, a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import io

import pytest

from specdec_ext.display import disable_progress, enable_progress, progress
from specdec_ext.display.console import PlainConsole
from specdec_ext.display.progress import Work, paused, tracked


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(Work.__init__, "__defaults__", (*Work.__init__.__defaults__[:-1], made))
    return made


@pytest.fixture
def enabled():
    enable_progress()
    yield
    disable_progress()


@pytest.fixture
def terminal(monkeypatch, enabled):
    """A terminal on standard error; returns its file."""
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, force_interactive=True, width=100)
    monkeypatch.setattr(progress, "_screen_of_standard_error", lambda: progress._Bars(console))
    return file


def test_the_line_of_a_piece_of_work(clock):
    work = Work("training", 900, "step")
    assert work.line() == "training: 0 of 900 steps"
    clock.now += 10
    work.update(20, "loss 1.2")
    assert work.line() == "training: 20 of 900 steps, 7:20 left, loss 1.2"
    clock.now += 3590
    work.update(450)
    assert work.line() == "training: 450 of 900 steps, 1:00:00 left"
    assert Work("loading").line() == "loading: ..."
    assert Work("one", 1, "call").line() == "one: 0 of 1 call"


def test_what_earlier_runs_did_does_not_count_for_the_time_left(clock):
    work = Work("training", 900, "step", done=800)
    clock.now += 10
    assert work.seconds_left is None
    work.advance(50)
    assert work.seconds_left == 10


def test_silent_by_default(capsys, clock):
    with tracked("training", 10) as work:
        for _ in range(10):
            clock.now += 60
            work.advance()
    assert capsys.readouterr() == ("", "")


def test_a_line_every_ten_seconds_without_a_terminal(capsys, clock, enabled):
    with tracked("training", 30) as work:
        for _ in range(30):
            clock.now += 1
            work.advance(note="[red]loss\x1b[2J")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        r"training: 10 of 30 steps, 0:20 left, [red]loss\x1b[2J",
        r"training: 20 of 30 steps, 0:10 left, [red]loss\x1b[2J",
        r"training: 30 of 30 steps, 0:00 left, [red]loss\x1b[2J",
        "training: took 0:30",
    ]


def test_short_work_prints_nothing_without_a_terminal(capsys, clock, enabled):
    with tracked("training", 9) as work:
        for _ in range(9):
            clock.now += 1
            work.advance()
    assert capsys.readouterr() == ("", "")


def test_other_processes_print_nothing(capsys, clock, enabled):
    with tracked("training", 9, shown=False) as work:
        clock.now += 60
        work.advance()
    assert capsys.readouterr() == ("", "")


def test_bars_on_a_terminal(terminal, clock):
    with tracked("training", 10) as work:
        clock.now += 5
        work.advance(note="[red]loss")
        with tracked("evaluating", 4, "text") as inner:
            clock.now += 1
            inner.advance()
            assert "evaluating: 1 of 4 texts" in terminal.getvalue()
        before = len(terminal.getvalue())
        with paused():
            terminal.write("printed\n")
    text = terminal.getvalue()
    assert "training: 1 of 10 steps, 0:45 left, [red]loss" in text
    assert "\x1b[2K" in text[before : text.index("printed")]  # the bar is erased before
    assert "training: 1 of 10" in text[text.index("printed") :]  # and drawn again after
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2  # the cursor is shown again
    assert progress._screen is None


def test_bars_are_redrawn_ten_times_a_second_at_most(terminal, clock):
    with tracked("training", 1000) as work:
        drawn = len(terminal.getvalue())
        clock.now += 1
        work.advance()
        once = len(terminal.getvalue())
        for _ in range(50):
            work.advance()
        assert len(terminal.getvalue()) == once > drawn


def test_an_error_removes_the_bar(terminal):
    with pytest.raises(RuntimeError), tracked("training", 10):
        raise RuntimeError
    assert progress._screen is None and terminal.getvalue().endswith("\x1b[1A\x1b[2K")


def test_nothing_is_paused_without_work(enabled):
    with paused():
        pass
