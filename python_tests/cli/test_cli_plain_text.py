r"""Names in checkpoints and prompts are printed as plain text, without markup and escape sequences.

Claim: no content of a file makes a command fail or changes the appearance of other output.
"""

from __future__ import annotations

import io
import json

import pytest
from helpers.command_line import run
from helpers.drafters.checkpoint_cases import random_head
from rich.table import Table

import specdec_ext
from specdec_ext.display.console import PlainConsole
from specdec_ext.display.text import printable

# Unbalanced, unknown and hidden markup; emoji codes; escape sequences that repaint a terminal.
HOSTILE = (
    "[/bold] [red]fits[/red] [link=x]y :smile: \x1b[2J\x1b]0;title\x07 \r\x08 \u202eslatot\u2029"
)
SHOWN = (
    r"[/bold] [red]fits[/red] [link=x]y :smile: \x1b[2J\x1b]0;title\x07 \r\x08 \u202eslatot\u2029"
)


def console(**options) -> PlainConsole:
    return PlainConsole(file=io.StringIO(), width=200, **options)


def test_control_characters_are_escaped():
    assert printable(HOSTILE) == SHOWN
    assert printable("plain\n\ttext, naïve — 🚨\u200d日本") == "plain\n\ttext, naïve — 🚨\u200d日本"
    assert printable("\ud800") == "\\ud800"
    assert printable("") == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_strings_are_printed_as_text_everywhere(terminal):
    plain = console(force_terminal=terminal, color_system=None)
    table = Table("a", title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE, HOSTILE)
    plain.print(HOSTILE)
    plain.sentence(HOSTILE)
    plain.print(table)
    plain.blocks(HOSTILE)
    said = plain.file.getvalue()
    assert said.count(SHOWN) >= 2 + 5
    assert "\x1b[2J" not in said and "\x07" not in said


def test_name_of_a_checkpoint_is_printed_as_text(tmp_path):
    folder = specdec_ext.save_draft(random_head(), tmp_path / "[red]head[/blue]\x1b[2J")
    result = run("inspect", folder, columns=200)
    assert result.exit_code == 0, result.output
    shown = result.output.replace("\n", "")  # the title breaks where the table is narrow
    assert "[red]head[/blue]\\x1b[2J" in shown and "\x1b" not in shown


@pytest.mark.parametrize("command", ["check", "bench"])
def test_names_of_prompts_are_printed_as_text(command, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"name": HOSTILE, "prompt": "def f():\n"}] * 2))
    few = {"bench": ("--repeats", "1")}.get(command, ())
    result = run(command, "--prompts", prompts, "--max-new-tokens", 2, *few, columns=200)
    assert result.exit_code == 0, result.output
    if command == "check":
        assert SHOWN in result.output
    assert "\x1b" not in result.output and "\x07" not in result.output


def test_errors_are_printed_as_text():
    result = run("generate", f"./{HOSTILE}", "-p", "x", columns=200)
    assert result.exit_code == 2, result.output
    assert "\x1b[2J" not in result.output and "\\x1b[2J" in result.output
