"""A tree that was drafted for the bundled model, with the path that it accepted: as text and as a picture.

    python profiling/draw_tree.py --out profiling/results/draft_tree.png

Of one completion the step whose tree has most leaves is shown, among those the one that accepted most.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

import specdec_ext
from specdec_ext import DraftTree, assets


class Watched(specdec_ext.SuffixDrafter):
    """Keeps every tree with its accepted path."""

    def start(self, *call) -> None:
        super().start(*call)
        self.steps: list[tuple[DraftTree, torch.Tensor]] = []

    def propose(self, context) -> DraftTree:
        self.tree = super().propose(context)
        return self.tree

    def commit(self, context, accepted, output) -> None:
        super().commit(context, accepted, output)
        if accepted.path.shape[1] == self.tree.num_nodes:  # else cut at the end of the text
            self.steps.append((self.tree, accepted.path[0]))


def interest(step: tuple[DraftTree, torch.Tensor]) -> tuple[int, int]:
    tree, path = step
    active = tree.parents[0] >= 0
    inner = tree.parents[0][active].unique()
    return int(active.sum()) + 1 - len(inner), int((path >= 0).sum())


def main(
    prompt: int = 5,
    max_new_tokens: int = 128,
    temperature: Annotated[float, typer.Option(help="sample; 0 is greedy")] = 0.8,
    out: Annotated[Path | None, typer.Option(help="write a picture here")] = None,
) -> None:
    tokenizer = assets.load_tokenizer()
    text = assets.held_out_prompts()[prompt]["prompt"]
    drafter = Watched(num_draft_tokens=12, min_probability=0.05)
    keywords = (
        {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    )
    specdec_ext.generate(
        assets.load_target(torch.float32),
        **tokenizer(text, return_tensors="pt"),
        drafter=drafter,
        speculation="fixed",
        seed=0,
        max_new_tokens=max_new_tokens,
        **keywords,
    )
    tree, path = max(drafter.steps, key=interest)
    print(tree.render(tokenizer, path=path))
    if out:
        tree.plot(tokenizer, path=path).savefig(out, dpi=120)


if __name__ == "__main__":
    typer.run(main)
