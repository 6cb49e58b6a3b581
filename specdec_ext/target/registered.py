"""Functions of ours in the registries of transformers, for as long as a pass needs them.

A registry belongs to the whole process: other models, and code that compiles them, should find in it what was
there before. Ours call through in threads that have no pass open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_lock = threading.Lock()


@dataclass
class _Front:
    """What stands in front of ``original`` while it has users.

    It is kept: compiled code is specialised on the function that it found.
    """

    original: Callable
    ours: Callable
    users: int = 0


_fronts: dict[tuple[type, str], _Front] = {}


@contextmanager
def in_front(registry: Any, name: str, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    """Within this context ``registry[name]`` is ``wrap(what was there)``.

    Contexts may nest and be open in several threads. What somebody registers meanwhile stays.

    Args:
        registry: ``ALL_ATTENTION_FUNCTIONS`` or ``ALL_MASK_ATTENTION_FUNCTIONS``.
        name: of an attention implementation.
        wrap: called once for each function that was found there.
    """
    key = (type(registry), name)
    with _lock:
        current = registry[name]
        front = _fronts.get(key)
        if front is None or current not in (front.original, front.ours):
            front = _fronts[key] = _Front(current, wrap(current))
        if current is not front.ours:
            registry.register(name, front.ours)
        front.users += 1
    try:
        yield
    finally:
        with _lock:
            front.users -= 1
            if front.users == 0 and registry[name] is front.ours:
                registry.register(name, front.original)
