"""Patches that make a pass over a block equal to passes over its single tokens, for models that need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from specdec_ext.models.families.alibi import alibi_of
from specdec_ext.models.families.local import local_attention_of
from specdec_ext.models.families.positions import distances_of, positions_of
from specdec_ext.models.families.selection import selection_of
from specdec_ext.models.families.steps import steps_of
from specdec_ext.models.families.temperature import temperature_of
from specdec_ext.models.patching.forwards import Replacement, replaced_forward


def patches_of(model: PreTrainedModel) -> list[Replacement]:
    """Return the patches of a model; none for most models, which take positions and masks as arguments."""
    finders = (
        positions_of,
        distances_of,
        alibi_of,
        temperature_of,
        local_attention_of,
        selection_of,
        steps_of,
    )
    return [replacement for find in finders for replacement in find(model)]


@contextmanager
def patched(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Apply patches, from :func:`patches_of`, in this thread during a pass over a block."""
    with ExitStack() as stack:
        for modules, compute in replacements:
            stack.enter_context(replaced_forward(modules, compute))
        yield
