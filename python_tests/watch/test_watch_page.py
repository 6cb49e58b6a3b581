"""The guide tells limits, metrics and alerts as they are, and its commands for other programs run."""

import re
import shlex
import shutil
import subprocess
from dataclasses import asdict

import pytest
import yaml
from helpers.places import ROOT
from helpers.promql import exported

from specdec_ext.watch.limits import LIMITS

PAGE = (ROOT / "docs" / "guide" / "watch.md").read_text("utf-8")
COMMANDS = re.findall(r"^(?:promtool|kubectl|helm) .*$", PAGE, re.MULTILINE)


def cells(heading: str) -> list[list[str]]:
    """The rows of the table whose first heading this is."""
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


def test_limits_are_told():
    told = {
        name: float(value)
        for names, values, _ in cells("limit")
        for name, value in zip(re.findall(r"\w+", names), values.split(", "), strict=True)
    }
    assert told == asdict(LIMITS)


def test_metrics_of_ours_are_told():
    told = {name for names, _ in cells("metric") for name in re.findall(r"`(specdec:\w+)`", names)}
    ours = {name for name in exported() if name.startswith("specdec:")}
    assert told == {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in ours}


def test_alerts_and_checks_are_told():
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert {name.strip("`") for name, _ in cells("alert")} == alerts
    checks = ["server", "pair", "drafts", "head", "drift", "gain"]
    assert [row[0] for row in cells("check")] == checks


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_for_other_programs_run(command, tmp_path):
    words = shlex.split(command)
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    overlay = ROOT / "deploy" / "kustomize" / "overlays" / "gpu"
    shutil.copy(overlay / "pair.lock", tmp_path)
    pair = {
        part: {"repository": f"owner/{part}", "revision": digit * 40}
        for part, digit in (("target", "1"), ("draft", "2"))
    }
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(pair))
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
