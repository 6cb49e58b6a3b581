"""Programs that generate text, by name."""

from __future__ import annotations

from peers.programs.base import PLAIN, Format, Program
from peers.programs.hugging_face import HuggingFace
from peers.programs.openvino_genai import OpenVino
from peers.programs.ours import Ours

__all__ = ["OWN", "PLAIN", "PROGRAMS", "Format", "Program"]

PROGRAMS: dict[str, type[Program]] = {
    "ours": Ours,
    "hf": HuggingFace,
    "openvino": OpenVino,
}
OWN = ("ours", "hf")  # run in this environment; the others are peers
