"""``specdec_ext.evaluate.benchmark``: tables and records of given results, and complete runs.

No test depends on a measured time.
"""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from helpers.models.tiny import VOCAB, prompts, tiny_model
from rich.console import Console

import specdec_ext
from specdec_ext import ComparedRuns, DraftModelDrafter, DraftTree, SpeculationStats, assets
from specdec_ext.drafters import Drafter, NgramDrafter
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import (
    Report,
    Series,
    Workload,
    batches,
    compare,
    compare_all,
    endless,
    files,
    generation_kwargs,
    interleave,
    ours,
    race,
    same_text,
    synthetic,
    unique_ngram_fraction,
)
from specdec_ext.evaluate.benchmark.latency import Latency
from specdec_ext.evaluate.benchmark.memory import peak_bytes, reset_peak


def stats(*steps, **seconds):
    made = SpeculationStats()
    for step in steps:
        made.count_step(*step)
    made.seconds.update(seconds)
    return made


def prompt(batch, columns):
    return {"input_ids": torch.zeros(batch, columns, dtype=torch.long)}


# --- counters -------------------------------------------------------------------------------------


def test_totals_over_calls_of_different_depth():
    calls = [stats((3, 3, 3, 4), (3, 3, 1, 2)), stats((1, 1, 0, 1), (0, 0, 0, 1))]
    series = Series("x", speculation_stats=calls)
    assert series.total_per_position("proposed_per_position") == [3, 2, 2]
    assert series.total_per_position("accepted_per_position") == [2, 1, 1]
    assert series.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert series.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert series.emitted_per_step == pytest.approx(8 / 4)


def test_a_contestant_without_counters():
    series = Series("x")
    assert series.acceptance_per_position == []
    assert series.mean_acceptance_length is None and series.emitted_per_step is None
    assert series.milliseconds_per_step == {} and series.peak is None
    assert (
        series.break_even(Series("plain", speculation_stats=[stats((0, 0, 0, 1), verify=0.01)]))
        is None
    )


def test_break_even_is_a_step_in_steps_of_plain():
    """Steps of 3 + 11 + 1 ms against plain steps of 10 ms: the break-even is 1.5 tokens per step."""
    chains = stats(*[(3, 3, 2, 3)] * 4, draft=0.012, verify=0.044, commit=0.004, prefill=9.0)
    plain = stats(*[(0, 0, 0, 1)] * 10, verify=0.1)
    series, alone = (
        Series("x", speculation_stats=[chains]),
        Series("plain", speculation_stats=[plain]),
    )
    assert series.milliseconds_per_step == pytest.approx({"draft": 3, "verify": 11, "commit": 1})
    assert series.break_even(alone) == pytest.approx(1.5)
    assert alone.break_even(alone) == 1


def test_verdicts_in_words():
    equal, tie = ComparedRuns(True, None, "equal"), ComparedRuns(False, 9, "near-tie", 0.1, 0.2)
    bug = ComparedRuns(False, 9, "bug", 3.0, 0.2)
    assert same_text([equal, equal]) == "2/2"
    assert same_text([tie, equal, tie]) == "1/3, 2 near-ties"
    assert same_text([tie, bug]) == "0/2, 1 near-tie, 1 bug"


def test_repetition():
    assert unique_ngram_fraction([[1] * 8]) == pytest.approx(1 / 5)
    assert unique_ngram_fraction([[1, 2, 3, 4, 5], [1] * 5]) == pytest.approx((1 + 1 / 2) / 2)
    assert unique_ngram_fraction([[1, 2]]) == 1.0  # too short to repeat anything


# --- runs -----------------------------------------------------------------------------------------


def test_interleaving_runs_all_contestants_on_all_prompts_and_rotates_the_first():
    order = []

    def appending(name, count):
        def run(prompt):
            order.append(name)
            ids = prompt["input_ids"]
            return torch.cat([ids, ids.new_ones(len(ids), count)], dim=1)

        return run

    contestants = {"a": appending("a", 4), "b": appending("b", 6)}
    results = interleave(contestants, [prompt(1, 3), prompt(2, 5)])
    assert order == ["a", "b", *("a", "b"), *("b", "a")]  # after a warm-up call of each
    assert results["a"].new_tokens == [4, 8] and results["b"].new_tokens == [6, 12]
    assert [mask.shape[1] for mask in results["a"].masks] == [3, 5]
    assert results["b"].unique_4grams == pytest.approx(1 / 3)  # 1 of 3 in each of the three rows


