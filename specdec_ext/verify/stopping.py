"""The end of a row: transformers' stopping criteria, evaluated for each token of an accepted block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from specdec_ext.context import Context
from specdec_ext.keyword_table import Reads
from specdec_ext.keywords import reads_of


class StopRule:
    """The stopping criteria of a call.

    End-of-sequence ids and the maximum length are compared as integers. Other criteria are called as plain
    decoding calls them: once per emitted position, in order, with ``[batch, columns]`` ids. Those of
    transformers that read only the text get it on the CPU, so that they do not wait for the device.

    Attributes:
        max_length: number of columns of ``sequences`` at which every row ends.
        pads: whether ended rows are padded. Transformers pads them only if there is an end-of-sequence id;
            otherwise ended rows continue.
        needs_lockstep: whether a criterion may keep state or read several rows, so that all rows of a batch
            must advance together.
    """

    def __init__(self, criteria: StoppingCriteriaList, config: GenerationConfig):
        self.max_length = config.max_length
        self._eos: set[int] = set()
        self.pads = False
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            else:
                self._others.append(criterion)
            self.pads = self.pads or hasattr(criterion, "eos_token_id")
        self.needs_lockstep = any(reads_of(other) is Reads.ORDER for other in self._others)

    @property
    def eos_ids(self) -> list[int]:
        """The end-of-sequence ids."""
        return sorted(self._eos)

    @property
    def is_known(self) -> bool:
        """Whether :meth:`end_of` covers all criteria: end-of-sequence ids and the maximum length."""
        return not self._others

    def end_of(self, tokens: Sequence[int], columns: int) -> int | None:
        """Return how many of these tokens a row emits until it ends, or None if it does not end.

        Args:
            tokens: the tokens in the order in which they would be emitted.
            columns: the row's length in columns before them.
        """
        for count, token in enumerate(tokens, start=1):
            if token in self._eos or columns + count >= self.max_length:
                return count
        return None

    def ended(
        self,
        rows: Sequence[int],
        tokens: Sequence[int],
        columns: Sequence[int],
        context: Context,
        scores: tuple[Tensor, ...] | None,
    ) -> list[bool]:
        """Return whether each row ends with the token that it just emitted.

        Args:
            rows: original row numbers.
            tokens: the token that each row emitted.
            columns: each row's length in columns, that token included.
            context: the text, these tokens included.
            scores: the processed scores so far, or None if they are not recorded.
        """
        ended = [
            self.end_of([token], length - 1) is not None
            for token, length in zip(tokens, columns, strict=True)
        ]
        if self._others:
            ids = context.sequences() if self.needs_lockstep else context.sequences_on_host()
            for length in sorted(set(columns)):
                verdict = self._others(ids[:, :length], scores).tolist()
                for i, row in enumerate(rows):
                    ended[i] = ended[i] or (columns[i] == length and verdict[row])
        return ended
