"""What people get back shows itself: one line, a table in notebooks, sentences that fit 80 columns.

Claim: for every such class, in every state, ``str`` is one line, the HTML is well-formed and has only tags of
ours, and no line of ``explain()`` is wider than 80 columns or cut off.
"""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from helpers.drafters.checkpoint_cases import random_head
from helpers.drafters.medusa_cases import random_heads
from helpers.models.tiny import tiny_model
from helpers.places import GOLDEN
from helpers.simulated_servers import QUESTIONS, Simulated, plain
from rich.cells import cell_len
from typer.testing import CliRunner

from specdec_ext import (
    Check,
    ComparedRuns,
    DraftTree,
    ModelCheck,
    PairLock,
    QuantisationReport,
    SpeculationConfig,
    SpeculationStats,
    Support,
    TreeConfig,
    assets,
    supports,
)
from specdec_ext.cli import app
from specdec_ext.cli.demo import OURS, _speed_table
from specdec_ext.display import Summarised, Table
from specdec_ext.display.console import WIDTH, plain_text
from specdec_ext.display.results import MAX_LINE
from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import Series
from specdec_ext.evaluate.benchmark.latency import Latency
from specdec_ext.evaluate.benchmark.reply import Reply
from specdec_ext.evaluate.benchmark.served import ServedSeries
from specdec_ext.evaluate.breakdown import PARTS, Breakdown, Part
from specdec_ext.evaluate.calibrate import Calibration, Trial
from specdec_ext.evaluate.speedup import Speedup
from specdec_ext.heads.record import HeadRecord
from specdec_ext.models.quantised.report import QuantisedLayer
from specdec_ext.planning.break_even import break_even
from specdec_ext.planning.costs import StepCosts
from specdec_ext.planning.memory import plan
from specdec_ext.planning.simulation import simulate
from specdec_ext.planning.traffic import Traffic
from specdec_ext.report import Report
from specdec_ext.rollout.gates import parse_gates
from specdec_ext.rollout.lock import LockedFiles, ReferenceAcceptance
from specdec_ext.rollout.stages import roll_out
from specdec_ext.serve import names
from specdec_ext.training.data.dump import DumpSize
from specdec_ext.training.evaluation import Evaluation
from specdec_ext.training.trainer import Progress
from specdec_ext.tree.view import MAX_NODES_DRAWN
from specdec_ext.watch.history import Growth
from specdec_ext.watch.judge import Reference, Verdict, acceptance, judge
from specdec_ext.watch.report import Report as WatchReport

TREE = "tree of 60 nodes, 6 levels"
SCRIPT = "<script>alert('drafter')</script>"
TARGET = assets.FOLDER / "tiny-python-target"
LONG = "/models/an-organisation/a-draft-head-with-a-very-long-name-for-llama-3.1-8b-instruct"


def stats(drafter="NgramDrafter", policy="auto", calls=300, **fields):
    made = SpeculationStats(drafter=drafter, policy=policy, **fields)
    for _ in range(calls):
        made.count_step(24, 12, 6, 7)
    return made


def measured(gain=1.52, low=1.4, high=1.6, calls=300, **shapes):
    """Statistics with a report of the controller."""
    rates = [0.97, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6]
    kinds = [("chain", rates, 1234.0), (TREE, rates, 12.0)]
    report = Report(
        [(1, 1, 0.00123, 1000), (1, 22, 0.0025, 12), (4, 1024, 1.5, 1)],
        [(1, "chain of 5", 0.0004, 17), (4, TREE, 0.1, 3)],
        kinds,
        gain,
        low,
        high,
    )
    nothing_proposed = 0
    if not shapes:
        nothing_proposed = 190
        shapes = {"plain": 10, TREE: 100, f"{TREE}, nothing proposed": 190}
    return stats(
        calls=calls, report=report, shapes=shapes, nothing_proposed=nothing_proposed, probes=4
    )


