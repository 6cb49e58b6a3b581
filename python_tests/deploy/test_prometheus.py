"""The rules for Prometheus: limits and formulas are those of ``specdec watch``, and their metrics exist."""

import re
import shutil
import subprocess
from dataclasses import asdict

import pytest
import yaml
from helpers.places import ROOT
from helpers.promql import exported, read_by

from specdec_ext.serve import names
from specdec_ext.watch.history import Growth
from specdec_ext.watch.judge import Reference, acceptance, judge
from specdec_ext.watch.limits import LIMITS

FOLDER = ROOT / "deploy" / "prometheus"
GROUPS = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
PREFIX = "specdec:limit:"
# The alert for each check of the watch.
CHECKS = {
    "drafts": "SpecdecNoDrafts",
    "head": "SpecdecDeadHead",
    "drift": "SpecdecDrift",
    "gain": "SpecdecNotPaying",
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; Debian's package prometheus has it",
)


def promtool(*arguments: object) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_limits_are_those_of_the_watch():
    limits = {
        name.removeprefix(PREFIX): float(re.fullmatch(r"vector\((.*)\)", expression)[1])
        for name, expression in RECORDED.items()
        if name.startswith(PREFIX)
    }
    expected = asdict(LIMITS)
    window = expected.pop("window_seconds")
    assert limits == expected
    spans = {span for rule in RULES for span in re.findall(r"\[(\w+)\]", rule["expr"])}
    assert spans == {f"{window / 60:g}m"}


def test_every_limit_is_used():
    used = {name for rule in RULES for name in read_by(rule["expr"]) if name.startswith(PREFIX)}
    assert used == {name for name in RECORDED if name.startswith(PREFIX)}


def test_every_metric_is_exported_or_recorded():
    known = exported() | set(RECORDED) | {"up"}
    read = {name for rule in RULES for name in read_by(rule["expr"])}
    assert read - known == set()
    assert set(RECORDED) <= read, "a rule records what nothing reads"


def test_alerts_are_as_severe_as_verdicts():
    severities = {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}
    assert severities == {
        "SpecdecUnreachable": "critical",
        "SpecdecDeadHead": "critical",
        **dict.fromkeys(("SpecdecNoDrafts", "SpecdecDrift", "SpecdecNotPaying"), "warning"),
    }
    assert set(ALERTS) == {"SpecdecUnreachable", *CHECKS.values()}


@needs_promtool
def test_the_rules_and_their_own_tests_are_valid():
    promtool("check", "rules", FOLDER / "rules.yml")
    promtool("check", "config", FOLDER / "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", FOLDER / "tests.yml")


# --- the same verdicts as the watch -----------------------------------------------------------------

REFERENCE = Reference((16000, 10000), (14000, 7500))  # some drafts had one token
# What a server counted in ten minutes, in tens: on both sides of each limit.
CASES = [
    dict(generation_tokens=9000, drafts=3000, reached=(3000, 2600), accepted=(2620, 1950)),
    dict(generation_tokens=1000, drafts=0),
    dict(generation_tokens=990, drafts=0),
    dict(generation_tokens=9000, drafts=100, reached=(100, 0), accepted=(0, 0)),
    dict(generation_tokens=9000, drafts=90, reached=(90, 0), accepted=(0, 0)),
    dict(generation_tokens=9000, drafts=1000, reached=(1000, 20), accepted=(10, 0)),
    dict(generation_tokens=9000, drafts=1000, reached=(1000, 20), accepted=(20, 0)),
    *(
        dict(generation_tokens=9000, drafts=4000, reached=(4000, 3500), accepted=(first, 2620))
        for first in range(3000, 3300, 20)  # the drop that is too large is between these
    ),
    *(
        dict(generation_tokens=9000, drafts=4000, reached=(4000, 600), accepted=(3500, second))
        for second in range(200, 360, 20)
    ),
    dict(generation_tokens=9000, drafts=400, reached=(400, 350), accepted=(100, 10)),
    dict(generation_tokens=9000, drafts=390, reached=(390, 340), accepted=(100, 10)),
    dict(generation_tokens=9000, drafts=10, timed_seconds=100, plain_seconds=110),
    dict(generation_tokens=9000, drafts=10, timed_seconds=1000, plain_seconds=1020),
    dict(generation_tokens=9000, drafts=10, timed_seconds=1000, plain_seconds=1000),
    dict(generation_tokens=9000, drafts=10, timed_seconds=10, plain_seconds=0),
    dict(generation_tokens=9000, drafts=10, timed_seconds=0, plain_seconds=0),
]


