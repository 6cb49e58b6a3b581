"""Measure how many drafts of heads for the bundled target are accepted.

    python profiling acceptance --out profiling/results/generation/acceptance     # about 5 minutes
    python profiling acceptance --repeats 20 --seeds 8 --temperature 1            # more texts
    python profiling acceptance --temperature 0 --head bundled --head OTHER       # greedy, two heads

For each temperature and each shape (a chain of 5, a static tree of 22 nodes and a dynamic tree of as many),
drafts are made without noise, as in greedy decoding, and coupled, with the noise of the verification. Text i
of a round continues held-out prompt i with seed i, so all drafts continue the same texts. The shape is fixed.
The row "every token" drafts each token of the texts alone, from the text before it, and verifies nothing.
"""

from __future__ import annotations

import math
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
from specdec_ext.heads.config import DraftHead
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
EVERY = "every token"
SHAPES = {
    "chain of 5": CHAIN,
    "static tree of 22": STATIC,
    "dynamic tree of 22": DYNAMIC,
    EVERY: TreeConfig(depth=1),
}
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
    'that a draft brings. "Level 1" is the share of drafts whose first token is right. "New text" is the',
    'same for tokens that do not end a 4-gram which occurred before. In the rows "every token", each token',
    "of the texts is drafted alone, from the text before it. Bundled target in float32, held-out prompts;",
    "all drafts of a temperature continue the same texts. Greedy drafts (temperature 0) have no noise.",
)


class NotingDrafter(HeadDrafter):
    """Notes the tokens that it drafts for the next position, for a single row.

    Args:
        withheld: whether the drafts are noted only, so that the next token is drafted as well.

    Attributes:
        first: length of the text -> tokens that were drafted to follow it.
    """

    def __init__(self, head: DraftHead, tree: TreeConfig, temperature: float, withheld: bool):
        super().__init__(head, tree, temperature=temperature)
        self._withheld = withheld

    def start(self, *args: Any) -> None:
        super().start(*args)
        self.first: dict[int, set[int]] = {}

    def propose(self, context: Context) -> DraftTree:
        tree = super().propose(context)
        nodes = zip(tree.token_lists[0], tree.parent_lists[0], strict=True)
        if follow := {token for token, parent in nodes if parent == 0}:
            self.first[len(context.text(0))] = follow
        return DraftTree.root(context.roots) if self._withheld else tree


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts over some texts.

    Attributes:
        length: mean acceptance length; 1 if drafts were withheld.
        first: share of drafts whose first token is right.
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
    accepted, found = 0, []
    # Whether the text repeats itself -> whether each draft is right.
    right: dict[bool, list[bool]] = {True: [], False: []}
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
        accepted += sum(output.speculation_stats.accepted_per_position)
        text = output.sequences[0].tolist()
        repeats = repeating(text)
        for place, drafted in drafter.first.items():
            right[repeats[place]].append(text[place] in drafted)
        found.append(text)
    drafts = right[True] + right[False]
    return Acceptance(1 + accepted / len(drafts), _share(drafts), _share(right[False]), found)


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else math.nan


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
                    drafter = NotingDrafter(heads[place], SHAPES[shape], noise, shape == EVERY)
                    measured = acceptance(target, drafter, texts, shared)
                    expected = expected or measured.texts
                    if measured.texts != expected:
                        raise SystemExit(f"{key}: the texts differ")
                    if shape != EVERY:
                        row[name] = measured.length
                    row[f"first_{name}"], row[f"new_{name}"] = measured.first, measured.new
                if "coupled" in row:
                    row["saved"] = 1 - row["without"] / row["coupled"]
                rows.append(row)
    machine = machine_line(torch.device("cpu"))
    settings = {"texts": len(texts), "tokens": options.tokens}
    results = Results("Acceptance of drafts", machine, COLUMNS, KEY, rows, settings, NOTES)
    results.publish(options.out, options.add)
