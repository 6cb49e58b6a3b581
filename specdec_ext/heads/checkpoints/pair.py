"""Does a head belong to a target? What can't work is an error, what looks wrong is told.

No draft can change what is emitted: a wrong pair is never wrong, but slow, and nobody would see why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_ext.heads.config import DraftHead, HeadRecord
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.models import vocab_size
from specdec_ext.models.wrapped import unwrapped

_SAMPLES = 32  # elements of each parameter that a fingerprint depends on
_OTHER_READINGS = {
    "feature_layers": "its ids may be outputs or inputs of layers, one apart",
    "norm_output": "SpecForge has used the field in two senses",
}


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
    else:
        problems = [*_size_problems(head, model), *_layer_problems(head, model)]
    if problems:
        raise ValueError(
            f"{head.source} can't draft for {_name(model) or type(model).__name__}: {'; '.join(problems)}"
        )
    return list(_doubts(head, model, tokenizer))


def completed_record(
    record: HeadRecord,
    target: PreTrainedModel | None = None,
    target_name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> HeadRecord:
    """A record with what is known of the target and its tokenizer; what is not stays as it was recorded.

    Args:
        record: of the head.
        target: with weights; a local folder is recorded by its name alone.
        target_name: in place of the target's own name.
        tokenizer: the target's.
    """
    if target is not None:
        name = _name(target)
        record = replace(
            record,
            target_name=(Path(name).resolve().name if Path(name).is_dir() else name) or None,
            target_revision=_revision(target),
            target_fingerprint=weights_fingerprint(target),
        )
    if target_name is not None:
        record = replace(record, target_name=target_name)
    if tokenizer is not None:
        record = replace(record, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    return record


@torch.no_grad()
def weights_fingerprint(model: PreTrainedModel) -> str | None:
    """16 hexadecimal digits that tell whose weights these are.

    They depend on the shapes of all parameters and on 32 elements of each, spread evenly and rounded to
    bfloat16: weights have one fingerprint in float32, in bfloat16 and under other names.

    Returns:
        None for weights that are not there in plain numbers of these types (offloaded, quantised, sharded,
        float16, which rounds otherwise).
    """
    parameters = [parameter for parameter in unwrapped(model).parameters() if parameter.numel()]
    readable = (torch.float32, torch.bfloat16)
    if not parameters or not all(
        type(each) in (Tensor, nn.Parameter) and each.dtype in readable and not each.is_meta
        for each in parameters
    ):
        return None
    shares = []
    for parameter in parameters:
        step = max(1, parameter.numel() // _SAMPLES)
        shares.append(parameter.detach().reshape(-1)[::step][:_SAMPLES].bfloat16().cpu())
    rows = [(list(p.shape), s.tolist()) for p, s in zip(parameters, shares, strict=True)]
    return hashlib.sha256("".join(sorted(map(str, rows))).encode()).hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of every token and its id: equal for tokenizers that give the same ids the same meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return "sha256:" + hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _size_problems(head: DraftHead, model: PreTrainedModel) -> Iterator[str]:
    config, target = head.config, _text_config(model)
    hidden, vocab = target.hidden_size, vocab_size(model)
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
    vocab = vocab_size(model)
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
    head: DraftHead | MedusaHeads,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Iterator[str]:
    if (difference := _difference(head.record, model)) is not None:
        yield (
            f"{head.source} was made for {difference}; a fine-tuned or other model accepts fewer of its "
            "drafts"
        )
    vocab = _text_config(model).vocab_size
    if head.config.vocab_size != vocab:
        yield (
            f"{head.source} was made for a vocabulary of {head.config.vocab_size} tokens, the target has "
            f"{vocab}"
        )
    for name in head.record.ambiguous:
        yield (
            f"{head.source}: {name} is read as {getattr(head.config, name)}, which its config leaves open "
            f"({_OTHER_READINGS[name]}); specdec inspect with --target and --calibrate finds out, and "
            f"load_draft(..., {name}=...) says so"
        )
    fingerprint = head.record.tokenizer_fingerprint
    if fingerprint and tokenizer is not None and tokenizer_fingerprint(tokenizer) != fingerprint:
        yield f"{head.source} was made for another tokenizer; ids that mean other tokens are drafted"


def _difference(record: HeadRecord, model: PreTrainedModel) -> str | None:
    """What a head was made for and what the target is, where these are known not to be the same.

    Weights tell more than names: a copy under another name is the same target.
    """
    name, recorded = _name(model), record.target_name
    found = weights_fingerprint(model) if record.target_fingerprint else None
    if found is not None and found == record.target_fingerprint:
        return None
    if recorded and name and _base_name(recorded) != _base_name(name):
        return f"{recorded}, the target is {name}"
    of_target = recorded or name or "its target"
    if found is not None:
        recorded = record.target_fingerprint
        return f"other weights of {of_target} (fingerprint {recorded}, the target's is {found})"
    revision = _revision(model)
    if record.target_revision and revision and record.target_revision != revision:
        return (
            f"revision {record.target_revision} of {of_target}, the target is revision {revision}"
        )
    return None


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _name(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "_name_or_path", "") or "")


def _revision(model: PreTrainedModel) -> str | None:
    """The commit that the hub gave the model by."""
    return getattr(model.config, "_commit_hash", None)


def _base_name(name: str) -> str:
    """The model's name without its owner; also that of a folder, and in the hub's cache, of a snapshot."""
    cached = re.search(r"models--(?:[^/\\]*--)?([^/\\]+)", name)
    base = cached.group(1) if cached else re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return base.lower()
