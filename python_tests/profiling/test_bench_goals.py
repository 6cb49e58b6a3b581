"""``python profiling goals``, ``controller`` and ``memory``: verdicts and records, without timing."""

import json
from pathlib import Path

import pytest
import torch
from baselines import random_targets
from bench import controller, goals, memory, never_slower
from bench.goals import COLUMNS, QUICK, Goals
from bench.memory import MIB
from helpers.models.tiny_shapes import TINY

from specdec_ext.evaluate.benchmark import PLAIN, Report, Series


def series(name, *seconds):
    return Series(name, seconds=list(seconds), new_tokens=[12] * len(seconds))


@pytest.mark.parametrize("goal, met", [(1.9, True), (2.0, True), (2.1, False)])
def test_a_ratio_meets_its_goal_or_misses_it(goal, met):
    rows = {"ours": series("ours", 1.0, 2.0), "theirs": series("theirs", 2.0, 4.0)}
    found = Goals()
    found.at_least(Report("", {"dtype": "float32"}, rows, "theirs"), "what", "ours", "theirs", goal)
    assert [*found.rows[0].values()] == [
        "what",
        "float32",
        f">= {goal:g}x",
        "2.00x [2.00, 2.00]",
        met,
    ]


def test_a_bound_is_met_up_to_itself():
    found = Goals()
    for value in (0.4996, 0.5, 0.51):
        found.at_most("what", "float32", value, 0.5, "ms", 2)
    assert [row["met"] for row in found.rows] == [True, True, False]
    assert (found.rows[2]["goal"], found.rows[2]["measured"]) == ("<= 0.50 ms", "0.51 ms")
    verdicts = [COLUMNS["verdict"]({"met": met}) for met in (True, False, None)]
    assert verdicts == ["met", "missed", "not measured"]


def test_the_synthetic_rows(monkeypatch):
    monkeypatch.setitem(random_targets.SHAPES, "135m", ("llama", TINY, 48))
    found = Goals()
    goals.synthetic("float32", QUICK, found)
    ratio, cost = found.rows
    assert "synthetic acceptance 3.5 at chain 7, 16 tokens" in ratio["what"]
    assert ratio["goal"] == ">= 2.3x"
    assert cost["goal"] == "<= 1.52" and "at 3.5" in cost["measured"]
    names = [row["name"] for row in found.records[0]["rows"]]
    ours = "specdec, synthetic acceptance 3.5 at chain 7"
    assert names == [PLAIN, ours, f"{ours}, auto"]
    assert [row["same_text"] for row in found.records[0]["rows"]] == ["", "1/1", "1/1"]


def test_a_run_writes_its_table(tmp_path):
    out = tmp_path / "goals"
    arguments = ["--only", "training", "--training-folder", str(tmp_path), "--quick"]
    arguments += ["--out", str(out)]
    goals.main(arguments)
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["rows"][0]["met"] is None and "history.jsonl" in record["rows"][0]["measured"]
    assert "numbers are not meaningful" in out.with_suffix(".md").read_text()
    # what is measured again replaces what was, the rest stays
    other = {**record["rows"][0], "what": "of another run"}
    record["rows"] = [other, {**record["rows"][0], "measured": "long ago"}]
    out.with_suffix(".json").write_text(json.dumps(record))
    goals.main([*arguments, "--add"])
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["of another run", record["rows"][1]["what"]]
    assert "history.jsonl" in rows[1]["measured"]


def test_a_race_pairs_calls():
    """A machine that is slow for a while slows both contestants of a pair, so the intervals stay narrow."""
    ratio = never_slower.ratio([(0.5, 1.0), (1.5, 3.0), (0.5, 1.0), (5.0, 10.0)], prompts=2)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    calls = []
    contestants = {
        name: lambda prompt, name=name: calls.append((name, prompt)) for name in (PLAIN, "ours")
    }
    seconds = never_slower.alternate(contestants, [("ours", PLAIN)], ["a", "b"], 2)
    assert [len(times) for times in seconds.values()] == [4]
    timed = calls[2:]
    assert [prompt for _, prompt in timed] == ["a", "a", "b", "b"] * 2
    assert [name for name, _ in timed[::2]] == [PLAIN, PLAIN, "ours", "ours"]  # who begins


