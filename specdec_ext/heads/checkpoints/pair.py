"""Check whether a head belongs to a target: impossible pairs raise, suspicious ones give warnings.

Drafts never change the emitted text. A wrong pair is only slow, and without these checks the cause is hidden.
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

from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.heads.record import HeadRecord
from specdec_ext.pretrained import unwrapped, vocab_size

_SAMPLES = 32  # number of elements of each parameter that a fingerprint depends on
_WHY_AMBIGUOUS = {
    "feature_layers": "the ids may number outputs or inputs of layers, which differ by one",
    "norm_output": "SpecForge has used this field with two meanings",
}


def check_pair(
    head: DraftHead | MedusaHeads,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[str]:
    """Check a head against the target that it is to draft for.

    Args:
        head: the head.
        model: the target; it may be on the meta device, and then its weights are not compared.
        tokenizer: the target's tokenizer; compared if the checkpoint recorded a fingerprint.

    Returns:
        Warnings, one sentence each; empty for a good pair.

    Raises:
        ValueError: for a pair that can't work, because sizes, vocabularies or feature layers do not match.
    """
    if isinstance(head, MedusaHeads):
        problems = list(_medusa_problems(head, model))
    else:
        problems = [*_size_problems(head, model), *_layer_problems(head, model)]
    if problems:
        raise ValueError(
            f"{head.source} can't draft for {_name(model) or type(model).__name__}: {'; '.join(problems)}"
        )
    return list(_warnings(head, model, tokenizer))


def recorded_name(target: PreTrainedModel) -> str | None:
    """Return the hub id of a target, or the own name of its local folder; None if it has neither."""
    name = _name(target)
    return (Path(name).resolve().name if Path(name).is_dir() else name) or None


def completed_record(
    record: HeadRecord,
    target: PreTrainedModel | None = None,
    target_name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> HeadRecord:
    """Return ``record`` with the facts about the given target and tokenizer; other fields stay.

    Args:
        record: record of the head.
        target: the target with its weights; its name is :func:`recorded_name`.
        target_name: recorded instead of the target's own name.
        tokenizer: the target's tokenizer.
    """
    if target is not None:
        record = replace(
            record,
            target_name=recorded_name(target),
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
    """Return a fingerprint of the weights, 16 hexadecimal digits.

    It depends on the shapes of all parameters and on 32 elements of each, evenly spread and rounded to
    bfloat16. The same weights have the same fingerprint in float32, in bfloat16 and under other names.

    Returns:
        None if the weights are not present as plain float32 or bfloat16 (offloaded, quantised, sharded, or
        float16, which rounds differently).
    """
    model = unwrapped(model)
    parameters = [parameter for parameter in model.parameters() if parameter.numel()]
    readable = (torch.float32, torch.bfloat16)
    quantised = getattr(model.config, "quantization_config", None) is not None
    if (
        quantised
        or not parameters
        or not all(
            type(each) in (Tensor, nn.Parameter) and each.dtype in readable and not each.is_meta
            for each in parameters
        )
    ):
        return None
    shares = []
    for parameter in parameters:
        step = max(1, parameter.numel() // _SAMPLES)
        shares.append(parameter.detach().reshape(-1)[::step][:_SAMPLES].bfloat16().cpu())
    rows = [(list(p.shape), s.tolist()) for p, s in zip(parameters, shares, strict=True)]
    return hashlib.sha256("".join(sorted(map(str, rows))).encode()).hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all tokens and their ids; equal for tokenizers with the same vocabulary."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return "sha256:" + hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _size_problems(head: DraftHead, model: PreTrainedModel) -> Iterator[str]:
    config, target = head.config, _text_config(model)
    hidden, vocab = target.hidden_size, vocab_size(model)
    if hidden != config.target_hidden_size:
        yield (
            f"it reads hidden states of width {config.target_hidden_size}, but the target's have {hidden}"
        )
    if not config.own_embedding and hidden != config.hidden_size:
        yield (
            f"it uses the target's embedding, but its width is {config.hidden_size} and the target's "
            f"{hidden}"
        )
    if config.own_embedding and config.vocab_size < vocab:
        yield f"its embedding has {config.vocab_size} tokens, but the target has {vocab}"
    if not config.own_lm_head:
        yield from _lm_head_problems(head, model, hidden)
    elif (largest := _largest_target_id(head)) >= vocab:
        yield f"it drafts token ids up to {largest}, but the target has only {vocab} tokens"


def _medusa_problems(heads: MedusaHeads, model: PreTrainedModel) -> Iterator[str]:
    target = _text_config(model)
    if target.hidden_size != heads.config.hidden_size:
        yield (
            f"it reads hidden states of width {heads.config.hidden_size}, but the target's have "
            f"{target.hidden_size}"
        )
    vocab = vocab_size(model)
    if (largest := _largest_target_id(heads)) >= vocab:
        yield f"it drafts token ids up to {largest}, but the target has only {vocab} tokens"


def _lm_head_problems(head: DraftHead, model: PreTrainedModel, hidden: int) -> Iterator[str]:
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        yield "it uses the target's lm_head, but the target has none"
        return
    rows = _rows(lm_head, head.config.draft_vocab_size)
    if rows != head.config.draft_vocab_size or hidden != head.config.hidden_size:
        yield (
            f"it uses the target's lm_head, which has shape [{rows}, {hidden}]; expected "
            f"[{head.config.draft_vocab_size}, {head.config.hidden_size}]"
        )
    if head.record.tied and not getattr(_text_config(model), "tie_word_embeddings", False):
        yield "its lm_head is the target's embedding, but the target does not tie its own lm_head to that"


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
            f"it reads the inputs of layers {list(layers)} ({head.record.layers_from}), but the target has "
            f"only layers 0 to {count - 1}; pass feature_layers=... to load_draft"
        )
    elif head.config.feature_layers is None and list(layers) != sorted(set(layers)):
        yield (
            f"its default layers 2, n // 2 and n - 3 are {list(layers)} for a target of {count} layers, "
            "which is not ascending; pass feature_layers=... to load_draft"
        )


def _warnings(
    head: DraftHead | MedusaHeads,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Iterator[str]:
    if (difference := _difference(head.record, model)) is not None:
        yield (
            f"{head.source} was trained for {difference}; a fine-tuned or different model accepts fewer of "
            "its drafts"
        )
    vocab = _text_config(model).vocab_size
    if head.config.vocab_size != vocab:
        yield (
            f"{head.source} was trained for a vocabulary of {head.config.vocab_size} tokens, but the target "
            f"has {vocab}"
        )
    for name in head.record.ambiguous:
        yield (
            f"{head.source}: {name} is read as {getattr(head.config, name)}, but its config is ambiguous "
            f"({_WHY_AMBIGUOUS[name]}). Find the correct value with specdec inspect --target ... "
            f"--calibrate, and pass it as load_draft(..., {name}=...)"
        )
    fingerprint = head.record.tokenizer_fingerprint
    if fingerprint and tokenizer is not None and tokenizer_fingerprint(tokenizer) != fingerprint:
        yield (
            f"{head.source} was trained with another tokenizer, so its ids mean other tokens and few of its "
            "drafts are accepted"
        )


def _difference(record: HeadRecord, model: PreTrainedModel) -> str | None:
    """Describe how the head's recorded target differs from ``model``; None if no difference is known.

    Equal weights count more than names: a copy under another name is the same target.
    """
    name, recorded = _name(model), record.target_name
    found = weights_fingerprint(model) if record.target_fingerprint else None
    if found is not None and found == record.target_fingerprint:
        return None
    if recorded and name and _base_name(recorded) != _base_name(name):
        return f"{recorded}, but the target is {name}"
    of_target = recorded or name or "its target"
    if found is not None:
        recorded = record.target_fingerprint
        return f"other weights of {of_target} (fingerprint {recorded}, but the target's is {found})"
    revision = _revision(model)
    if record.target_revision and revision and record.target_revision != revision:
        return f"revision {record.target_revision} of {of_target}, but the target is revision {revision}"
    return None


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _name(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "_name_or_path", "") or "")


def _revision(model: PreTrainedModel) -> str | None:
    """Return the commit of the model's repository on the hub."""
    return getattr(model.config, "_commit_hash", None)


def _base_name(name: str) -> str:
    """Return a model's name without its owner, from a hub id, a folder or a snapshot in the hub's cache."""
    cached = re.search(r"models--(?:[^/\\]*--)?([^/\\]+)", name)
    base = cached.group(1) if cached else re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return base.lower()
