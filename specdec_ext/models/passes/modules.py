"""``ModulePass``: a forward pass through the model's own modules, over a cache that this package lays out."""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec_ext.models import compat
from specdec_ext.models.base import TargetOutput
from specdec_ext.models.cache.slot_cache import SlotCache
from specdec_ext.models.families.griffin import recurrent_blocks, states_in_cache
from specdec_ext.models.families.patches import patched, patches_of
from specdec_ext.models.families.scans import continuing, stateless_scans
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder, concatenated
from specdec_ext.models.passes.linears import row_invariant, row_invariant_linears
from specdec_ext.models.passes.masks import visibility
from specdec_ext.models.passes.visibility import BlockVisibility
from specdec_ext.models.patching.changes import Entry, inference_mode, joined_changes
from specdec_ext.models.patching.forwards import Replacement

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


@dataclass(frozen=True)
class ModelParts:
    """What passes need to know of a model's modules.

    Attributes:
        parameters: names of the arguments of the model's ``forward``.
        patches: replaced forwards of modules that count slots instead of tokens (``families/patches.py``).
        griffin_blocks: modules that keep recurrent states themselves (``families/griffin.py``).
        scans: modules whose scans start from zero (``families/scans.py``).
        linears: modules that can be computed row-invariantly.
        head: the output head, if it is one of them.
        models: the models inside of the model.
    """

    parameters: frozenset[str]
    patches: list[Replacement]
    griffin_blocks: list[nn.Module]
    scans: list[nn.Module]
    linears: list[nn.Module]
    head: list[nn.Module]
    models: list[PreTrainedModel]

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelParts:
        linears, head = row_invariant(model), model.get_output_embeddings()
        return cls(
            frozenset(inspect.signature(model.forward).parameters),
            patches_of(model),
            recurrent_blocks(model),
            stateless_scans(model),
            linears,
            [each for each in linears if each is head],
            [x for x in model.modules() if isinstance(x, PreTrainedModel) and x is not model],
        )


class ModulePass:
    """Calls the model with the masks, patches and states that a block of tokens needs.

    Args:
        model: a decoder-only causal language model.
        parts: of the model.
        cache: the cache that it reads and writes.
        forward_kwargs: passed to every call (``output_hidden_states`` and the like).

    Attributes:
        cache_name: the name of the argument that takes the cache.
        griffin_blocks: modules that keep recurrent states themselves, if the cache has any.
        recorder: records the auxiliary hidden states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parts: ModelParts,
        cache: SlotCache,
        forward_kwargs: dict[str, Any] | None,
    ):
        self.model, self.parts, self.cache = model, parts, cache
        self.config = model.config.get_text_config(decoder=True)
        self.forward_kwargs = {"use_cache": True, "return_dict": True, **(forward_kwargs or {})}
        self.cache_name: Any = compat.cache_argument(parts.parameters)
        self.griffin_blocks = parts.griffin_blocks if cache.states else []
        self._scans = parts.scans if cache.states else []
        self.recorder = HiddenStateRecorder(model, self.config, ())

    def __call__(
        self,
        block: BlockVisibility | None,
        max_rows: float = math.inf,
        past: bool = True,
        **inputs: Any,
    ) -> TargetOutput:
        """Run one forward pass.

        Args:
            block: which slots the tokens may attend to; None uses transformers' own masks.
            max_rows: up to this many tokens, linear layers sum in the order for few rows, beyond in that for
                many.
            past: whether the cache holds tokens before these.
            inputs: passed to the model's forward.

        Raises:
            RuntimeError: the model did not make its attention masks through transformers' mask interface.
        """
        layers = self.cache.layers
        given = (inputs.get(name) for name in ("input_ids", "inputs_embeds"))
        rows, columns = next(text.shape[:2] for text in given if text is not None)
        if compat.NEEDS_MASK and layers and inputs.get("attention_mask") is None:
            slots = layers[0].length + columns
            inputs["attention_mask"] = torch.ones(rows, slots, device=self.model.device).long()
        if "position_ids" not in self.parts.parameters:
            inputs.pop("position_ids", None)
        # Inference mode makes small ops faster. Tensors that the caller may keep are allocated outside of it:
        # the cache (RollbackLayer._allocate, States.release) and recorded outputs (Recorder copies them).
        with ExitStack() as stack:
            # Outside of a call, the changes end with this pass.
            changes = stack.enter_context(joined_changes())
            changes.patch((_PADDING_CHECK, id(self)), self._unchecked)
            stack.enter_context(inference_mode())
            if block is not None:
                stack.enter_context(visibility(block))
                stack.enter_context(patched(self.parts.patches))
            # In a prompt, the output head has few rows: the columns in which texts end.
            few_rows = None if rows * columns <= max_rows else self.parts.head
            stack.enter_context(row_invariant_linears(self.parts.linears, few_rows))
            if past and self._scans:
                stack.enter_context(continuing(self._scans))
            if self.griffin_blocks:
                stack.enter_context(states_in_cache(self.cache.cache, self.griffin_blocks))
            states = stack.enter_context(self.recorder.recording())
            output: Any = self.model(
                **{self.cache_name: self.cache.cache}, **inputs, **self.forward_kwargs
            )
        if block is not None and layers and not block.consulted:
            raise RuntimeError(
                f"{type(self.model).__name__} made its attention masks without transformers' mask interface, "
                "so the attention mask of a draft can't be set; pass drafter=None or use model.generate"
            )
        logits = output.logits
        return TargetOutput(
            # transformers' own loop rounds float64 logits in the same way
            logits.float() if logits.dtype == torch.float64 else logits,
            concatenated([each.to(logits.device) for each in states]),
            tuple(output.get("hidden_states") or ()),
            tuple(output.get("attentions") or ()),
        )

    def _unchecked(self) -> list[Entry]:
        """Turn off a check of GPT-2 and others, which would copy tokens to the host in every pass.

        Without a mask, it warns of tokens that equal the padding token. transformers' ``generate`` always
        passes a mask, so it never warns, and a draft may contain any token.
        """
        return [
            (vars(each), _PADDING_CHECK, lambda _: _check_nothing)
            for each in (self.model, *self.parts.models)
        ]


def _check_nothing(input_ids: Any, attention_mask: Any) -> None:
    pass
