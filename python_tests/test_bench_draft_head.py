"""``profiling/bench_draft_head.py``: both contestants draft the same trees, and the report is complete."""

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "profiling"))
import bench_draft_head
from bench_draft_head import CASES, Case, contest
from timing import Bandwidth

from specdec_ext.tree_config import TreeConfig


def tiny(tree: TreeConfig, dtype: torch.dtype = torch.float32, rows: int = 2) -> Case:
    return Case("tiny", 64, 96, 16, 300, dtype, tree, rows)


@pytest.mark.parametrize(
    "tree", [bench_draft_head.CHAIN, bench_draft_head.TREE], ids=["chain", "tree"]
)
def test_contestants_draft_the_same(tree):
    """``contest`` compares them by itself; the op's cache keeps the committed elements."""
    ours, theirs = contest(tiny(tree), context=20).runs.values()
    for _ in range(2):
        for given, expected in zip(ours(), theirs(), strict=False):
            assert torch.equal(given, expected)


def test_a_difference_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        bench_draft_head.TorchHead, "draft", lambda self, tokens, *_: (tokens, tokens)
    )
    with pytest.raises(SystemExit, match="tiny: the op and PyTorch draft different tokens"):
        contest(tiny(bench_draft_head.CHAIN), context=4)


def test_bytes_of_a_draft():
    """fc once; for each of five levels all other weights and the cache."""
    attention = (4 + 2 + 2) * 16 * 128 + 64 * 64
    weights = attention + 3 * 64 * 96 + 300 * 64 + 4 * 64  # MLP, lm_head, norms
    cache = 2 * 2 * 20 * 16
    moved = contest(tiny(bench_draft_head.CHAIN, rows=1), context=20).moved_bytes
    assert moved == 4 * (64 * 3 * 64 + 5 * (weights + cache))


def test_report(monkeypatch, tmp_path):
    import typer

    monkeypatch.setattr(bench_draft_head, "CASES", [tiny(CASES[0].tree, torch.bfloat16)])
    monkeypatch.setattr(
        bench_draft_head.Stopwatch, "bandwidth", lambda self: Bandwidth(copy=10.0, read=20.0)
    )
    app = typer.Typer()
    app.command()(bench_draft_head.main)
    command = ["--repeats", "5", "--context", "16", "--warm", "--out", str(tmp_path / "report")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "read 20 GB/s, caches warm" in result.output and "chain 5" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    (row,) = report["rows"]
    assert row["read_percent"] == pytest.approx(5 * row["gb_per_s"])
    assert row["moved_mb"] == pytest.approx(row["gb_per_s"] * row["ours_us"] / 1e3)
