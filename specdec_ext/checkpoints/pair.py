"""Does a head belong to a target? What can't work is an error, what looks wrong is told.

No draft can change what is emitted: a wrong pair is never wrong, but slow, and nobody would see why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_ext.head import DraftHead
from specdec_ext.medusa import MedusaHeads


def check_pair(
    head: DraftHead | MedusaHeads,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[str]:
    """Check a head against the target it is to draft for.

    Args:
        head: the head.
        model: the target; its weights are not read, so it may be on the meta device.
        tokenizer: the target's; compared where the checkpoint recorded a fingerprint.

    Returns:
        What looks wrong, one sentence each; empty for a good pair.

    Raises:
        ValueError: for a pair that can't work: sizes, vocabularies or tapped layers that do not fit.
    """
    if isinstance(head, MedusaHeads):
        problems = list(_medusa_problems(head, model))
        doubts = _target_doubts(head.source, head.target_name, head.config.vocab_size, model)
    else:
        problems = [*_size_problems(head, model), *_layer_problems(head, model)]
        doubts = _doubts(head, model, tokenizer)
    if problems:
        raise ValueError(
            f"{head.source} can't draft for {_name(model) or type(model).__name__}: {'; '.join(problems)}"
        )
    return list(doubts)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of every token and its id: equal for tokenizers that give the same ids the same meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return "sha256:" + hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _size_problems(head: DraftHead, model: PreTrainedModel) -> Iterator[str]:
    config, target = head.config, _text_config(model)
    hidden, vocab = target.hidden_size, _rows(model.get_input_embeddings(), target.vocab_size)
    if hidden != config.target_hidden_size:
        yield f"it reads features of width {config.target_hidden_size}, the target's have {hidden}"
    if not config.own_embedding and hidden != config.hidden_size:
        yield (
            f"it has no embedding of its own, and its width is {config.hidden_size}, the target's {hidden}"
        )
    if config.own_embedding and config.vocab_size < vocab:
        yield f"its embedding has {config.vocab_size} tokens, the target {vocab}"
    if not config.own_lm_head:
        yield from _lm_head_problems(head, model, hidden)
    elif (largest := _largest_target_id(head)) >= vocab:
        yield f"it drafts token ids up to {largest}, the target has {vocab} tokens"


def _medusa_problems(heads: MedusaHeads, model: PreTrainedModel) -> Iterator[str]:
    target = _text_config(model)
    if target.hidden_size != heads.config.hidden_size:
        yield (
            f"it reads features of width {heads.config.hidden_size}, the target's have {target.hidden_size}"
        )
    vocab = _rows(model.get_input_embeddings(), target.vocab_size)
    if (largest := _largest_target_id(heads)) >= vocab:
        yield f"it drafts token ids up to {largest}, the target has {vocab} tokens"


def _lm_head_problems(head: DraftHead, model: PreTrainedModel, hidden: int) -> Iterator[str]:
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        yield "it has no lm_head of its own, nor has the target"
        return
    rows = _rows(lm_head, head.config.draft_vocab_size)
    if rows != head.config.draft_vocab_size or hidden != head.config.hidden_size:
        yield (
            f"it uses the target's lm_head, which is [{rows}, {hidden}]; expected "
            f"[{head.config.draft_vocab_size}, {head.config.hidden_size}]"
        )
    if head.record.tied and not getattr(_text_config(model), "tie_word_embeddings", False):
        yield "its lm_head is tied to the target's embedding, which the target's own lm_head is not"


def _rows(module: Any, otherwise: int) -> int:
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 else otherwise


def _largest_target_id(head: DraftHead | MedusaHeads) -> int:
    targets = head.tensors.get("draft_to_target")
    return head.config.draft_vocab_size - 1 if targets is None else int(targets.max())


def _layer_problems(head: DraftHead, model: PreTrainedModel) -> Iterator[str]:
    count = _text_config(model).num_hidden_layers
    layers = head.config.resolved_feature_layers(count)
    outside = [layer for layer in layers if not -1 <= layer <= count]
    if outside:
        yield (
            f"it reads inputs of layers {list(layers)} ({head.record.layers_from}), the target has layers 0 "
            f"to {count - 1}; pass feature_layers=... to load_draft"
        )
    elif head.config.feature_layers is None and list(layers) != sorted(set(layers)):
        yield (
            f"its default layers 2, n // 2 and n - 3 are {list(layers)} for a target of {count} layers; pass "
            "feature_layers=... to load_draft"
        )


def _doubts(
    head: DraftHead, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[str]:
    yield from _target_doubts(head.source, head.record.target_name, head.config.vocab_size, model)
    fingerprint = head.record.tokenizer_fingerprint
    if fingerprint and tokenizer is not None and tokenizer_fingerprint(tokenizer) != fingerprint:
        yield f"{head.source} was made for another tokenizer; ids that mean other tokens are drafted"


def _target_doubts(
    source: str, recorded: str | None, vocab_size: int, model: PreTrainedModel
) -> Iterator[str]:
    name, vocab = _name(model), _text_config(model).vocab_size
    if recorded and name and _base_name(recorded) != _base_name(name):
        yield (
            f"{source} was made for {recorded}, the target is {name}; a fine-tuned or other model accepts "
            "fewer of its drafts"
        )
    if vocab_size != vocab:
        yield (f"{source} was made for a vocabulary of {vocab_size} tokens, the target has {vocab}")


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _name(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "_name_or_path", "") or "")


def _base_name(name: str) -> str:
    """The model's name without its owner; also that of a folder, and in the hub's cache, of a snapshot."""
    cached = re.search(r"models--(?:[^/\\]*--)?([^/\\]+)", name)
    base = cached.group(1) if cached else re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return base.lower()
