"""llama.cpp through llama-cpp-python's bindings of its C functions, which pip compiles for this processor.

The loop of decoding is in Python here, a few microseconds for each token; a program in C would save them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from peers.programs.base import PLAIN, Format, Program
from peers.programs.hugging_face import LOOKUP
from peers.versions import TORCH

CONTEXT = 8192  # tokens of all rows together
ROWS = 16  # at most
BATCH = 2048  # tokens of a call
FILE = "model.gguf"
NGRAM, DRAFT = 2, 10  # defaults of llama-cpp-python's prompt lookup


class LlamaCpp(Program):
    title = "llama.cpp"
    package = "llama-cpp-python"
    requirements = ("llama-cpp-python", "gguf", "safetensors", TORCH)
    formats: ClassVar = {
        "f32": Format("f32", 4),
        "bf16": Format("bf16", 2),
        "int8": Format("q8_0", 34 / 32),
        "int4": Format("q4_0", 18 / 32),
    }
    ways: ClassVar = {PLAIN: True, LOOKUP: False}

    @staticmethod
    def export(model: Path, out: Path, format: str) -> None:
        """Quantised files are made from one in bfloat16, by llama.cpp itself."""
        from serving.gguf_file import write_gguf

        out.mkdir(parents=True)
        if format in ("f32", "bf16"):
            write_gguf(model, out / FILE, half=format == "bf16")
            return
        import llama_cpp

        source = out / "bf16.gguf"
        write_gguf(model, source, half=True)
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{format.upper()}")
        names = (str(each).encode() for each in (source, out / FILE))
        if llama_cpp.llama_model_quantize(*names, settings):
            raise RuntimeError(f"llama.cpp could not write {format}")
        source.unlink()

    def __init__(self, files: Path, format: str, way: str, threads: int):
        import llama_cpp

        self.api: Any = llama_cpp
        self.way = way
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(files / FILE).encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = CONTEXT, BATCH, ROWS
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = True
        if format == "f32":
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(model, settings)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, ROWS)

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        self.api.llama_memory_clear(self.memory, False)
        texts = [[*prompt] for prompt in prompts]
        for row, text in enumerate(texts):
            cells = [(token, place, row, False) for place, token in enumerate(text[:-1])]
            (first,) = self._pass([*cells, (text[-1], len(text) - 1, row, True)])
            text.append(first)
        length = len(prompts[0])
        while len(texts[0]) < length + count:
            if self.way == LOOKUP:
                self._verify(texts[0], length + count)
            else:
                cells = [(text[-1], len(text) - 1, row, True) for row, text in enumerate(texts)]
                for text, token in zip(texts, self._pass(cells), strict=True):
                    text.append(token)
        return [text[length:] for text in texts]

    def _pass(self, cells: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest token after each cell that asks for it: token, position, row, whether it asks."""
        for start in range(0, len(cells), BATCH):
            part = cells[start : start + BATCH]
            batch = self.batch
            batch.n_tokens = len(part)
            for index, (token, place, row, asks) in enumerate(part):
                batch.token[index], batch.pos[index] = token, place
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = asks
            if self.api.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
        return [self._likeliest(index) for index, cell in enumerate(part) if cell[3]]

    def _likeliest(self, index: int) -> int:
        import numpy as np

        logits = self.api.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def _verify(self, text: list[int], end: int) -> None:
        """A step of prompt lookup: a pass over the last token and a draft, and the tokens that it accepts."""
        import numpy as np
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        find = LlamaPromptLookupDecoding.find_candidate_pred_tokens
        draft = [int(token) for token in find(np.array(text), NGRAM, DRAFT)][: end - len(text) - 1]
        root = len(text) - 1
        tokens = [text[-1], *draft]
        chosen = self._pass([(token, root + i, 0, True) for i, token in enumerate(tokens)])
        for token, drafted in zip(chosen, [*draft, None], strict=True):
            text.append(token)
            if token != drafted:
                break
        self.api.llama_memory_seq_rm(self.memory, 0, len(text) - 1, -1)
