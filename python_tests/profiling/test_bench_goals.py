"""``profiling/bench_goals.py`` and ``bench_memory.py``: verdicts, bounds and records, without timing."""

import json
from pathlib import Path

import bench_goals
import bench_memory
import pytest
import random_targets
import torch
from bench_goals import Measured, Model, Part, Race, Row, Scale
from bench_memory import MIB, Bound, Peak
from tiny_shapes import TINY

from specdec_ext.evaluate.benchmark import PLAIN, Report, Series


def series(name, *seconds):
    return Series(name, seconds=list(seconds), new_tokens=[12] * len(seconds))


@pytest.mark.parametrize("goal, met", [(1.9, True), (2.0, True), (2.1, False)])
def test_a_ratio_meets_its_goal_or_misses_it(goal, met):
    rows = {"ours": series("ours", 1.0, 2.0), "theirs": series("theirs", 2.0, 4.0)}
    found = Measured()
    found.at_least(Report("", {"dtype": "float32"}, rows, "theirs"), "what", "ours", "theirs", goal)
    expected = ("what", "float32", f">= {goal:g}x", "2.00x [2.00, 2.00]")
    assert found.rows[0].cells == (*expected, "met" if met else "missed")


def test_a_bound_is_met_up_to_itself():
    found = Measured()
    for value in (0.4996, 0.5, 0.51):
        found.at_most("what", "float32", value, 0.5, "ms", 2)
    assert [row.met for row in found.rows] == [True, True, False]
    assert found.rows[2].cells[2:4] == ("<= 0.50 ms", "0.51 ms")
    assert Row("what", "", "", "", None).cells[-1] == "not measured"


def test_the_synthetic_rows(monkeypatch):
    monkeypatch.setitem(random_targets.SHAPES, "135m", ("llama", TINY, 48))
    found = Measured()
    bench_goals.synthetic("float32", Scale.quick(), found)
    ratio, cost = found.rows
    assert (
        "synthetic acceptance 3.5 at chain 7, 16 tokens" in ratio.what and ratio.goal == ">= 2.3x"
    )
    assert cost.goal == "<= 1.52" and "at 3.5" in cost.measured
    names = [row["name"] for row in found.records[0]["rows"]]
    ours = "specdec, synthetic acceptance 3.5 at chain 7"
    assert names == [PLAIN, ours, f"{ours}, auto"]
    assert [row["same_text"] for row in found.records[0]["rows"]] == ["", "1/1", "1/1"]


def test_a_run_writes_its_table(tmp_path):
    out = tmp_path / "goals"
    arguments = dict(only=[Part.training], dtype=[], training_folder=tmp_path, quick=True, out=out)
    bench_goals.main(**arguments)
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["rows"][0]["met"] is None and "history.jsonl" in record["rows"][0]["measured"]
    assert "numbers are not meaningful" in out.with_suffix(".md").read_text()
    # what is measured again replaces what was, the rest stays
    other = {**record["rows"][0], "what": "of another run"}
    record["rows"] = [other, {**record["rows"][0], "measured": "long ago"}]
    out.with_suffix(".json").write_text(json.dumps(record))
    bench_goals.main(**arguments, add=True)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["of another run", record["rows"][1]["what"]]
    assert "history.jsonl" in rows[1]["measured"]


def test_a_race_pairs_calls():
    """A machine that is slow for a while slows both contestants of a pair, so the intervals stay narrow."""
    pair = ("ours", PLAIN)
    race = Race({pair: [(0.5, 1.0), (1.5, 3.0), (0.5, 1.0), (5.0, 10.0)]})
    ratio = race.speedup(*pair, prompts=2)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    calls = []
    contestants = {
        name: lambda prompt, name=name: calls.append((name, prompt)) for name in (PLAIN, "ours")
    }
    race = Race.run(contestants, [pair], ["a", "b"], 2)
    assert [len(times) for times in race.pairs.values()] == [4]
    timed = calls[2:]
    assert [prompt for _, prompt in timed] == ["a", "a", "b", "b"] * 2
    assert [name for name, _ in timed[::2]] == [PLAIN, PLAIN, "ours", "ours"]  # who begins


def test_every_drafter_is_raced_with_plain_decoding(monkeypatch):
    monkeypatch.setitem(random_targets.SHAPES, "135m", ("llama", TINY, 48))
    found = Measured()
    bench_goals.never_slower(Model.small, "float32", 2, Scale.quick(), found)
    raced = [
        row.what.removeprefix("135m, batch 2: ").removesuffix(" to plain") for row in found.rows
    ]
    assert raced == ["lookahead", "suffix", "draft model", "random head", "n-gram", "adversary"]
    assert {row.goal for row in found.rows} == {">= 0.97x"}
    seconds = found.records[0]["seconds"]
    assert len(seconds) == 6 and all(len(each) == 1 for each in seconds.values())


# --- memory ---------------------------------------------------------------------------------------


def test_what_a_head_needs(monkeypatch):
    """27,072 weights of a tiny head, counted by hand, and keys and values: 20 tokens, 2 heads of size 8."""
    monkeypatch.setitem(random_targets.SHAPES, "500m", ("llama", TINY, 48))
    head = random_targets.random_head_of("500m", torch.bfloat16)
    bound = Bound.of(head, tokens=13, depth=7)
    matrices = 32 * 96 + 64 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + 32 * 48
    assert bound.weights == 2 * (matrices + 4 * 32) + 8 * 48  # norms; ids of the draft vocabulary
    assert bound.cache == 20 * 2 * 2 * 8 * 2
    assert bound.total == pytest.approx(1.05 * (bound.weights + bound.cache))


@pytest.mark.parametrize("extra, met", [(0, True), (1, False)])
def test_medians_of_fresh_processes(monkeypatch, extra, met, capsys):
    monkeypatch.setitem(random_targets.SHAPES, "500m", ("llama", TINY, 48))
    asked, peaks = [], [100, 90, 700]

    def apart(head, **arguments):
        asked.append(None if head is None else (Path(head) / "config.json").exists())
        most = peaks[len(asked) // 2 - (head is not None)]
        return Peak(0, most * MIB + (head is not None) * (1 * MIB * extra), "a machine")

    monkeypatch.setattr(bench_memory, "measure_apart", apart)
    report = bench_memory.compare("500m", "bfloat16", 16, 4, 3)
    assert asked == [None, True] * 3
    assert report["plain_peak_bytes"] == 100 * MIB
    assert report["extra_bytes"] == extra * MIB and report["met"] == met
    bench_memory.show(report)
    assert ("met" if met else "missed") in capsys.readouterr().out
