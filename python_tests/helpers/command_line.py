"""Runs the command line in this process."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from specdec_ext.cli import app


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "160"})


def words(text: str) -> str:
    """Text without colours, boxes and line breaks, which depend on the terminal."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
