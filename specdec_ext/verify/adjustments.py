"""Transformers' processors that read the text, computed by ``ops.adjust_logits`` at all nodes of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.keyword_table import Reads
from specdec_ext.keywords import reads_of
from specdec_ext.ops import Adjustment
from specdec_ext.transfer import Staged
from specdec_ext.tree.draft_tree import DraftTree

# Which adjustment a processor is, and from which number of columns on and up to which it applies.
Range = tuple[Adjustment, int, int]
_FOREVER = 2**62


def _always(kind: Adjustment) -> Callable[[Any], Range]:
    return lambda processor: (kind, 0, _FOREVER)


def _overwrites(first: int, end: int) -> Range:
    return (Adjustment.OVERWRITE, int(first), int(end))


RANGES: dict[type, Callable[[Any], Range]] = {
    hf.SequenceBiasLogitsProcessor: _always(Adjustment.ADD),
    hf.NoBadWordsLogitsProcessor: _always(Adjustment.ADD),
    hf.RepetitionPenaltyLogitsProcessor: _always(Adjustment.PENALISE),
    hf.NoRepeatNGramLogitsProcessor: _always(Adjustment.BAN),
    hf.SuppressTokensLogitsProcessor: _always(Adjustment.OVERWRITE),
    hf.MinLengthLogitsProcessor: lambda each: _overwrites(0, each.min_length),
    hf.MinNewTokensLengthLogitsProcessor: lambda each: _overwrites(
        0, each.prompt_length_to_skip + each.min_new_tokens
    ),
    hf.SuppressTokensAtBeginLogitsProcessor: lambda each: _overwrites(
        each.begin_index, each.begin_index + 1
    ),
    hf.ForcedBOSTokenLogitsProcessor: lambda each: _overwrites(1, 2),
    hf.ForcedEOSTokenLogitsProcessor: lambda each: _overwrites(
        each.max_length - 1, each.max_length
    ),
}


class AdjustLogits:
    """A sequence of processors, computed by one op at all nodes.

    Args:
        processors: at most one of them is a penalty, and at most one bans n-grams.
    """

    def __init__(self, processors: Iterable[Any]):
        self._processors = list(processors)
        self._ranges = [RANGES[type(each)](each) for each in self._processors]
        kinds = {kind for kind, *_ in self._ranges}
        # Others need to know how long the text is, and nothing else.
        self._reads_tokens = not kinds.isdisjoint((Adjustment.PENALISE, Adjustment.BAN))
        self._arguments: tuple[Tensor, ...] | None = None  # the op's last ones, of all rows
        self._rows: tuple[list[int], Staged] | None = None
        self._lengths: tuple[list[int], Staged] | None = None

    @property
    def keeps_nan(self) -> bool:
        """Whether logits that are all NaN leave NaN in the scores. Forced tokens leave nothing of them."""
        forced = (hf.ForcedBOSTokenLogitsProcessor, hf.ForcedEOSTokenLogitsProcessor)
        return not any(isinstance(each, forced) for each in self._processors)

    def stage(self, context: Context) -> None:
        """Begin a round: stage the text, its lengths and the active rows."""
        if self._reads_tokens:
            context.stage_text()
        self._staged_lengths(context)
        self._staged_rows(context)

    def _staged_lengths(self, context: Context) -> Staged:
        lengths = [context.columns(row) for row in context.rows]
        if self._lengths is None or self._lengths[0] != lengths:
            self._lengths = lengths, context.staging.stage(lengths)
        return self._lengths[1]

    def _staged_rows(self, context: Context) -> Staged | None:
        """The active rows; None if these are all, in order."""
        rows = list(context.rows)
        if rows == list(range(len(context.generated))):
            return None
        if self._rows is None or self._rows[0] != rows:
            self._rows = rows, context.staging.stage(rows)
        return self._rows[1]

    def on_tree(self, logits: Tensor, tree: DraftTree, context: Context) -> Tensor:
        """``[rows, nodes, vocab]`` float32 scores of all nodes, each with the node's text."""
        if self._arguments is None:
            self._arguments = self._prepare(len(context.generated), logits)
        skips, penalties, sizes, adjustments, tables = self._arguments
        lengths = self._staged_lengths(context)
        text = (
            context.sequences()
            if self._reads_tokens
            else skips[:, None].expand(-1, max(lengths.values))
        )
        staged_rows = self._staged_rows(context)
        if staged_rows is not None:
            rows = staged_rows.tensor
            text, skips, penalties, sizes = text[rows], skips[rows], penalties[rows], sizes[rows]
        return ops.adjust_logits(
            logits,
            tree.tokens,
            tree.parents,
            text,
            lengths.tensor,
            skips,
            penalties,
            sizes,
            adjustments,
            tables,
        )

    def _prepare(self, batch: int, logits: Tensor) -> tuple[Tensor, ...]:
        """The arguments after ``lengths``, on the device of ``logits``."""
        skips = torch.zeros(batch, dtype=torch.int64, device=logits.device)
        penalties = torch.ones(batch, device=logits.device)
        sizes = torch.zeros_like(skips)
        for each in self._processors:
            if isinstance(each, hf.RepetitionPenaltyLogitsProcessor):
                penalties.fill_(each.penalty)
                skips += _ignored(each, batch, skips.device)
            elif isinstance(each, hf.NoRepeatNGramLogitsProcessor):
                sizes.fill_(each.ngram_size)
        tables = [
            _table(each, *its, logits)
            for each, its in zip(self._processors, self._ranges, strict=True)
        ]
        adjustments = torch.tensor(self._ranges, device=logits.device)
        return skips, penalties, sizes, adjustments, torch.stack(tables)


