"""``supports``: decide what can be done exactly with a model, from its parts and without running it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from specdec_ext.display import Summarised, Table
from specdec_ext.models.cache.adoption import unserved_layers
from specdec_ext.models.cache.indexed import is_indexed, selects_by_slot
from specdec_ext.models.compat import (
    CACHE_ARGUMENTS,
    CACHE_NAMES,
    ONE_TOKEN_MODELS,
    STATES_CONTINUE,
    LinearAttentionCacheLayerMixin,
    cache_argument,
    cached_tokens,
)
from specdec_ext.models.families import griffin
from specdec_ext.models.families.alibi import alibi_of
from specdec_ext.models.families.positions import positions_of
from specdec_ext.models.families.scans import can_continue, stateless_scans
from specdec_ext.models.passes.masks import SUPPORTED_IMPLEMENTATIONS

Rollback = Literal["compact", "replay", "snapshot", "recompute", "none"]
_CLAIMS = ("chain", "tree", "batch")
# What a rollback does, for ``explain()``.
_ROLLBACKS: dict[Rollback, str] = {
    "compact": "Rejected drafts are removed by freeing the cache slots of their keys and values.",
    "replay": (
        "Rejected drafts are removed by restoring the recurrent states from before the pass; the accepted "
        "tokens are read again with the next draft."
    ),
    "snapshot": (
        "Rejected drafts are removed by restoring a copy of the whole cache from before the pass; the "
        "accepted tokens are read again with the next draft."
    ),
    "recompute": "There is no cache: every pass reads the whole text, and drafts save passes.",
    "none": "Nothing is drafted, so nothing has to be removed from the cache.",
}
# Arguments of a call that SlotTarget lays out itself. All others (images, token types) are read with the
# prompt, as transformers prepares them.
_TEXT_INPUTS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    *CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
}

# Models for which a pass over several tokens after cached ones differs from passes over single tokens. Only
# their code shows it: ProphetNet asserts a length of 1, BLT cuts its input into patches anew in every pass,
# CPM-Ant prepends a prompt, FSMT hides later tokens only if it has no cache.
_ONE_TOKEN = {"prophetnet", "blt", "cpmant", "fsmt"} | ONE_TOKEN_MODELS
# Functions of transformers that make masks through the mask interface; a model's file imports those it uses.
_CAUSAL_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
}
# Up to transformers 5.17 some decoders (BigBird, RemBERT) use these masks, too. They are correct for single
# tokens, and for a prompt, which model.generate runs with the same masks.
_BIDIRECTIONAL_MASKS = {"create_bidirectional_mask"}


@dataclass(frozen=True, repr=False)
class Support(Summarised):
    """What can be done exactly with a model.

    Attributes:
        chain: whether chains of drafts are verified in one pass.
        tree: whether trees of drafts are verified in one pass. With every rollback but ``"compact"``, each
            branch of a tree is a separate row of the pass with a copy of the cache, so a tree costs its
            branches times its depth.
        batch: whether the rows of a batch are speculated on. If False, only a single row is, and larger
            batches are decoded one token at a time.
        rollback: how rejected drafts are removed from the cache. ``"compact"``: the slots of their keys and
            values are freed. ``"replay"``: recurrent states are saved before a pass and restored after it,
            and the accepted tokens are read again in front of the next block. ``"snapshot"``: the same with a
            copy of the whole cache, of any kind. ``"recompute"``: there is no cache, every pass runs the
            whole text. ``"none"``: nothing is drafted, the model is decoded one token at a time.
        reasons: why the other capabilities are missing, one clause each.
    """

    chain: bool
    tree: bool
    batch: bool
    rollback: Rollback
    reasons: tuple[str, ...] = ()

    def summary(self) -> str:
        claims = {"chains": self.chain, "trees": self.tree, "batches": self.batch}
        able = ", ".join(name for name, holds in claims.items() if holds) or "one token at a time"
        return "; ".join((able, f"rollback {self.rollback}", *self.reasons))

    def sentences(self) -> Iterable[str]:
        if not self.chain:
            able = "The model is decoded one token at a time; a drafter can't make it faster."
        elif self.tree:
            able = "Chains and trees of drafts are verified exactly."
        else:
            able = (
                "Chains of drafts are verified exactly. If a drafter proposes a tree, its first branch is "
                "verified."
            )
        rows = "The rows of a batch are speculated on together."
        if self.chain and not self.batch:
            rows = (
                "Only a single row is speculated on: larger batches are decoded one token at a time, so "
                "generate one row per call."
            )
        yield f"{able} {rows}" if self.chain else able
        yield _ROLLBACKS[self.rollback]
        if self.reasons:
            yield f"The reason: {'; '.join(self.reasons)}."
        yield "`specdec check`, or check_model(model), tests this on your weights and machine."

    def tables(self) -> Iterable[Table]:
        claims = [(name, "yes" if getattr(self, name) else "no") for name in _CLAIMS]
        reasons = (("because", reason) for reason in self.reasons)
        yield Table((*claims, ("rollback", self.rollback), *reasons))

    @property
    def by_slots(self) -> bool:
        """True if this package lays out cache, masks and positions; False if transformers prepares passes."""
        return self.rollback in ("compact", "replay")


def supports(model: PreTrainedModel, inputs: Mapping[str, Any] | None = None) -> Support:
    """Return what ``generate`` can do exactly with a model: chains, trees, batches.

    Args:
        model: any Hugging Face model that generates text.
        inputs: inputs of the call, as passed to ``generate``; by default text alone.

    Returns:
        A ``Support`` for every model; at worst the model is decoded one token at a time. It holds for texts
        of ordinary length. If positions change their meaning from some length on (dynamic and longrope
        rotations), a call that may cross that length is decoded one token at a time, with a warning.
    """
    if reason := _one_token_reason(model):
        return Support(False, False, False, "none", (reason,))
    inputs = inputs or {}
    if inputs.get("use_cache", getattr(model.generation_config, "use_cache", None)) is False:
        return _prepared_support(model, ["the call uses no cache (use_cache=False)"], "recompute")
    if obstacles := _slot_obstacles(model) or _input_obstacles(model, inputs):
        return _prepared_support(model, obstacles)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    indexed = any(is_indexed(layer) for layer in cache.layers)
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        reasons = ("its indexer keeps one list of positions for all rows",) if indexed else ()
        # Up to transformers 5.17 that list is not part of the layers, so it can't be copied per branch.
        branches = all(hasattr(x, "indexer_position_ids") for x in cache.layers if is_indexed(x))
        return Support(True, tree=branches, batch=not indexed, rollback="replay", reasons=reasons)
    if any(selects_by_slot(layer) for layer in cache.layers):
        reason = "its sparse attention selects tokens by their cache slots"
        return Support(True, tree=False, batch=False, rollback="compact", reasons=(reason,))
    if _has_part(model, "image_patch_tokens"):  # GIT
        reason = "it shifts padding masks by the number of image tokens, even without an image"
        return Support(True, tree=True, batch=False, rollback="compact", reasons=(reason,))
    return Support(chain=True, tree=True, batch=True, rollback="compact")


def _one_token_reason(model: PreTrainedModel) -> str | None:
    """Return why a pass over several tokens differs from passes over single tokens, None if it does not."""
    if not griffin.states_fit_cache(model):
        return "its layers keep recurrent states outside of the cache, where drafts can't be undone"
    if model.config.model_type in _ONE_TOKEN:
        return "after cached tokens it reads only one token at a time"
    if not all(can_continue(mixer) for mixer in stateless_scans(model)):
        return "its Mamba mixers do not pass initial states to their scans"
    if _sees_later_tokens(model):
        return "its tokens attend to later tokens (is_decoder=False)"
    if _drops_tokens(model):
        return "the tokens that its experts process depend on the other tokens of a pass"
    if not STATES_CONTINUE and _has_states(model):
        return (
            "with this version of transformers its recurrent layers reset their states in a pass over "
            "several tokens"
        )
    if _uses(model, _BIDIRECTIONAL_MASKS) and not _uses(model, _CAUSAL_MASKS):
        return "the tokens of a pass would attend to later tokens"
    return None


def _slot_obstacles(model: PreTrainedModel) -> list[str]:
    """Return why this package can't lay out cache, masks and positions itself; empty if it can."""
    parameters = inspect.signature(model.forward).parameters
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return ["it is an encoder-decoder model"]
    if cache_argument(parameters) is None:
        return ["its forward does not take a cache of transformers"]
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        return ["it needs a cache class of its own"]
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":  # Dory
        return ["its loops but the last read the keys in the cache without its layers"]
    cache = DynamicCache(config=config)
    if foreign := unserved_layers(cache):
        return [f"its cache has layers of type {', '.join(foreign)}"]
    obstacles = []
    attends = any(not isinstance(x, LinearAttentionCacheLayerMixin) for x in cache.layers)
    if attends and "position_ids" not in parameters and not _positions_can_be_patched(model):
        obstacles.append("its forward takes no position_ids, which trees and ragged rows need")
    if attends and config._attn_implementation not in SUPPORTED_IMPLEMENTATIONS:
        obstacles.append(
            f"its attention {config._attn_implementation!r} does not support tree masks (load the model with "
            f"attn_implementation={' or '.join(map(repr, SUPPORTED_IMPLEMENTATIONS))})"
        )
    if attends and not _uses(model, _CAUSAL_MASKS):
        obstacles.append("its attention masks are not made through transformers' mask interface")
    return obstacles