def test_peaks_are_of_the_call_alone():
    """A call that allocates 64 MiB has a higher peak than a later one that allocates nothing."""
    cpu = torch.device("cpu")
    reset_peak(cpu)
    before = peak_bytes(cpu)
    if before is None:
        pytest.skip("this system does not tell a process's peak")
    torch.ones(16 << 20).sum()
    assert peak_bytes(cpu) > before + (60 << 20)
    reset_peak(cpu)
    assert peak_bytes(cpu) < before + (30 << 20)


def test_batches_are_padded_on_the_left():
    tokenizer = assets.load_tokenizer()
    texts = ["import os\n", "def f(x):\n    return x\n", "never a part of a batch"]
    (pair,) = batches(tokenizer, texts, 2)
    assert pair["attention_mask"][0, 0] == 0 and pair["attention_mask"][:, -1].tolist() == [1, 1]
    assert len(batches(tokenizer, texts, 1)) == 3
    with pytest.raises(ValueError, match="a batch of 4 needs 4 prompts, got 3"):
        batches(tokenizer, texts, 4)


def test_texts_have_one_length_and_the_model_is_left_as_it_was():
    model = tiny_model("llama")
    ids, mask = prompts((5,))
    first = int(model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)[0, -1])
    end, model.generation_config.eos_token_id = model.generation_config.eos_token_id, first
    try:
        plain = ours(model, None, generation_kwargs(6))
        assert plain({"input_ids": ids, "attention_mask": mask}).sequences.shape[1] == 5 + 1
        with endless(model):
            assert plain({"input_ids": ids, "attention_mask": mask}).sequences.shape[1] == 5 + 6
        assert model.generation_config.eos_token_id == first
    finally:
        model.generation_config.eos_token_id = end


def pairs(count):
    made = []
    for seed in range(count):
        ids, mask = prompts((4 + seed, 7), seed=seed)
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_a_comparison_of_padded_batches(temperature):
    """Our contestants sample the same text; greedy texts equal Hugging Face's."""
    model = tiny_model("llama")
    report = compare(
        model,
        pairs(2),
        {"ngram": NgramDrafter(min_ngram=1)},
        assistant=model,
        max_new_tokens=12,
        temperature=temperature,
        repeats=1,
    )
    assert list(report.series) == ["HF generate", "specdec none", "specdec ngram"]
    assert set(report.left_out) == {"HF prompt lookup", "HF assisted"}
    expected = {"specdec none": "4/4", "specdec ngram": "4/4"}
    if temperature:
        expected = {"specdec ngram": "2/2"}
    assert report.same_text == expected
    assert report.expected == ("specdec none" if temperature else "HF generate")
    assert report.settings["batch"] == 2 and report.settings["do_sample"] == (temperature > 0)
    assert report.series["HF generate"].new_tokens == [24, 24]


def test_texts_of_all_batch_sizes_are_compared(monkeypatch):
    """Rows are the same without their padding, whatever the batch."""
    model = tiny_model("llama")
    ids, mask = prompts((4, 7, 5))
    rows = [{"input_ids": each[None, -int(m.sum()) :]} for each, m in zip(ids, mask, strict=True)]
    sizes = [Workload(rows, names=["a", "b", "c"])]
    sizes.append(Workload([{"input_ids": ids[:2], "attention_mask": mask[:2]}], names=["a", "b"]))
    options = dict(max_new_tokens=6, repeats=1, transformers_too=False)
    one, two = compare_all(model, sizes, {}, **options)
    assert "same text of specdec none in batches of 2 as of 1: 2/2" in two.remarks
    assert not one.remarks and not two.differences
    together = two.series["specdec none"].rows()
    for (alone, length), (text, same) in zip(
        one.series["specdec none"].rows(), together, strict=False
    ):
        assert torch.equal(alone, text) and length == same

    def bug(model, first, second, prompt_length):
        return ComparedRuns(False, prompt_length, "bug", 3.0, 0.2)

    monkeypatch.setattr("specdec_ext.evaluate.benchmark.series.compare_runs", bug)
    _, two = compare_all(model, sizes, {}, **options)
    assert "specdec none in batches of 2 as of 1, prompt b: bug: " in two.differences[1]


