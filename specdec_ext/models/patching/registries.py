"""Temporary entries in the registries of transformers.

A registry belongs to the whole process, and other models, and code that compiles them, must find the original
entries after a call. Outside of our own passes, and in other threads, our functions call the originals.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from specdec_ext.models.patching.changes import Entry


def wrapped_entry(registry: Any, name: str, wrap: Callable[[Callable], Callable]) -> Entry:
    """Return the entry that replaces ``registry[name]`` by ``wrap(registry[name])``.

    Args:
        registry: ``ALL_ATTENTION_FUNCTIONS`` or ``ALL_MASK_ATTENTION_FUNCTIONS``.
        name: name of an attention implementation.
        wrap: must return the same object for the same function, because compiled code is specialised on it.
    """
    local: MutableMapping[str, Any] = registry._local_mapping
    return local if name in local else registry._global_mapping, name, wrap
