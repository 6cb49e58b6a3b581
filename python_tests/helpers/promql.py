"""The metrics that a server exports, and those that an expression in PromQL reads."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from specdec_ext.engine import EngineLoad
from specdec_ext.rollout.lock import ReferenceAcceptance
from specdec_ext.serve.metrics import ServerMetrics
from specdec_ext.stats import SpeculationStats

# The words of the language that the expressions of this repository use, and units of time.
_WORDS = {
    *("and", "or", "unless", "sum", "by", "without", "scalar", "vector", "sqrt"),
    *("rate", "increase", "histogram_quantile", "label_values"),
}


def exported() -> set[str]:
    """The names of all samples on the page of metrics of a server with a lock."""
    stats = SpeculationStats(reached_per_position=[1], accepted_per_position=[1])
    load = EngineLoad(0, 0, 0, 1, 1)
    engine: Any = SimpleNamespace(load=load, stats=lambda: stats)
    page = ServerMetrics(engine, "m", ReferenceAcceptance(1, 1, (1,), 1, 2)).page().decode()
    return set(re.findall(r"^([a-zA-Z_:][\w:]*)\{", page, re.MULTILINE))


def read_by(expression: str) -> set[str]:
    """The metrics in an expression: its names that are no words of the language."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - _WORDS
