"""The dashboard: Grafana can load it, it reads metrics that exist, and its expressions are valid."""

import json
import shutil
import subprocess

import pytest
import yaml
from helpers.places import ROOT
from helpers.promql import exported, read_by

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())
PANELS = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}


def test_every_metric_is_exported():
    known = exported() | {"ALERTS"}
    for expression in EXPRESSIONS:
        read = read_by(expression)
        assert read and read <= known, expression
    for name in ("job", "instance", "model"):
        query = VARIABLES[name]["query"]["query"].rpartition(",")[0]
        assert read_by(query) <= known


def test_a_metric_that_does_not_exist_is_found():
    missing = 'sum by (le) (rate(vllm:no_such_total{job="a"}[5m])) / scalar(specdec:gone)'
    assert read_by(missing) == {"vllm:no_such_total", "specdec:gone"}


def test_the_parts_that_grafana_needs():
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["time"].keys() == {"from", "to"}
    numbers = [panel["id"] for panel in PANELS]
    assert len(set(numbers)) == len(numbers)
    for panel in PANELS:
        assert panel["type"] == "timeseries" and panel["title"] and panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert set(panel["fieldConfig"]) == {"defaults", "overrides"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))
    assert VARIABLES["datasource"]["type"] == "datasource"
    for name in ("job", "instance", "model"):
        assert VARIABLES[name]["type"] == "query" and VARIABLES[name]["includeAll"]


def test_panels_fill_the_grid_without_overlap():
    """Grafana's grid is 24 columns wide."""
    cells = [
        (x, y)
        for panel in PANELS
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) == 23


def test_every_variable_is_used():
    text = " ".join(EXPRESSIONS)
    assert all(f"${name}" in text for name in ("job", "instance", "model"))


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; Debian's package prometheus has it",
)
def test_expressions_are_valid(tmp_path):
    rules = [
        {"record": f"dashboard:{number}", "expr": each.replace("$__rate_interval", "1m")}
        for number, each in enumerate(EXPRESSIONS)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