def test_every_drafter_is_raced_with_plain_decoding(monkeypatch):
    monkeypatch.setitem(random_targets.SHAPES, "135m", ("llama", TINY, 48))
    found = Goals()
    goals.compare_in_pairs("135m", 2, "float32", QUICK, found)
    raced = [
        row["what"].removeprefix("135m, batch 2: ").removesuffix(" to plain") for row in found.rows
    ]
    assert raced == ["lookahead", "suffix", "draft model", "random head", "n-gram", "adversary"]
    assert {row["goal"] for row in found.rows} == {">= 0.97x"}
    seconds = found.records[0]["seconds"]
    assert len(seconds) == 6 and all(len(each) == 1 for each in seconds.values())


# --- memory ---------------------------------------------------------------------------------------


def test_what_a_head_needs(monkeypatch):
    """27,072 weights of a tiny head, counted by hand, and keys and values: 20 tokens, 2 heads of size 8."""
    monkeypatch.setitem(random_targets.SHAPES, "500m", ("llama", TINY, 48))
    head = random_targets.random_head_of("500m", torch.bfloat16)
    weights, cache = memory.bound(head, tokens=13, depth=7)
    matrices = 32 * 96 + 64 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + 32 * 48
    assert weights == 2 * (matrices + 4 * 32) + 8 * 48  # norms; ids of the draft vocabulary
    assert cache == 20 * 2 * 2 * 8 * 2


@pytest.mark.parametrize("extra, met", [(0, True), (1, False)])
def test_medians_of_fresh_processes(monkeypatch, extra, met, capsys):
    monkeypatch.setitem(random_targets.SHAPES, "500m", ("llama", TINY, 48))
    asked, peaks = [], [100, 90, 700]

    def apart(head, **arguments):
        asked.append(None if head is None else (Path(head) / "config.json").exists())
        most = peaks[len(asked) // 2 - (head is not None)]
        most = most * MIB + (head is not None) * (1 * MIB * extra)
        return {"before": 0, "most": most, "machine": "a machine"}

    monkeypatch.setattr(memory, "measure_apart", apart)
    report = memory.compare("500m", "bfloat16", 16, 4, 3)
    assert asked == [None, True] * 3
    assert report["plain_peak_bytes"] == 100 * MIB
    assert report["extra_bytes"] == extra * MIB and report["met"] == met
    needed = report["draft_weights_bytes"] + report["draft_cache_bytes"]
    assert report["bound_bytes"] == pytest.approx(1.05 * needed)
    asked.clear()
    memory.main(["--context", "16", "--max-new-tokens", "4", "--repeats", "3"])
    assert capsys.readouterr().out.split()[-1] == ("met" if met else "missed")


# --- the controller ---------------------------------------------------------------------------------


def test_the_controller_is_compared_with_plain_and_with_the_best_fixed_shape(tmp_path, capsys):
    sizes = ["--max-new-tokens", "16", "--count", "1", "--repeats", "1", "--cold"]
    controller.main([*sizes, "--out", str(tmp_path / "controller")])
    report = json.loads((tmp_path / "controller.json").read_text())
    whats = [row["what"].removeprefix("batch 1, ") for row in report["rows"]]
    assert whats[:3] == [
        f"{name}, wrong: auto to plain" for name in ("draft model", "chains", "trees")
    ]
    assert whats[5:] == [
        f"{name}: auto to the best fixed shape" for name in ("python, n-gram", "oracle")
    ]
    fixed = [
        [row["name"] for row in record["rows"] if row["name"].startswith("fixed")]
        for record in report["records"]
    ]
    assert fixed[-2:] == [["fixed 10", "fixed 4", "fixed 16"], ["fixed 7", "fixed 3"]]
    oracle = {row["name"]: row["mean_acceptance_length"] for row in report["records"][-1]["rows"]}
    assert oracle["fixed 7"] > 5 and oracle["fixed 3"] == pytest.approx(4, abs=0.3)
    for record in report["records"][:3]:
        (wrong,) = [row for row in record["rows"] if row["name"] == "fixed"]
        assert wrong["mean_acceptance_length"] == 1
