"""Folders of the repository that tests read."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
GOLDEN = HELPERS.parent / "golden"
ROOT = HELPERS.parent.parent
