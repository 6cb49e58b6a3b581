"""What makes a pass over a block what passes over its tokens would be, where a model alone would not."""

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


def placements(model: PreTrainedModel) -> list[Replacement]:
    """What to replace in passes of the model; nothing in most, which are told positions and masks."""
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
def placed(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Let replacements, from :func:`placements`, act in this thread; for passes over a block."""
    with ExitStack() as stack:
        for modules, compute in replacements:
            stack.enter_context(replaced_forward(modules, compute))
        yield
