"""``make_target``: choose the ``Target`` class for a model and the inputs that ``generate`` prepared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from specdec_ext.models.base import Target
from specdec_ext.models.compat import cache_of
from specdec_ext.models.context_limit import Span, rotation_change, scale_change, selection_change
from specdec_ext.models.findings import findings_of
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

    Raises:
        ValueError: for an unsupported cache; the message names it and the way out.
    """
    kwargs = {name: value for name, value in (model_kwargs or {}).items() if value is not None}
    findings = findings_of(model)
    use_cache = kwargs.get("use_cache", getattr(model.generation_config, "use_cache", None))
    as_found = not beyond_text(kwargs) and use_cache is not False
    support = findings.support if as_found else supports(model, kwargs)
    if span is not None:
        support = _over_span(support, model.config.get_text_config(decoder=True), span)
    if support.by_slots and (support.batch or span is None or span.rows == 1):
        prompt = kwargs if beyond_text(kwargs) else None
        cache = cache_of(kwargs)
        return SlotTarget(
            model, cache, max_slots, support, findings, forward_kwargs, prompt, graphs
        )
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