def _ignored(processor: Any, batch: int, device: torch.device) -> Tensor:
    """Number of first columns of each row, or of all rows, that a penalty does not read."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor) and len(ignored) != batch:
        raise ValueError(
            f"prompt_ignore_length of RepetitionPenaltyLogitsProcessor has {len(ignored)} entries; "
            f"expected one per row of the batch of {batch}"
        )
    return torch.as_tensor(0 if ignored is None else ignored, device=device)


def _table(processor: Any, kind: Adjustment, first: int, end: int, logits: Tensor) -> Tensor:
    """``[vocab]``: what the processor itself makes of scores that the adjustment leaves as they are."""
    neutral = 0.0 if kind is Adjustment.ADD else torch.nan
    scores = torch.full((1, logits.shape[-1]), neutral, device=logits.device)
    if kind in (Adjustment.ADD, Adjustment.OVERWRITE) and first < end:
        scores = processor(torch.zeros(1, first, dtype=torch.int64, device=logits.device), scores)
    return scores[0]


def fuse_adjustments(processors: Iterable[Any]) -> list[Any]:
    """Replace each sequence of processors that the op computes by one :class:`AdjustLogits`.

    Sequences that do not read the text are left as they are.
    """
    fused: list[Any] = []
    run: list[Any] = []

    def end_run() -> None:
        reads_text = any(reads_of(each) is Reads.PREFIX for each in run)
        fused.extend([AdjustLogits(run)] if reads_text else run)
        run.clear()

    for processor in processors:
        if not _is_adjustment(processor):
            end_run()
            fused.append(processor)
            continue
        if _would_repeat(run, processor) or len(run) == ops.MAX_ADJUSTMENTS:
            end_run()
        run.append(processor)
    end_run()
    return fused


def _is_adjustment(processor: Any) -> bool:
    """Whether the op computes exactly what this processor does. Subclasses may do anything."""
    if type(processor) not in RANGES:
        return False
    biased = getattr(processor, "sequence_bias", None)
    return biased is None or all(len(sequence) == 1 for sequence in biased)


def _would_repeat(run: list[Any], processor: Any) -> bool:
    """Whether ``run`` has the one processor of this kind that the op has parameters for."""
    kind = RANGES[type(processor)](processor)[0]
    is_single = kind in (Adjustment.PENALISE, Adjustment.BAN)
    return is_single and any(RANGES[type(each)](each)[0] is kind for each in run)
