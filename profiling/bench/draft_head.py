"""Time a draft by an EAGLE-3 head: the op ``draft_head`` against the same head as PyTorch modules.

    python profiling draft-head                                            # all cases, best device
    python profiling draft-head --device cpu --head small --threads 1 --repeats 200
    python profiling draft-head --head 8b --draft "chain 5" --batch 1 --weights same --weights int8
    python profiling draft-head --quick                                    # a few cases of each head

- A call does the work of a decoding step: it adds three committed elements per row to a cache of --context
  elements and drafts a chain or a dynamic tree. On a GPU the heads have the sizes published for 8B, 32B and
  70B targets; all weights are random.
- The op, the modules (baselines/torch_draft_head.py) and, on a GPU, a CUDA graph of the modules take turns
  call by call. Unless --warm, caches are flushed before each call, as the target's weights flush them in
  decoding; on the CPU the same code then drafts with a tiny head, so that code and threads are ready.
- GB/s counts the weights once per level, and the cache; %read is its share of the read bandwidth of this run.
  A level of more than 32 nodes, of all rows together, takes several passes over the weights and shows less.
- "coupled" is how many times as long the op takes with noise, as in calls that sample.
- The modules have unquantised weights in every row; the graph has one context length baked in.
- "host us", on a GPU, is the time for which a call on an idle device occupies the host, launch included.
- "agree" is the share of drafted tokens that op and modules have in common. It is no test: after a near-tie,
  rounding makes a row differ for good. In float32 a difference is an error, and nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
from baselines.draft_calls import DraftCall, RandomHead, captured
from baselines.heads import HEADS, head_config
from cuda_kernels.draft_schedule import WEIGHT_BYTES, widths

from bench.op_cases import equal
from bench.runner import OURS, Case, Results, Row, device_parser, measure_all, parse
from bench.stopwatch import Stopwatch
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.evaluate.measuring import Call, wall_seconds
from specdec_ext.tree.config import TreeConfig

DRAFTS = {
    **{f"chain {depth}": TreeConfig(depth=depth) for depth in (3, 5, 7)},
    "tree 41": TreeConfig(depth=5, top_k=8, num_nodes=41),
    "tree 60": TreeConfig(depth=8, top_k=5, num_nodes=60),
}
CONFIGS = {
    "tiny": head_config(64, 96, 2, 2, 256, head_dim=32, draft_vocab=128),  # the primer
    "small": head_config(256, 704, 4, 2, 8192, head_dim=64, draft_vocab=4096),
    "large": head_config(1024, 3584, 8, 2, 32_768, draft_vocab=16_384),
    **HEADS,
}
PRIMER_CONTEXT = 8
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONTEXT = {"cpu": 512, "cuda": 1024}
CHOICES = {
    "head": (*CONFIGS,),
    "dtype": (*DTYPES,),
    "weights": (*WEIGHT_BYTES,),
    "draft": (*DRAFTS,),
    "batch": None,
}
COLUMNS = {
    **{name: f"{{{name}}}" for name in CHOICES},
    "MB": "{moved_mb:.0f}",
    "us": "{ours_us:.0f}",
    "p10": "{ours_p10_us:.0f}",
    "us/level": "{level_us:.0f}",
    "GB/s": "{gb_per_s:.0f}",
    "%read": "{read_percent:.0f}",
    "host us": "{host_us:.0f}",
    "coupled": "{vs_coupled:.2f}x",
    "torch us": "{torch_us:.0f}",
    "graph us": "{graph_us:.0f}",
    "vs torch": "{vs_torch:.1f}x",
    "95 %": "{vs_torch_95[0]:.1f}-{vs_torch_95[1]:.1f}",
    "vs graph": "{vs_graph:.1f}x",
    "agree": "{agree:.0%}",
}


@dataclass(frozen=True)
class Draft:
    """One row of the table."""

    head: str
    dtype: str = "bfloat16"
    weights: str = "same"
    draft: str = "chain 5"
    batch: int = 1

    @property
    def tree(self) -> TreeConfig:
        return DRAFTS[self.draft]

    def call(self, random: RandomHead, context: int) -> DraftCall:
        return DraftCall.make(random, self.tree, context, self.batch, self.weights)


ON_CPU = [
    *(
        Draft(head, dtype, weights, draft)
        for head, dtype, weights, draft in product(
            ("small", "large"), ("float32", "bfloat16"), ("int8", "same"), ("chain 5", "tree 41")
        )
    ),
    *(Draft("small", "float32", weights, batch=8) for weights in ("int8", "same")),
]
ON_CUDA = [
    Draft(head, weights=weights, draft=draft, batch=batch)
    for head, weights, draft, batch in product(
        HEADS, WEIGHT_BYTES, ("chain 3", "chain 5", "chain 7", "tree 60"), (1, 4, 16)
    )
]
QUICK = [
    *(Draft(head, weights=weights) for head in HEADS for weights in WEIGHT_BYTES),
    *(Draft(head, draft="tree 60") for head in HEADS),
    *(Draft("8b", batch=batch) for batch in (4, 16)),
]


def chosen(options: argparse.Namespace) -> list[Draft]:
    """The cases with the values that the options ask for, sorted by head: memory holds few of them."""
    drafts = QUICK if options.quick else {"cpu": ON_CPU, "cuda": ON_CUDA}[options.device]
    for name in CHOICES:
        if values := getattr(options, name):
            drafts = [replace(each, **{name: value}) for each in drafts for value in values]
    order = [*CONFIGS], [*WEIGHT_BYTES]
    return sorted(
        dict.fromkeys(drafts),
        key=lambda each: (order[0].index(each.head), each.dtype, order[1].index(each.weights)),
    )


@lru_cache(maxsize=2)  # a case's and the primer's; cases are sorted by head
def random_head(name: str, dtype: torch.dtype, device: torch.device) -> RandomHead:
    return RandomHead(CONFIGS[name], dtype, device)


def prepared(draft: Draft, stopwatch: Stopwatch, options: argparse.Namespace) -> Case:
    """The calls of a case."""
    on_gpu, dtype = stopwatch.device.type == "cuda", DTYPES[draft.dtype]
    call = draft.call(random_head(draft.head, dtype, stopwatch.device), options.context)
    common = agreement(call)  # calls the modules, as the capture of their graph requires
    calls: dict[str, Call] = {OURS: call.ours, "coupled": call.coupled, "torch": call.theirs}
    primers = None
    if on_gpu:
        calls["graph"] = captured(call.theirs)
    elif not options.warm:
        tiny = draft.call(random_head("tiny", dtype, stopwatch.device), PRIMER_CONTEXT)
        primers = {OURS: tiny.ours, "coupled": tiny.coupled, "torch": tiny.theirs}

    def more() -> Row:
        host = {"host_us": host_us(call.ours, options.repeats)} if on_gpu else {}
        return {"agree": common, **host}

    def agree() -> bool:
        is_exact = dtype == torch.float32 and draft.weights == "same"
        return not is_exact or equal(call.ours()[:2], call.theirs())

    return Case(vars(draft), calls, call.needed_bytes, agree, primers, more)


def agreement(call: DraftCall) -> float:
    """Share of the drafted tokens that op and modules have in common, row by row."""
    ours, theirs = (drafted[0][:, 1:] for drafted in (call.ours(), call.theirs()))
    common = (ours[:, :, None] == theirs[:, None, :]).any(-1)
    return common.float().mean().item()


def host_us(run: Call, repeats: int) -> float:
    """Median host time of a call on an idle device."""
    calls = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        calls.append(wall_seconds(OURS, run))
    return 1e6 * statistics.median(calls)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    given = device_parser(__doc__, 50, "calls of each, at least 5")
    for name, choices in CHOICES.items():
        kind = str if choices else int
        text = "instead of the cases' own; may be repeated"
        given.add_argument(f"--{name}", action="append", type=kind, choices=choices, help=text)
    given.add_argument("--quick", action="store_true", help="a few cases of each head of a GPU")
    given.add_argument("--context", type=int, help="elements in the cache (default 512; GPU: 1024)")
    given.add_argument("--warm", action="store_true", help="do not flush caches between calls")
    options = parse(given, arguments)
    options.context = options.context or CONTEXT[options.device]
    return options


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    drafts = chosen(options)
    stopwatch = Stopwatch(torch.device(options.device))
    machine = machine_line(stopwatch.device)

    def cases() -> Iterator[Case]:
        for each in drafts:
            yield prepared(each, stopwatch, options)

    rows, bandwidth = measure_all(cases(), stopwatch, options.repeats, warm=options.warm)
    for row in rows:
        row["level_us"] = row["ours_us"] / len(widths(DRAFTS[row["draft"]]))
    caches = "warm" if options.warm else "flushed"
    settings = {**bandwidth, "context": options.context, "caches": caches}
    results = Results("Drafts by a head", machine, COLUMNS, [*CHOICES], rows, settings)
    results.publish(options.out, options.add)
