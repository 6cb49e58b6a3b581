"""Progress of long work with the time left, on standard error.

Functions that may take more than ten seconds report their progress with :func:`tracked`. Nothing is shown
until :func:`enable_progress` is called; the command line calls it. A terminal shows a bar for each piece of
work, which disappears at its end. Elsewhere a line is written every ten seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from specdec_ext.display.text import counted, one_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from specdec_ext.display.console import PlainConsole

LINE_SECONDS = 10.0  # between two lines where there is no terminal
REDRAW_SECONDS = 0.1
BAR_WIDTH = 20


class Work:
    """One piece of long work.

    Args:
        name: what is done, such as ``"training"``.
        total: amount of work; None if it is not known.
        noun: unit of ``total``, in the singular.
        done: what earlier runs have done; it does not count for the time left.
        changed: called after each update.
        clock: returns seconds.
    """

    def __init__(
        self,
        name: str,
        total: float | None = None,
        noun: str = "step",
        done: float = 0,
        changed: Callable[[Work], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name, self.total, self.noun, self.done, self.note = name, total, noun, done, ""
        self.clock, self.began, self._done_before = clock, clock(), done
        self._changed = changed

    def update(self, done: float, note: str = "") -> None:
        """Tell how much is done now, and in a few words what else to show."""
        self.done, self.note = done, note
        if self._changed is not None:
            self._changed(self)

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Add to what is done."""
        self.update(self.done + amount, note)

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return self.clock() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest will take at the mean speed so far; None if that is not known."""
        done_here = self.done - self._done_before
        if self.total is None or done_here <= 0:
            return None
        return max(0.0, self.total - self.done) * self.seconds / done_here

    def line(self) -> str:
        """The state in one line, such as ``"training: 20 of 900 steps, 3:20 left, loss 1.2"``."""
        parts = []
        if self.total is not None:
            parts.append(f"{self.done:,.0f} of {counted(round(self.total), self.noun)}")
        if (left := self.seconds_left) is not None:
            parts.append(f"{_clock_time(left)} left")
        if self.note:
            parts.append(one_line(self.note))
        return f"{one_line(self.name)}: {', '.join(parts) or '...'}"


class _Screen(Protocol):
    """Where progress is shown."""

    def opened(self, work: Work) -> None: ...

    def changed(self, work: Work) -> None: ...

    def closed(self, work: Work) -> bool:
        """Returns whether no work is shown any more."""

    def clear(self) -> None:
        """Make room for other output."""

    def restore(self) -> None:
        """Show again what :meth:`clear` has removed."""


class _Lines:
    """A line every ten seconds."""

    def __init__(self, file: TextIO):
        self._file = file
        self._written: dict[Work, float] = {}  # when the last line was written

    def opened(self, work: Work) -> None:
        self._written[work] = work.began

    def changed(self, work: Work) -> None:
        now = work.clock()
        if now - self._written[work] >= LINE_SECONDS:
            self._written[work] = now
            print(work.line(), file=self._file, flush=True)

    def closed(self, work: Work) -> bool:
        if self._written.pop(work) > work.began:
            done = f"{one_line(work.name)}: took {_clock_time(work.seconds)}"
            print(done, file=self._file, flush=True)
        return not self._written

    def clear(self) -> None: ...

    def restore(self) -> None: ...


class _Bars:
    """A bar for each piece of work. No thread redraws them, because it would disturb measurements."""

    def __init__(self, console: PlainConsole):
        self._console = console
        self._bars: dict[Work, TaskID] = {}
        self._progress: Progress | None = None
        self._drawn = 0.0

    def opened(self, work: Work) -> None:
        if self._progress is None:
            self._progress = self._started()
        self._bars[work] = self._added(work)
        self._progress.refresh()

    def changed(self, work: Work) -> None:
        now = work.clock()
        if self._progress is None or now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        self._progress.update(
            self._bars[work], total=work.total, completed=work.done, description=work.line()
        )
        self._progress.refresh()

    def closed(self, work: Work) -> bool:
        bar = self._bars.pop(work)
        if not self._bars:
            self.clear()
        elif self._progress is not None:
            self._progress.remove_task(bar)
            self._progress.refresh()
        return not self._bars

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def restore(self) -> None:
        if self._bars and self._progress is None:
            self._progress = self._started()
            self._bars = {work: self._added(work) for work in self._bars}
            self._progress.refresh()

    def _started(self) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn

        progress = Progress(
            BarColumn(BAR_WIDTH),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        progress.start()
        return progress

    def _added(self, work: Work) -> TaskID:
        assert self._progress is not None
        return self._progress.add_task(work.line(), total=work.total, completed=int(work.done))


_enabled = False
_screen: _Screen | None = None


def enable_progress() -> None:
    """Show the progress of long work on standard error, from the next piece of work on."""
    global _enabled
    _enabled = True


def disable_progress() -> None:
    """Show no progress any more; this is the default."""
    global _enabled
    _enabled = False


@contextmanager
def tracked(
    name: str, total: float | None = None, noun: str = "step", done: float = 0, shown: bool = True
) -> Iterator[Work]:
    """Show the progress of a block, if progress is enabled.

    Args:
        name, total, noun, done: as for :class:`Work`.
        shown: False for processes that leave the display to the main process.
    """
    global _screen
    if not (_enabled and shown):
        yield Work(name, total, noun, done)
        return
    if _screen is None:
        _screen = _screen_of_standard_error()
    screen = _screen
    work = Work(name, total, noun, done, screen.changed)
    screen.opened(work)
    try:
        yield work
    finally:
        if screen.closed(work):
            _screen = None


@contextmanager
def paused() -> Iterator[None]:
    """Remove the bars during a block that prints, and show them again below its output."""
    screen = _screen
    if screen is not None:
        screen.clear()
    try:
        yield
    finally:
        if screen is not None:
            screen.restore()


def _screen_of_standard_error() -> _Screen:
    from specdec_ext.display.console import PlainConsole

    console = PlainConsole(stderr=True)
    return _Bars(console) if console.is_interactive else _Lines(sys.stderr)


def _clock_time(seconds: float) -> str:
    """Return minutes and seconds, such as ``"3:20"``, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
