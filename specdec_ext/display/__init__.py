"""How results and progress are shown: one line, a table, sentences; a bar with the time left."""

from specdec_ext.display.progress import disable_progress, enable_progress
from specdec_ext.display.results import Summarised
from specdec_ext.display.table import Table

__all__ = ["Summarised", "Table", "disable_progress", "enable_progress"]
