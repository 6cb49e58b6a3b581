"""Proposers for vLLM: its engine verifies, and the n-gram and suffix drafters of this package propose.

``vllm serve MODEL --speculative-config '{"method": "custom_class", "model":
"specdec_ext.hosts.vllm.SuffixProposer", "num_speculative_tokens": 8}'``

vLLM makes an object of the class that ``model`` names and calls ``propose`` after each step (vLLM 0.33,
``vllm/v1/spec_decode/custom_class_proposer.py`` and ``gpu_model_runner.py``: ``propose(sampled_token_ids,
num_tokens_no_spec, token_ids_cpu, slot_mappings=...)``). Neither class imports vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from specdec_ext._host import NgramIndex, SuffixIndex, propose_suffix
from specdec_ext.drafters.lookup.suffix import SuffixDrafter

Index = TypeVar("Index")
Ids = NDArray[Any]  # of integers


@dataclass
class _Text(Generic[Index]):
    """A text that vLLM decodes.

    Attributes:
        index: the index of its tokens.
        tokens: the tokens that the index has, ``[n]``.
        prompt_tokens: number of them that no step has sampled.
    """

    index: Index
    tokens: Ids
    prompt_tokens: int


class _Proposer(Generic[Index]):
    """Base class: follows the texts in the rows of vLLM's batch.

    vLLM does not say which request a row holds, and moves requests to other rows, so a text is recognised by
    its tokens.

    Args:
        vllm_config: ``speculative_config.num_speculative_tokens`` and ``model_config.max_model_len`` are
            read.
    """

    def __init__(self, vllm_config: Any):
        self.num_draft_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest: int = vllm_config.model_config.max_model_len
        self._texts: list[_Text[Index]] = []

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The drafts of each row, at most ``num_speculative_tokens`` tokens.

        Args:
            sampled_token_ids: what the last step has emitted to each row; [] for a row whose prompt is not
                read to its end, for which nothing is proposed.
            num_tokens_no_spec: ``[>= rows]``, number of tokens of each text, the emitted ones included.
            token_ids_cpu: ``[>= rows, >= tokens]``, the texts.
            slot_mappings: not read.
        """
        given = [
            token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))
        ]
        texts = self._followed(given, sampled_token_ids)
        wanted = [
            row
            for row, sampled in enumerate(sampled_token_ids)
            if len(sampled) and len(given[row]) < self._longest
        ]
        drafts: list[list[int]] = [[] for _ in texts]
        if wanted:
            tokens, parents = self._draft([texts[row].index for row in wanted])
            for place, row in enumerate(wanted):
                room = self._longest - len(given[row])
                count = min(int((parents[place] >= 0).sum()), room)
                drafts[row] = tokens[place, 1 : 1 + count].tolist()
        return drafts

    def _followed(
        self, given: Sequence[Ids], sampled: Sequence[Sequence[int]]
    ) -> list[_Text[Index]]:
        """The texts of the rows, brought up to date; those that are gone have ended."""
        known = dict(enumerate(self._texts))
        found = {row: known.pop(row) for row in [*known] if _goes_on(known[row], given, row)}
        for row in range(len(given)):
            if row not in found:
                moved = next((place for place in known if _goes_on(known[place], given, row)), None)
                found[row] = (
                    self._new(given[row], sampled[row]) if moved is None else known.pop(moved)
                )
        for text in known.values():
            self._ended(text)
        self._texts = [found[row] for row in range(len(given))]
        for text, tokens in zip(self._texts, given, strict=True):
            self._append(text.index, tokens[len(text.tokens) :].astype(np.int64))
            text.tokens = tokens.copy()  # vLLM reuses its buffer
        return self._texts

    def _new(self, tokens: Ids, sampled: Sequence[int]) -> _Text[Index]:
        return _Text(self._index(), tokens[:0], len(tokens) - len(sampled))

    def _index(self) -> Index:
        raise NotImplementedError

    def _append(self, index: Index, tokens: Ids) -> None:
        raise NotImplementedError

    def _draft(self, indexes: list[Index]) -> tuple[Ids, Ids]:
        """(tokens, parents), ``[len(indexes), nodes]``, of chains."""
        raise NotImplementedError

    def _ended(self, text: _Text[Index]) -> None:
        """A text has left the batch."""


def _goes_on(text: _Text[Any], given: Sequence[Ids], row: int) -> bool:
    """Whether a row now holds a continuation of a text."""
    return row < len(given) and np.array_equal(text.tokens, given[row][: len(text.tokens)])


class NgramProposer(_Proposer[NgramIndex]):
    """Proposes what :class:`specdec_ext.NgramDrafter` proposes, as chains.

    Args:
        vllm_config: as vLLM passes it.
        min_ngram, max_ngram: as for the drafter. vLLM passes none, and sets ``prompt_lookup_min`` and
            ``prompt_lookup_max`` to 0 for ``custom_class``: for other lengths, derive a class.
    """

    def __init__(self, vllm_config: Any, min_ngram: int = 2, max_ngram: int = 6):
        super().__init__(vllm_config)
        self._lengths = min_ngram, max_ngram
        self._index()  # checks them

    def _index(self) -> NgramIndex:
        return NgramIndex(*self._lengths)

    def _append(self, index: NgramIndex, tokens: Ids) -> None:
        index.extend(tokens)

    def _draft(self, indexes: list[NgramIndex]) -> tuple[Ids, Ids]:
        return NgramIndex.propose_batch(indexes, self.num_draft_tokens, 1)


class SuffixProposer(_Proposer[SuffixIndex]):
    """Proposes what :class:`specdec_ext.SuffixDrafter` proposes, as chains, also from earlier outputs.

    A text that leaves the batch is added to the history; one that vLLM has preempted, too.

    Args:
        vllm_config: as vLLM passes it. ``suffix_decoding_max_spec_factor`` and
            ``suffix_decoding_min_token_prob`` are the ``factor`` and ``min_probability`` of the drafter.
        **rule: other arguments of the drafter, but ``tree``. vLLM passes none: derive a class that does.
    """

    def __init__(self, vllm_config: Any, **rule: Any):
        super().__init__(vllm_config)
        config = vllm_config.speculative_config
        rule = {
            "factor": config.suffix_decoding_max_spec_factor,
            "min_probability": config.suffix_decoding_min_token_prob,
            **rule,
        }
        self._drafter = SuffixDrafter(num_draft_tokens=self.num_draft_tokens, tree=False, **rule)

    def _index(self) -> SuffixIndex:
        return SuffixIndex()

    def _append(self, index: SuffixIndex, tokens: Ids) -> None:
        index.append(tokens)

    def _draft(self, indexes: list[SuffixIndex]) -> tuple[Ids, Ids]:
        drafter = self._drafter
        tokens, parents, _, _ = propose_suffix(indexes, drafter.history._outputs, **drafter._rule)
        return tokens, parents

    def _ended(self, text: _Text[SuffixIndex]) -> None:
        self._drafter.history.add(text.tokens[text.prompt_tokens :].tolist())
