"""Measure how many drafts of the bundled head are accepted when a call samples.

    python profiling acceptance --out profiling/results/generation/acceptance     # about 5 minutes
    python profiling acceptance --repeats 20 --seeds 8 --temperature 1            # more texts

For each temperature and each shape (a chain of 5, a static tree of 22 nodes and a dynamic tree of as many),
drafts are made without noise, as in greedy decoding, and coupled, with the noise of the verification. Text i
of a round continues held-out prompt i with seed i, so all drafts continue the same texts. The shape is fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from bench.runner import Results, Row, parse, table_parser
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext import HeadDrafter, TreeConfig, assets
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import Prompt
from specdec_ext.evaluate.machine import machine_line

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
COLUMNS = {
    "temperature": "{temperature}",
    "filters": "{filters}",
    "shape": "{shape}",
    "without noise": "{without:.2f}",
    "coupled": "{coupled:.2f}",
    "fewer passes": "{saved:.0%}",
    "level 1 without": "{first_without:.1%}",
    "level 1 coupled": "{first_coupled:.1%}",
}
NOTES = (
    "`python profiling acceptance`. Numbers without a percent sign are mean acceptance lengths, the tokens",
    "that a draft brings. Bundled target and head in float32, held-out prompts; every text is the same with",
    "both drafts.",
)


def acceptance(
    target: PreTrainedModel, drafter: HeadDrafter, texts: Iterable[tuple[int, Prompt]], options: Row
) -> tuple[float, float, list[list[int]]]:
    """Mean acceptance length, acceptance of the first level, and the texts.

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
            do_sample=True,
            seed=seed,
            return_dict_in_generate=True,
            **prompt,
            **options,
        )
        stats = output.speculation_stats
        counts["drafts"] += stats.proposed_per_position[0]
        counts["first"] += stats.accepted_per_position[0]
        counts["accepted"] += sum(stats.accepted_per_position)
        found.append(output.sequences[0].tolist())
    drafts = counts["drafts"]
    return 1 + counts["accepted"] / drafts, counts["first"] / drafts, found


def main(arguments: list[str] | None = None) -> None:
    given = table_parser(__doc__, 20, "held-out prompts")
    given.add_argument("--seeds", type=int, default=1, help="texts per prompt (default 1)")
    given.add_argument("--tokens", type=int, default=128, help="tokens per text (default 128)")
    given.add_argument("--temperature", type=float, action="append", help="may be repeated")
    given.add_argument("--filters", choices=[*FILTERS], action="append", help="may be repeated")
    options = parse(given, arguments)
    target = assets.load_target(torch.float32)
    held_out = [each["prompt"] for each in assets.held_out_prompts()[: options.repeats]]
    prompts = benchmark.batches(assets.load_tokenizer(), held_out, 1)
    texts = [
        (turn * len(prompts) + i, prompt)
        for turn in range(options.seeds)
        for i, prompt in enumerate(prompts)
    ]
    head, rows = assets.load_head(), list[Row]()
    for temperature in options.temperature or (0.8, 1.0):
        for filters in options.filters or FILTERS:
            shared = dict(
                temperature=temperature, max_new_tokens=options.tokens, **FILTERS[filters]
            )
            for name, shape in SHAPES.items():
                drafters = [HeadDrafter(head, shape, temperature=noise) for noise in (0, 1)]
                (without, first_without, expected), (coupled, first_coupled, found) = (
                    acceptance(target, drafter, texts, shared) for drafter in drafters
                )
                if found != expected:
                    raise SystemExit(f"{name} at temperature {temperature}: the texts differ")
                rows.append(
                    {
                        "temperature": temperature,
                        "filters": filters,
                        "texts": len(texts),
                        "shape": name,
                        "without": without,
                        "coupled": coupled,
                        "saved": 1 - without / coupled,
                        "first_without": first_without,
                        "first_coupled": first_coupled,
                    }
                )
    machine, key = machine_line(torch.device("cpu")), ("temperature", "filters", "shape")
    settings = {"texts": len(texts), "tokens": options.tokens}
    results = Results("Acceptance of sampled drafts", machine, COLUMNS, key, rows, settings, NOTES)
    results.publish(options.out, options.add)
