"""Compare ``speculation="auto"`` with plain decoding and with the best fixed shape.

    python profiling controller                     # bundled model, 128 tokens, batch 1
    python profiling controller --max-new-tokens 512 --batch 4 --out profiling/results/generation/controller

The goal: "auto" is never slower than plain decoding, and as fast as the best fixed shape. Every row is one
interleaved run of plain decoding, "auto" and "fixed", with medians over prompts. What "auto" learns is kept
over calls, as in a server; --cold forgets it before each call. Scripted drafts are right or wrong as the
scenario says and cost almost nothing; those of the draft model have their real cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from baselines.random_targets import random_prompts

from bench.goals import COLUMNS, KEY, Goals
from bench.runner import Results, parse, table_parser
from specdec_ext import Drafter, DraftModelDrafter, NgramDrafter, assets
from specdec_ext.evaluate import benchmark, scripted
from specdec_ext.evaluate.benchmark import PLAIN, Contestant, Prompt
from specdec_ext.schedule.memory import forget

AUTO = "auto"
GOALS = {"wrong": 0.97, "random": 0.97, "right": 0.98}
RANDOM_PROMPT = 128
# Makes a contestant that drafts under "auto" or "fixed".
Maker = Callable[[str], Contestant]


class Script(scripted.Script):
    """Drafts chains or trees from a known text, right or wrong from the first token on.

    Args:
        texts: :func:`benchmark.plain_texts` of the prompts.
        vocab: size of the vocabulary, from which wrong tokens are taken.
        length: number of tokens in a path.
        branches: number of further paths, all wrong.
        right: whether the first path is right.
    """

    def __init__(self, texts: Any, vocab: int, length: int, branches: int = 0, right: bool = True):
        def paths(answer: list[int], vocab: int, turn: int) -> list[list[int]]:
            changed = [scripted.wrong(answer, vocab, by) for by in range(1, branches + 2)]
            return [answer, *changed[:-1]] if right else changed

        super().__init__([], vocab, paths, length)
        self._texts, self._kind = texts, (length, branches, right)

    @property
    def identity(self) -> Any:
        return super().identity, self._kind

    def start(self, context: Any, model: Any, output: Any) -> None:
        self._answers = self._texts[benchmark.key_of(context.input_ids)]


def scenarios(
    target: Any, batch: int, count: int, tokens: int
) -> Iterator[tuple[str, str, dict[str, Maker], list[Prompt], dict[str, Any]]]:
    """Yield (kind, name, makers by label, prompts, keywords of generate) of each scenario.

    All makers run with "fixed"; the first one also runs with "auto".
    """
    texts = [prompt["prompt"] for prompt in assets.held_out_prompts()[: max(count, batch)]]
    python = benchmark.batches(assets.load_tokenizer(), texts, batch)[:count]
    vocab = target.config.vocab_size
    random = random_prompts(vocab, batch, RANDOM_PROMPT, count)
    greedy = benchmark.generation_kwargs(tokens)
    hot = benchmark.generation_kwargs(tokens, temperature=1.5)
    answers = benchmark.plain_texts(target, python, greedy)
    draft = DraftModelDrafter(assets.load_draft(target.dtype))

    def of(drafter: Drafter, shared: dict[str, Any] = greedy) -> Maker:
        return lambda policy: benchmark.ours(target, drafter, shared, speculation=policy)

    def wrong(policy: str) -> Contestant:
        return benchmark.synthetic(target, draft, [], python, greedy, speculation=policy)

    yield "wrong", "draft model, wrong", {"": wrong}, python, greedy
    for name, *shape in (("chains", 7, 0), ("trees", 4, 3)):
        script = Script(answers, vocab, *shape, right=False)
        yield "wrong", f"{name}, wrong", {"": of(script)}, python, greedy
    yield "random", "random text, n-gram", {"": of(NgramDrafter(), hot)}, random, hot
    yield "random", "random text, draft model", {"": of(draft, hot)}, random, hot
    lengths = {str(n): of(NgramDrafter(num_draft_tokens=n)) for n in (10, 4, 16)}
    yield "right", "python, n-gram", lengths, python, greedy
    oracles = {str(n): of(Script(answers, vocab, n)) for n in (7, 3)}
    yield "right", "oracle", oracles, python, greedy


def main(arguments: list[str] | None = None) -> None:
    given = table_parser(__doc__, 3, "calls per prompt, of which the median is used")
    given.add_argument("--max-new-tokens", type=int, default=128)
    given.add_argument("--batch", type=int, default=1)
    given.add_argument("--count", type=int, default=6, help="number of prompts (default 6)")
    given.add_argument("--dtype", default="float32")
    given.add_argument("--cold", action="store_true", help="forget what earlier calls measured")
    given.add_argument("--only", default="", help="scenarios whose name contains this")
    options = parse(given, arguments)
    target = assets.load_target(getattr(torch, options.dtype))
    found = Goals()
    with benchmark.endless(target):
        for kind, name, makers, prompts, shared in scenarios(
            target, options.batch, options.count, options.max_new_tokens
        ):
            if options.only not in name:
                continue
            warm = next(iter(makers.values()))(AUTO)

            def auto(prompt: Prompt, run: Contestant = warm) -> Any:
                if options.cold:
                    forget(target)
                return run(prompt)

            fixed = {f"fixed {label}".strip(): make("fixed") for label, make in makers.items()}
            contestants = {PLAIN: benchmark.ours(target, None, shared), AUTO: auto, **fixed}
            report = benchmark.race(
                target, contestants, prompts, shared, options.repeats, baseline=PLAIN,
                settings={"dtype": options.dtype},
            )  # fmt: skip
            best = max(fixed, key=lambda each: report.series[each].median_tokens_per_second)
            what = f"batch {options.batch}, {name}: auto to "
            to = best if kind == "right" else PLAIN
            what += "the best fixed shape" if kind == "right" else "plain"
            found.at_least(report, what, AUTO, to, GOALS[kind])
            found.records.append({"name": name, **report.record()})
            if options.only:
                print(report.series[AUTO].speculation_stats[-1].explain())
    settings = {
        "tokens": options.max_new_tokens,
        "prompts": options.count,
        "memory": "cold" if options.cold else "warm",
    }
    machine = benchmark.machine_line(target)
    results = Results(
        'Goals of speculation="auto"', machine, COLUMNS, KEY, found.rows, settings,
        records=found.records,
    )  # fmt: skip
    results.publish(options.out, options.add)