def _positions_can_be_patched(model: PreTrainedModel) -> bool:
    """Whether a patch can set positions in a model without ``position_ids``: in its embeddings or ALiBi."""
    return bool(positions_of(model) or alibi_of(model))


def beyond_text(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call that are not text: images, audio, token types, encoder outputs."""

    def given(value: Any) -> bool:
        return value is not None and not (isinstance(value, dict) and not value)

    return {name: x for name, x in inputs.items() if name not in _TEXT_INPUTS and given(x)}


def _input_obstacles(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[str]:
    """Return why a call with these inputs can't continue as plain text after its prompt; empty if it can."""
    media = beyond_text(inputs)
    if not media:
        return []
    if cached_tokens(inputs):
        return [f"{', '.join(media)} come after text that is in the cache already"]
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    prepare: Any = model.prepare_inputs_for_generation
    later = prepare(
        token, next_sequence_length=1, is_first_iteration=False, **{"use_cache": True, **media}
    )
    # For generated tokens mm_token_type_ids only say that they are text.
    if needed := sorted(set(beyond_text(later)) - {"mm_token_type_ids"}):
        return [f"its passes after the prompt need {', '.join(needed)}"]
    return []


def _prepared_support(
    model: PreTrainedModel, reasons: list[str], rollback: Rollback = "snapshot"
) -> Support:
    """Return the support for a model whose inputs transformers prepares."""
    if not set(CACHE_ARGUMENTS) & set(inspect.signature(model.forward).parameters):
        rollback = "recompute"
    if reason := _unprepared_reason(model, rollback):
        return Support(False, False, False, "none", (*reasons, reason))
    return Support(chain=True, tree=True, batch=False, rollback=rollback, reasons=tuple(reasons))


def _unprepared_reason(model: PreTrainedModel, rollback: Rollback) -> str | None:
    """Return why transformers can't prepare a pass over several tokens at the end of a text, else None."""
    if rollback == "snapshot":
        if _prepares_several(model):
            return None
        return "its prepare_inputs_for_generation prepares one token at a time"
    if any(hasattr(module, "num_hashes") for module in model.modules()):
        return "its hashing attention sorts all tokens of the text, including later ones"
    # Some models predict only at a token that they append to the text.
    text = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    prepare: Any = model.prepare_inputs_for_generation
    prepared = prepare(text, is_first_iteration=True).get("input_ids")
    if prepared is None or prepared.shape != text.shape:
        return "it predicts only at a token that it appends to the text"
    return None


def _prepares_several(model: PreTrainedModel) -> bool:
    """Whether ``prepare_inputs_for_generation`` accepts the number of tokens to prepare."""
    for cls in type(model).__mro__:
        prepare = vars(cls).get("prepare_inputs_for_generation")
        if prepare is None:
            continue
        if "next_sequence_length" in inspect.signature(prepare).parameters:
            return True
        calls_super = "__class__" in inspect.unwrap(prepare).__code__.co_freevars
        if not calls_super:
            return False
    return False


def _has_part(model: PreTrainedModel, attribute: str) -> bool:
    return any(hasattr(module, attribute) for module in model.modules())


def _sees_later_tokens(model: PreTrainedModel) -> bool:
    """Whether the model is an encoder, of the kind that can be configured as encoder or decoder."""
    config = model.config.get_text_config(decoder=True)
    is_encoder = not config.is_encoder_decoder and getattr(config, "is_decoder", None) is False
    # GPT-NeoX has this entry in its config, but not in its modules, which are always a decoder.
    return is_encoder and _has_part(model, "is_decoder")


def _drops_tokens(model: PreTrainedModel) -> bool:
    """Whether experts drop tokens beyond their capacity in a pass (Switch, NLLB-MoE)."""
    routers = (module for module in model.modules() if hasattr(module, "expert_capacity"))
    # A capacity of 1.0 times the tokens of a pass lets one expert take all of them.
    return any(getattr(each, "moe_eval_capacity_token_fraction", 0) < 1 for each in routers)


def _has_states(model: PreTrainedModel) -> bool:
    """Whether the cache holds more than keys and values, as far as this is visible without a pass."""
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        return True
    return bool(unserved_layers(DynamicCache(config=model.config.get_text_config(decoder=True))))


def _uses(model: PreTrainedModel, functions: set[str]) -> bool:
    """Whether a source file of the model's modules imports one of these functions of transformers."""
    files = {type(module).__module__ for module in model.modules()}
    return any(functions & vars(sys.modules[file]).keys() for file in files & sys.modules.keys())
