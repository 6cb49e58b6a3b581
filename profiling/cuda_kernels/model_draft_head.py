"""ESTIMATE the time of a draft by the fused CUDA op ``draft_head`` from its schedule of work.

    python profiling model-draft-head                                  # every head on every machine
    python profiling model-draft-head --head 8b --depth 8 --top-k 5 --weights int8
    python profiling model-draft-head --out build/model                # build/model.json and .md
    python profiling model-draft-head --head 8b --machine h200 --picture build/level.png

Nothing here is measured. Bytes, passes, tiles, panels and barriers are counted from the kernel's own schedule
(``draft_heads.py``); the speeds in ``MACHINES`` and the times in ``TIMES`` are assumptions. Two sums bracket
the time of a level:

    worst   nothing overlaps: the time is the sum of reading weights and cache at the busiest block's pace,
            reading inputs from the L2 cache, the start of every phase, and every barrier
    best    memory is always busy, except when the warps do other work than products for longer than it
            takes to fill the ring with weights

"compute" is the time in which the warps of the busiest block compute a level's products if all weights have
arrived. It costs nothing while it is shorter than "memory". With up to TILE_ROWS rows of 16-bit inputs a
block loads a slice of inputs while it multiplies the one before; with more rows it waits for every slice.
Below sm_90 warp 0, which also refills the ring, sets the pace. The floor is the time to read the weights once
per level and the cache at the read bandwidth; the goal is GOAL times the floor.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from baselines.heads import HEADS
from bench.runner import Results

from cuda_kernels.draft_schedule import (
    WEIGHT_BYTES,
    Matrix,
    Phase,
    cache_bytes,
    levels,
    matrices,
    phases,
    slice_bytes,
    widths,
)
from cuda_kernels.occupancy import most_shared_bytes
from specdec_ext import _host
from specdec_ext.heads.config import HeadConfig
from specdec_ext.tree.config import TreeConfig

GOAL = 1.35
NEW = 3  # committed elements per draft and row
# Shared memory of a block: partial sums of its warps, static data (csrc/kernels/draft_head/block.cuh).
REDUCE_BYTES, STATIC_BYTES = 32 * 1024, 15_872
STAGE_BYTES = _host.DRAFT_TILE_OUTS * (_host.DRAFT_SLICE_BYTES + _host.DRAFT_UNIT_BYTES)
MOST_STAGES = 24
LEAST_LAG = 2  # stages that are free but not yet refilled when the warps finish a product
TILE_ROWS = 16  # rows that are multiplied together
WARPS = 8


@dataclass(frozen=True)
class Machine:
    """Assumed speeds of a GPU.

    Attributes:
        arch: architecture, such as "sm_90".
        sms: number of SMs.
        read_gb_per_s: sustained read bandwidth of memory.
        l2_gb_per_s: read bandwidth of the L2 cache, all SMs together.
        barrier_us: time from the last block's arrival at a grid barrier to the first block's departure.
        source: where the numbers come from.
    """

    arch: str
    sms: int
    read_gb_per_s: float
    l2_gb_per_s: float
    barrier_us: float
    source: str

    @property
    def stages(self) -> int:
        """Number of stages in the ring of weights."""
        free = most_shared_bytes(self.arch) - REDUCE_BYTES - STATIC_BYTES
        return min(MOST_STAGES, free // STAGE_BYTES)

    @property
    def lag(self) -> int:
        """Number of stages that stay free: a quarter of the ring."""
        return max(LEAST_LAG, self.stages // 4)

    @property
    def refill_us(self) -> float:
        """A warp's time per stage to refill the ring, in turn with bulk copies, alone below sm_90."""
        if self.arch == "sm_90":
            return (TIMES["refill"] + TIMES["copy"]) / WARPS
        return TIMES["refill"] + _host.DRAFT_TILE_OUTS * TIMES["copy"]

    def ring_bytes(self, weights: str) -> int:
        """Bytes of weights in flight into the rings of all SMs when the warps finish a product."""
        return self.sms * (self.stages - self.lag) * _host.DRAFT_TILE_OUTS * slice_bytes(weights)

    def read_us(self, count: float) -> float:
        return count / self.read_gb_per_s / 1e3

    def l2_us(self, count: float) -> float:
        return count / self.l2_gb_per_s / 1e3


