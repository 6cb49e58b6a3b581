"""The time model of the fused draft_head: its sums are consistent, and its constants are the kernel's.

The model only estimates; these tests measure no time.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from baselines.heads import HEADS
from cuda_kernels import model_draft_head
from cuda_kernels.draft_schedule import Matrix, needed_bytes
from cuda_kernels.model_draft_head import (
    MACHINES,
    PARTS,
    Workload,
    compute_us,
    draft_estimate,
    level_estimates,
    phase_costs,
    timeline,
)
from helpers.places import ROOT

from specdec_ext import _host
from specdec_ext.tree.config import TreeConfig

CHAIN = TreeConfig(depth=5)
TREE = TreeConfig(depth=8, top_k=5, num_nodes=60)
WORKS = {
    "chain": Workload(HEADS["8b"], CHAIN),
    "tree": Workload(HEADS["70b"], TREE, context=4096),
    "batch": Workload(HEADS["32b"], TREE, batch=16),
    "int8": Workload(HEADS["8b"], CHAIN, weights="int8"),
}


def test_bytes_of_a_level():
    first, *_, last = level_estimates(WORKS["chain"], MACHINES["h200"])
    weights = 2 * (6144 * 8192 + 4096 * 4096 + 28_672 * 4096 + 4096 * 14_336 + 32_000 * 4096)
    assert last["weight_bytes"] == weights == 748_683_264
    assert first["weight_bytes"] == weights + 2 * 4096 * 12_288
    # 1024 elements, 3 new ones and the 4 nodes that were expanded before and are now.
    assert last["cache_bytes"] == 2 * 8 * 128 * 2 * (1024 + 3 + 4)
    assert (first["barriers"], last["barriers"]) == (9, 8)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_sums(work, machine):
    """The parts of the worst case add up to its total, and the floor is bytes divided by bandwidth."""
    costs, rows = phase_costs(work, machine), level_estimates(work, machine)
    total = draft_estimate(rows)
    launch = model_draft_head.TIMES["launch"]
    assert total["worst_us"] == pytest.approx(launch + sum(cost.worst_us for cost in costs))
    for part in PARTS:
        assert total[part] == pytest.approx(sum(getattr(cost, part) for cost in costs))
    for row in rows:
        assert row["memory_us"] == pytest.approx(
            (row["weight_bytes"] + row["cache_bytes"]) / machine.read_gb_per_s / 1e3
        )
        assert row["floor_us"] <= row["memory_us"] * (1 + 1e-9)
        assert row["floor_us"] < row["best_us"]
        assert row["goal_us"] == pytest.approx(1.35 * row["floor_us"])
    assert total["best_us"] < total["worst_us"]
    needed = needed_bytes(work.config, work.tree, work.weights) + total["cache_bytes"]
    assert total["floor_us"] == pytest.approx(needed / machine.read_gb_per_s / 1e3)


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_each_unit_does_one_thing_at_a_time(work):
    machine = MACHINES["h100"]
    costs = phase_costs(work, machine)
    intervals = timeline(work, machine)
    ring_us = machine.read_us(machine.ring_bytes(work.weights))
    for actor in ("memory", "compute"):
        own = [each for each in intervals if each.actor == actor]
        for before, after in pairwise(own):
            assert before.begin_us <= before.end_us <= after.begin_us + 1e-6
        if actor == "memory":  # what comes ahead of products fits into the ring
            assert max(each.end_us - each.begin_us for each in own[::2]) <= ring_us + 1e-9
    streamed = sum(each.end_us - each.begin_us for each in intervals if each.actor == "memory")
    assert (
        streamed
        >= sum(cost.memory_us for cost in costs if cost.op not in model_draft_head.OTHERS) - 1e-6
    )


def test_without_latencies_the_best_case_is_the_floor(monkeypatch):
    monkeypatch.setattr(model_draft_head, "TIMES", dict.fromkeys(model_draft_head.TIMES, 0.0))
    machine = replace(MACHINES["h200"], barrier_us=0.0, l2_gb_per_s=float("inf"))
    total = draft_estimate(level_estimates(WORKS["chain"], machine))
    tail = phase_costs(WORKS["chain"], machine)[-2].tail_us  # nothing follows that could hide it
    assert total["best_us"] == pytest.approx(total["floor_us"] + tail)


def test_computing_slower_than_memory_sets_the_pace(monkeypatch):
    monkeypatch.setitem(model_draft_head.TIMES, "stage", 5.0)
    total = draft_estimate(level_estimates(WORKS["chain"], MACHINES["h200"]))
    assert total["compute_us"] > 5 * total["memory_us"]
    assert total["best_us"] > total["compute_us"]


def test_slices_of_inputs_are_waited_for_where_they_do_not_come_ahead(monkeypatch):
    """60 tiles of the busiest block make 8 panels, the last with 4 tiles; 8192 bfloat16 inputs, 16 slices."""
    matrix, machine = Matrix(outs=60 * 8 * 132, ins=8192), MACHINES["h200"]
    times = {"stage": 1.0, "refill": 0.0, "multiply": 0.0, "slice": 5.0}
    for name, value in times.items():
        monkeypatch.setitem(model_draft_head.TIMES, name, value)
    assert compute_us(matrix, 16, "same", machine) == 8 * 5 + 16 * (7 * 8 + 5)
    assert compute_us(matrix, 17, "same", machine) == 16 * (60 + 8 * 5)


def test_the_ring_is_the_kernels():
    """47 KiB are reserved: 21 stages fit into a Hopper block's 227 KiB, 13 into an Ampere block's 163 KiB."""
    kernels = ROOT / "csrc" / "kernels" / "draft_head"
    text = "".join(path.read_text() for path in kernels.rglob("*.cuh"))
    assert f"kMaxStages = {model_draft_head.MOST_STAGES};" in text
    assert "kStageRowBytes = kSliceBytes + 64;" in text
    assert f"kLag = {model_draft_head.LAG};" in text
    assert "kLoadsAhead = kRowTiles == 1 && sizeof(T) == 2;" in text
    tile = model_draft_head.TILE_ROWS * _host.DRAFT_TILE_OUTS
    assert "kDraftWarps = 8;" in text and f"kTileRows = {model_draft_head.TILE_ROWS};" in text
    assert 8 * _host.DRAFT_PANEL_TILES * tile * 4 == model_draft_head.REDUCE_BYTES
    assert (MACHINES["h200"].stages, MACHINES["a100"].stages) == (21, 13)


def test_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    places = ["--out", str(tmp_path / "model"), "--picture", str(tmp_path / "pictures" / "8b.png")]
    model_draft_head.main(["--head", "8b", "--machine", "h200", *places])
    printed = capsys.readouterr().out
    assert printed.startswith("ESTIMATE, not a measurement\ndepth 5, top_k 1, batch 1")
    assert [line.split()[:3] for line in printed.splitlines()[-3:]] == [
        ["8b", "h200", "first"],
        ["8b", "h200", "last"],
        ["8b", "h200", "draft"],
    ]
    report = json.loads((tmp_path / "model.json").read_text())
    assert report["machine"].startswith("ESTIMATE") and report["depth"] == 5
    assert [row["level"] for row in report["rows"]] == ["first", "last", "draft"]
    assert (tmp_path / "pictures" / "8b.png").stat().st_size > 5000


@pytest.mark.parametrize("head", HEADS)
def test_the_estimates_in_the_documentation_are_of_today(head):
    cells = [f"{head.upper()} target"]
    for machine in (MACHINES["h200"], MACHINES["h100"]):
        total = draft_estimate(level_estimates(Workload(HEADS[head], CHAIN), machine))
        floor, best, worst = (total[f"{name}_us"] / 1e3 for name in ("floor", "best", "worst"))
        cells += [f"{floor:.2f} ms", f"{best:.2f} to {worst:.2f} ms"]
    page = (ROOT / "docs" / "reference" / "performance.md").read_text()
    assert f"| {' | '.join(cells)} |\n" in page


def test_the_committed_estimates_are_of_today(tmp_path):
    model_draft_head.main(["--out", str(tmp_path / "model")])
    committed = (ROOT / "profiling" / "results" / "draft_head" / "draft_head_model.md").read_text()
    assert (tmp_path / "model.md").read_text() == committed
