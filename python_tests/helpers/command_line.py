"""Runs the command line in this process."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from specdec_ext.cli import app


def run(*arguments: object, stdin: str | bytes | None = None, columns: int = 160):
    given = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, given, input=stdin, env={"COLUMNS": str(columns)})


def words(text: str) -> str:
    """Text without colours, boxes and line breaks, which depend on the terminal."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(re.sub(r"[│╭╮╰╯─┃┏┓┗┛┡┩┌┐└┘━]", " ", text).split())
