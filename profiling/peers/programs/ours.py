"""``specdec_ext.generate`` in this environment."""

from __future__ import annotations

from typing import Any, ClassVar

from peers.programs.base import PLAIN
from peers.programs.hugging_face import HuggingFace

# Way -> value of the argument ``drafter``.
DRAFTERS = {PLAIN: None, "auto": "auto", "n-gram": "ngram"}


class Ours(HuggingFace):
    """A precision of quantised weights is an entry of ``formats`` and its reading in ``__init__``."""

    title = "specdec_ext"
    package = "specdec_ext"
    ways: ClassVar = dict.fromkeys(DRAFTERS, True)

    def contestant(self, shared: dict[str, Any]) -> Any:
        from specdec_ext.evaluate.benchmark import ours

        return ours(self.model, DRAFTERS[self.way], shared)
