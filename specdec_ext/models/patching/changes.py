"""``Changes``: what a call changes outside of itself, and the way back.

An exception can come between any two steps of Python code: Ctrl-C, the handler of a timeout's signal. It can
come in the middle of ``__enter__``, ``__exit__`` and ``finally``, too, so those alone leave things behind.
Here the way back is noted in a journal *before* a change is made. Whatever is noted may be undone at any time
and more than once. The outermost function of a call (:func:`transactional`) undoes all that is noted, and
tries again when it is interrupted. Context variables need no journal: such a function runs in a copy of the
context, which the interpreter drops in one step.

What is not undone even so (an interrupt in each of several attempts) is undone before the next call.
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
# An entry of a dict, and what makes ours of what is there (None if nothing is).
Entry = tuple[MutableMapping[str, Any], str, Callable[[Any], Any]]

# An entry of a journal that fails this often does not fail because of interrupts.
_ATTEMPTS = 100


class Changes:
    """The changes of one call in one thread."""

    def __init__(self) -> None:
        # What tells the users of a patch apart. Not the object itself, which patches would keep alive.
        self._token = object()
        self._made: dict[Hashable, object] = {}
        self._patches: list[Undo] = []
        self._entered: list[Undo] = [partial(torch.set_grad_enabled, torch.is_grad_enabled())]
        self._on_failure: list[Undo] = []

    def patch(self, key: Hashable, entries: Callable[[], Iterable[Entry]]) -> None:
        """Put ours into entries of dicts until the call ends; calls in other threads may do the same.

        Args:
            key: what has been patched once in a call is not patched again.
            entries: kept as long as ``key``, which may be made of the ``id`` of what it refers to.
        """
        if key in self._made:
            return
        wanted = list(entries())
        self._patches.append(partial(_release, wanted, self._token))
        _acquire(wanted, self._token)
        self._made[key] = entries

    def make(self, key: Hashable, changes: Iterable[tuple[Callable[[], object], Undo]]) -> None:
        """Make other changes until the call ends: pairs of what to do and how it is undone."""
        if key in self._made:
            return
        for do, undo in changes:
            self._patches.append(undo)
            do()
        self._made[key] = None

    def enter(self, manager: AbstractContextManager[None]) -> int:
        """Enter ``manager`` until :meth:`leave` gets what this returns, at the latest until the call ends."""
        depth = len(self._entered)
        self._entered.append(partial(_leave, manager))
        try:
            manager.__enter__()
        except BaseException:
            self.leave(depth)
            raise
        return depth

    def leave(self, depth: int) -> None:
        """Leave the manager that was entered there, and all since."""
        _undo(self._entered, depth)

    def on_failure(self, undo: Undo) -> None:
        """What is to be done in addition if the call ends with an exception."""
        self._on_failure.append(undo)

    def undo(self) -> None:
        """Undo all changes; a second time does nothing."""
        try:
            _undo(self._entered)
        finally:
            _undo(self._patches)

    def fail(self) -> None:
        try:
            self.undo()
        finally:
            _undo(self._on_failure)

    def __del__(self) -> None:
        # Not undone here: the garbage collector may come while this thread has the lock of the patches.
        if patches := vars(self).get("_patches"):
            _left_behind.append(patches)


_current: ContextVar[Changes | None] = ContextVar("specdec_changes", default=None)
_left_behind: list[list[Undo]] = []


def transactional(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function after which nothing is left of what it has changed with :func:`current_changes`.

    Nor of the context variables and the mode of gradients that it, or what it has called, has changed.
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
    """Those of the :func:`transactional` function that this thread is in."""
    changes = _current.get()
    assert changes is not None
    return changes


class binding:
    """Lets a context variable have a value for a while."""

    def __init__(self, variable: ContextVar[_R], value: _R):
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        # A generator that an interrupt has left is closed in another context, where the value never was.
        with suppress(ValueError):
            self._variable.reset(self._token)


@contextmanager
def joined_changes() -> Iterator[Changes]:
    """The changes of the call that this thread is in; without one, such that end with this context."""
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
    """``torch.inference_mode(mode)``, which ends with the call at the latest.

    Interrupted, torch's own would be left when its object is destroyed, which may be much later. A class,
    as every pass enters it: generators would take three times as long.
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
    """Undo the entries behind the first ``depth``, the last one first; interrupts wait until that is done."""
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
    with suppress(IndexError):  # all done, perhaps by another thread
        while True:
            _undo(_left_behind.pop())


def _leave(manager: AbstractContextManager[None]) -> None:
    try:
        manager.__exit__(None, None, None)
    except AttributeError:  # it was never entered
        return


class _Patch:
    """What stands in for ``original`` in an entry of a dict while it has users."""

    def __init__(self, place: MutableMapping[str, Any], key: str, make: Callable[[Any], Any]):
        self.place, self.key = place, key
        self.original = place.get(key)
        self.ours = make(self.original)
        self.users: set[object] = set()

    def restore(self) -> None:
        if self.place.get(self.key) is not self.ours:
            return  # somebody else has replaced ours meanwhile
        if self.original is None:
            self.place.pop(self.key, None)
        else:
            self.place[self.key] = self.original


_patches: dict[tuple[int, str], _Patch] = {}


class _Lock:
    """A lock whose owner may release it at any time: before it has it, and again."""

    def __init__(self) -> None:
        self._owner: dict[str, object] = {}

    def acquire(self, token: object) -> None:
        while self._owner.setdefault("owner", token) is not token:
            time.sleep(1e-5)

    def release(self, token: object) -> None:
        if self._owner.get("owner") is token:
            self._owner.pop("owner", None)


_lock = _Lock()


def _acquire(entries: Iterable[Entry], token: object) -> None:
    """Be a user of a patch of each entry."""
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
    """Be none, however far :func:`_acquire` came; a patch without users goes."""
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
