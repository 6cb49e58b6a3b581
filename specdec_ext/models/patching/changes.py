"""``Changes``: a journal of the changes that a call makes to shared objects, used to undo them.

An exception can occur between any two steps of Python code: Ctrl-C, or the signal handler of a timeout. It
can also occur inside of ``__enter__``, ``__exit__`` and ``finally``, so these alone can't guarantee that a
change is undone. Here the undo function is written to a journal *before* the change is made. Every undo
function may run at any time and more than once. The outermost function of a call (:func:`transactional`) runs
all of them, and tries again if it is interrupted. Context variables need no journal: a transactional function
runs in a copy of the context, which the interpreter drops in one step.

If changes remain nevertheless (every attempt was interrupted), they are undone before the next call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

Undo = Callable[[], object]
# A dict, a key, and a function from the value there (None if missing) to our replacement.
Entry = tuple[MutableMapping[str, Any], str, Callable[[Any], Any]]

# After this many failures in a row, an entry of a journal is dropped: interrupts can't be the cause.
_ATTEMPTS = 100


class Changes:
    """The changes of one call in one thread."""

    def __init__(self) -> None:
        # Identifies this object among the users of a patch, which would keep the object itself alive.
        self._token = object()
        self._made: dict[Hashable, object] = {}
        self._patches: list[Undo] = []
        self._entered: list[Undo] = [partial(torch.set_grad_enabled, torch.is_grad_enabled())]
        self._on_failure: list[Undo] = []

    def patch(self, key: Hashable, entries: Callable[[], Iterable[Entry]]) -> None:
        """Replace entries of dicts until the call ends; calls in other threads may patch the same entries.

        Args:
            key: a second patch with the same key in one call does nothing.
            entries: returns the entries. It is kept as long as ``key``, because ``key`` may contain the
                ``id`` of an object that ``entries`` refers to.
        """
        if key in self._made:
            return
        wanted = list(entries())
        self._patches.append(partial(_release, wanted, self._token))
        _acquire(wanted, self._token)
        self._made[key] = entries

    def make(self, key: Hashable, changes: Iterable[tuple[Callable[[], object], Undo]]) -> None:
        """Make other changes until the call ends, given as pairs (do, undo)."""
        if key in self._made:
            return
        for do, undo in changes:
            self._patches.append(undo)
            do()
        self._made[key] = None

    def enter(self, manager: AbstractContextManager[None]) -> int:
        """Enter ``manager`` until :meth:`leave` is called with the returned depth, or the call ends."""
        depth = len(self._entered)
        self._entered.append(partial(_leave, manager))
        try:
            manager.__enter__()
        except BaseException:
            self.leave(depth)
            raise
        return depth

    def leave(self, depth: int) -> None:
        """Leave the manager that was entered at ``depth``, and all that were entered after it."""
        _undo(self._entered, depth)

    def on_failure(self, undo: Undo) -> None:
        """Add a function that also runs if the call ends with an exception."""
        self._on_failure.append(undo)

    def undo(self) -> None:
        """Undo all changes; a second call does nothing."""
        try:
            _undo(self._entered)
        finally:
            _undo(self._patches)

    def fail(self) -> None:
        """Undo all changes, then run the functions of :meth:`on_failure`."""
        try:
            self.undo()
        finally:
            _undo(self._on_failure)

    def __del__(self) -> None:
        # Not undone here: the garbage collector may run while this thread holds the lock of the patches.
        if patches := vars(self).get("_patches"):
            _left_behind.append(patches)


_current: ContextVar[Changes | None] = ContextVar("specdec_changes", default=None)
_left_behind: list[list[Undo]] = []


def transactional(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that all changes it makes with :func:`current_changes` are undone at its end.

    Changes of context variables and of the gradient mode, in it or in functions that it calls, are undone as
    well.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _sweep()
        changes = Changes()
        try:
            try:
                return copy_context().run(_run, changes, function, args, kwargs)
            finally:
                changes.undo()
        except BaseException:
            changes.fail()
            raise

    return call


def _run(changes: Changes, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _current.set(changes)
    return function(*args, **kwargs)


def current_changes() -> Changes:
    """Return the changes of the current :func:`transactional` function of this thread."""
    changes = _current.get()
    assert changes is not None
    return changes


class binding:
    """Context manager that sets a context variable and resets it at the end."""

    def __init__(self, variable: ContextVar[_R], value: _R):
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        # A generator that an interrupt has left is closed in another context, where the value was never set.
        with suppress(ValueError):
            self._variable.reset(self._token)


@contextmanager
def joined_changes() -> Iterator[Changes]:
    """Yield the changes of the current call in this thread; outside of a call, new ones for this context."""
    changes = _current.get()
    if changes is not None:
        yield changes
        return
    changes = Changes()
    try:
        with binding(_current, changes):
            yield changes
    finally:
        changes.undo()


class inference_mode(ContextDecorator):
    """``torch.inference_mode(mode)`` that ends with the call at the latest.

    After an interrupt, torch's own context manager ends only when its object is destroyed, which may be much
    later. This is a class because every pass enters it: a generator would take three times as long.
    """

    def __init__(self, mode: bool = True):
        self._mode = mode

    def _recreate_cm(self) -> inference_mode:
        return inference_mode(self._mode)  # a decorated function may run in several threads

    def __enter__(self) -> None:
        self._changes = _current.get() or Changes()
        self._depth = self._changes.enter(torch.inference_mode(self._mode))

    def __exit__(self, *error: object) -> None:
        self._changes.leave(self._depth)


def _undo(journal: list[Undo], depth: int = 0) -> None:
    """Undo the entries after the first ``depth``, the last one first; interrupts are raised at the end."""
    interrupt, attempts = None, 0
    while len(journal) > depth:
        try:
            journal[-1]()
            journal.pop()
            attempts = 0
        except BaseException as error:
            interrupt, attempts = error, attempts + 1
            if attempts == _ATTEMPTS:
                journal.pop()
    if interrupt is not None:
        raise interrupt


def _sweep() -> None:
    with suppress(IndexError):  # the list is empty; another thread may have emptied it
        while True:
            _undo(_left_behind.pop())


def _leave(manager: AbstractContextManager[None]) -> None:
    try:
        manager.__exit__(None, None, None)
    except AttributeError:  # it was never entered
        return


class _Patch:
    """The replacement of ``original`` in an entry of a dict, for as long as it has users."""

    def __init__(self, place: MutableMapping[str, Any], key: str, make: Callable[[Any], Any]):
        self.place, self.key = place, key
        self.original = place.get(key)
        self.ours = make(self.original)
        self.users: set[object] = set()

    def restore(self) -> None:
        if self.place.get(self.key) is not self.ours:
            return  # other code has replaced our entry in the meantime
        if self.original is None:
            self.place.pop(self.key, None)
        else:
            self.place[self.key] = self.original


_patches: dict[tuple[int, str], _Patch] = {}


class Lock:
    """A lock that its owner may release at any time, even before it is acquired and more than once."""

    def __init__(self) -> None:
        self._owner: dict[str, object] = {}

    def try_acquire(self, token: object) -> bool:
        """Acquire the lock if no other owner has it; returns whether ``token`` is the owner."""
        return self._owner.setdefault("owner", token) is token

    def acquire(self, token: object) -> None:
        while not self.try_acquire(token):
            time.sleep(1e-5)

    def release(self, token: object) -> None:
        if self._owner.get("owner") is token:
            self._owner.pop("owner", None)


_lock = Lock()


def _acquire(entries: Iterable[Entry], token: object) -> None:
    """Register as a user of a patch of each entry; make the patch if it does not exist."""
    try:
        _lock.acquire(token)
        for place, key, make in entries:
            patch = _patches.get((id(place), key))
            current = place.get(key)
            if patch is None or (current is not patch.ours and current is not patch.original):
                patch = _patches[id(place), key] = _Patch(place, key, make)
            patch.users.add(token)
            if current is not patch.ours:
                place[key] = patch.ours
    finally:
        _lock.release(token)


def _release(entries: Iterable[Entry], token: object) -> None:
    """Unregister as a user, even if :func:`_acquire` was interrupted; remove patches without users."""
    try:
        _lock.acquire(token)
        for place, key, _ in entries:
            patch = _patches.get((id(place), key))
            if patch is None:
                continue
            patch.users.discard(token)
            if not patch.users:
                patch.restore()
                _patches.pop((id(place), key), None)
    finally:
        _lock.release(token)