def report(name="specdec x", seconds=(1.0, 2.0)):
    series = {
        each: Series(
            each,
            list(seconds),
            [torch.ones(1, 2)] * 2,
            [8, 8],
            [torch.arange(10)[None]] * 2,
            [5 << 20] * 2,
            [stats()] * 2,
            [Latency(0.2, (0.004, 0.008), (1, 4, 4), 9, 2)] * 2,
        )
        for each in ("HF generate", "specdec none", name)
    }
    made = benchmark.Report(
        "a machine", {"batch": 1, "prompts": 2}, series, "HF generate", "specdec none"
    )
    made.same_text[name] = "8/10, 2 near-ties"
    made.left_out[f"other {name}"] = "no reason"
    return made


def checks(*verdicts):
    return tuple(
        Check(f"check {i}", verdict, 1.2e-6, 3e-5, 16, 12, 0.25 if verdict == "near-tie" else None)
        for i, verdict in enumerate(verdicts)
    )


def tree(*rows):
    """A tree of these parents in each row; tokens are large."""
    parents = torch.tensor(rows)
    return DraftTree(torch.full_like(parents, 128_000), parents)


ANY = Support(True, True, True, "compact")
EVALUATION = Evaluation(812, (0.71, 0.47, 0.3), (0.71, 0.66, 0.64), (0.6, 0.4, 0.2))
TRIALS = (
    Trial((2, 16, 29), True, 128, 0.61, 0.4),
    Trial((3, 17, 30), True, 128, 0.2, 0.1),
    Trial((3, 17, 30), False, 128, 0.001, 0.0),
)
LAYERS = tuple(
    QuantisedLayer(
        f"model.layers.{i}.mlp.{name}", 4 << 20, 9 << 18, "4, groups of 32, bfloat16", error
    )
    for i, error in enumerate((0.071, 0.083))
    for name in ("up_proj", "down_proj")
)


def watched():
    """A server that drafts nothing any more, after millions of drafts that were all accepted."""
    counters = {
        names.GENERATION_TOKENS: 9e9,
        names.DRAFTS: 2e9,
        names.ACCEPTED_TOKENS: 6e9,
        names.TIMED_SECONDS: 600.0,
        names.PLAIN_SECONDS: 300.0,
    }
    positions = {names.ACCEPTED_PER_POSITION: (2e9,) * 3}
    growth = Growth(
        600.0, counters, positions, {names.INTER_TOKEN_LATENCY: {1.0: 2.0, math.inf: 2.0}}
    )
    found = acceptance(growth, Reference((9.0, 9.0), (9.0, 1.0)))
    verdicts = [Verdict("server", "well", "answers"), *judge(growth, found)]
    idle = Growth(5.0, {names.GENERATION_TOKENS: 0.0}, {}, {})
    return WatchReport(
        "http://" + "x" * 90, verdicts, "m", growth, idle, {names.RUNNING: 3.0}, found
    )


FILES = LockedFiles("target", None, {"config.json": "0f" * 32, "model.safetensors": "a1" * 32})


def lock(name):
    reference = ReferenceAcceptance(1000, 5000, (700, 500), 1100, 2300)
    return PairLock(FILES, replace(FILES, name=name), "HeadDrafter", reference=reference)


def rolled_out(candidate=None, gates="speedup>=0.5,equal>=1"):
    """A rollout of simulated servers; the texts of some say what they are."""
    asked = [replace(each, name=f"{each.name}{SCRIPT}") for each in QUESTIONS[:8]]
    candidate = candidate or Simulated(2)
    told = {"max_new_tokens": 16, "repeats": 1, "streams": [1, 4], "policy": "auto"}
    return roll_out(Simulated(1), candidate, asked, parse_gates(gates), **told)


