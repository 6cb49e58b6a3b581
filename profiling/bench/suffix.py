"""Measure suffix decoding with a full history: time per drafted token and memory per stored token.

    python profiling suffix                      # a million tokens
    python profiling suffix --tokens 100000 --vocabulary 4096

The text is synthetic: half of each output consists of spans of 20 tokens on average that are copied from
earlier outputs; the rest is a Markov chain in which each token has four possible successors, the first being
the most likely. Requests are such outputs as well and grow by two tokens between two drafts, as in decoding.
One row, one thread.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from specdec_ext._host import SuffixHistory, SuffixIndex, propose_suffix

from bench.runner import Results, parse, table_parser
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.reference.suffix import Rule

OUTPUT_TOKENS = 500
REQUEST_TOKENS = 400
COLUMNS = {
    "draft": "{draft}",
    "us per draft": "{median_us:.1f}",
    "slowest 1 %": "{p99_us:.1f}",
    "us per drafted token": "{us_per_token:.1f}",
    "drafted per draft": "{drafted:.2f}",
    "accepted": "{accepted:.0%}",
    "history": "{history_tokens}",
    "bytes per token": "{bytes_per_token:.1f}",
    "us to add a token": "{us_to_add_a_token:.2f}",
    "slowest output ms": "{slowest_output_ms:.0f}",
}


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


def main(arguments: list[str] | None = None) -> None:
    given = table_parser(__doc__, 10, "requests that are drafted for")
    given.add_argument("--tokens", type=int, default=1_000_000, help="size of the history")
    given.add_argument("--vocabulary", type=int, default=32_000)
    options = parse(given, arguments)
    text = MadeText(options.vocabulary)
    history, seconds_per_token, slowest = fill(text, options.tokens)
    requests = [text.output(REQUEST_TOKENS) for _ in range(options.repeats)]
    stored = {
        "vocabulary": options.vocabulary,
        "history_tokens": history.num_tokens,
        "outputs": len(history),
        "bytes_per_token": history.nbytes / history.num_tokens,
        "us_to_add_a_token": 1e6 * seconds_per_token,
        "slowest_output_ms": 1e3 * slowest,
    }
    rows = []
    for name, tree in (("path", False), ("tree", True)):
        rule = Rule(num_draft_tokens=16, max_match=24, tree=tree)
        seconds, drafted, accepted = draft(requests, history, rule)
        row = {
            "draft": name,
            "median_us": 1e6 * np.median(seconds),
            "p99_us": 1e6 * np.quantile(seconds, 0.99),
            "us_per_token": 1e6 * sum(seconds) / max(drafted, 1),
            "drafted": drafted / len(seconds),
            "accepted": accepted / max(drafted, 1),
        }
        rows.append(row | stored)
    machine = machine_line(torch.device("cpu"))
    key = ("draft", "history_tokens", "vocabulary")
    Results("Suffix drafts", machine, COLUMNS, key, rows).publish(options.out, options.add)