def judged(case) -> dict[str, str]:
    counters = {
        getattr(names, name.upper()): float(value)
        for name, value in case.items()
        if not isinstance(value, tuple)
    }
    positions = {
        names.REACHED_PER_POSITION: tuple(map(float, case.get("reached", ()))),
        names.ACCEPTED_PER_POSITION: tuple(map(float, case.get("accepted", ()))),
    }
    growth = Growth(LIMITS.window_seconds, counters, positions, {})
    verdicts = judge(growth, acceptance(growth, REFERENCE))
    return {each.check: each.state for each in verdicts}


def drifting(case) -> set[str]:
    growth = Growth(
        None,
        {},
        {
            names.REACHED_PER_POSITION: case.get("reached", ()),
            names.ACCEPTED_PER_POSITION: case.get("accepted", ()),
        },
        {},
    )
    found = acceptance(growth, REFERENCE)
    return {str(each.position - 1) for each in found if each.drifts(LIMITS)}


def series(name: str, instance: int, values: str, position: int | None = None) -> dict[str, str]:
    labels = {"job": "specdec", "instance": str(instance), "model_name": "m", "engine": "0"}
    if position is not None:
        labels["position"] = str(position)
    told = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{told}}}", "values": values}


def inputs(case, instance: int):
    """Counters that grow by a tenth of the counts in each minute, and the reference."""
    for name, value in case.items():
        if isinstance(value, tuple):
            metric = getattr(names, f"{name}_per_position".upper())
            for position, count in enumerate(value):
                yield series(f"{metric}_total", instance, f"0+{count // 10}x40", position)
        else:
            yield series(f"{getattr(names, name.upper())}_total", instance, f"0+{value // 10}x40")
    for metric, counts in (
        (names.REFERENCE_REACHED, REFERENCE.reached),
        (names.REFERENCE_ACCEPTED, REFERENCE.accepted),
    ):
        for position, count in enumerate(counts):
            yield series(metric, instance, f"{count}x40", position)


@needs_promtool
def test_alerts_are_the_verdicts_of_the_watch(tmp_path):
    """All cases are servers of one Prometheus; an alert must name exactly those that the watch finds."""
    wrong = {check: [] for check in CHECKS}
    for instance, case in enumerate(CASES):
        for check, state in judged(case).items():
            if state in ("warning", "critical"):
                labels = {"job": "specdec", "instance": str(instance), "model_name": "m"}
                each = drifting(case) if check == "drift" else {None}
                wrong[check] += [
                    labels | ({} if position is None else {"position": position})
                    for position in sorted(each, key=str)
                ]
    assert all(0 < len(found) < len(CASES) for found in wrong.values())
    tests = [
        {
            "interval": "1m",
            "input_series": [
                line for number, case in enumerate(CASES) for line in inputs(case, number)
            ],
            "promql_expr_test": [
                {
                    "expr": f"count by (job, instance, model_name, position) ({ALERTS[alert]['expr']})",
                    "eval_time": "30m",
                    "exp_samples": [
                        {
                            "labels": "{"
                            + ", ".join(f'{k}="{v}"' for k, v in labels.items())
                            + "}",
                            "value": 1,
                        }
                        for labels in wrong[check]
                    ],
                }
                for check, alert in CHECKS.items()
            ],
        }
    ]
    file = tmp_path / "tests.yml"
    rules = str(FOLDER / "rules.yml")
    file.write_text(
        yaml.safe_dump({"rule_files": [rules], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", file)
