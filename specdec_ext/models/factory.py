"""``make_target``: choose the ``Target`` class for a model and the inputs that ``generate`` prepared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from specdec_ext.models.base import Target
from specdec_ext.models.compat import cache_of
from specdec_ext.models.context_limit import Span, rotation_change, scale_change, selection_change
from specdec_ext.models.prepared import PreparedTarget
from specdec_ext.models.slots import SlotTarget
from specdec_ext.models.support import Support, beyond_text, supports


def make_target(
    model: PreTrainedModel,
    max_slots: int,
    forward_kwargs: dict[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    config: GenerationConfig | None = None,
    span: Span | None = None,
    graphs: bool | str = False,
    like: SlotTarget | None = None,
) -> Target:
    """Make the target for one call.

    Args:
        model: any Hugging Face model that generates text.
        max_slots: the most cache slots that the call may need, including the last block.
        forward_kwargs: passed to every forward pass (``output_hidden_states`` and the like).
        model_kwargs: the inputs that ``generate`` prepared for the model besides its text; among them the
            cache of the caller.
        config: generation config of the call; by default the model's.
        span: number of rows and lengths of the call. By default one row, and limits that depend on the length
            are not checked.
        graphs: whether passes are recorded; see :class:`~specdec_ext.models.slots.target.SlotTarget`.
        like: an earlier target of the model, for text alone; None if the model may have changed. If this call
            is for text alone, too, what the earlier one found out about the model is not looked up again.

    Raises:
        ValueError: for an unsupported cache; the message names it and the way out.
    """
    kwargs = {name: value for name, value in (model_kwargs or {}).items() if value is not None}
    if forward_kwargs or beyond_text(kwargs) or kwargs.get("use_cache") is False:
        like = None
    support = supports(model, kwargs) if like is None else like.support
    if span is not None:
        support = _over_span(support, model.config.get_text_config(decoder=True), span)
    if support.by_slots and (support.batch or span is None or span.rows == 1):
        prompt = kwargs if beyond_text(kwargs) else None
        cache = cache_of(kwargs)
        return SlotTarget(model, cache, max_slots, support, forward_kwargs, prompt, graphs, like)
    if graphs is True:
        raise ValueError(
            f"graphs=True, but passes of {type(model).__name__} can't be recorded: transformers lays out its "
            "cache. Use graphs='auto', which runs them without a recording"
        )
    return PreparedTarget(model, support, kwargs, config or model.generation_config, forward_kwargs)


def _over_span(support: Support, config: PreTrainedConfig, span: Span) -> Support:
    """Restrict ``support`` to what stays exact in a call of this length."""
    if change := rotation_change(config, span) or selection_change(config, span):
        return Support(False, False, False, "none", (*support.reasons, change))
    if change := scale_change(config, span):
        return replace(support, tree=False, batch=False, reasons=(*support.reasons, change))
    return support