NAMED = HeadRecord("EAGLE-3", "a default", "org/target", "abc", "0f" * 8, None, ("norm_output",))
RESULTS = {
    "stats": lambda: stats(),
    "no stats": lambda: SpeculationStats(),
    "fixed stats": lambda: stats(policy="fixed"),
    "measured stats": lambda: measured(),
    "stats without drafts": lambda: measured(calls=0, plain=300),
    "stats of a short call": lambda: measured(low=0.0, high=math.inf, plain=1, chain=2),
    "hostile stats": lambda: stats(SCRIPT * 40),
    "schedule": lambda: measured().report,
    "support": lambda: supports(tiny_model("llama")),
    "single rows": lambda: Support(True, False, False, "replay", ("it is " + LONG,)),
    "hostile reasons": lambda: Support(False, False, False, "none", (SCRIPT, "because " * 100)),
    "check": lambda: checks("exact")[0],
    "model check": lambda: ModelCheck(ANY, checks("exact", "near-tie")),
    "failed check": lambda: ModelCheck(ANY, checks("exact", "wrong", "idle")),
    "equal runs": lambda: ComparedRuns(True, None, "equal"),
    "near-tie": lambda: ComparedRuns(False, 83, "near-tie", 0.002, 0.004),
    "bug": lambda: ComparedRuns(False, 83, "bug", math.inf),
    "report": lambda: report(),
    "slow report": lambda: report(LONG, (4000.0, 0.004)),
    "hostile report": lambda: report(SCRIPT),
    "series": lambda: report().series["specdec x"],
    "empty series": lambda: Series("x"),
    "series of a server": lambda: ServedSeries(
        "x",
        [1.0, 2.0],
        new_tokens=[8, 8],
        latencies=[Latency(0.2, (0.004, 0.008), (1, 4, 4), 9, 2)] * 2,
        replies=[[Reply(0.0, text=text)] for text in ("a b c d e", "f g h i")],
        throughput=[9.0, 8.0],
        requests=2,
    ),
    "empty series of a server": lambda: ServedSeries("x"),
    "speedup": lambda: Speedup(1.5, 0.9, 2.0),
    "watched server": lambda: watched(),
    "watched server that does not answer": lambda: WatchReport(
        "http://x", [Verdict("server", "critical", LONG)]
    ),
    "hostile watched server": lambda: replace(watched(), model=SCRIPT, restarts=2),
    "lock": lambda: lock("org/a-target"),
    "lock without a reference": lambda: PairLock(FILES, None, None),
    "hostile lock": lambda: lock(SCRIPT),
    "rollout": lambda: rolled_out(),
    "failed rollout": lambda: rolled_out(plain(3), "speedup>=9,p99_itl<=0.1x,acceptance>=9"),
    "rollout without an answer": lambda: rolled_out(Simulated(1, fails=range(32))),
    "rollout with other texts": lambda: rolled_out(Simulated(1, text=lambda _: SCRIPT)),
    "hostile breakdown": lambda: Breakdown(
        tuple(Part(name, 123456.7, 12.5) for name in PARTS), 5, 1.5, SCRIPT, "a machine | " * 12
    ),
    "trial": lambda: TRIALS[0],
    "calibration": lambda: Calibration(random_head(), TRIALS, True),
    "hopeless calibration": lambda: Calibration(random_head(), TRIALS[2:], True),
    "head": lambda: random_head(),
    "named head": lambda: replace(random_head(), source=LONG, record=NAMED),
    "hostile head": lambda: replace(random_head(), source=SCRIPT),
    "Medusa heads": lambda: random_heads(),
    "chain config": lambda: TreeConfig(depth=1),
    "dynamic config": lambda: TreeConfig(depth=6, top_k=10, num_nodes=60),
    "static config": lambda: TreeConfig(choices=((0,), (1,), (0, 0))),
    "tree": lambda: tree([-1, 0, 0, 1, 1]),
    "chain": lambda: tree([-1, 0, 1, 2]),
    "batch": lambda: tree([-1, 0, 0, 1], *[[-1, 0, -2, -2]] * 12),
    "roots": lambda: DraftTree.root(torch.tensor([5, 6])),
    "large tree": lambda: tree([-1, *range(600)]),
    "settings": lambda: SpeculationConfig(),
    "pinned settings": lambda: SpeculationConfig([TreeConfig(3)], 8, may_rest=False),
    "evaluation": lambda: EVALUATION,
    "step": lambda: Progress(200, (1.2, 2.3), 0.5, 1e-3, 4000, 0.5, EVALUATION),
    "break-even": lambda: break_even(StepCosts.relative(0.05), [0.8, 0.6], rows=(1, 4)),
    "break-even that does not pay": lambda: break_even(StepCosts.relative(0.9), [0.1]),
    "simulation": lambda: simulate(StepCosts.relative(0.05), Traffic.uniform([0.7]), 3, rows=2),
    "memory plan": lambda: plan(TARGET, context=512, rows=2),
    "memory plan with a limit": lambda: plan(TARGET, context=512, memory="1MiB"),
    "quantised model": lambda: QuantisationReport(LAYERS, 5 << 20, torch.bfloat16),
    "quantised model that was loaded": lambda: QuantisationReport(
        tuple(replace(each, error=None) for each in LAYERS), 5 << 20, torch.bfloat16
    ),
    "hostile quantised model": lambda: QuantisationReport(
        (replace(LAYERS[0], name=SCRIPT),), 5 << 20, torch.bfloat16
    ),
    "dump": lambda: DumpSize(10**9, 32768, 10**9, 10**12),
}


