"""``calibrate``: find out how an ambiguous config of a draft head is meant, by drafting along a text.

Ids of auxiliary hidden states have two conventions that differ by one
(:mod:`specdec_ext.heads.checkpoints.feature_layers`). ``norm_output`` has had two meanings: the normed output
is fed back, or, in SpecForge before September 2026, it is not. The files do not say which one applies. A
*reading* is one choice of both. Along a short text, a wrong reading drafts much worse than the right one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.drafters.bound_head import BoundHead
from specdec_ext.heads.checkpoints.pair import check_pair
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.rope import rope_tables
from specdec_ext.models.passes.features import FeatureTap
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.tree.config import TreeConfig

_PAIR = TreeConfig(depth=2)


@dataclass(frozen=True)
class Trial:
    """The quality of the drafts of one reading of a head along a text.

    Attributes:
        feature_layers, norm_output: the reading.
        drafts: number of drafts, each of two tokens.
        first: share of first tokens that equal the target's most probable token.
        second: the same share of second tokens, counted only where the first token equals the text's; 0 if
            there are none.
    """

    feature_layers: tuple[int, ...]
    norm_output: bool
    drafts: int
    first: float
    second: float

    @property
    def score(self) -> float:
        """Expected number of accepted tokens per draft of two."""
        return self.first * (1 + self.second)


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate`.

    Attributes:
        head: the head with the reading of the best trial; among equal trials, the reading it was passed with.
            Its record lists no ambiguous fields any more.
        trials: all readings that were tried.
    """

    head: DraftHead
    trials: tuple[Trial, ...]


@inference_mode()
def calibrate(
    head: DraftHead, model: PreTrainedModel, input_ids: Tensor, num_drafts: int = 128
) -> Calibration:
    """Try all readings of a head along a text and choose the best one.

    The readings are its feature layers as given, plus one and minus one, each with ``norm_output`` as given
    and False. The cost is one pass of the target over the text, and for each trial one pass of the head and
    ``num_drafts`` drafts of two tokens. A text that the target would write itself is the most reliable; 512
    tokens are enough.

    Args:
        head: the head to calibrate.
        model: its target, with weights.
        input_ids: ``[1, length]`` or ``[length]``, at least 8 tokens.
        num_drafts: number of places along the text at which to draft, evenly spread.

    Raises:
        ValueError: for a text that is too short, or a pair that can't work in any reading.
    """
    text = input_ids.reshape(-1).to(model.device)
    if len(text) < 8 or num_drafts < 1 or len(text) != input_ids.shape[-1]:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)} and num_drafts is {num_drafts}; expected one text "
            "of at least 8 tokens and at least 1 draft"
        )
    config: Any = model.config.get_text_config(decoder=True)
    readings = list(_readings(head, config.num_hidden_layers))
    check_pair(readings[0] if readings else head, model)
    layers = sorted({layer for each in readings for layer in each.config.feature_layers or ()})
    tap = FeatureTap(model, config, layers)
    with tap.recording() as states:
        predicted = model(input_ids=text[None], use_cache=False).logits[0].argmax(dim=-1)
    features = {layer: state[0] for layer, state in zip(layers, states, strict=True)}
    trials = [_trial(each, model, text, features, predicted, num_drafts) for each in readings]
    chosen = readings[max(range(len(trials)), key=lambda index: trials[index].score)]
    own = head.config.resolved_feature_layers(config.num_hidden_layers)
    record = replace(head.record, ambiguous=())
    if chosen.config == replace(head.config, feature_layers=own):
        certain = replace(head, record=record) if head.record.ambiguous else head
        return Calibration(certain, tuple(trials))
    record = replace(record, layers_from=f"calibration on a text of {len(text)} tokens")
    return Calibration(replace(chosen, record=record), tuple(trials))


def _readings(head: DraftHead, num_layers: int) -> Iterator[DraftHead]:
    """Yield the head with each reading whose layers exist in the target; its own reading comes first."""
    own = head.config.resolved_feature_layers(num_layers)
    shifts = (0,) if -1 in own else (0, 1, -1)
    for shift in shifts:
        layers = tuple(layer + shift for layer in own)
        if -1 not in own and not (min(layers) >= 0 and max(layers) <= num_layers):
            continue
        for norm_output in dict.fromkeys((head.config.norm_output, False)):
            config = replace(head.config, feature_layers=layers, norm_output=norm_output)
            yield replace(head, config=config)


def _trial(
    head: DraftHead,
    model: PreTrainedModel,
    text: Tensor,
    features: dict[int, Tensor],
    predicted: Tensor,
    num_drafts: int,
) -> Trial:
    """Draft two tokens at places along the text, each from the text before it.

    Args:
        text: ``[length]`` token ids.
        features: auxiliary hidden states ``[length, target_hidden]`` by layer.
        predicted: ``[length]`` the target's most probable token after each token.
    """
    layers = head.config.feature_layers
    assert layers is not None
    # Element t reads token t + 1; at least two tokens of the text must follow for the comparison.
    last, count = len(text) - 2, min(num_drafts, len(text) - 2)
    ends = [1 + index * (last - 1) // max(count - 1, 1) for index in range(count)]
    drafted = _drafts(head, model, text, torch.cat([features[i] for i in layers], dim=-1), ends)
    at = torch.tensor(ends, device=text.device)
    first = drafted[:, 0] == predicted[at]
    known = drafted[:, 0] == text[at + 1]
    second = (drafted[:, 1] == predicted[at + 1])[known]
    return Trial(
        layers,
        head.config.norm_output,
        len(ends),
        float(first.float().mean()),
        float(second.float().mean()) if len(second) else 0.0,
    )


def _drafts(
    head: DraftHead, model: PreTrainedModel, text: Tensor, features: Tensor, ends: list[int]
) -> Tensor:
    """Draft two tokens after the first ``end + 1`` tokens of the text, for each end: ``[drafts, 2]``."""
    bound, config = BoundHead.bind(head, model), head.config
    dtype, device = bound.dtype, bound.device
    cosines, sines = (table.to(device) for table in rope_tables(config, len(text) + 2))
    shape = config.num_layers, 1, config.num_kv_heads, len(text) + 2, config.head_dim
    keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    drafted, start = [], 0
    for end in ends:
        counts, starts = (torch.tensor([n], device=text.device) for n in (end - start, start))
        tokens, _, _ = bound.draft(
            _PAIR,
            cosines,
            sines,
            keys,
            values,
            text[None, start + 1 : end + 1],
            features[None, start:end].to(dtype),
            counts,
            starts,
            starts,
            text[end : end + 1],
        )
        drafted.append(tokens[0, 1:])
        start = end
    return torch.stack(drafted)
