"""Measure how many drafts of heads for the bundled target are accepted.

    python profiling acceptance --out profiling/results/generation/acceptance     # about 5 minutes
    python profiling acceptance --repeats 20 --seeds 8 --temperature 1            # more texts
    python profiling acceptance --temperature 0 --head bundled --head OTHER       # greedy, two heads

For each temperature and each shape (a chain of 5, a static tree of 22 nodes and a dynamic tree of as many),
drafts are made without noise, as in greedy decoding, and coupled, with the noise of the verification. Text i
of a round continues held-out prompt i with seed i, so all drafts continue the same texts. The shape is fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from bench.runner import Results, Row, parse, table_parser
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext import HeadDrafter, TreeConfig, assets
from specdec_ext.context import Context
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import Prompt
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.heads.checkpoints import load_draft
from specdec_ext.tree.draft_tree import DraftTree

CHAIN = TreeConfig(depth=5)
STATIC = TreeConfig(
    choices=[
        *((i,) for i in range(4)),
        *((0, j) for j in range(3)),
        *((i, j) for i in (1, 2) for j in range(2)),
        *((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 2), (2, 0, 0)),
        *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (1, 0, 0, 0)),
        (0, 0, 0, 0, 0),
    ]
)
DYNAMIC = TreeConfig(depth=5, top_k=4, num_nodes=1 + len(STATIC.choices or ()))
SHAPES = {"chain of 5": CHAIN, "static tree of 22": STATIC, "dynamic tree of 22": DYNAMIC}
FILTERS: dict[str, Row] = {
    "none": dict(top_k=0),
    "top-k 50": dict(top_k=50),
    "top-k 50, top-p 0.9": dict(top_k=50, top_p=0.9),
}
REPEATED = 4  # a token repeats the text if it ends n-grams of this size that occurred before
BUNDLED = "bundled"
KEY = ("head", "temperature", "filters", "shape")
COLUMNS = {
    "head": "{head}",
    "temperature": "{temperature}",
    "filters": "{filters}",
    "shape": "{shape}",
    "without noise": "{without:.2f}",
    "coupled": "{coupled:.2f}",
    "fewer passes": "{saved:.0%}",
    "level 1 without": "{first_without:.1%}",
    "level 1 coupled": "{first_coupled:.1%}",
    "new text without": "{new_without:.1%}",
    "new text coupled": "{new_coupled:.1%}",
}
NOTES = (
    "`python profiling acceptance`. Numbers without a percent sign are mean acceptance lengths, the tokens",
    'that a draft brings. "Level 1" is the share of drafts whose first token is accepted, and "new text"',
    "the same where the next token does not end a 4-gram that occurred before. Bundled target in float32,",
    "held-out prompts; every text of a temperature is the same with all drafts. Greedy drafts (temperature",
    "0) have no noise.",
)


class NotingDrafter(HeadDrafter):
    """Notes the tokens that it drafts for the next position.

    Attributes:
        first: length of the text -> tokens that were drafted to follow it. For a single row.
    """

    def start(self, *args: Any) -> None:
        super().start(*args)
        self.first: dict[int, set[int]] = {}

    def propose(self, context: Context) -> DraftTree:
        tree = super().propose(context)
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        follow = {token for token, parent in zip(tokens, parents, strict=True) if parent == 0}
        if follow:
            self.first[len(context.text(0))] = follow
        return tree


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts over some texts.

    Attributes:
        length: mean acceptance length.
        first: share of drafts whose first token is accepted.
        new: the same where the text does not repeat itself.
        texts: the texts, with their prompts.
    """

    length: float
    first: float
    new: float
    texts: list[list[int]]


