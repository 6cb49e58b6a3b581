"""``specdec_ext.generate`` in this environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from peers.programs.base import PLAIN, Format
from peers.programs.hugging_face import HuggingFace

# Way -> value of the argument ``drafter``.
DRAFTERS = {PLAIN: None, "auto": "auto", "n-gram": "ngram"}
# Format -> arguments of ``quantize``. Such models compute in bfloat16.
QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8"},
    "int4-32": {"weights": "int4", "group_size": 32},
    "int4-64": {"weights": "int4", "group_size": 64},
}


class Ours(HuggingFace):
    """int8 has a scale for each output, int4 one in bfloat16 for each group and an output head in int8."""

    title = "specdec_ext"
    package = "specdec_ext"
    formats: ClassVar = {
        **HuggingFace.formats,
        "int8": Format("int8", 1),
        "int4": Format("int4-32", 0.5 + 2 / 32),
        "int4-64": Format("int4-64", 0.5 + 2 / 64),
    }
    ways: ClassVar = dict.fromkeys(DRAFTERS, True)
    computes_in: ClassVar = dict.fromkeys(QUANTISED, "bfloat16")

    def __init__(self, files: Path, format: str, way: str, threads: int):
        super().__init__(files, format, way, threads)
        if format in QUANTISED:
            import specdec_ext

            specdec_ext.quantize(self.model, **QUANTISED[format])

    def contestant(self, shared: dict[str, Any]) -> Any:
        from specdec_ext.evaluate.benchmark import ours

        return ours(self.model, DRAFTERS[self.way], shared)
