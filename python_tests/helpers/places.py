"""Folders of the repository that tests read."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
GOLDEN = TESTS / "golden"
ROOT = TESTS.parent
