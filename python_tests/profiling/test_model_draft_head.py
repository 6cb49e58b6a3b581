"""The time model of the fused draft_head: its constants are the kernel's, and its tables are of today.

The model only estimates; these tests measure no time.
"""

from __future__ import annotations

import json

import pytest
from baselines.heads import HEADS
from cuda_kernels import model_draft_head
from cuda_kernels.model_draft_head import (
    MACHINES,
    Workload,
    draft_estimate,
    level_estimates,
)
from helpers.places import ROOT

from specdec_ext import _host
from specdec_ext.tree.config import TreeConfig

CHAIN = TreeConfig(depth=5)


def test_bytes_of_a_level():
    first, *_, last = level_estimates(Workload(HEADS["8b"], CHAIN), MACHINES["h200"])
    weights = 2 * (6144 * 8192 + 4096 * 4096 + 28_672 * 4096 + 4096 * 14_336 + 32_000 * 4096)
    assert last["weight_bytes"] == weights == 748_683_264
    assert first["weight_bytes"] == weights + 2 * 4096 * 12_288
    # 1024 elements, 3 new ones and the 4 nodes that were expanded before and are now.
    assert last["cache_bytes"] == 2 * 8 * 128 * 2 * (1024 + 3 + 4)
    assert (first["barriers"], last["barriers"]) == (9, 8)
    # Tiles of 8 outputs, in slices of 512 inputs: 91,392 of them, with 132 SMs 692 for each.
    tiles = 768 * 16 + 512 * 8 + 3584 * 8 + 512 * 28 + 4000 * 8
    assert last["stages"] * 132 == pytest.approx(tiles)
    assert first["stages"] * 132 == pytest.approx(tiles + 512 * 24)


def test_the_ring_is_the_kernels():
    """47 KiB are reserved: 21 stages fit into a Hopper block's 227 KiB, 13 into an Ampere block's 163 KiB."""
    kernels = ROOT / "csrc" / "kernels" / "draft_head"
    text = "".join(path.read_text() for path in kernels.rglob("*.cuh"))
    assert f"kMaxStages = {model_draft_head.MOST_STAGES};" in text
    assert "kStageRowBytes = kSliceBytes + kUnitBytes;" in text
    assert f"kLeastLag = {model_draft_head.LEAST_LAG};" in text
    assert "max(kLeastLag, block_.num_stages / 4)" in text
    assert "kLoadsAhead = kRowTiles == 1 && sizeof(T) == 2;" in text
    tile = model_draft_head.TILE_ROWS * _host.DRAFT_TILE_OUTS
    assert (
        f"kDraftWarps = {model_draft_head.WARPS};" in text
        and f"kTileRows = {model_draft_head.TILE_ROWS};" in text
    )
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
