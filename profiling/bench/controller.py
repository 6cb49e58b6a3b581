"""Compare ``speculation="auto"`` with plain decoding and with the best fixed shape.

    python profiling/bench_controller.py                     # bundled model, 128 tokens, batch 1
    python profiling/bench_controller.py --max-new-tokens 512 --batch 4 --out profiling/results/controller

The goal: ``"auto"`` is never slower than plain decoding, and as fast as the best fixed shape. Every row is
one interleaved run of plain decoding, ``"auto"`` and ``"fixed"``, with medians over prompts. What
``"auto"`` learns is kept over calls, as in a server; ``--cold`` forgets it before each call. Scripted
drafts are right or wrong as the scenario says and cost almost nothing; those of the draft model have their
real cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from random_targets import random_prompts
from text_table import format_table

from specdec_ext import Drafter, DraftModelDrafter, DraftTree, NgramDrafter, assets
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import PLAIN, Prompt
from specdec_ext.schedule.memory import forget

AUTO = "auto"
GOALS = {"wrong": 0.97, "random": 0.97, "right": 0.98}
RANDOM_PROMPT = 128


class Wrong(DraftModelDrafter):
    """Drafts of a draft model at their real cost, in which every token is replaced by a wrong one."""

    def propose(self, context: Any) -> DraftTree:
        tree = super().propose(context)
        tokens = tree.tokens.clone()
        tokens[:, 1:] = (tokens[:, 1:] + 1) % self.model.config.vocab_size
        return DraftTree(tokens, tree.parents)


class Script(Drafter):
    """Drafts chains or trees from a known text, right or wrong from the first token on.

    Args:
        texts: prompt -> for each row, the tokens that plain decoding generates.
        vocab: size of the vocabulary, from which wrong tokens are taken.
        length: number of tokens in a path.
        branches: number of further paths, all wrong.
        right: whether the first path is right.
    """

    def __init__(self, texts: Any, vocab: int, length: int, branches: int = 0, right: bool = True):
        self._texts, self._vocab, self._length = texts, vocab, length
        self._branches, self._right = branches, right

    @property
    def identity(self) -> Any:
        return super().identity, self._length, self._branches, self._right

    def start(self, context: Any, model: Any, output: Any) -> None:
        self._answers = self._texts[_key(context.input_ids)]

    def propose(self, context: Any) -> DraftTree:
        paths = []
        for row in context.rows:
            done = len(context.generated[row])
            answer = self._answers[row][done : done + self._length]
            changed = [
                [(token + by) % self._vocab for token in answer]
                for by in range(1, self._branches + 2)
            ]
            paths.append([answer, *changed[:-1]] if self._right else changed)
        return DraftTree.from_paths(context.roots, paths)


def _key(ids: torch.Tensor) -> tuple[int, ...]:
    return tuple(ids.flatten().tolist())


def scenarios(
    target: Any, batch: int, count: int, tokens: int
) -> Iterator[tuple[str, str, dict[str, Any], list[Prompt], dict[str, Any]]]:
    """Yield (kind, name, drafters by label, prompts, keywords of generate) of each scenario.

    All drafters run with "fixed"; the first one also runs with "auto".
    """
    texts = [prompt["prompt"] for prompt in assets.held_out_prompts()[: max(count, batch)]]
    python = benchmark.batches(assets.load_tokenizer(), texts, batch)[:count]
    vocab = target.config.vocab_size
    random = random_prompts(vocab, batch, RANDOM_PROMPT, count)
    greedy = benchmark.generation_kwargs(tokens)
    plain = benchmark.ours(target, None, greedy)
    answers = {
        _key(each["input_ids"]): plain(each).sequences[:, each["input_ids"].shape[1] :].tolist()
        for each in python
    }
    draft = assets.load_draft(target.dtype)
    yield "wrong", "draft model, wrong", {"": Wrong(draft)}, python, greedy
    yield "wrong", "chains, wrong", {"": Script(answers, vocab, 7, right=False)}, python, greedy
    yield "wrong", "trees, wrong", {"": Script(answers, vocab, 4, 3, right=False)}, python, greedy
    hot = benchmark.generation_kwargs(tokens, temperature=1.5)
    yield "random", "random text, n-gram", {"": NgramDrafter()}, random, hot
    yield "random", "random text, draft model", {"": DraftModelDrafter(draft)}, random, hot
    lengths = {str(n): NgramDrafter(num_draft_tokens=n) for n in (10, 4, 16)}
    yield "right", "python, n-gram", lengths, python, greedy
    oracles = {str(n): Script(answers, vocab, n) for n in (7, 3)}
    yield "right", "oracle", oracles, python, greedy


def main(
    max_new_tokens: int = 128,
    batch: int = 1,
    count: Annotated[int, typer.Option(help="number of prompts")] = 6,
    repeats: Annotated[int, typer.Option(help="calls per prompt, of which the median is used")] = 3,
    dtype: str = "float32",
    threads: Annotated[int, typer.Option(help="threads of torch; 0: torch's default")] = 0,
    cold: Annotated[
        bool, typer.Option(help="before each call, forget what earlier calls measured")
    ] = False,
    only: Annotated[str, typer.Option(help="only scenarios whose name contains this")] = "",
    out: Annotated[Path | None, typer.Option(help="write OUT.json")] = None,
) -> None:
    if threads:
        torch.set_num_threads(threads)
    target = assets.load_target(getattr(torch, dtype))
    rows, records = [], []
    with benchmark.endless(target):
        for kind, name, drafters, prompts, shared in scenarios(
            target, batch, count, max_new_tokens
        ):
            if only not in name:
                continue
            contestants = {PLAIN: benchmark.ours(target, None, shared)}
            first = next(iter(drafters.values()))

            def auto(prompt: Prompt, drafter: Any = first, shared: Any = shared) -> Any:
                if cold:
                    forget(target)
                return benchmark.ours(target, drafter, shared, speculation="auto")(prompt)

            contestants[AUTO] = auto
            for label, drafter in drafters.items():
                fixed = benchmark.ours(target, drafter, shared, speculation="fixed")
                contestants[f"fixed {label}".strip()] = fixed
            report = benchmark.race(target, contestants, prompts, shared, repeats, baseline=PLAIN)
            series = report.series
            to_plain = {each: series[each].speedup(series[PLAIN]) for each in series}
            best = max(to_plain[each].value for each in series if each.startswith("fixed"))
            ratio = to_plain[AUTO].value / (best if kind == "right" else 1.0)
            verdict = "holds" if ratio >= GOALS[kind] else "MISSED"
            goal = f"auto / {'best fixed' if kind == 'right' else 'plain'} >= {GOALS[kind]}"
            rows.append([name, str(to_plain[AUTO]), f"{best:.2f}x", f"{ratio:.3f}", goal, verdict])
            records.append({"name": name, "ratio": ratio, "goal": goal, **report.record()})
            if only:
                print(series[AUTO].speculation_stats[-1].explain())
    header = ["", "auto to plain", "best fixed to plain", "ratio", "goal", ""]
    print(benchmark.machine_line(target))
    state = "cold" if cold else "warm"
    print(f"batch {batch}, {max_new_tokens} tokens, {count} prompts, {state}")
    print(format_table(header, rows))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