class Tags(HTMLParser):
    """Collects the tags of a piece of HTML, and checks that each one is closed."""

    def __init__(self, html):
        super().__init__()
        self.found, self.open = set(), []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.found.add(tag)


OURS_ALONE = {"p", "table", "caption", "thead", "tbody", "tr", "th", "td", "svg", "line", "text"}


def fits(text: str) -> bool:
    return "…" not in text and all(cell_len(line) <= WIDTH for line in text.split("\n"))


def every_class(base=Summarised):
    for each in base.__subclasses__():
        yield each
        yield from every_class(each)


def test_every_class_has_a_case():
    shown = {type(make()) for make in RESULTS.values()}
    named = {each for each in every_class() if each.__module__.startswith("specdec_ext")}
    assert {each.__name__ for each in named - shown} == {"DraftWeights"}  # an abstract base class


@pytest.mark.parametrize("case", RESULTS)
def test_a_line_a_table_and_sentences(case):
    result = RESULTS[case]()
    assert str(result) and "\n" not in str(result) and len(str(result)) <= MAX_LINE
    assert repr(result).startswith(f"{type(result).__name__}(")
    html = result._repr_html_()
    assert html.startswith("<p>") and Tags(html).found <= OURS_ALONE
    if "hostile" in case:
        assert "&lt;script&gt;" in html
    assert result.explain() and fits(result.explain()), result.explain()


@pytest.mark.parametrize("case", ["report", "slow report", "measured stats", "named head"])
def test_numbers_are_whole(case):
    """A column that is too narrow wraps its text; a number stands on one line."""
    result = RESULTS[case]()
    tables = result.report.tables() if case == "measured stats" else result.tables()
    for table in tables:
        text = plain_text(table)
        assert fits(text)
        for row in table.rows:
            for cell in filter(None, row[1:]):
                assert cell in text or not cell[0].isdigit(), cell


# --- what the lines and sentences say


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("no stats", "plain decoding: 0 tokens in 0 steps"),
        ("near-tie", "near-tie: the first difference is at token 83, prompt included; the logit gap is "
         "0.002, rounding explains 0.004"),
        ("bug", "bug: one text ends at token 83, prompt included"),
        ("failed check", "NOT EVERY CLAIM HOLDS: check 0 exact, check 1 wrong, check 2 idle"),
        ("series", "specdec x: 6.0 tokens/s, the median over 2 prompts"),
        ("speedup", "1.50x [0.90, 2.00]"),
        ("chain config", "chain of 1 token"),
        ("dynamic config", "dynamic tree of 59 tokens, 6 levels deep"),
        ("static config", "static tree of 3 tokens, 2 levels deep"),
        ("tree", "tree of 4 tokens, 2 levels deep"),
        ("chain", "chain of 3 tokens"),
        ("batch", "13 trees of 1 to 3 tokens, at most 2 levels deep"),
        ("roots", "no draft, only 2 roots"),
        ("settings", "drafts where it pays: any shape of the drafter"),
        ("pinned settings", "drafts in every step: chain of 3 tokens, at most 8 nodes"),
        ("quantised model", "4 layers of 4.50 bits per weight: 9.0 MiB instead of 32.0 MiB in bfloat16; mean "
         "error of a layer 7.70%"),
        ("quantised model that was loaded", "4 layers of 4.50 bits per weight: 9.0 MiB instead of 32.0 MiB "
         "in bfloat16"),
        ("step", "step 200: loss 1.200 .. 2.300, 8,000 tokens/s; held out: mean acceptance length 2.48 "
         "greedy, 2.20 sampled at temperature 1; by position 0.71 0.66 0.64"),
    ],
)  # fmt: skip
def test_lines(case, line):
    assert str(RESULTS[case]()) == line


