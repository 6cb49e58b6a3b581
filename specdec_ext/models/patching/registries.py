"""Functions of ours in the registries of transformers, for as long as a call needs them.

A registry belongs to the whole process: other models, and code that compiles them, should find in it what was
there before. Ours call through outside of passes of ours, and in other threads.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from specdec_ext.models.patching.changes import Entry


def registered(registry: Any, name: str, wrap: Callable[[Callable], Callable]) -> Entry:
    """The entry ``registry[name]``, where ``wrap(what was there)`` is to stand.

    Args:
        registry: ``ALL_ATTENTION_FUNCTIONS`` or ``ALL_MASK_ATTENTION_FUNCTIONS``.
        name: of an attention implementation.
        wrap: gives the same for the same function: compiled code is specialised on what it found.
    """
    local: MutableMapping[str, Any] = registry._local_mapping
    return local if name in local else registry._global_mapping, name, wrap
