"""Count what one round of ``generate`` does on a GPU: launches, copies to and from the host. Needs no GPU.

    python profiling count-round                   # a table; --out also writes the places in the code
    python profiling count-round --out profiling/results/generation/round_counts
    python profiling count-round --tiny --drafter ngram "head tree"    # several architectures
    python profiling count-round --graphs          # with recorded passes, each of which is one launch
    python profiling count-round --graphs --engine # the rows are requests of an engine

Models and heads run on the tensors of cuda_like.py, which take the code paths of CUDA and have real values.
By default these are the bundled ones; ``--tiny`` takes tiny random models of several architectures. A round
is one turn of the decoding loop: draft, verify, commit. The script counts the calls that reach torch's
dispatcher; an op of ours counts as one launch. A *new shape* is a launch whose op was not launched with the
same shapes in the round before, so a CUDA graph of that round can't contain it. The first round of a call,
which allocates buffers, and the last one are left out. Rounds in which a row of the batch ends, so that the
rows in the cache are reordered, are counted separately.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any
from unittest import mock

import nvtx
import torch
import transformers
from baselines.random_targets import TINY, random_prompts, tiny_head, tiny_target
from bench.runner import Results
from text_table import format_markdown
from torch import Tensor

import specdec_ext
from generation.cuda_like import CPU, CudaLike, cuda_like, reporting, to_device
from generation.trace import FROM_HOST, KINDS, LAUNCH, NO_LAUNCH, TO_HOST, Call
from specdec_ext import CombinedDrafter, HeadDrafter, NgramDrafter, assets
from specdec_ext.engine import Engine
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.heads.config import DraftHead
from specdec_ext.models.slots import SlotTarget
from specdec_ext.ops import packed_head
from specdec_ext.tree.config import TreeConfig

NEW_TOKENS = 32
PROMPT = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
    "def read_all(paths):\n"
)
RAGGED = (PROMPT, PROMPT[40:], PROMPT + PROMPT, PROMPT[16:64])
TEXTS = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": 1}}
DRAFTERS = ("none", "ngram", "head chain", "head tree", "ngram and head")
BATCHES = {"1": (PROMPT,), "ragged 4": RAGGED}
BUNDLED = "bundled"
NEW_SHAPE = "new shape"
COUNTED = (*KINDS, NEW_SHAPE)
KEY = ("model", "drafter", "batch", "text")
COLUMNS = {
    **{name: f"{{{name}}}" for name in (*KEY, "rounds")},
    **{kind: f"{{median[{kind}]:g}}" for kind in COUNTED},
    **{f"most {kind}": f"{{most[{kind}]}}" for kind in (TO_HOST, FROM_HOST)},
    "rows end": "{rounds in which a row ends}",
    **{f"most {kind} then": f"{{most then[{kind}]}}" for kind in (TO_HOST, FROM_HOST)},
}
NOTES = [
    "Counted by `python profiling count-round`: medians, and the largest numbers over all rounds. Rounds in",
    "which a row of the batch ends are counted separately.",
]


@dataclass
class Round:
    """Counts of one round.

    Attributes:
        asked: ``(kind, place in the code) -> number of calls``.
        shapes: the ops that were launched, with their shapes.
        row_ended: whether a row left the batch, or joined it.
    """

    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    shapes: set[tuple[Any, ...]] = field(default_factory=set)
    row_ended: bool = False

    def count(self, kind: str) -> int:
        return sum(times for (asked, _), times in self.asked.items() if asked == kind)


@dataclass
class Case:
    """The rounds of one call."""

    model: str
    drafter: str
    batch: str
    text: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def steady(self) -> list[Round]:
        return [each for each in self.rounds[1:-1] if not each.row_ended]

    @property
    def with_ends(self) -> list[Round]:
        return [each for each in self.rounds[1:-1] if each.row_ended]

    def sites(self, kind: str) -> dict[str, float]:
        """Mean number of calls per steady round by place in the code, the most frequent place first."""
        total: Counter[str] = Counter()
        for each in self.steady:
            for (asked, site), times in each.asked.items():
                if asked == kind:
                    total[site] += times
        return {site: round(times / len(self.steady), 2) for site, times in total.most_common()}

    def row(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "drafter": self.drafter,
            "batch": self.batch,
            "text": self.text,
            "rounds": len(self.steady),
            "median": {kind: median(each.count(kind) for each in self.steady) for kind in COUNTED},
            "most": {kind: _most(self.steady, kind) for kind in COUNTED},
            "rounds in which a row ends": len(self.with_ends),
            "most then": {kind: _most(self.with_ends, kind) for kind in COUNTED},
            "places": {kind: self.sites(kind) for kind in (TO_HOST, FROM_HOST, NEW_SHAPE)},
        }


def _most(rounds: Sequence[Round], kind: str) -> int:
    return max((each.count(kind) for each in rounds), default=0)


class Counting:
    """Counts the calls of each round."""

    def __init__(self) -> None:
        self.case: Case | None = None
        self._open = False
        self._reorder, self._adopt = SlotTarget.reorder, SlotTarget.adopt

    def report(self, call: Call) -> None:
        if not self._open or self.case is None or call.kind == NO_LAUNCH:
            return
        current, *before = self.case.rounds[:-3:-1]
        current.asked[call.kind, call.site] += 1
        if call.kind == LAUNCH:
            shapes = call.shapes
            current.shapes.add(shapes)
            if not any(shapes in each.shapes for each in before):
                current.asked[NEW_SHAPE, call.site] += 1

    def phase(self, name: str, **_: Any) -> Any:
        """Replacement of ``nvtx.annotate``, with which the loop marks its phases: "draft" begins a round."""
        phase = mock.MagicMock()
        if name == "draft":
            phase.__enter__.side_effect = self._begin
        return phase

    def _begin(self) -> None:
        if self.case is not None:
            self.case.rounds.append(Round())
            self._open = True

    def reorder(self, target: SlotTarget, *args: Any, **kwargs: Any) -> None:
        """Replacement of ``SlotTarget.reorder``, which the loop calls when a row has left the batch."""
        if self._open and self.case is not None:
            self.case.rounds[-1].row_ended = True
        self._reorder(target, *args, **kwargs)

    def adopt(self, target: SlotTarget, *args: Any, **kwargs: Any) -> None:
        """Replacement of ``SlotTarget.adopt``, which an engine calls when a row joins the batch."""
        if self._open and self.case is not None:
            self.case.rounds[-1].row_ended = True
        self._adopt(target, *args, **kwargs)

    @contextmanager
    def of(self, case: Case) -> Iterator[None]:
        """Count the calls inside this context for ``case``."""
        self.case, self._open = case, False
        yield
        self.case = None


def room_like(tensor: Tensor) -> CudaLike:
    return CudaLike(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))


def own_weights(head: DraftHead, target: Any) -> DraftHead:
    """The head on the device, with its own copy of the target's embedding."""
    embedding = target.get_input_embeddings().weight.detach().clone()
    tensors = {**head.to(CPU, target.dtype).tensors, "embed_tokens.weight": embedding}
    config = replace(head.config, own_embedding=True)
    return DraftHead(config, {name: CudaLike(each) for name, each in tensors.items()}, head.source)


