"""Results are shown as one line of text, and in notebooks as a table with escaped text."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from specdec_ext import SpeculationStats, Support, check_model, supports
from specdec_ext.display import MAX_LINE
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import Series
from specdec_ext.evaluate.breakdown import Breakdown, Part

SCRIPT = "<script>alert('drafter')</script>"


def stats(drafter="NgramDrafter"):
    made = SpeculationStats(drafter=drafter, policy="auto")
    for _ in range(300):
        made.count_step(24, 12, 6, 7)
    return made


def report(name="specdec x"):
    series = {
        each: Series(each, [1.0, 2.0], [torch.ones(1, 2)] * 2, [8, 8], [torch.arange(10)[None]] * 2)
        for each in ("HF generate", name)
    }
    return benchmark.Report("a machine", {"batch": 1, "prompts": 2}, series, "HF generate")


RESULTS = {
    "stats": lambda: stats(),
    "hostile stats": lambda: stats(SCRIPT * 40),
    "support": lambda: supports(tiny_model("llama")),
    "long reasons": lambda: Support(False, False, False, "none", (SCRIPT, "because " * 100)),
    "check": lambda: check_model(tiny_model("llama"), max_new_tokens=4),
    "report": lambda: report(),
    "hostile report": lambda: report(SCRIPT),
    "series": lambda: report().series["HF generate"],
    "empty series": lambda: Series("x"),
    "breakdown": lambda: Breakdown((Part("verify", 3.0, 1.0),), 5, 1.5, SCRIPT, "a machine"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_have_one_line_and_an_escaped_table(case):
    result = RESULTS[case]()
    for line in (repr(result), str(result)):
        assert line.startswith(type(result).__name__ + "(") and "\n" not in line
        assert len(line) <= MAX_LINE + len(type(result).__name__) + 2
    html = result._repr_html_()
    assert html.startswith("<p>") and html.endswith("</table>") and "<script>" not in html
    if "hostile" in case or case in ("long reasons", "breakdown"):
        assert "&lt;script&gt;" in html


def test_lines_contain_the_main_numbers():
    assert "2100 tokens in 300 steps, 1800 of 7200 draft tokens accepted" in repr(stats())
    assert "mean acceptance length 7.00" in repr(stats())
    support = repr(supports(tiny_model("llama")))
    assert support == "Support(chains, trees, batches; rollback compact)"
    assert "every claim holds: single step exact" in repr(RESULTS["check"]())
    assert "specdec x is the fastest of 2: 1.00x HF generate" in repr(report())