MACHINES = {
    "h200": Machine(
        "sm_90", 132, 4300, 5500, 1.5, "4.3 TB/s measured for copies, 90 % of the data sheet's 4.8"
    ),
    "h100": Machine("sm_90", 132, 3000, 5500, 1.5, "90 % of the data sheet's 3.35 TB/s (SXM)"),
    "a100": Machine("sm_80", 108, 1830, 4000, 1.5, "90 % of the data sheet's 2.04 TB/s (80 GB)"),
}
# Microseconds, guessed from similar kernels.
TIMES = {
    "gather": 2.0,
    "rotate": 2.0,
    "attend": 4.0,  # without reading the cache
    "grow": 4.0,
    "product": 1.0,  # from a barrier to the first multiplication, without the norms of the inputs
    "stage": 0.08,  # for a warp to acquire and release a stage of the ring
    "refill": 0.02,  # for a warp to request the weights of another stage, without the copies
    "copy": 0.0075,  # for a bulk copy to be requested, or 1 KiB by the lanes of a warp
    "multiply": 0.1,  # per 1024 inputs, for all eight warps together and up to TILE_ROWS rows
    "slice": 0.7,  # for a slice of the inputs to arrive from the L2 cache
    "launch": 8.0,  # once per draft: a cooperative launch, and the work of blocks before their first phase
}
OTHERS = ("gather", "rotate", "attend", "grow")  # phases that are not products
NORMED = ("projections", "gate_up", "logits")  # products whose inputs are normalised first


PARTS = ("memory_us", "tail_us", "compute_us", "inputs_us", "start_us", "barrier_us")


@dataclass(frozen=True)
class Cost:
    """Cost of one phase, in microseconds.

    Attributes:
        stages: stages of the ring that an SM fills, on average.
        memory_us: time to read its bytes from memory at full bandwidth.
        tail_us: additional time until the busiest block has read its share.
        compute_us: time of the busiest block's warps once its weights have arrived.
        inputs_us: time to read its inputs from the L2 cache.
        start_us: time before it uses its first byte.
        barrier_us: time of the barrier after it.
    """

    op: str
    level: int
    memory_bytes: int
    stages: float
    memory_us: float
    tail_us: float
    compute_us: float
    inputs_us: float
    start_us: float
    barrier_us: float

    @property
    def worst_us(self) -> float:
        paced = max(self.memory_us + self.tail_us, self.compute_us)
        return paced + self.inputs_us + self.start_us + self.barrier_us


@dataclass(frozen=True)
class Workload:
    config: HeadConfig
    tree: TreeConfig
    context: int = 1024
    batch: int = 1
    weights: str = "same"

    @property
    def phases(self) -> list[Phase]:
        return phases(self.config, self.tree, NEW * self.batch, self.batch)