@dataclass
class World:
    """A target with everything that its rounds need.

    Attributes:
        name: of the target.
        target: it is moved to the device when it is counted.
        head: a draft head for it.
        batches: name -> ``input_ids`` and ``attention_mask``.
    """

    name: str
    target: Any
    head: DraftHead
    batches: dict[str, Any]


def bundled_world() -> World:
    tokenizer = assets.load_tokenizer()
    batches = {
        name: tokenizer(list(texts), return_tensors="pt", padding=True)
        for name, texts in BATCHES.items()
    }
    return World(BUNDLED, assets.load_target(), assets.load_head(), batches)


def tiny_world(name: str) -> World:
    """A model of ``TINY`` on a random text that repeats itself, so that n-grams draft."""
    (prompt,) = random_prompts(vocab_size=96, batch=3, length=8, count=1)
    ids = prompt["input_ids"].repeat(1, 3)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 10)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    batches = {
        "1": {"input_ids": ids[:1], "attention_mask": mask[:1]},
        "ragged 3": {"input_ids": ids, "attention_mask": mask},
    }
    return World(name, tiny_target(name), tiny_head(), batches)


def serve(
    target: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    drafter: Any,
    speculation: str,
    graphs: bool,
    **kwargs: Any,
) -> None:
    """Decode the rows of a batch as requests of an engine, and the first one again when a row is free.

    The engine runs in this thread, to which the modes of torch belong.
    """
    decoder = Engine(
        target, drafter=drafter, speculation=speculation, graphs=graphs, max_rows=len(input_ids)
    )
    decoder._thread = Thread()  # never started
    rows = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
    handles = [decoder.submit(CudaLike(ids[None]), **kwargs) for ids in (*rows, rows[0])]
    decoder._accepts = False
    decoder._run()
    for handle in handles:
        handle.check()


