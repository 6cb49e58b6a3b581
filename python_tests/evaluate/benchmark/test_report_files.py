"""Each format of a benchmark's results, parsed back, with hostile names in it."""

import csv
import json
from html.parser import HTMLParser

import pytest
import torch

from specdec_ext import SpeculationStats
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import Report, Series, files, joint_notes
from specdec_ext.evaluate.benchmark.latency import Latency
from specdec_ext.evaluate.breakdown import Breakdown, Part

HOSTILE = '<script>alert(1)</script> | `a` *b*, "c"\x1b[2J\nnext'


def report(batch=1, **fields):
    stats = SpeculationStats(drafter="head", policy="fixed")
    stats.count_step(3, 3, 2, 3)
    series = {
        name: Series(
            name,
            [1.0 / factor, 2.0 / factor],
            [torch.ones(1, 2)] * 2,
            [8, 8],
            [torch.arange(10, device="cpu")[None]] * 2,
            [],
            [counted] * 2,
            [Latency(0.1, (0.2, 0.4), (1, 3, 2), 6, 2)] * 2,
        )
        for name, factor, counted in (
            ("specdec none", 1, SpeculationStats()),
            ("specdec head", 2, stats),
        )
    }
    settings = {"batch": batch, "prompts": 2, "temperature": 0.8}
    plain = "specdec none"
    return Report(
        "a machine",
        settings,
        series,
        plain,
        plain,
        {"specdec head": "1/2, 1 near-tie"},
        plain,
        [f"specdec head, prompt {HOSTILE}: near-tie"],
        categories=["math", HOSTILE],
        **fields,
    )


@pytest.fixture
def written(tmp_path):
    """The files of two reports and a breakdown, by suffix."""
    paths = [
        tmp_path / f"results{suffix}" for suffix in (".html", ".md", ".csv", ".jsonl", ".json")
    ]
    parts = (Part("verify", 10.0, 1.0),)
    steps = [Breakdown(parts, 9, 1.5, "head, float32", "a machine")]
    files.write([report(), report(batch=4)], paths, steps)
    return {path.suffix: path.read_text("utf-8") for path in paths}


