"""``python profiling``: the list of tools is complete, and a tool gets its own arguments."""

import ast
import runpy
import subprocess
import sys

import pytest
from helpers.places import ROOT

PROFILING = ROOT / "profiling"
TOOLS = runpy.run_path(str(PROFILING / "__main__.py"), run_name="tools")["TOOLS"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "profiling", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_a_main_and_is_in_the_readme(name):
    module, _ = TOOLS[name]
    source = (PROFILING / f"{module.replace('.', '/')}.py").read_text()
    assert "main" in {getattr(node, "name", "") for node in ast.parse(source).body}
    page = (PROFILING / "README.md").read_text()
    assert name in page


def test_the_list_is_shown():
    shown = run()
    assert shown.returncode == 0
    assert all(f"  {name} " in shown.stdout for name in TOOLS)


def test_an_unknown_tool_is_an_error():
    shown = run("matmul")
    assert shown.returncode == 2 and "there is no tool 'matmul'" in shown.stdout


def test_a_tool_gets_its_arguments(monkeypatch):
    """In this process, which has imported torch."""
    monkeypatch.setattr(sys, "argv", ["profiling", "nsight", "none", "matmul", "--device", "cpu"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match="no case fits; there are: generate;"):
        runpy.run_path(str(PROFILING / "__main__.py"), run_name="__main__")
