"""Show a tree that was drafted for the bundled model and its accepted path, as text and as a picture.

    python profiling/draw_tree.py --out profiling/results/draft_tree.png

It takes the tree with the most leaves of one completion, and among those the one with the longest accepted
path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

import specdec_ext
from specdec_ext import DraftTree, assets


class Watched(specdec_ext.SuffixDrafter):
    """Records every tree with its accepted path."""

    def start(self, *call) -> None:
        super().start(*call)
        self.steps: list[tuple[DraftTree, torch.Tensor]] = []

    def propose(self, context) -> DraftTree:
        self.tree = super().propose(context)
        return self.tree

    def commit(self, context, accepted, output) -> None:
        super().commit(context, accepted, output)
        if (
            accepted.path.shape[1] == self.tree.num_nodes
        ):  # otherwise the tree was cut at the text's end
            self.steps.append((self.tree, accepted.path[0]))


def interest(step: tuple[DraftTree, torch.Tensor]) -> tuple[int, int]:
    tree, path = step
    active = tree.parents[0] >= 0
    inner = tree.parents[0][active].unique()
    return int(active.sum()) + 1 - len(inner), int((path >= 0).sum())


def main(
    prompt: int = 5,
    max_new_tokens: int = 128,
    temperature: Annotated[float, typer.Option(help="sampling temperature; 0: greedy")] = 0.8,
    out: Annotated[Path | None, typer.Option(help="write the picture to this file")] = None,
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