def test_json(written):
    first, second = json.loads(written[".json"])
    assert (first["settings"]["batch"], second["settings"]["batch"]) == (1, 4)
    assert first["differences"] == [f"specdec head, prompt {HOSTILE}: near-tie"]
    plain, head = first["rows"]
    assert (head["name"], head["ratio"], plain["ratio"]) == ("specdec head", 2.0, 1.0)
    assert head["acceptance_per_position"] == [1.0, 1.0, 0.0]
    assert head["mean_acceptance_length"] == 3.0
    assert head["milliseconds"]["ttft"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert head["milliseconds"]["itl"]["p99"] == pytest.approx(200.0)
    assert head["prompt_tokens_per_second"] == pytest.approx(20)
    assert head["generated_per_second"] == pytest.approx(5 / 0.6)
    assert head["failed"] == 0
    by_category = {each["category"]: each for each in first["categories"]}
    assert list(by_category) == ["math", HOSTILE] and by_category["math"]["prompts"] == 1
    assert by_category["math"]["contestants"]["specdec head"] == {
        "tokens_per_second": 16.0,
        "ratio": 2.0,
        "acceptance_length": 3.0,
    }
    assert first["breakdowns"][0]["title"] == "head, float32" and "breakdowns" not in second


def test_json_lines(written):
    rows = [json.loads(line) for line in written[".jsonl"].splitlines()]
    assert [(row["settings"]["batch"], row["name"]) for row in rows] == [
        (1, "specdec none"),
        (1, "specdec head"),
        (4, "specdec none"),
        (4, "specdec head"),
    ]
    assert rows[0] == {"machine": "a machine", **rows[0]}


def test_csv(written):
    rows = list(csv.DictReader(written[".csv"].splitlines()))
    assert len(rows) == 4 and all(None not in row and None not in row.values() for row in rows)
    head = rows[3]
    assert (head["settings.batch"], head["name"], head["ratio"]) == ("4", "specdec head", "2.0")
    assert head["interval"] == "2.0 2.0" and head["acceptance_per_position"] == "1.0 1.0 0.0"
    assert float(head["milliseconds.chunk_gap.p50"]) == pytest.approx(300)
    assert rows[0]["mean_acceptance_length"] == ""
    assert not [name for name in head if name.endswith(("_by_prompt", "_by_request"))]


def cells(line):
    """The cells of a line of a table in Markdown."""
    return [each.strip() for each in line.replace("\\|", "\0").strip("|").split("|")]


def test_markdown(written):
    text = written[".md"]
    lines = text.splitlines()
    assert lines[0] == "# Benchmark" and "\x1b" not in text and "<script>" not in text
    tables = [line for line in lines if line.startswith("|")]
    (heading,) = {line for line in tables if "TTFT" in line and "ratio" in line}
    assert cells(heading)[1:4] == ["tokens/s", "ratio \\[95 %\\]", "accepted"]
    row = cells(lines[lines.index(heading) + 3])
    assert row[:4] == ["specdec head", "12.0", "2.00x \\[2.00, 2.00\\]", "3.00"]
    # A title and its table are apart, and all lines of a table have as many cells.
    for number, line in enumerate(lines):
        if line.startswith("|---"):
            width = len(cells(line))
            assert lines[number - 2] == "" and len(cells(lines[number - 1])) == width
    assert any(
        r"\<script\>alert(1)\</script\> \| \`a\` \*b\*" in line and "next" in line
        for line in lines
        if line.startswith("- ")
    )


class Parsed(HTMLParser):
    """The open tags and the text of a page."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text, self.links = [], [], "", []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "path", "use", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_is_one_page_that_loads_nothing(written):
    found = Parsed()
    found.feed(written[".html"])
    assert not found.open and found.tags.count("svg") == 1 and "script" not in found.tags
    assert found.tags.count("details") == 2
    assert not [link for link in found.links if not link.startswith("#")]
    assert "<script>alert(1)</script>" in found.text and "\x1b" not in written[".html"]
    assert "2.00x [2.00, 2.00]" in found.text and "head, float32" not in found.tags


def test_names_are_drawn_as_they_are(tmp_path):
    """Dollar signs are no formulas: a wrong one would be an error after everything was measured."""
    made = report()
    made.settings["model"] = r"a$\frac$ \x1b"
    made.series["specdec head"].name = "$x$"
    files.write([made], [tmp_path / "x.html"])
    benchmark.plot([made], tmp_path / "x.png")
    assert r"a$\frac$" in (tmp_path / "x.html").read_text()


def test_what_was_measured_is_written_before_anything_is_drawn(tmp_path, monkeypatch):
    def broken(reports):
        raise RuntimeError("no picture")

    monkeypatch.setattr(files, "figure", broken)
    paths = [tmp_path / f"x{suffix}" for suffix in (".html", ".md", ".json", ".csv", ".jsonl")]
    with pytest.raises(RuntimeError, match="no picture"):
        files.write([report()], paths)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "x.csv",
        "x.json",
        "x.jsonl",
        "x.md",
    ]


@pytest.mark.parametrize("name", ["results", "results.txt", "results.JSON", ".json"])
def test_a_suffix_says_the_format(name, tmp_path):
    message = r"--out \S+: the name must end with one of \.json, \.jsonl, \.csv, \.md, \.html"
    with pytest.raises(ValueError, match=message):
        files.check_file(tmp_path / name, "--out")
    for suffix in (".json", ".jsonl", ".csv", ".md", ".html"):
        files.check_file(tmp_path / f"new{suffix}", "--out")
    assert not list(tmp_path.iterdir())


def test_a_page_needs_matplotlib_and_says_so_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"--out \S+x\.html needs matplotlib"):
        files.check_file(tmp_path / "x.html", "--out")
    files.check_file(tmp_path / "x.md", "--out")


def test_notes_of_all_reports_are_shown_once_and_others_with_their_report():
    notes = joint_notes([report(), report(batch=4, remarks=["read this"])])
    assert sum("TTFT: time to the first token" in note for note in notes) == 1
    own = [note for note in notes if "read this" in note]
    assert own == ["batch 4, prompts 2, temperature 0.8: read this"]


def test_only_the_first_differences_are_shown():
    made = report()
    made.differences = [f"difference {number}" for number in range(7)]
    notes = "\n".join(made.notes())
    assert "difference 4" in notes and "difference 5" not in notes
    assert "and 2 further texts; a JSON file has all of them" in notes
    assert made.record()["differences"] == made.differences