def test_lines_of_computed_results():
    assert "2100 tokens in 300 steps, 1800 of 7200 draft tokens accepted" in str(stats())
    assert "mean acceptance length 7.00" in str(stats())
    assert repr(supports(tiny_model("llama"))) == (
        "Support(chains, trees, batches; rollback compact)"
    )
    assert "is the fastest of 3: 1.00x HF generate" in str(report())
    head = random_head()
    size = sum(each.numel() for each in head.tensors.values() if each.is_floating_point())
    assert f"EAGLE-3 head of {size:,} parameters" in str(head)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("measured stats", "1.52x the estimated speed of plain decoding (95 % interval: 1.40x to 1.60x)"),
        ("measured stats", "In most steps the drafter had nothing to propose."),
        ("stats without drafts", "no draft was verified"),
        ("stats of a short call", "the call was too short to measure a speed-up"),
        ("fixed stats", "drafted in every step (speculation='fixed')"),
        ("support", "Chains and trees of drafts are verified exactly."),
        ("single rows", "generate one row per call"),
        ("hostile reasons", "decoded one token at a time; a drafter can't make it faster"),
        ("failed check", "wrong (check 1): the logits differ by more than rounding explains."),
        ("near-tie", "expected in half precision"),
        ("speedup", "measure more prompts"),
        ("calibration", "pass feature_layers=(2, 16, 29), norm_output=True to load_draft"),
        ("hopeless calibration", "the head was made for another target"),
        ("named head", "The checkpoint is ambiguous about norm_output"),
        ("head", "does not record the model"),
        ("quantised model", "layers that were left out take 5.0 MiB"),
    ],
)  # fmt: skip
def test_sentences_say_why_and_what_to_do(case, words):
    assert words in " ".join(RESULTS[case]().explain().split())


# --- trees


def test_a_tree_is_drawn():
    html = RESULTS["tree"]()._repr_html_()
    assert html.count("<text ") == 5 and html.count("<line ") == 4
    assert "currentColor" in html  # light and dark notebooks


def test_of_a_large_tree_the_first_nodes_are_drawn():
    assert RESULTS["large tree"]()._repr_html_().count("<text ") == MAX_NODES_DRAWN


# --- commands


def test_the_table_of_the_demo_fits():
    made = report(OURS.format(LONG)).series
    compared = {name: [ComparedRuns(False, 3, "near-tie")] * 12 for name in made}
    tables = [_speed_table(made, compared, "medians " * 20)]
    tables += [benchmark.position_table(series) for series in made.values()]
    for text in map(plain_text, tables):
        assert fits(text), text


@pytest.mark.parametrize(
    "arguments",
    [
        ("keywords",),
        ("inspect", str(GOLDEN / "speculators_qwen3_two_layers" / "draft"), "--all"),
        ("check", "-p", "def f(x):\n", "--max-new-tokens", "2"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_tables_of_commands_fit(arguments):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(WIDTH)})
    assert result.exit_code == 0, result.output
    assert fits(result.stdout), result.stdout


def test_a_table_without_rows():
    assert plain_text(Table((), ("a", "b"))).startswith("a  b")
    Tags(Table((), ("a", "b")).html())