def compute_us(matrix: Matrix, num_rows: int, weights: str, machine: Machine) -> float:
    """Time of the busiest block, which processes its tiles in panels and each panel slice by slice."""
    slices = matrix.slices(weights)
    row_tiles = -(-num_rows // TILE_ROWS)
    elements = slice_bytes(weights) / WEIGHT_BYTES[weights]
    tile_us = TIMES["stage"] + machine.refill_us + TIMES["multiply"] * row_tiles * elements / 1024
    tiles = -(-int(matrix.rows(machine.sms).max()) // _host.DRAFT_TILE_OUTS)
    total = 0.0
    for first in range(0, tiles, _host.DRAFT_PANEL_TILES):
        panel_us = min(tiles - first, _host.DRAFT_PANEL_TILES) * tile_us
        if row_tiles == 1:  # the next slice is loaded meanwhile
            total += TIMES["slice"] + slices * max(panel_us, TIMES["slice"])
        else:
            total += slices * (panel_us + TIMES["slice"])
    return total


def product_cost(phase: Phase, matrix: Matrix, weights: str, machine: Machine) -> Cost:
    size = matrix.size(weights)
    rows = matrix.rows(machine.sms)
    memory_us = machine.read_us(size)
    inputs = phase.num_rows * matrix.ins * 2
    norms = machine.sms * inputs if phase.op in NORMED else 0
    return Cost(
        op=phase.op,
        level=phase.level,
        memory_bytes=size,
        stages=matrix.stages(weights) / machine.sms,
        memory_us=memory_us,
        tail_us=memory_us * float(rows.max() / rows.mean() - 1),
        compute_us=compute_us(matrix, phase.num_rows, weights, machine),
        inputs_us=machine.l2_us(matrix.panels(machine.sms) * inputs),
        start_us=TIMES["product"] + machine.l2_us(norms),
        barrier_us=machine.barrier_us,
    )


def other_cost(phase: Phase, work: Workload, machine: Machine) -> Cost:
    """Cost of a phase that is not a product: attention, and phases that move few bytes."""
    config, level = work.config, phase.level
    memory = reread = 0
    if phase.op == "attend":
        expanded = sum(widths(work.tree)[1 : level + 1])
        slots = work.context + NEW + expanded
        batch_rows = min(work.batch, phase.num_rows)
        memory = batch_rows * cache_bytes(config, slots) // config.num_layers
        # Each tile of 16 query rows reads the values once, and the keys once per panel of 64 dimensions.
        queries = phase.num_rows / batch_rows * config.num_heads / config.num_kv_heads
        tiles, panels = -(-queries // 16), -(-config.head_dim // 64)
        reread = memory * (tiles * (panels + 1) / 2 - 1)
    return Cost(
        op=phase.op,
        level=level,
        memory_bytes=memory,
        stages=0.0,
        memory_us=machine.read_us(memory),
        tail_us=0.0,
        compute_us=0.0,
        inputs_us=machine.l2_us(reread),
        start_us=TIMES[phase.op],
        barrier_us=machine.barrier_us,
    )


def phase_costs(work: Workload, machine: Machine) -> list[Cost]:
    found = matrices(work.config)
    return [
        product_cost(phase, matrix, work.weights, machine)
        if (matrix := found.get((phase.op, phase.layer)))
        else other_cost(phase, work, machine)
        for phase in work.phases
    ]


@dataclass(frozen=True)
class Interval:
    """An interval of a timeline: "memory" streams the weights of an op, or the warps "compute" its phase."""

    actor: str
    op: str
    begin_us: float
    end_us: float


def timeline(work: Workload, machine: Machine) -> list[Interval]:
    """Timeline of the best case: while the warps do other work, the ring fills with the next weights."""
    ring_us = machine.read_us(machine.ring_bytes(work.weights))
    found: list[Interval] = []
    now = away_since = 0.0
    cache_us = 0.0  # time in which memory reads the cache instead of weights
    late = 0.0  # the busiest block's tail, for which the other blocks wait
    for cost in phase_costs(work, machine):
        begin = now
        if cost.op not in OTHERS:
            now += cost.start_us + late
            late = 0.0
            ahead = min(now - away_since - cache_us, ring_us, cost.memory_us)
            cache_us = 0.0
            found.append(Interval("memory", cost.op, away_since, away_since + ahead))
            paced = max(cost.memory_us - ahead, cost.compute_us)
            begin, now = now, now + paced
            found.append(Interval("memory", cost.op, begin, now))
            away_since = now
            late = max(0.0, cost.memory_us - ahead + cost.tail_us - paced)
        else:
            now += cost.start_us + late + cost.memory_us + cost.inputs_us
            cache_us += cost.memory_us
            late = 0.0
        found.append(Interval("compute", cost.op, begin, now))
        now += cost.barrier_us
    return found


def level_estimates(work: Workload, machine: Machine) -> list[dict[str, float]]:
    """Bytes and microseconds of each level: the parts of the worst case, both sums, floor and goal."""
    rows = []
    costs = phase_costs(work, machine)
    floor_sizes = {op: each.size(work.weights) for op, each in matrices(work.config).items()}
    ends = {}
    done = 0
    intervals = [each for each in timeline(work, machine) if each.actor == "compute"]
    for cost, interval in zip(costs, intervals, strict=True):
        ends[cost.level] = interval.end_us + cost.barrier_us
    for level, order in enumerate(levels(work.phases)):
        own = costs[done : done + len(order)]
        done += len(order)
        weights = sum(cost.memory_bytes for cost in own if cost.op not in OTHERS)
        cache = sum(cost.memory_bytes for cost in own if cost.op == "attend")
        needed = {(phase.op, phase.layer) for phase in order} & floor_sizes.keys()
        floor = machine.read_us(cache + sum(floor_sizes[op] for op in needed))
        rows.append(
            {
                "level": level,
                "weight_bytes": weights,
                "cache_bytes": cache,
                "stages": sum(cost.stages for cost in own),
                "barriers": len(own),
                **{part: sum(getattr(cost, part) for cost in own) for part in PARTS},
                "worst_us": sum(cost.worst_us for cost in own),
                "best_us": ends[level] - ends.get(level - 1, 0.0),
                "floor_us": floor,
                "goal_us": GOAL * floor,
            }
        )
    return rows


def draft_estimate(rows: list[dict[str, float]]) -> dict[str, float]:
    """The sums over the levels of a draft, with its launch."""
    total = {name: sum(row[name] for row in rows) for name in rows[0] if name != "level"}
    total["best_us"] += TIMES["launch"]
    total["worst_us"] += TIMES["launch"]
    return total


NOTES = """\
- Microseconds. `memory` to `barrier` are the parts of the worst case. `first` is level 0 with the new
  elements, `last` the deepest level, `draft` all levels and the launch.
- `stages`: of the ring, that each SM fills on average. From sm_90 on, each is one bulk copy of a tile; below,
  and of a matrix in rows, eight rows are copied.
- `floor`: weights once per level and the cache, at the read bandwidth. `goal`: 1.35 times that.
- `best`: memory waits only where the warps are away from products for longer than the ring lasts. `worst`:
  nothing overlaps.
- `compute`: what the warps of the busiest block need if all weights are there. Above `memory` it sets the
  pace: taking a stage is guessed at 0.08 us, refilling one at 0.02 us and 0.0075 us for each copy, and it
  hardly shrinks with 8-bit weights (`--weights int8`).
- `tail`: how much later the busiest block has its weights, at an equal share of the bandwidth.
- Measured numbers far above `worst` mean that an assumption is wrong. Look for it with
  `python profiling nsight ncu "draft_head chain"`, first at waits for stages (*Source Counters*), then at
  barriers."""
SHOWN = (*PARTS, "floor_us", "goal_us", "best_us", "worst_us")
KEY = ("head", "machine", "level")
COLUMNS = {
    **{name: f"{{{name}}}" for name in KEY},
    "MB": lambda row: f"{row['weight_bytes'] / 1e6:.0f}",
    "stages": "{stages:.0f}",
    "barriers": "{barriers}",
    **{name.removesuffix("_us"): f"{{{name}:.0f}}" for name in SHOWN},
    "best/floor": lambda row: f"{row['best_us'] / row['floor_us']:.2f}x",
    "worst/floor": lambda row: f"{row['worst_us'] / row['floor_us']:.2f}x",
}


def draw(intervals: list[Interval], title: str, path: Path) -> None:
    """Draw the intervals of one level: memory in the upper row, the warps in the lower one."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    colors = colormaps["tab10"].colors
    ops = list(dict.fromkeys(each.op for each in intervals))
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots()
    for each in intervals:
        height = 1 if each.actor == "memory" else 0
        width = each.end_us - each.begin_us
        color = colors[ops.index(each.op) % len(colors)]
        axes.barh(height, width, 0.7, each.begin_us, color=color, edgecolor="white", linewidth=0.5)
        if width > intervals[-1].end_us / 14:
            axes.text(each.begin_us + width / 2, height, each.op, ha="center", va="center")
    handles = [Rectangle((0, 0), 1, 1, color=colors[i % len(colors)]) for i in range(len(ops))]
    axes.legend(handles, ops, ncols=len(ops), loc="upper center", bbox_to_anchor=(0.5, -0.28))
    axes.set_yticks([0, 1], ["warps compute", "weights from memory"])
    axes.set_xlabel("microseconds (estimate)")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def one_level(intervals: list[Interval]) -> list[Interval]:
    """The deepest level: from the end of the previous level's logits (time 0) to the end of its own."""
    ends = [each.end_us for each in intervals if each.actor == "compute" and each.op == "logits"]
    begin, end = ([0.0, *ends])[-2:]
    return [
        Interval(each.actor, each.op, each.begin_us - begin, each.end_us - begin)
        for each in intervals
        if begin <= each.begin_us < end
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", action="append", choices=HEADS, help="may be repeated")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="may be repeated")
    parser.add_argument("--depth", type=int, default=5, help="levels of the draft")
    parser.add_argument("--top-k", type=int, default=1, help="1: a chain; more: a dynamic tree")
    parser.add_argument("--context", type=int, default=1024, help="elements in the cache")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--weights", choices=WEIGHT_BYTES, default="same")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--picture", type=Path, help="draw a level of the first head and machine")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    shape = {
        name: getattr(options, name) for name in ("depth", "top_k", "batch", "context", "weights")
    }
    tree = TreeConfig(depth=options.depth, top_k=options.top_k)
    heads, machines = options.head or list(HEADS), options.machine or list(MACHINES)
    works = {
        head: Workload(HEADS[head], tree, options.context, options.batch, options.weights)
        for head in heads
    }
    rows = []
    for head, name in product(heads, machines):
        levels = level_estimates(works[head], MACHINES[name])
        lines = {"first": levels[0], "last": levels[-1], "draft": draft_estimate(levels)}
        of = {"head": head, "machine": name}
        rows += [{**line, **of, "level": which} for which, line in lines.items()]
    speeds = [
        f"- {name}: {MACHINES[name].read_gb_per_s:.0f} GB/s ({MACHINES[name].source}), "
        f"{MACHINES[name].stages} stages."
        for name in machines
    ]
    notes = [*NOTES.splitlines(), *speeds]
    title = "Drafts by a head on a GPU, estimated"
    results = Results(title, "ESTIMATE, not a measurement", COLUMNS, KEY, rows, shape, notes)
    results.publish(options.out)
    if options.picture:
        work, machine = works[heads[0]], MACHINES[machines[0]]
        title = f"A level of the {heads[0].upper()} head, {machines[0].upper()}: estimate"
        draw(one_level(timeline(work, machine)), title, options.picture)
