"""``calibrate``: find out how an ambiguous config of a draft head is meant, by drafting along a text.

Ids of auxiliary hidden states have two conventions that differ by one
(:mod:`specdec_ext.heads.checkpoints.config.feature_layers`). ``norm_output`` has had two meanings: the normed
output is fed back, or, in SpecForge before September 2026, it is not. The files do not say which one applies.
A *reading* is one choice of both. Along a short text, a wrong reading drafts much worse than the right one.

A drafter calibrates an ambiguous head by itself when it is first used (:func:`calibrated`).
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import Work, tracked
from specdec_ext.drafters.heads.bound_head import BoundHead
from specdec_ext.heads.checkpoints.pair import check_pair
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.rope import rope_tables
from specdec_ext.models.compat import cache_argument, cache_of
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.tree.config import TreeConfig

_log = logging.getLogger(__name__)

_PAIR = TreeConfig(depth=2)
# If no reading predicts this share of first tokens, the head was made for another target.
_LEAST_AGREEMENT = 0.02
_OWN_TEXT_TOKENS = 160


@dataclass(frozen=True)
class Trial(Summarised):
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

    @property
    def _reading(self) -> str:
        """The arguments of ``load_draft`` for this reading."""
        return f"feature_layers={self.feature_layers}, norm_output={self.norm_output}"

    def summary(self) -> str:
        return (
            f"{self._reading}: {self.first:.1%} of first and {self.second:.1%} of second tokens agree with "
            f"the target, {self.score:.2f} of 2 draft tokens would be accepted, over {self.drafts} drafts"
        )


@dataclass(frozen=True, repr=False)
class Calibration(Summarised):
    """The result of :func:`calibrate`.

    Attributes:
        head: the head with the reading of the best trial; among equal trials, the reading it was passed with.
            Its record lists no ambiguous fields any more.
        trials: all readings that were tried.
        changed: whether ``head`` is read in another way than it was passed.
    """

    head: DraftHead
    trials: tuple[Trial, ...]
    changed: bool

    @property
    def _best(self) -> Trial:
        """The trial with the highest score, the first among equal ones."""
        return max(self.trials, key=lambda trial: trial.score)

    @property
    def agrees(self) -> bool:
        """Whether any reading agrees with the target."""
        return max(trial.first for trial in self.trials) >= _LEAST_AGREEMENT

    @property
    def reading(self) -> str:
        """The arguments of ``load_draft`` for the reading of the best trial."""
        return self._best._reading

    @property
    def _advice(self) -> str:
        """What to do."""
        if not self.agrees:
            return "no reading agrees with the target, so the head was made for another target"
        return (
            f"pass {self.reading} to load_draft"
            if self.changed
            else "the checkpoint is read correctly"
        )

    def summary(self) -> str:
        best = self._best
        return (
            f"{self._advice}: {best.first:.1%} of first and {best.second:.1%} of second draft tokens agree "
            "with the target"
        )

    def sentences(self) -> Iterable[str]:
        yield (
            f"{len(self.trials)} readings of the checkpoint drafted two tokens at {self._best.drafts} places "
            "of the text. The right one agrees with the target far more often than the others."
        )
        yield f"The result: {self._advice}."

    def tables(self) -> Iterable[Table]:
        trials = sorted(self.trials, key=lambda trial: -trial.score)
        rows = [
            (
                ", ".join(map(str, trial.feature_layers)),
                str(trial.norm_output),
                f"{trial.first:.1%}",
                f"{trial.second:.1%}",
                f"{trial.score:.2f}",
            )
            for trial in trials
        ]
        headings = "hidden states", "norm_output", "first token", "second token", "accepted of 2"
        title = f"agreement with the target on {self._best.drafts} drafts"
        yield Table(rows, headings, title, marked=[0])


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
    recorder = HiddenStateRecorder(model, config, layers)
    with recorder.recording() as states:
        predicted = model(input_ids=text[None], use_cache=False).logits[0].argmax(dim=-1)
    features = {layer: state[0] for layer, state in zip(layers, states, strict=True)}
    count = min(num_drafts, len(text) - 2)
    with tracked("calibrating", len(readings) * count, "draft") as work:
        trials = [_trial(each, model, text, features, predicted, count, work) for each in readings]
    for trial in trials:
        _log.info("%s", trial)
    chosen = readings[max(range(len(trials)), key=lambda index: trials[index].score)]
    own = head.config.resolved_feature_layers(config.num_hidden_layers)
    record = replace(head.record, ambiguous=())
    if chosen.config == replace(head.config, feature_layers=own):
        certain = replace(head, record=record) if head.record.ambiguous else head
        return Calibration(certain, tuple(trials), changed=False)
    record = replace(record, layers_from=f"calibration on a text of {len(text)} tokens")
    return Calibration(replace(chosen, record=record), tuple(trials), changed=True)


def calibrated(head: DraftHead, model: PreTrainedModel) -> DraftHead:
    """Return an ambiguous head with the reading that drafts best along a text of its target.

    A warning names the reading. If none agrees with the target, the head is returned as it is.

    Args:
        head: a head whose record lists ambiguous fields.
        model: its target, with weights.

    Raises:
        ValueError: for a pair that can't work in any reading.
    """
    names = " and ".join(head.record.ambiguous)
    _log.info("%s: calibrating %s, along a text of the target", head.source, names)
    found = calibrate(head, model, own_text(model))
    if not found.agrees:
        return head
    warnings.warn(
        f"{head.source}: its config is ambiguous about {names}. Along {_OWN_TEXT_TOKENS} tokens that the "
        f"target wrote, this reading drafts best and is used: {found.reading}. Pass it to load_draft to save "
        "this calibration",
        stacklevel=3,
    )
    return found.head


@inference_mode()
def own_text(model: PreTrainedModel, num_tokens: int = _OWN_TEXT_TOKENS, seed: int = 0) -> Tensor:
    """Let a target write a text from its beginning, at temperature 1; returns ``[1, num_tokens]``.

    The text begins with the token that begins or ends texts, and goes on behind ends of texts.
    """
    config: Any = model.config.get_text_config(decoder=True)
    tokens = (config.bos_token_id, config.eos_token_id, config.pad_token_id, 0)
    first = next(each for each in tokens if each is not None)
    text = torch.tensor([[first[0] if isinstance(first, list) else first]], device=model.device)
    generator = torch.Generator(model.device).manual_seed(seed)
    name: Any = cache_argument(inspect.signature(model.forward).parameters)
    past, step = None, text
    for _ in range(num_tokens - 1):
        output = model(input_ids=step, **{name: past}, use_cache=True)
        past, logits = cache_of(output), output.logits[:, -1].float()
        step = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        text = torch.cat([text, step], dim=1)
    return text


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
    count: int,
    work: Work,
) -> Trial:
    """Draft two tokens at ``count`` places along the text, each from the text before it.

    Args:
        text: ``[length]`` token ids.
        features: auxiliary hidden states ``[length, target_hidden]`` by layer.
        predicted: ``[length]`` the target's most probable token after each token.
    """
    layers = head.config.feature_layers
    assert layers is not None
    # Element t reads token t + 1; at least two tokens of the text must follow for the comparison.
    last = len(text) - 2
    ends = [1 + index * (last - 1) // max(count - 1, 1) for index in range(count)]
    drafted = _drafts(
        head, model, text, torch.cat([features[i] for i in layers], dim=-1), ends, work
    )
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
    head: DraftHead,
    model: PreTrainedModel,
    text: Tensor,
    features: Tensor,
    ends: list[int],
    work: Work,
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
        work.advance()
    return torch.stack(drafted)
