"""Find what keeps a target pass from being captured as a CUDA graph. Needs no GPU.

    python profiling capture-pass                    # tiny models of several architectures
    python profiling capture-pass --out profiling/results/generation/capture_pass

A pass goes from embeddings to logits over a draft tree, with a cache whose buffers have room for all tokens.
It runs on the tensors of cuda_like.py, which take the code paths of CUDA and have real values. Three passes
are recorded. The second one scores other tokens in the place of the first. A replay of the first pass must
compute the logits of both, bit for bit ("replay"). The third pass follows after tokens were accepted, so each
of its differences is a call that a graph would repeat wrongly (``differences`` in trace.py).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from baselines.random_targets import TINY, random_prompts, tiny_target
from bench.runner import Results
from text_table import format_markdown
from torch import Tensor

from generation.cuda_like import (
    CPU,
    DEVICE,
    CudaLike,
    FakeGraph,
    cuda_like,
    reporting,
    to_device,
)
from generation.trace import (
    ADDRESS,
    CAUSES,
    FROM_HOST,
    LAUNCH,
    TO_HOST,
    Difference,
    Trace,
    differences,
    replay,
)
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.models.factory import make_target
from specdec_ext.tree.draft_tree import DraftTree

SLOTS = 128
PADDINGS = (0, 3, 10)
HIDDEN_STATES = (0, 1, 2)
# Parents of the scored trees: plain decoding, and a tree with siblings and two levels.
TREES = {"root": (-1,), "tree of 6": (-1, 0, 0, 1, 1, 2)}
BATCHES = {"1": 1, "ragged 3": 3}
KEY = ("model", "batch", "nodes")
COLUMNS = {
    **{name: f"{{{name}}}" for name in (*KEY, LAUNCH, TO_HOST, FROM_HOST, "replay")},
    **{cause: f"{{causes[{cause}]}}" for cause in CAUSES},
    "first difference": "{first}",
}
NOTES = [
    "Counted by `python profiling capture-pass`. `replay`: whether the repeated calls of a pass compute the",
    "logits of other tokens in the same place. The next columns count, by cause, the calls of the next round",
    "that a graph would repeat wrongly: `number`, another Python number; `address`, a tensor from outside",
    "the pass is elsewhere; `shape`, such a tensor has another shape; `size`, a shape determined on the",
    "device; `order`, other calls.",
    "",
]


@dataclass
class Passes:
    """What was found about the passes of one model, batch and tree.

    Attributes:
        first: the pass that a graph would capture.
        replays: whether its replay computes its own logits, and those of other tokens in the same place.
        causes: the differences of the pass of the next round.
    """

    model: str
    batch: str
    nodes: str
    first: Trace
    replays: bool
    causes: list[Difference]

    def row(self) -> dict[str, Any]:
        counts = Counter(each.cause for each in self.causes)
        return {
            "model": self.model,
            "batch": self.batch,
            "nodes": self.nodes,
            **{kind: self.first.count(kind) for kind in (LAUNCH, TO_HOST, FROM_HOST)},
            "replay": "yes" if self.replays else "no",
            "causes": {cause: counts[cause] for cause in CAUSES},
            "first": str(self.causes[0]) if self.causes else "none",
            "differences": [str(each) for each in self.causes],
        }


class _Rounds:
    """Rounds of one model on the device, whose passes are recorded.

    Args:
        model: on the device.
        rows: of the batch; they differ in length.
        parents: of the tree of every round.
        graphs: whether the passes are recorded by the target itself.
    """

    def __init__(self, model: Any, rows: int, parents: Sequence[int], graphs: bool = False):
        self._vocab, self._parents = model.config.vocab_size, parents
        (prompt,) = random_prompts(self._vocab, rows, 24, count=1)
        mask = torch.ones_like(prompt["input_ids"])
        for row, padding in enumerate(PADDINGS[:rows]):
            mask[row, :padding] = 0
        self._rows = rows
        self._random = torch.Generator().manual_seed(0)
        self.target = make_target(model, None, SLOTS, graphs=graphs)
        self.target.record_hidden_states(HIDDEN_STATES)
        self.target.prefill(CudaLike(prompt["input_ids"]), CudaLike(mask) if rows > 1 else None)

    def score(self) -> tuple[Trace, Tensor]:
        """Score a tree of random tokens; returns the calls and the logits."""
        shape = self._rows, len(self._parents)
        tokens = torch.randint(1, self._vocab, shape, generator=self._random)
        tree = DraftTree(tokens, torch.tensor(self._parents).expand(shape).contiguous())
        self.tree = tree.on(self.target.staging)  # copies the numbers of the rows, too
        trace = Trace()
        with reporting(trace.add):
            logits: Any = self.target.forward(self.tree).logits
        return trace, logits.inner

    def commit(self) -> None:
        """Accept a branch of the tree, to another depth in each row."""
        branch = max(self.tree.branches[0], key=len)
        counts = [min(row, len(branch) - 1) for row in range(self._rows)]
        path = [branch + [-1] * (len(self._parents) - len(branch))] * self._rows
        on_device = (torch.tensor(each, device=DEVICE) for each in (path, counts))
        self.target.commit(*on_device, (path, counts))


def passes(model: Any, name: str, batch: str, nodes: str) -> Passes:
    """Record the passes of a model that is on the device; call it inside ``cuda_like``."""
    rounds = _Rounds(model, BATCHES[batch], TREES[nodes])
    first, logits = rounds.score()
    rounds.target.withdraw(rounds.tree)
    other, expected = rounds.score()
    same = all(each.cause == ADDRESS for each in differences(first, other))
    replays = same and not any(first.count(kind) for kind in (TO_HOST, FROM_HOST))
    if replays:
        own = logits.clone()
        replay(first)  # overwrites keys and values of the other tokens
        replays = torch.equal(logits, own)
        replay(first, other)
        replays &= torch.equal(logits, expected)
    rounds.commit()
    following, _ = rounds.score()
    return Passes(name, batch, nodes, first, replays, list(differences(first, following)))


def recorded_passes(model: Any, batch: str, nodes: str) -> tuple[Trace, list[Difference]]:
    """The calls that a target records, and their differences to the next round; inside ``cuda_like``."""
    rounds, traces = _Rounds(model, BATCHES[batch], TREES[nodes], graphs=True), []
    for _ in range(2):
        traces.append(Trace())
        with mock.patch.object(FakeGraph, "inside", staticmethod(traces[-1].add)):
            rounds.score()
        rounds.commit()
    rounds.target.runner.graphs.finish()
    return traces[0], list(differences(*traces))


def run(names: Iterable[str] = TINY) -> list[Passes]:
    found = []
    with cuda_like():
        for name in names:
            model = to_device(tiny_target(name))
            found += [passes(model, name, *case) for case in product(BATCHES, TREES)]
    return found


def place_lines(found: Iterable[Passes]) -> list[str]:
    """A Markdown table: each place that keeps passes from being captured, with the models concerned."""
    models: dict[tuple[str, str, str], dict[str, None]] = {}
    for each in found:
        waits = [(call.kind, call.site, call.name) for call in each.first.calls if call.is_copy]
        for place in [*waits, *((one.cause, one.site, one.name) for one in each.causes)]:
            models.setdefault(place, {})[each.model] = None
    rows = [[*place, ", ".join(names)] for place, names in sorted(models.items())]
    return format_markdown(["cause", "place", "op", "models"], rows).splitlines()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=TINY, default=[*TINY])
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args(arguments)
    machine = machine_line(CPU, f"transformers {transformers.__version__}")
    found = run(options.model)
    places = place_lines(found)
    rows = [each.row() for each in found]
    title = "What keeps a target pass from being a CUDA graph"
    Results(title, machine, COLUMNS, KEY, rows, notes=[*NOTES, *places]).publish(options.out)
    print("", *places, sep="\n")
