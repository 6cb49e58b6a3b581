"""``supports``: what can be done exactly with a model, decided from its own parts without running it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from specdec_ext.display import Summarised
from specdec_ext.models.cache.adoption import unserved_layers
from specdec_ext.models.cache.indexed import is_indexed, selects_by_slot
from specdec_ext.models.compat import (
    ONE_TOKEN_MODELS,
    STATES_CONTINUE,
    LinearAttentionCacheLayerMixin,
)
from specdec_ext.models.families import griffin as held
from specdec_ext.models.families.alibi import alibi_of
from specdec_ext.models.families.positions import positions_of
from specdec_ext.models.families.scans import can_continue, stateless_scans
from specdec_ext.models.passes.masks import SUPPORTED_IMPLEMENTATIONS

Rollback = Literal["compact", "replay", "snapshot", "recompute", "none"]
# Where a model's forward takes what it remembers of the text before.
CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")
# What of a call is text, which SlotTarget lays out itself. All else (images, token types) is read with the
# prompt, as transformers prepares it.
_TEXT_INPUTS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache_params",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
}

# Models whose pass over several tokens behind cached ones is not what single passes are, which nothing but
# their code tells: ProphetNet asserts a length of 1, BLT cuts its input into patches anew in every pass,
# CPM-Ant prepends a prompt, FSMT hides later tokens only where it has no cache.
_ONE_TOKEN = {"prophetnet", "blt", "cpmant", "fsmt"} | ONE_TOKEN_MODELS
# How a model's file makes its masks; through what transformers registers for each attention implementation.
_CAUSAL_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
}
# Up to 5.17 the masks of some decoders, too (BigBird, RemBERT): right for a prompt, which is run like that
# without us as well, and for single tokens.
_BIDIRECTIONAL_MASKS = {"create_bidirectional_mask"}


@dataclass(frozen=True, repr=False)
class Support(Summarised):
    """The verdict on a model.

    Attributes:
        chain: whether chains of drafts are verified in one pass.
        tree: whether trees are. Where a cache has no room for siblings (all but ``"compact"``), every branch
            is a row of the pass, on a copy of the cache, and a tree costs its branches times its depth.
        batch: whether rows of a batch are speculated on; otherwise only a single row is, and larger batches
            are decoded one token at a time.
        rollback: how rejected drafts are forgotten. ``"compact"``: keys and values lie in slots that are
            given up. ``"replay"``: recurrent states are saved before a pass and restored after it; what was
            accepted is read again in front of the next block. ``"snapshot"``: the same with a cache of any
            kind, copied whole. ``"recompute"``: there is no cache, the whole text runs in every pass.
            ``"none"``: nothing is drafted, one token at a time.
        reasons: why what is not possible is not.
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

    def details(self) -> Iterable[tuple[str, ...]]:
        for name in ("chain", "tree", "batch"):
            yield name, "yes" if getattr(self, name) else "no"
        yield "rollback", self.rollback
        yield from (("because", reason) for reason in self.reasons)

    @property
    def by_slots(self) -> bool:
        """Whether we lay out cache, masks and positions ourselves; otherwise transformers prepares passes."""
        return self.rollback in ("compact", "replay")


def supports(model: PreTrainedModel, inputs: Mapping[str, Any] | None = None) -> Support:
    """What ``generate`` does with a model.

    Args:
        model: any Hugging Face model that generates text.
        inputs: of the call, as they are passed to ``generate``; by default text alone.

    Returns:
        The verdict; every model gets one, at worst one token at a time. It is for texts of ordinary length:
        where positions change their meaning behind some length (dynamic and longrope rotations), a call
        that would cross it is decoded one token at a time, and says so.
    """
    if reason := _one_token_reason(model):
        return Support(False, False, False, "none", (reason,))
    inputs = inputs or {}
    if inputs.get("use_cache", getattr(model.generation_config, "use_cache", None)) is False:
        return _hosted(model, ["the call keeps no cache (use_cache=False)"], "recompute")
    if obstacles := _slot_obstacles(model) or _input_obstacles(model, inputs):
        return _hosted(model, obstacles)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    indexed = any(is_indexed(layer) for layer in cache.layers)
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        reasons = ("its indexer keeps one list of positions for all rows",) if indexed else ()
        # Up to 5.17 that list is not in the layers, where it would branch with the rest.
        branches = all(hasattr(x, "indexer_position_ids") for x in cache.layers if is_indexed(x))
        return Support(True, tree=branches, batch=not indexed, rollback="replay", reasons=reasons)
    if any(selects_by_slot(layer) for layer in cache.layers):
        reason = "its sparse attention selects tokens by the cache slots they lie in"
        return Support(True, tree=False, batch=False, rollback="compact", reasons=(reason,))
    if _has_part(model, "image_patch_tokens"):  # GIT
        reason = "it shifts padding masks by the tokens of an image, even where there is none"
        return Support(True, tree=True, batch=False, rollback="compact", reasons=(reason,))
    return Support(chain=True, tree=True, batch=True, rollback="compact")


def _one_token_reason(model: PreTrainedModel) -> str | None:
    """Why passes over several tokens are not what passes over single ones are, whoever prepares them."""
    if not held.all_fit(model):
        return "its layers keep recurrent states outside of the cache, where no rejected draft is undone"
    if model.config.model_type in _ONE_TOKEN:
        return "behind cached tokens it takes one token at a time"
    if not all(can_continue(mixer) for mixer in stateless_scans(model)):
        return "its Mamba mixers do not hand states to their scans"
    if _sees_later_tokens(model.config.get_text_config(decoder=True)):
        return "its tokens read those after them (is_decoder=False)"
    if _drops_tokens(model):
        return "which tokens its experts take depends on the others of a pass"
    if not STATES_CONTINUE and _has_states(model):
        return "recurrent layers of this transformers forget their states in a pass over several tokens"
    if _uses(model, _BIDIRECTIONAL_MASKS) and not _uses(model, _CAUSAL_MASKS):
        return "tokens of one pass would read those after them"
    return None