def test_single_rows_meet_all_of_hugging_faces_ways(tmp_path):
    model = tiny_model("llama")
    ids, mask = prompts((6,))
    single = [{"input_ids": ids, "attention_mask": mask}]
    drafters = {"ngram": NgramDrafter(min_ngram=1)}
    report = compare(model, single, drafters, assistant=model, max_new_tokens=8, repeats=1)
    names = ["HF generate", "HF prompt lookup", "HF assisted", "specdec none", "specdec ngram"]
    assert list(report.series) == names and not report.left_out
    for series in report.series.values():  # every token arrives
        (latency,) = series.latencies
        assert latency.first > 0 and latency.per_token > 0 and latency.tokens == 8
        assert latency.prompt_tokens == 6 and series.prompt_tokens_per_second > 0
    record = json.loads(json.dumps(report.record()))
    assert [row["name"] for row in record["rows"]] == names
    assert record["rows"][0]["ratio"] == 1 and record["rows"][0]["interval"] == [1, 1]
    assert record["settings"]["max_new_tokens"] == 8
    assert all(row["milliseconds"] for row in record["rows"])
    benchmark.plot([report, report], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_leaves_matplotlib_to_its_user(tmp_path):
    """A notebook keeps its backend and figures, and later figures are shown."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_backend()
    try:
        pyplot.switch_backend("svg")
        figure = pyplot.figure()
        benchmark.plot([hand_made_report()], tmp_path / "bars.png")
        assert pyplot.get_backend() == "svg"
        assert pyplot.get_fignums() == [figure.number]
    finally:
        pyplot.close("all")
        pyplot.switch_backend(before)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_no_module_chooses_a_backend():
    """Plots use neither ``pyplot``, which keeps figures, nor ``matplotlib.use``."""
    root = Path(specdec_ext.__file__).parent
    sources = [*root.rglob("*.py"), *(root.parent / "profiling").rglob("*.py")]
    naming = [path for path in sources if re.search(r"pyplot|matplotlib\.use", path.read_text())]
    assert len(sources) > 100 and not naming


def hand_made_report():
    def series(name, seconds, *calls):
        return Series(
            name,
            seconds=seconds,
            masks=[torch.ones(1, 2)] * 2,
            new_tokens=[8, 8],
            texts=[torch.arange(10)[None]] * 2,
            peaks=[5 << 20, 7 << 20],
            speculation_stats=list(calls),
        )

    rows = [
        series("HF generate", [4.0, 8.0]),
        series("specdec none", [2.0, 4.0], stats(*[(0, 0, 0, 1)] * 7, verify=7.0)),
        series("specdec x", [1.0, 2.0], stats((3, 3, 2, 3), (3, 3, 0, 1), verify=4.0)),
    ]
    made = {each.name: each for each in rows}
    return Report("a machine", {"batch": 1}, made, "HF generate", "specdec none")


def test_a_row_of_the_record():
    row = hand_made_report().rows()[2]
    assert row["ratio"] == pytest.approx(4) and row["ratio_to_plain"] == pytest.approx(2)
    assert row["ratio_of_means"] == pytest.approx(4) and row["interval"] == pytest.approx([4, 4])
    assert row["tokens_per_second_by_prompt"] == [8, 4] and row["tokens_per_second"] == 6
    assert row["mean_acceptance_length"] == 2 and row["break_even"] == pytest.approx(2)
    assert row["acceptance_per_position"] == [0.5, 0.5, 0] and row["peak_bytes"] == 7 << 20


def test_a_table_shows_what_has_to_be_read_together():
    report = hand_made_report()
    report.left_out["HF assisted"] = "no reason"
    report.same_text["specdec x"], report.expected = "8/10, 2 near-ties", "HF generate"
    report.series["specdec x"].fixed = [stats((3, 3, 1, 2))]
    report.series["specdec x"].speculation_stats[0].policy = "auto"
    report.series["specdec x"].latencies = [
        Latency(0.2, (0.004, 0.008), (1, 2, 2), 5, prompt_tokens=2),
        Latency(0.4, (), (1,), 1, prompt_tokens=2),
    ]
    console = Console(width=80)
    with console.capture() as shown:
        console.print(*report.tables(), *report.details())
    lines = [line.split() for line in shown.get().splitlines() if "specdec x" in line]
    assert lines[:4] == [
        ["specdec", "x", "6.0", "2.00x", "[2.00,", "2.00]", "2.00", "300", "3.00", "4.00"],
        ["specdec", "x", "7.5", "333.3", "4.00x", "[4.00,", "4.00]", "7"],
        ["specdec", "x", "auto", "2.00", "2.00", "8/10,", "2", "near-ties"],
        ["specdec", "x", "TTFT", "300.00", "380.00", "398.00"],
    ]
    notes = "\n".join(report.notes())
    assert notes.startswith(
        "HF assisted: left out, no reason\nsame text as HF generate: 8/10, 2 near-ties"
    )
    for part in ("unique 4-grams", "accepted: ", "ITL: the time before a chunk"):
        assert part in notes


def test_a_table_fits_a_terminal_of_80_columns():
    """Long names wrap, numbers never do."""
    report = hand_made_report()
    name = "specdec /models/organisation/a-draft-head-with-a-very-long-name-3.1-8b"
    series = report.series.pop("specdec x")
    series.name = name
    report.series[name] = series
    report.series["HF generate"].seconds = [4000.0, 8.0]
    console = Console(width=80)
    with console.capture() as shown:
        console.print(*report.tables(), *report.details())
    text = shown.get()
    assert max(map(len, text.splitlines())) <= 80
    for row in report.rows():
        assert f"{row['ratio']:.2f}x [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]" in text


def test_acceptance_is_compared_where_every_step_drafts(monkeypatch):
    model = tiny_model("llama")
    ids, mask = prompts((6,))
    single = [{"input_ids": ids, "attention_mask": mask}]
    drafters = {"right": DraftModelDrafter(model), "none": None}
    for speculation, calls in (("auto", 1), ("fixed", 0)):
        report = compare(
            model, single, drafters, max_new_tokens=12, repeats=1, speculation=speculation
        )
        series = report.series["specdec right"]
        assert len(series.fixed) == calls and not report.series["specdec none"].fixed
        (row,) = (row for row in report.rows() if row["name"] == "specdec right")
        assert (row["fixed_acceptance_length"] or row["mean_acceptance_length"]) > 3
    assert row["policy"] == "fixed"


class AtRandom(Drafter):
    """Chains of three random tokens."""

    def propose(self, context):
        chains = [[[random.randrange(VOCAB) for _ in range(3)]] for _ in context.rows]
        return DraftTree.from_paths(context.roots, chains)


def test_synthetic_contestants_know_each_prompts_text():
    """A synthetic drafter that is always right, wrapped around a drafter that is almost never right."""
    model, made = tiny_model("llama"), pairs(2)
    shared = generation_kwargs(9)
    sure = synthetic(model, AtRandom(), [1.0] * 3, made, shared)
    contestants = {"HF generate": ours(model, None, shared), "sure": sure}
    series = race(model, contestants, made, shared).series["sure"]
    assert series.acceptance_per_position == [1, 1, 1]
    assert series.equals(
        Series("", texts=[ours(model, None, shared)(each).sequences for each in made])
    )


# --- failures and interrupts ------------------------------------------------------------------------


class Failing(NgramDrafter):
    """Raises an error in batches of two rows, or for one prompt."""

    def __init__(self, error, rows=2):
        super().__init__(min_ngram=1)
        self.error, self.rows = error, rows

    def propose(self, context):
        if len(context.rows) == self.rows:
            raise self.error
        return super().propose(context)


def singles_and_pairs():
    """The same four prompts, in batches of one row and of two."""
    ids, _ = prompts((7, 7, 7, 7))
    return [
        Workload([{"input_ids": part} for part in ids.split(rows)], names=[*"abcd"])
        for rows in (1, 2)
    ]


QUICK = dict(max_new_tokens=6, repeats=2, transformers_too=False)


def test_a_contestant_that_fails_at_a_setting_is_a_row_and_all_others_are_measured(tmp_path):
    drafters = {"bad": Failing(RuntimeError("no\nmemory")), "ngram": NgramDrafter(min_ngram=1)}
    one, two = compare_all(tiny_model("llama"), singles_and_pairs(), drafters, **QUICK)
    assert list(one.series) == ["specdec none", "specdec bad", "specdec ngram"] and one.is_whole
    assert list(two.series) == ["specdec none", "specdec ngram"] and not two.is_whole
    assert two.errors == {"specdec bad": "RuntimeError: no memory"}
    assert [len(each.seconds) for each in two.series.values()] == [2, 2]
    assert two.same_text == {"specdec ngram": "4/4"}
    (table,) = two.tables()
    assert table.rows[-1][0] == "specdec bad" and table.rows[-1][-1] == "RuntimeError"
    assert "specdec bad: failed, RuntimeError: no memory" in two.notes()
    paths = [tmp_path / f"all{suffix}" for suffix in (".json", ".jsonl", ".csv", ".md", ".html")]
    files.write([one, two], paths)
    assert all("RuntimeError: no memory" in path.read_text("utf-8") for path in paths)


def test_a_baseline_that_fails_leaves_ratios_to_another(monkeypatch, tmp_path):
    def broken(model, shared, **keywords):
        def run(prompt, streamer=None):
            raise NotImplementedError("not this model")

        return run

    monkeypatch.setattr(benchmark, "hugging_face", broken)
    report = compare(tiny_model("llama"), pairs(1), {}, max_new_tokens=4, repeats=1)
    assert report.baseline == report.plain == "specdec none"
    assert set(report.errors) == {"HF generate"}
    benchmark.plot([report], tmp_path / "bars.png")


def test_a_setting_in_which_everything_fails_has_rows_only(monkeypatch, tmp_path):
    plain = benchmark.ours

    def ours(model, drafter, shared, **keywords):
        run = plain(model, drafter, shared, **keywords)

        def checked(prompt, streamer=None):
            if len(prompt["input_ids"]) == 2:
                raise ValueError("no pairs")
            return run(prompt, streamer)

        return checked

    monkeypatch.setattr(benchmark, "ours", ours)
    one, two = compare_all(tiny_model("llama"), singles_and_pairs(), {}, **QUICK)
    assert (
        one.is_whole and not two.series and two.errors == {"specdec none": "ValueError: no pairs"}
    )
    assert "failed" in str(two) and two.explain()
    files.write([one, two], [tmp_path / f"all{suffix}" for suffix in (".json", ".csv", ".html")])
    with pytest.raises(ValueError, match="no pairs"):
        compare_all(tiny_model("llama"), singles_and_pairs()[1:], {}, **QUICK)


def test_an_interrupt_keeps_the_prompts_before_it(monkeypatch, tmp_path):
    turns = []
    plain = benchmark.Race.turn

    def turn(self, number, *arguments):
        turns.append(number)
        if len(turns) == 4:
            raise KeyboardInterrupt
        plain(self, number, *arguments)

    monkeypatch.setattr(benchmark.Race, "turn", turn)
    drafters = {"ngram": NgramDrafter(min_ngram=1)}
    one, two = compare_all(tiny_model("llama"), singles_and_pairs(), drafters, **QUICK)
    assert turns == [0, 0, 1, 1]
    assert [each.settings["prompts"] for each in (one, two)] == [2, 1]
    assert one.is_interrupted and "interrupted after 2 of 4 prompts" in one.remarks
    assert one.same_text == {"specdec ngram": "2/2"} and two.same_text == {"specdec ngram": "2/2"}
    files.write([one, two], [tmp_path / "all.json"])
    turns[:] = [0, 0, 0]
    with pytest.raises(KeyboardInterrupt):  # nothing was measured before it
        compare_all(tiny_model("llama"), singles_and_pairs(), drafters, **QUICK)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("no memory")], ids=["ctrl-c", "error"]
)
def test_what_was_measured_is_kept_if_texts_can_not_be_compared(error, monkeypatch):
    def compare_runs(*_):
        raise error

    monkeypatch.setattr("specdec_ext.evaluate.benchmark.series.compare_runs", compare_runs)
    report = compare(tiny_model("llama"), pairs(1), {}, max_new_tokens=4, repeats=1)
    assert list(report.series) == ["HF generate", "specdec none"] and not report.is_whole
    told = "interrupted before all texts were compared"
    if not isinstance(error, KeyboardInterrupt):
        told = "comparison of texts: failed, RuntimeError: no memory"
    assert told in report.notes()
