"""The op benchmark: its PyTorch baselines equal the ops, its numbers are right, a run writes all rows."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import bench_cases
import bench_ops
import pytest
import timing
import torch
import torch_ops
from bench_cases import ACCEPTED, CASES
from text_table import format_markdown, format_table

CPU = torch.device("cpu")
SMALL = {case.op: case.reduced() for case in CASES if "cpu" in case.devices}


def outcome(op: str) -> tuple[bench_cases.Work, object, object]:
    """The work, the op's result and the baseline's; an op that changes its arguments gets copies."""
    case = SMALL[op]
    work, same = case.make(CPU, seed=3), case.make(CPU, seed=3)
    return work, case.run(same.arguments), work.baseline()


def test_tree_mask_formulation():
    work, ours, theirs = outcome("tree_mask")
    nodes = work.arguments[0].shape[1]
    bits = (ours.ancestors[..., :1] >> torch.arange(nodes)) & 1
    for mine, other in zip((bits.bool(), *ours[1:]), theirs, strict=True):
        assert torch.equal(mine, other)


def test_build_dynamic_tree_formulation():
    _, ours, theirs = outcome("build_dynamic_tree")
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[2][:, 1:], theirs[2])


@pytest.mark.parametrize(
    "op",
    [
        "verify_match greedy",
        "verify_match sampled",
        "verify_rejection",
        "verify_block",
        "verify_recursive",
    ],
)
def test_verification_accepts_what_the_case_planted(op):
    work, ours, (accepted, token) = outcome(op)
    vocab = work.arguments[0].shape[-1]
    assert ours.num_accepted.tolist() == list(accepted) == [ACCEPTED]
    assert ours.next_token.tolist() == list(token) == [vocab - 1]
    assert ours.status.tolist() == [0]


def test_sample_filter_formulation():
    _, ours, theirs = outcome("sample_filter")
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("op", ["kv_compact", "kv_compact paged"])
def test_kv_compact_formulation(op):
    case = SMALL[op]
    work, same, before = (case.make(CPU, seed=3) for _ in range(3))
    case.run(work.arguments)
    same.baseline()
    for mine, other, original in zip(
        work.arguments[0], same.arguments[0], before.arguments[0], strict=True
    ):
        assert torch.equal(mine, other)
        assert not torch.equal(mine, original)


@pytest.mark.parametrize("op", ["tree_attention", "tree_attention paged", "linear"])
def test_formulations_in_floating_point(op):
    _, ours, theirs = outcome(op)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("op", ["draft_head chain", "draft_head tree"])
def test_draft_head_formulation(op):
    case = replace(SMALL[op], dtype=torch.float32)
    work = case.make(CPU, seed=3)
    for given, expected in zip(case.run(work.arguments), work.baseline(), strict=False):
        assert torch.equal(given, expected)


@pytest.mark.parametrize("op", SMALL)
def test_seeds_change_values_and_nothing_else(op):
    first, again, other = (list(tensors(SMALL[op].make(CPU, seed).arguments)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [t.shape for t in first] == [t.shape for t in other]
    assert (
        not all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) or op == "tree_mask"
    )


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def test_the_benchmarks_trees_have_at_most_eight_levels():
    for nodes in (1, 2, 8, 60, 64):
        parents = bench_cases.Inputs(CPU, 0).parents(2, nodes)
        depths = torch_ops.tree_mask(parents, torch.zeros(2, dtype=torch.int64))[1]
        assert depths.max() == min(nodes, torch_ops.LEVELS) - 1
        assert parents[0].tolist() == parents[1].tolist()


def test_quantiles():
    times = timing.Times([float(i) for i in range(100, 0, -1)])
    assert (times.quantile(0.1), times.median, times.quantile(0.9)) == (11.0, 50.5, 90.0)
    assert timing.Times([3.0]).quantile(0.9) == 3.0


def test_the_stopwatch_alternates_flushes_and_primes(monkeypatch):
    log = []
    monkeypatch.setattr(timing, "last_level_cache_bytes", lambda device: 1 << 12)
    stopwatch = timing.Stopwatch(CPU)
    monkeypatch.setattr(stopwatch, "cool", lambda: log.append("cool"))
    contestants = {name: (lambda name=name: log.append(name)) for name in ("a", "b")}
    primers = {name: (lambda name=name: log.append(f"prime {name}")) for name in ("a", "b")}
    times = stopwatch.time(contestants, 5, primers=primers)
    assert log[:6] == ["a"] * 3 + ["b"] * 3
    assert log[6:] == ["cool", "prime a", "a", "cool", "prime b", "b"] * 5
    assert [len(each.calls) for each in times.values()] == [5, 5]
    # Time is up at once, yet five calls are made.
    assert len(stopwatch.time(contestants, 9, seconds=0)["a"].calls) == 5


def test_tables():
    header, rows = ["op", "us"], [["tree_mask", "1.5"], ["linear", "12.0"]]
    assert format_table(header, rows, left=("op",)).splitlines() == [
        "op           us",
        "---------------",
        "tree_mask   1.5",
        "linear     12.0",
    ]
    assert format_markdown(header, rows).splitlines() == [
        "| op | us |",
        "|---|---|",
        "| tree_mask | 1.5 |",
        "| linear | 12.0 |",
    ]


def test_a_run_prints_the_machine_and_writes_json_and_csv(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "LARGE", 1 << 16)
    monkeypatch.setattr(timing, "last_level_cache_bytes", lambda device: 1 << 16)
    options = ["--device", "cpu", "--op", "kv_compact", "--model", "small", "--repeats", "5"]
    bench_ops.main([*options, "--out", str(tmp_path / "ops")])
    printed = capsys.readouterr().out
    assert "torch" in printed.splitlines()[0] and "%copy" in printed
    report = json.loads((tmp_path / "ops.json").read_text())
    row, paged = report["rows"]
    assert paged["op"] == "kv_compact paged"
    assert (row["op"], row["case"], row["dtype"], row["calls"]) == (
        "kv_compact", "small", "bfloat16", 5,
    )  # fmt: skip
    # 8 tokens of 2 heads of 64 bfloat16, K and V of 6 layers, read and written.
    moved = 2 * 8 * 2 * 64 * 2 * 12
    assert row["gb_per_s"] == pytest.approx(moved / row["median_us"] / 1e3)
    assert row["copy_percent"] == pytest.approx(100 * row["gb_per_s"] / report["copy_gb_per_s"])
    line, _ = csv.DictReader((tmp_path / "ops.csv").open())
    assert line["op"] == "kv_compact" and float(line["median_us"]) == row["median_us"]


def test_compiled_formulations_have_a_column(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "LARGE", 1 << 16)
    monkeypatch.setattr(timing, "last_level_cache_bytes", lambda device: 1 << 16)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    options = ["--device", "cpu", "--op", "verify_match", "--model", "small", "--repeats", "5"]
    bench_ops.main([*options, "--compile", "--largest", "--out", str(tmp_path / "ops")])
    assert "vs compile" in capsys.readouterr().out
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert [row["op"] for row in rows] == ["verify_match greedy", "verify_match sampled"]
    assert all(row["nodes"] == 64 and row["compile_us"] > 0 for row in rows)


def test_an_op_that_is_not_built_is_an_error_only_when_named(monkeypatch):
    monkeypatch.delattr(bench_cases.ops, "kv_compact")
    with pytest.raises(SystemExit, match="--op kv_compact: not in this build"):
        bench_ops.chosen_cases(["kv_compact"], [], "cpu")
    cases, missing = bench_ops.chosen_cases([], [], "cpu")
    assert "kv_compact" in missing and cases
    assert all(case.function != "kv_compact" for case in cases)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--op", "matmul"], "--op matmul: expected some of tree_mask"),
        (["--model", "gpt5"], "--model gpt5: expected some of llama3-70b"),
    ],
)
def test_unknown_names_are_errors(arguments, message):
    with pytest.raises(SystemExit, match=message):
        bench_ops.main(["--device", "cpu", *arguments])


def test_cupy_is_an_error_on_the_cpu(capsys):
    with pytest.raises(SystemExit):
        bench_ops.main(["--device", "cpu", "--cupy"])
    assert "--cupy times CUDA work; use it with --device cuda" in capsys.readouterr().err


def test_largest_is_one_case_per_op():
    cases, _ = bench_ops.chosen_cases([], ["llama3-8b"], "cpu", largest=True)
    assert [case.op for case in cases] == list(dict.fromkeys(case.op for case in cases))
    sizes = {case.op: case.nodes for case in cases}
    assert sizes["verify_match greedy"] == 64


def test_every_op_has_cases_of_all_sizes():
    expected = {
        "tree_mask", "build_dynamic_tree", "verify_match", "verify_rejection", "verify_block",
        "verify_recursive", "sample_filter", "kv_compact", "tree_attention", "draft_head", "linear",
    }  # fmt: skip
    assert set(bench_cases.OPS) == expected
    for op in ("kv_compact", "tree_attention", "linear"):
        named = {case.name for case in CASES if case.function == op}
        assert named == set(bench_cases.MODELS)