def _slot_obstacles(model: PreTrainedModel) -> list[str]:
    """What keeps us from laying out cache, masks and positions ourselves."""
    parameters = inspect.signature(model.forward).parameters
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return ["its decoder reads an encoder"]
    if not {"past_key_values", "cache_params"} & set(parameters):
        return ["its forward takes no cache of transformers"]
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        return ["it makes a cache of its own"]
    cache = DynamicCache(config=config)
    if foreign := unserved_layers(cache):
        return [f"its cache has layers of type {', '.join(foreign)}"]
    obstacles = []
    attends = any(not isinstance(x, LinearAttentionCacheLayerMixin) for x in cache.layers)
    if attends and "position_ids" not in parameters and not _places(model):
        obstacles.append("its forward takes no position_ids, which trees and ragged rows need")
    if attends and config._attn_implementation not in SUPPORTED_IMPLEMENTATIONS:
        obstacles.append(
            f"its attention {config._attn_implementation!r} takes no tree mask (load it with "
            f"attn_implementation={' or '.join(map(repr, SUPPORTED_IMPLEMENTATIONS))})"
        )
    if attends and not _uses(model, _CAUSAL_MASKS):
        obstacles.append("its attention masks are not made through transformers' mask interface")
    return obstacles


def _places(model: PreTrainedModel) -> bool:
    """Whether we can place tokens in a model that takes no positions: it embeds them, or biases attention."""
    return bool(positions_of(model) or alibi_of(model))


def beyond_text(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What of the inputs of a call is no text: images, sounds, token types, encoder outputs."""

    def given(value: Any) -> bool:
        return value is not None and not (isinstance(value, dict) and not value)

    return {name: x for name, x in inputs.items() if name not in _TEXT_INPUTS and given(x)}


def _input_obstacles(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[str]:
    """What keeps a call with these inputs from going on as text alone after its prompt."""
    media = beyond_text(inputs)
    if not media:
        return []
    cache = inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        return [f"{', '.join(media)} come behind text that the cache holds"]
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    prepare: Any = model.prepare_inputs_for_generation
    later = prepare(
        token, next_sequence_length=1, is_first_iteration=False, **{"use_cache": True, **media}
    )
    # mm_token_type_ids of generated tokens say that they are text.
    if needed := sorted(set(beyond_text(later)) - {"mm_token_type_ids"}):
        return [f"its passes after the prompt take {', '.join(needed)}"]
    return []


def _hosted(model: PreTrainedModel, reasons: list[str], rollback: Rollback = "snapshot") -> Support:
    """The verdict on a model whose passes transformers prepares."""
    if not set(CACHE_ARGUMENTS) & set(inspect.signature(model.forward).parameters):
        rollback = "recompute"
    if reason := _unprepared_reason(model, rollback):
        return Support(False, False, False, "none", (*reasons, reason))
    return Support(chain=True, tree=True, batch=False, rollback=rollback, reasons=tuple(reasons))


def _unprepared_reason(model: PreTrainedModel, rollback: Rollback) -> str | None:
    """Why transformers can't prepare a pass over several tokens at the end of a text, if it can't."""
    if rollback == "snapshot":
        if _prepares_several(model):
            return None
        return "its prepare_inputs_for_generation prepares one token at a time"
    if any(hasattr(module, "num_hashes") for module in model.modules()):
        return "its hashing attention sorts all tokens of the text, those behind a token too"
    # Some models predict at a token that they append to the text, so that no other column counts.
    text = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    prepare: Any = model.prepare_inputs_for_generation
    prepared = prepare(text, is_first_iteration=True).get("input_ids")
    if prepared is None or prepared.shape != text.shape:
        return "it predicts only at a column that it adds to the text"
    return None


def _prepares_several(model: PreTrainedModel) -> bool:
    """Whether ``prepare_inputs_for_generation`` can be told how many tokens to prepare."""
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


def _sees_later_tokens(config: PreTrainedConfig) -> bool:
    """Whether a model that can be an encoder or a decoder is an encoder."""
    return not config.is_encoder_decoder and getattr(config, "is_decoder", None) is False


def _drops_tokens(model: PreTrainedModel) -> bool:
    """Whether experts leave out what is beyond their capacity in a pass (Switch, NLLB-MoE)."""
    routers = (module for module in model.modules() if hasattr(module, "expert_capacity"))
    # As many tokens as a pass has fit into one expert where the capacity is that share of them.
    return any(getattr(each, "moe_eval_capacity_token_fraction", 0) < 1 for each in routers)


def _has_states(model: PreTrainedModel) -> bool:
    """Whether its cache is more than keys and values, so far as it can be seen without a pass."""
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        return True
    return bool(unserved_layers(DynamicCache(config=model.config.get_text_config(decoder=True))))


def _uses(model: PreTrainedModel, functions: set[str]) -> bool:
    """Whether a file that the model's modules come from imports one of these functions of transformers."""
    files = {type(module).__module__ for module in model.modules()}
    return any(functions & vars(sys.modules[file]).keys() for file in files & sys.modules.keys())
