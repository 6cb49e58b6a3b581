"""The op benchmark: its PyTorch baselines equal the ops, its numbers are right, a run writes all rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from bench import op_cases, ops, runner, stopwatch
from bench.op_cases import CASES
from bench.runner import Case, Results
from bench.stopwatch import Stopwatch

CPU = torch.device("cpu")
SMALL = {case.op: case.reduced() for case in CASES if "cpu" in case.devices}


@pytest.mark.parametrize("op", SMALL)
def test_formulations_agree_with_the_ops(op):
    assert SMALL[op].agrees(CPU)


@pytest.mark.parametrize("op", SMALL)
def test_a_formulation_that_computes_something_else_is_found(op):
    """The formulation gets other inputs; of verification, whose results are planted, other results."""
    case = SMALL[op]
    if case.function == "draft_head":
        case = replace(case, dtype=torch.float32)
    ours, theirs = (case.make(CPU, seed) for seed in (3, 4))
    if op == "tree_mask":
        theirs.arguments[0][0, 2] = 0
    result, expected = case.run(ours.arguments), theirs.baseline()
    if op.startswith("verify"):
        accepted, token = expected
        expected = [int(each) - 1 for each in accepted], token
    assert not ours.agree(ours.changed or result, theirs.changed or expected)


def test_the_stopwatch_alternates_flushes_and_primes(monkeypatch):
    log = []
    monkeypatch.setattr(stopwatch, "last_level_cache_bytes", lambda device: 1 << 12)
    watch = Stopwatch(CPU)
    monkeypatch.setattr(watch, "cool", lambda: log.append("cool"))
    contestants = {name: (lambda name=name: log.append(name)) for name in ("a", "b")}
    primers = {name: (lambda name=name: log.append(f"prime {name}")) for name in ("a", "b")}
    times = watch.time(contestants, 5, primers=primers)
    assert log[:6] == ["a"] * 3 + ["b"] * 3
    assert log[6:] == ["cool", "prime a", "a", "cool", "prime b", "b"] * 5
    assert [len(each) for each in times.values()] == [5, 5]
    # Time is up at once, yet five calls are made.
    assert len(watch.time(contestants, 9, seconds=0)["a"]) == 5


def test_a_run_prints_the_machine_and_writes_json_and_markdown(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(stopwatch.LARGE, "cpu", 1 << 16)
    monkeypatch.setattr(stopwatch, "last_level_cache_bytes", lambda device: 1 << 16)
    options = ["--device", "cpu", "--op", "kv_compact", "--model", "small", "--repeats", "5"]
    ops.main([*options, "--out", str(tmp_path / "ops")])
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
    assert row["gb_per_s"] == pytest.approx(moved / row["ours_us"] / 1e3)
    assert row["vs_torch"] == pytest.approx(row["torch_us"] / row["ours_us"])
    assert row["vs_torch_95"][0] <= row["vs_torch"] <= row["vs_torch_95"][1]
    assert row["copy_percent"] == pytest.approx(100 * row["gb_per_s"] / report["copy_gb_per_s"])
    page = (tmp_path / "ops.md").read_text()
    assert report["machine"] in page and "| kv_compact | small | bfloat16 | 1 | 64 | 5 |" in page


def test_rows_of_an_earlier_run_are_kept_when_asked(tmp_path, capsys):
    columns = {"op": "{op}", "us": "{ours_us:.1f}", "graph": "{graph_us:.0f}"}

    def publish(add, **times):
        rows = [{"op": op, "ours_us": us} for op, us in times.items()]
        results = Results("Ops", "a machine", columns, ("op",), rows, {"read_gb_per_s": 26.748})
        results.publish(tmp_path / "ops", add)
        return [
            (row["op"], row["ours_us"])
            for row in json.loads((tmp_path / "ops.json").read_text())["rows"]
        ]

    assert publish(False, a=1.0, b=2.0) == [("a", 1.0), ("b", 2.0)]
    assert publish(True, b=3.0, c=4.0) == [("a", 1.0), ("b", 3.0), ("c", 4.0)]
    page = (tmp_path / "ops.md").read_text().splitlines()
    assert page[:5] == ["# Ops", "", "a machine", "", "read_gb_per_s 26.7"]
    assert page[-3:] == ["| a | 1.0 | - |", "| b | 3.0 | - |", "| c | 4.0 | - |"]
    assert publish(False, c=5.0) == [("c", 5.0)]
    assert "c   5.0      -" in capsys.readouterr().out


def test_a_run_replaces_its_own_record(tmp_path):
    def publish(**seconds):
        records = [{"run": run, "seconds": taken} for run, taken in seconds.items()]
        results = Results("Ops", "a machine", {"op": "{op}"}, ("op",), [], records=records)
        results.publish(tmp_path / "ops", add=True)
        kept = json.loads((tmp_path / "ops.json").read_text())["records"]
        return {record["run"]: record["seconds"] for record in kept}

    assert publish(a=1.0, b=2.0) == {"a": 1.0, "b": 2.0}
    assert publish(b=3.0, c=4.0) == {"a": 1.0, "b": 3.0, "c": 4.0}


def test_a_case_becomes_a_row(monkeypatch):
    """Medians, the bandwidth of ours, and ratios whose interval is that of the paired turns."""
    times = {"ours": [2.0, 4.0, 6.0], "torch": [6.0, 12.0, 18.0]}
    monkeypatch.setattr(Stopwatch, "__init__", lambda self: None)
    monkeypatch.setattr(Stopwatch, "time", lambda self, calls, repeats, **how: times)
    case = Case({"op": "x"}, dict.fromkeys(times, int), 8000, bool, more=lambda: {"agree": 1.0})
    with pytest.raises(SystemExit, match="x: the results differ; not timed"):
        runner.measure(case, Stopwatch(), 3)
    case = replace(case, agree=lambda: True)
    row = runner.measure(case, Stopwatch(), 3)
    assert (row["op"], row["calls"], row["ours_us"]) == ("x", 3, 4.0)
    assert row["torch_p10_us"] == pytest.approx(7.2) and row["torch_p90_us"] == pytest.approx(16.8)
    assert (row["vs_torch"], row["vs_torch_95"]) == (3.0, [3.0, 3.0])
    assert (row["gb_per_s"], row["moved_mb"], row["agree"]) == (2.0, 0.008, 1.0)


def test_compiled_formulations_have_a_column(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(stopwatch.LARGE, "cpu", 1 << 16)
    monkeypatch.setattr(stopwatch, "last_level_cache_bytes", lambda device: 1 << 16)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    options = ["--device", "cpu", "--op", "verify_match", "--model", "small", "--repeats", "5"]
    ops.main([*options, "--compile", "--largest", "--out", str(tmp_path / "ops")])
    assert "vs compile" in capsys.readouterr().out
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert [row["op"] for row in rows] == ["verify_match greedy", "verify_match sampled"]
    assert all(row["nodes"] == 64 and row["compile_us"] > 0 for row in rows)


def test_an_op_that_is_not_built_is_an_error_only_when_named(monkeypatch):
    monkeypatch.delattr(op_cases.ops, "kv_compact")
    with pytest.raises(SystemExit, match="--op kv_compact: not in this build"):
        ops.chosen_cases(["kv_compact"], [], "cpu")
    cases, missing = ops.chosen_cases([], [], "cpu")
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
        ops.main(["--device", "cpu", *arguments])


def test_cupy_is_an_error_on_the_cpu(capsys):
    with pytest.raises(SystemExit):
        ops.main(["--device", "cpu", "--cupy"])
    assert "--cupy times CUDA work; use it with --device cuda" in capsys.readouterr().err


def test_largest_is_one_case_per_op():
    cases, _ = ops.chosen_cases([], ["llama3-8b"], "cpu", largest=True)
    assert [case.op for case in cases] == list(dict.fromkeys(case.op for case in cases))
    sizes = {case.op: case.nodes for case in cases}
    assert sizes["verify_match greedy"] == 64


def test_every_op_has_cases_of_all_sizes():
    expected = {
        "tree_mask", "build_dynamic_tree", "verify_match", "verify_rejection", "verify_block",
        "verify_recursive", "sample_filter", "kv_compact", "tree_attention", "draft_head", "linear",
        "merge_trees", "ngram_draft", "adjust_logits",
    }  # fmt: skip
    assert set(op_cases.OPS) == expected
    for op in ("kv_compact", "tree_attention", "linear"):
        named = {case.name for case in CASES if case.function == op}
        assert named == set(op_cases.MODELS)