def run(
    worlds: Iterable[World],
    names: Sequence[str] = DRAFTERS,
    new_tokens: int = NEW_TOKENS,
    graphs: bool = False,
    engine: bool = False,
) -> list[Case]:
    """Count the rounds of these targets and drafters, for every batch and kind of text.

    Args:
        graphs: replay recorded passes, each of which is one launch. A first call, which is not counted,
            records them.
        engine: the rows of a batch are requests of an engine.
    """
    counting = Counting()
    with (
        mock.patch.object(nvtx, "annotate", counting.phase),
        mock.patch.object(
            SlotTarget, "reorder", lambda *args, **kwargs: counting.reorder(*args, **kwargs)
        ),
        mock.patch.object(
            SlotTarget, "adopt", lambda *args, **kwargs: counting.adopt(*args, **kwargs)
        ),
        # The CPU op computes for the device, and it reads matrices in panels.
        mock.patch.object(packed_head, "reads_panels", lambda device: True),
        mock.patch.object(packed_head, "_in_huge_pages", lambda like: [*map(room_like, like)]),
        cuda_like(),
        reporting(counting.report),
    ):
        return [
            case
            for world in worlds
            for case in _count(world, counting, names, new_tokens, graphs, engine)
        ]


def _count(
    world: World,
    counting: Counting,
    names: Sequence[str],
    new_tokens: int,
    graphs: bool,
    engine: bool,
) -> Iterator[Case]:
    head = own_weights(world.head, world.target)
    to_device(world.target)
    drafters = {
        "none": None,
        "ngram": NgramDrafter(min_ngram=1, num_branches=2),
        "head chain": HeadDrafter(head, TreeConfig(depth=7)),
        "head tree": HeadDrafter(head, TreeConfig(depth=6, top_k=10, num_nodes=60)),
        "ngram and head": CombinedDrafter(
            NgramDrafter(min_ngram=1), HeadDrafter(head, TreeConfig(depth=7)), max_nodes=16
        ),
    }
    for name, (batch, inputs), (text, kwargs) in product(
        names, world.batches.items(), TEXTS.items()
    ):
        case = Case(world.name, name, batch, text)
        wrap = (lambda ids: ids) if engine else CudaLike
        call = partial(
            serve if engine else specdec_ext.generate,
            world.target,
            input_ids=wrap(inputs["input_ids"]),
            attention_mask=wrap(inputs["attention_mask"]),
            drafter=drafters[name],
            speculation="fixed",
            graphs=graphs,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            **kwargs,
        )
        if graphs:
            call()
        with counting.of(case):
            call()
        yield case


def place_lines(cases: Sequence[Case], kinds: Sequence[str]) -> list[str]:
    """A Markdown table: the places in the code behind these kinds of calls, with the cases concerned."""
    found: dict[tuple[str, str], list[tuple[Case, float]]] = {}
    for case, kind in product(cases, kinds):
        for site, times in case.sites(kind).items():
            found.setdefault((kind, site), []).append((case, times))
    rows = []
    for place, each in sorted(found.items()):
        most = max(times for _, times in each)
        drafters, models = (
            {getattr(case, name) for case, _ in each} for name in ("drafter", "model")
        )
        rows.append([*place, f"{most:g}", ", ".join(sorted(drafters)), ", ".join(sorted(models))])
    header = ["kind", "place", "mean per round, at most", "drafters", "models"]
    return format_markdown(header, rows).splitlines()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--tiny", action="store_true", help="tiny models of several architectures")
    parser.add_argument("--graphs", action="store_true", help="replay recorded passes")
    parser.add_argument(
        "--engine", action="store_true", help="the rows of a batch are requests of an engine"
    )
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args(arguments)
    machine = machine_line(CPU, f"transformers {transformers.__version__}")
    worlds = map(tiny_world, TINY) if options.tiny else [bundled_world()]
    cases = run(worlds, options.drafter, options.new_tokens, options.graphs, options.engine)
    rows = [case.row() for case in cases]
    passes = "recorded passes" if options.graphs else "passes kernel by kernel"
    place = ", in an engine" if options.engine else ""
    title = f"One round on a GPU: launches and copies, {passes}{place}"
    places = place_lines(cases, (TO_HOST, FROM_HOST, NEW_SHAPE))
    notes = [*NOTES, "", *places] if options.tiny else NOTES
    Results(title, machine, COLUMNS, KEY, rows, notes=notes).publish(options.out)
