"""The draft benchmarks: all contestants draft the same trees, byte counts are right, reports are complete."""

import json
from pathlib import Path

import bench_draft_head
import bench_draft_head_cuda
import gpu_steps
import pytest
import timing
import torch
from bench_draft_head import CASES, Case, contest
from bench_draft_head_cuda import CONFIGS
from draft_calls import DraftCall, RandomHead
from timing import Bandwidth
from torch_draft_head import TorchHead
from typer.testing import CliRunner

from specdec_ext.tree.config import TreeConfig


def tiny(tree: TreeConfig, dtype: torch.dtype = torch.float32, rows: int = 2) -> Case:
    return Case("tiny", 64, 96, 16, 300, dtype, tree, rows)


@pytest.mark.parametrize(
    "tree", [bench_draft_head.CHAIN, bench_draft_head.TREE], ids=["chain", "tree"]
)
def test_contestants_draft_the_same(tree):
    """``contest`` itself compares the drafts; the op's cache keeps the committed elements."""
    ours, theirs = contest(tiny(tree), context=20).runs.values()
    for _ in range(2):
        for given, expected in zip(ours(), theirs(), strict=False):
            assert torch.equal(given, expected)


def test_a_difference_is_not_timed(monkeypatch):
    monkeypatch.setattr(TorchHead, "draft", lambda self, tokens, *_: (tokens, tokens))
    with pytest.raises(SystemExit, match="tiny: the op and PyTorch draft different tokens"):
        contest(tiny(bench_draft_head.CHAIN), context=4)


def test_bytes_of_a_draft():
    """Reads fc once, and all other weights and the cache for each of five levels."""
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


# --- on a GPU: the same code on a CPU ---------------------------------------------------------------


def measure_tiny(tmp_path: Path, monkeypatch, *arguments: str) -> dict:
    monkeypatch.setattr(bench_draft_head_cuda, "READ", 1 << 16)
    monkeypatch.setattr(timing, "LARGE", 1 << 16)
    monkeypatch.setattr(timing, "last_level_cache_bytes", lambda device: 1 << 16)
    common = ["--device", "cpu", "--head", "tiny", "--weights", "same", "--repeats", "5"]
    bench_draft_head_cuda.main([*common, *arguments, "--out", str(tmp_path / "report")])
    return json.loads((tmp_path / "report.json").read_text())


def test_the_gpus_benchmark(tmp_path, monkeypatch, capsys):
    arguments = ["--draft", "chain 3", "--draft", "tree 60", "--batch", "2", "--context", "16"]
    report = measure_tiny(tmp_path, monkeypatch, *arguments, "--dtype", "float32")
    chain, tree = report["rows"]
    assert (chain["levels"], tree["levels"]) == (3, 8)
    # In float32 op and modules draft the same.
    assert chain["agree"] == tree["agree"] == 1
    for row in report["rows"]:
        assert row["level_us"] == pytest.approx(row["ours_us"] / row["levels"])
        assert row["gb_per_s"] == pytest.approx(row["needed_mb"] / row["ours_us"] * 1e3)
        share = 100 * row["gb_per_s"] / report["read_gb_per_s"]
        assert row["read_percent"] == pytest.approx(share)
        assert row["host_us"] > 0 and row["torch_us"] > 0
    printed = capsys.readouterr().out
    assert gpu_steps.read_table(printed) == "2 cases"
    assert printed.splitlines()[-1].split()[:5] == ["tiny", "same", "tree", "60", "2"]


def test_needed_bytes():
    """Reads fc once, and all other weights and the caches of 2 rows for each of five levels."""
    call = DraftCall.make(RandomHead(CONFIGS["tiny"], torch.bfloat16, "cpu"), CASES[0].tree, 20, 2)
    weights = (4 + 2 + 2) * 16 * 128 + 64 * 64 + 3 * 64 * 96 + 300 * 64
    cache = 2 * 2 * (20 + 3) * 16
    assert call.needed_bytes == 2 * (64 * 3 * 64 + 5 * (weights + 2 * cache))


def test_disagreement_shows(monkeypatch):
    call = DraftCall.make(RandomHead(CONFIGS["tiny"], torch.float32, "cpu"), CASES[0].tree, 20, 2)
    assert bench_draft_head_cuda.agreement(call) == 1
    nothing = torch.full((2, 6), -1)
    monkeypatch.setattr(TorchHead, "draft", lambda *_: (nothing, nothing))
    assert bench_draft_head_cuda.agreement(call) == 0


def test_the_plan_needs_no_gpu(capsys):
    bench_draft_head_cuda.main(["--quick", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    # Of three heads a chain with each of three types of weights, and a tree; two more batches.
    assert "estimates" in lines[0] and len(lines) == 3 + 3 * 4 + 2
    bench_draft_head_cuda.main(["--dry-run"])
    assert len(capsys.readouterr().out.splitlines()) == 3 + 3 * 3 * 4 * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        bench_draft_head_cuda.main([])
    assert "needs a GPU and a CUDA build of torch; --dry-run" in capsys.readouterr().err
