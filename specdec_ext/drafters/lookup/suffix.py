"""Suffix decoding: proposes what most often followed the last tokens, in this text and in past outputs.

Source: SuffixDecoding (Oliaro et al. 2024). ``specdec_ext.reference.suffix`` specifies the rule. An index of
sorted suffixes (``csrc/retrieval/suffix_index.h``) counts the occurrences of any string.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedModel

from specdec_ext._host import SuffixHistory as NativeHistory
from specdec_ext._host import SuffixIndex, propose_suffix
from specdec_ext.context import Context
from specdec_ext.drafters.lookup.retrieval import RetrievalDrafter
from specdec_ext.models import TargetOutput
from specdec_ext.preflight.inputs import regular_file
from specdec_ext.pretrained import vocab_size
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

FILE_FORMAT = "specdec_ext suffix history 1"


class SuffixHistory:
    """Past outputs to draft from. Drafters, calls and threads may share a history.

    Security: the output of one request is drafted for others, and the speed of a response shows whether a
    text was generated before. Share a history only between requests that may know about each other.

    Args:
        max_tokens: largest number of tokens held, where each output counts as one more token. When it is
            full, the oldest eighth is removed. A token takes 8 to 10 bytes (``nbytes``).
    """

    def __init__(self, max_tokens: int = 1_000_000):
        self._outputs = NativeHistory(max_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Append an output.

        Raises:
            ValueError: for an id outside ``[0, 2**31 - 1]``; then nothing is added.
        """
        self._outputs.add(np.array(tokens, dtype=np.int64), [len(tokens)])

    def __len__(self) -> int:
        """Number of outputs held."""
        return len(self._outputs)

    @property
    def max_tokens(self) -> int:
        return self._outputs.max_tokens

    @property
    def num_tokens(self) -> int:
        return self._outputs.num_tokens

    @property
    def largest_token(self) -> int:
        """The largest token that was ever added; -1 if there was none."""
        return self._outputs.largest_token

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated."""
        return self._outputs.nbytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all outputs to a safetensors file that only its owner can read.

        An existing file at ``path`` is replaced after everything is written.
        """
        tokens, counts = self._outputs.outputs()
        contents = save({"tokens": tokens, "counts": counts}, {"format": FILE_FORMAT})
        with NamedTemporaryFile(dir=Path(path).parent, delete=False) as file:
            try:
                file.write(contents)
                file.close()
                os.replace(file.name, path)
            finally:
                Path(file.name).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_tokens: int = 1_000_000) -> SuffixHistory:
        """Read a file that :meth:`save` wrote. If ``max_tokens`` is too small, the oldest outputs are lost.

        Raises:
            OSError: the file does not exist, or is a pipe or folder.
            ValueError: the file was not written by ``save``, or is damaged.
        """
        regular_file(path, "a file that SuffixHistory.save wrote")
        try:
            with safe_open(path, "numpy") as file:
                _check_contents(file, path)
                tokens, counts = file.get_tensor("tokens"), file.get_tensor("counts")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
        history = cls(max_tokens)
        try:
            history._outputs.add(tokens, counts.tolist())
        except ValueError as error:
            raise ValueError(f"{path} holds no token history: {error}") from error
        return history


def _check_contents(file: Any, path: str | os.PathLike[str]) -> None:
    """Check format, names, dtypes and shapes before any tensor is read; numpy lacks some of the dtypes."""
    found, names = (file.metadata() or {}).get("format"), sorted(file.keys())
    if found != FILE_FORMAT or names != ["counts", "tokens"]:
        raise ValueError(
            f"{path} has format {found!r} and tensors {names}; expected {FILE_FORMAT!r} with 'counts' and "
            "'tokens', as SuffixHistory.save writes it"
        )
    for name in names:
        part = file.get_slice(name)
        dtype, shape = part.get_dtype(), part.get_shape()
        if dtype != "I64" or len(shape) != 1:
            raise ValueError(
                f"{path} holds no token history: {name} is {dtype} {shape}; expected I64 [n]"
            )


class SuffixDrafter(RetrievalDrafter):
    """Proposes the most frequent continuations of the last tokens.

    Args:
        num_draft_tokens: largest number of proposed tokens.
        max_match: largest number of the last tokens that are looked up, at most 63.
        factor, offset: a match of m tokens proposes at most ``factor * m + offset`` tokens.
        min_probability: smallest probability of the path to a proposed token, estimated from counts; at least
            0.01.
        tree: True proposes alternatives as a tree, False a chain.
        history: outputs of earlier requests. The outputs of this drafter's calls are added when they end. By
            default, the drafter has a history of its own.

    Raises:
        ValueError: for an argument out of its range.
    """

    keeps_outputs = True
    joinable = True

    def __init__(
        self,
        num_draft_tokens: int = 16,
        max_match: int = 24,
        factor: float = 1.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        tree: bool = True,
        history: SuffixHistory | None = None,
    ):
        self._rule = dict(
            num_draft_tokens=num_draft_tokens,
            max_match=max_match,
            factor=factor,
            offset=offset,
            min_probability=min_probability,
            tree=tree,
        )
        propose_suffix([], None, **self._rule)  # checks the rule
        self.history = SuffixHistory() if history is None else history

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        if self.history.largest_token >= (limit := vocab_size(model)):
            raise ValueError(
                f"history contains token {self.history.largest_token}, but {type(model).__name__} has a "
                f"vocabulary of {limit} tokens; pass a history of this model's outputs"
            )
        self._requests = [SuffixIndex() for _ in context.generated]
        self._known = [0] * len(self._requests)
        self._unfinished: set[int] = set()
        self.join(context, context.rows, output)

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        for row in rows:
            self._requests[row] = SuffixIndex()
            text = np.array(context.source(row) + context.prompt(row), dtype=np.int64)
            self._requests[row].append(text)
            self._known[row] = 0
        self._unfinished.update(rows)

    def propose(self, context: Context) -> DraftTree:
        for row in context.rows:
            new = context.generated[row][self._known[row] :]
            self._requests[row].append(np.array(new, dtype=np.int64))
            self._known[row] += len(new)
        tokens, parents, matches, _ = propose_suffix(
            [self._requests[row] for row in context.rows], self.history._outputs, **self._rule
        )
        self._match_lengths: list[int] = matches.tolist()
        return DraftTree(torch.from_numpy(tokens), torch.from_numpy(parents))

    @property
    def longest_match(self) -> int:
        return int(self._rule["max_match"])

    @property
    def match_lengths(self) -> list[int]:
        return self._match_lengths

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """Add the outputs that ended to the history, once per row, up to the end of the row."""
        for row, ended in zip(context.rows, accepted.ended, strict=True):
            if ended and row in self._unfinished:
                self._unfinished.remove(row)
                self.history.add(context.generated[row])
