"""Texts of a given form: JSON, by a grammar that excludes every token which can't continue it.

The grammars are those of llguidance, which the extra ``structured`` installs.
"""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from specdec_ext.keyword_table import Reads
from specdec_ext.preflight.extras import require


class Grammars:
    """Makes logits processors for response formats.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of logits of the model.
        ends: the end-of-sequence ids.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: list[int]):
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._lock = threading.Lock()

    def processor(self, schema: dict[str, Any], prompt_columns: int) -> GrammarProcessor:
        """A processor for one request.

        Args:
            schema: the JSON schema of the text.
            prompt_columns: number of columns of the prompt.

        Raises:
            ImportError: llguidance is not installed.
            ValueError: the schema is not valid or not supported, or the tokenizer is not.
        """
        library: Any = require("llguidance", "response_format")
        with self._lock:  # making the tokenizer takes a second
            tokenizer = self._grammar_tokenizer
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        failed, messages = library.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        if failed:
            raise ValueError(f"the schema is not supported: {messages[0]}")
        return GrammarProcessor(library.LLMatcher(tokenizer, grammar), prompt_columns)

    @functools.cached_property
    def _grammar_tokenizer(self) -> Any:
        adapter: Any = require("llguidance.hf", "response_format")
        return adapter.from_tokenizer(
            self._tokenizer, n_vocab=self._vocab_size, eos_token=self._ends or None
        )


class GrammarProcessor(LogitsProcessor):
    """Excludes tokens that can't continue a text of one row.

    It depends on the ids alone: the state of the grammar goes back when the text does.

    Args:
        matcher: the state of the grammar before the first new token.
        prompt_columns: number of columns of the prompt.
    """

    reads = Reads.PREFIX

    def __init__(self, matcher: Any, prompt_columns: int):
        self._matcher, self._prompt_columns = matcher, prompt_columns
        self._read: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``[1, vocab]`` scores of the tokens after ``[1, columns]`` ids."""
        if not self._follow(input_ids[0, self._prompt_columns :].tolist()):
            return scores  # after a draft that can't be accepted
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=scores.shape[-1]).astype(bool)
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def _follow(self, tokens: list[int]) -> bool:
        """Bring the grammar to the end of ``tokens``; returns whether it allows them."""
        same = 0
        for mine, given in zip(self._read, tokens, strict=False):
            if mine != given:
                break
            same += 1
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
        self._read = tokens[:same]
        self._read += tokens[same : same + self._matcher.try_consume_tokens(tokens[same:])]
        return len(self._read) == len(tokens)