def acceptance(
    target: PreTrainedModel,
    drafter: NotingDrafter,
    texts: Iterable[tuple[int, Prompt]],
    options: Row,
) -> Acceptance:
    """Generate texts with a draft in every step.

    Args:
        texts: seed and prompt of each text.
    """
    counts: Counter[str] = Counter()
    found = []
    for seed, prompt in texts:
        output = specdec_ext.generate(
            target,
            drafter=drafter,
            speculation="fixed",
            seed=seed,
            return_dict_in_generate=True,
            **prompt,
            **options,
        )
        stats = output.speculation_stats
        counts["drafts"] += stats.proposed_per_position[0]
        counts["first"] += stats.accepted_per_position[0]
        counts["accepted"] += sum(stats.accepted_per_position)
        text = output.sequences[0].tolist()
        repeats = repeating(text)
        new = {place: drafted for place, drafted in drafter.first.items() if not repeats[place]}
        counts["new"] += len(new)
        counts["new first"] += sum(text[place] in drafted for place, drafted in new.items())
        found.append(text)
    drafts = counts["drafts"]
    return Acceptance(
        1 + counts["accepted"] / drafts,
        counts["first"] / drafts,
        counts["new first"] / max(counts["new"], 1),
        found,
    )


def repeating(text: Sequence[int]) -> list[bool]:
    """For each token, whether it ends an n-gram of ``REPEATED`` tokens that occurred before."""
    seen, repeats = set(), []
    for end in range(1, len(text) + 1):
        ngram = tuple(text[max(end - REPEATED, 0) : end])
        repeats.append(ngram in seen)
        seen.add(ngram)
    return repeats


def main(arguments: list[str] | None = None) -> None:
    given = table_parser(__doc__, 20, "held-out prompts")
    given.add_argument("--seeds", type=int, default=1, help="texts per prompt (default 1)")
    given.add_argument("--tokens", type=int, default=128, help="tokens per text (default 128)")
    given.add_argument(
        "--temperature", type=float, action="append", help="0 is greedy; may be repeated"
    )
    given.add_argument("--filters", choices=[*FILTERS], action="append", help="may be repeated")
    given.add_argument(
        "--head", action="append", help=f"a head's folder, default {BUNDLED}; may be repeated"
    )
    options = parse(given, arguments)
    heads = {
        place: assets.load_head() if place == BUNDLED else load_draft(Path(place))
        for place in options.head or [BUNDLED]
    }
    target = assets.load_target(torch.float32)
    held_out = [each["prompt"] for each in assets.held_out_prompts()[: options.repeats]]
    prompts = benchmark.batches(assets.load_tokenizer(), held_out, 1)
    texts = [
        (turn * len(prompts) + i, prompt)
        for turn in range(options.seeds)
        for i, prompt in enumerate(prompts)
    ]
    rows = list[Row]()
    for temperature in options.temperature or (0.8, 1.0):
        for filters in (options.filters or FILTERS) if temperature else ("none",):
            shared: Row = dict(do_sample=False)
            if temperature:
                shared = dict(do_sample=True, temperature=temperature, **FILTERS[filters])
            shared["max_new_tokens"] = options.tokens
            noises = {"without": 0, "coupled": 1} if temperature else {"without": 0}
            expected: list[list[int]] = []
            for shape, place in product(SHAPES, heads):
                key = dict(zip(KEY, (place, temperature, filters, shape), strict=True))
                row: Row = {**key, "texts": len(texts)}
                for name, noise in noises.items():
                    drafter = NotingDrafter(heads[place], SHAPES[shape], temperature=noise)
                    measured = acceptance(target, drafter, texts, shared)
                    expected = expected or measured.texts
                    if measured.texts != expected:
                        raise SystemExit(f"{key}: the texts differ")
                    row[name] = measured.length
                    row[f"first_{name}"], row[f"new_{name}"] = measured.first, measured.new
                if "coupled" in row:
                    row["saved"] = 1 - row["without"] / row["coupled"]
                rows.append(row)
    machine = machine_line(torch.device("cpu"))
    settings = {"texts": len(texts), "tokens": options.tokens}
    results = Results("Acceptance of drafts", machine, COLUMNS, KEY, rows, settings, NOTES)
    results.publish(options.out, options.add)
