"""Measure suffix decoding with a full history: time per drafted token and memory per stored token.

    python profiling/bench_suffix.py                      # a million tokens
    python profiling/bench_suffix.py --tokens 100000 --vocabulary 4096

The text is synthetic: half of each output consists of spans of 20 tokens on average that are copied from
earlier outputs; the rest is a Markov chain in which each token has four possible successors, the first being
the most likely. Requests are such outputs as well and grow by two tokens between two drafts, as in decoding.
One row, one thread.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from specdec_ext._host import SuffixHistory, SuffixIndex, propose_suffix

from specdec_ext.evaluate.machine import machine_line
from specdec_ext.reference.suffix import Rule

OUTPUT_TOKENS = 500
REQUEST_TOKENS = 400


@dataclass
class MadeText:
    """Generates outputs over ``vocabulary`` tokens that repeat parts of earlier outputs."""

    vocabulary: int
    seed: int = 0
    earlier: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.followers = self.random.integers(0, self.vocabulary, (self.vocabulary, 4))

    def output(self, length: int) -> np.ndarray:
        spans: list[np.ndarray] = []
        while sum(map(len, spans)) < length:
            span = int(self.random.geometric(1 / 20))
            copied = self.earlier and self.random.random() < 0.5
            spans.append(self._copied(span) if copied else self._new(span))
        output = np.concatenate(spans)[:length]
        self.earlier.append(output)
        return output

    def _copied(self, length: int) -> np.ndarray:
        source = self.earlier[int(self.random.integers(len(self.earlier)))]
        start = int(self.random.integers(len(source)))
        return source[start : start + length]

    def _new(self, length: int) -> np.ndarray:
        token, tokens = int(self.random.integers(self.vocabulary)), []
        for choice in np.minimum(self.random.geometric(0.5, length) - 1, 3).tolist():
            token = int(self.followers[token, choice])
            tokens.append(token)
        return np.array(tokens, dtype=np.int64)


def fill(text: MadeText, tokens: int) -> tuple[SuffixHistory, float, float]:
    """Fill a history; returns it with the seconds per token and those of the slowest output."""
    history = SuffixHistory(tokens)
    seconds, slowest = 0.0, 0.0
    # 10 % more than fit, so that the history also has to drop old outputs.
    num_outputs = tokens * 11 // 10 // OUTPUT_TOKENS
    for _ in range(num_outputs):
        output = text.output(OUTPUT_TOKENS)
        began = time.perf_counter()
        history.add(output, [len(output)])
        took = time.perf_counter() - began
        seconds, slowest = seconds + took, max(slowest, took)
    return history, seconds / (num_outputs * OUTPUT_TOKENS), slowest


def draft(
    outputs: list[np.ndarray], history: SuffixHistory, rule: Rule
) -> tuple[list[float], int, int]:
    """Seconds of every draft, number of drafted tokens, and number of accepted ones."""
    seconds, drafted, accepted = [], 0, 0
    for output in outputs:
        request = SuffixIndex()
        for known in range(2, REQUEST_TOKENS - rule.num_draft_tokens, 2):
            began = time.perf_counter()
            request.append(output[known - 2 : known])
            tokens, parents, _, _ = propose_suffix([request], history, **asdict(rule))
            seconds.append(time.perf_counter() - began)
            drafted += tokens.shape[1] - 1
            node = 0
            for token in output[known:].tolist():
                below = (parents[0] == node) & (tokens[0] == token)
                if not below.any():
                    break
                node = int(below.argmax())
                accepted += 1
    return seconds, drafted, accepted


def main(
    tokens: Annotated[int, typer.Option(help="size of the history in tokens")] = 1_000_000,
    vocabulary: int = 32_000,
) -> None:
    text = MadeText(vocabulary)
    history, seconds_per_token, slowest = fill(text, tokens)
    console = Console(width=110)
    console.print(machine_line(torch.device("cpu")), style="dim")
    console.print(
        f"history of {history.num_tokens} tokens in {len(history)} outputs: "
        f"{history.nbytes / history.num_tokens:.1f} bytes per token; adding took "
        f"{seconds_per_token * 1e6:.2f} us per token, the slowest output {slowest * 1e3:.0f} ms"
    )
    outputs = [text.output(REQUEST_TOKENS) for _ in range(10)]
    table = Table(
        "draft", "us per draft", "slowest 1 %", "us per drafted token", "drafted", "accepted"
    )
    for tree in (False, True):
        rule = Rule(num_draft_tokens=16, max_match=24, tree=tree)
        seconds, drafted, accepted = draft(outputs, history, rule)
        table.add_row(
            "tree" if tree else "path",
            f"{np.median(seconds) * 1e6:.1f}",
            f"{np.quantile(seconds, 0.99) * 1e6:.1f}",
            f"{sum(seconds) / max(drafted, 1) * 1e6:.1f}",
            f"{drafted / len(seconds):.2f} a draft",
            f"{accepted / max(drafted, 1):.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
