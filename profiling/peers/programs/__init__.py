"""Programs that generate text, by name."""

from __future__ import annotations

from peers.programs.base import PLAIN, Format, Program
from peers.programs.ctranslate2 import CTranslate2
from peers.programs.hugging_face import HuggingFace
from peers.programs.llama_cpp import LlamaCpp
from peers.programs.onnx_genai import OnnxGenai
from peers.programs.openvino_genai import OpenVino
from peers.programs.ours import Ours

__all__ = ["OWN", "PLAIN", "PROGRAMS", "Format", "Program"]

PROGRAMS: dict[str, type[Program]] = {
    "ours": Ours,
    "hf": HuggingFace,
    "openvino": OpenVino,
    "llama": LlamaCpp,
    "ctranslate2": CTranslate2,
    "onnxruntime": OnnxGenai,
}
OWN = ("ours", "hf")  # run in this environment; the others are peers
