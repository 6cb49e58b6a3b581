"""``ModulePass``: a forward pass through the model's own modules, over a cache that this package lays out."""

from __future__ import annotations

import copy
import inspect
import math
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_ext.models import compat
from specdec_ext.models.base import TargetOutput
from specdec_ext.models.cache.slot_cache import SlotCache
from specdec_ext.models.families.griffin import recurrent_blocks, states_in_cache
from specdec_ext.models.families.patches import patched, patches_of
from specdec_ext.models.families.scans import continuing, stateless_scans
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder, concatenated
from specdec_ext.models.passes.linears import plain_linears, row_invariant_linears
from specdec_ext.models.passes.masks import visibility
from specdec_ext.models.passes.visibility import BlockVisibility
from specdec_ext.models.patching.changes import Entry, inference_mode, joined_changes

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


class ModulePass:
    """Calls the model with the masks, patches and states that a block of tokens needs.

    Args:
        model: a decoder-only causal language model.
        cache: the cache that it reads and writes.
        forward_kwargs: passed to every call (``output_hidden_states`` and the like).

    Attributes:
        parameters: names of the arguments of the model's ``forward``.
        cache_name: the name of the argument that takes the cache.
        patches: replaced forwards of modules that count slots instead of tokens (``families/patches.py``).
        griffin_blocks: modules that keep recurrent states themselves (``families/griffin.py``).
        recorder: records the auxiliary hidden states.
    """

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, forward_kwargs: dict[str, Any] | None
    ):
        self.model, self.cache = model, cache
        self.config = model.config.get_text_config(decoder=True)
        self.forward_kwargs = {"use_cache": True, "return_dict": True, **(forward_kwargs or {})}
        self.parameters = set(inspect.signature(model.forward).parameters)
        self.cache_name: Any = compat.cache_argument(self.parameters)
        self.patches = patches_of(model)
        self.griffin_blocks = recurrent_blocks(model) if cache.states else []
        self._scans = stateless_scans(model) if cache.states else []
        self._linears = plain_linears(model)
        head = model.get_output_embeddings()
        # In a prompt, the output head has few rows: the columns in which texts end.
        self._head = [each for each in self._linears if each is head]
        self._inner = [each for each in self._linears if each is not head]
        self._checked = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
        self.recorder = HiddenStateRecorder(model, self.config, ())

    def over(self, cache: SlotCache) -> ModulePass:
        """The same pass over another cache of the same model. They share the recorder."""
        other = copy.copy(self)
        other.cache = cache
        return other

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
        if "position_ids" not in self.parameters:
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
                stack.enter_context(patched(self.patches))
            if rows * columns <= max_rows:
                stack.enter_context(row_invariant_linears(self._linears))
            else:
                stack.enter_context(row_invariant_linears(self._head))
                stack.enter_context(row_invariant_linears(self._inner, many_rows=True))
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
        return [(vars(each), _PADDING_CHECK, lambda _: _check_nothing) for each in self._checked]


def _check_nothing(input_ids: Any, attention_mask: Any) -> None:
    pass
