"""Make the prompts in ``specdec_ext/assets``: beginnings of files that are not in the training text.

    python tools/bundled/bundled_models.py prepare
    python tools/bundled/make_prompts.py

Each file in ``SOURCES`` is one of the held-out texts and is found by the hash of its content. The files were
chosen by kind (library code, tests, scientific code; classes, functions, doctests) and by licence, before any
speed was measured. A prompt is the longest sequence of whole lines from the top of a file that has at most
``MAX_TOKENS`` tokens and ends with a line that opens a block. Because text is copied between files, it is not
enough that a file is held out: of all runs of ``RUN`` tokens in a prompt and its true continuation, at most
the share ``MAX_SEEN`` may occur in the training text.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from transformers import PreTrainedTokenizerFast

MAX_TOKENS = 350
CONTINUATION_TOKENS = 128
RUN = 24
MAX_SEEN = 0.15
MAX_TOTAL_BYTES = 60_000


@dataclass(frozen=True)
class Source:
    """A held-out file: the first 16 digits of its SHA-256, its project and path, and its SPDX licence."""

    sha256: str
    name: str
    license: str


SOURCES = [
    Source("64e194e451414141", "cpython/Lib/idlelib/filelist.py", "PSF-2.0"),
    Source("00f69b962192889e", "cpython/Lib/test/test_generators.py", "PSF-2.0"),
    Source("3203fdfdc2a5c386", "networkx/classes/tests/test_reportviews.py", "BSD-3-Clause"),
    Source("fada56c25b6a457c", "cpython/Lib/email/headerregistry.py", "PSF-2.0"),
    Source("c8975e8ad62bf77d", "torch/fx/_pytree.py", "BSD-3-Clause"),
    Source("64ed4613fd7e3995", "cpython/Lib/test/test_xml_dom_minicompat.py", "PSF-2.0"),
    Source("96b70cc5456e1bab", "numpy/_core/tests/test_array_coercion.py", "BSD-3-Clause"),
    Source("c8eb28ef7addf5a6", "cpython/Lib/idlelib/autoexpand.py", "PSF-2.0"),
    Source("c82a8a6867211524", "networkx/algorithms/euler.py", "BSD-3-Clause"),
    Source("00287eb81780e8be", "cpython/Lib/test/test_float.py", "PSF-2.0"),
    Source("c8de9de30fd95573", "sympy/combinatorics/prufer.py", "BSD-3-Clause"),
    Source("fa3d5df7f26c40e2", "torch/testing/_comparison.py", "BSD-3-Clause"),
    Source("321333b3eaad9ecb", "cpython/Lib/idlelib/idle_test/test_replace.py", "PSF-2.0"),
    Source("007ebb070de5a79b", "cpython/Lib/test/libregrtest/save_env.py", "PSF-2.0"),
]

NOTICE = """# Prompts

`prompts.json` quotes the beginnings of the files below under their own licences; copyright is their
authors'. Neither bundled model was trained on these files. Made by `tools/bundled/make_prompts.py`.

| file | licence |
|---|---|
"""


def cut(text: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The longest beginning that has at most MAX_TOKENS and ends with a whole line that opens a block.

    The text then has to continue, while after the end of a block it might as well end. The last line break is
    cut off, because the model's tokens join it with the following indentation.
    """
    lines = text.splitlines(keepends=True)
    best = ""
    for count in range(1, len(lines)):
        candidate = "".join(lines[:count])
        if len(tokenizer(candidate)["input_ids"]) > MAX_TOKENS:
            break
        if lines[count - 1].rstrip().endswith(":") and lines[count].startswith((" ", "\t")):
            best = candidate.rstrip()
    return best


def run_hashes(ids: np.ndarray) -> np.ndarray:
    """Hash each run of ``RUN`` tokens with a 64-bit polynomial; ``[len(ids) - RUN + 1]``."""
    count = len(ids) - RUN + 1
    hashes = np.zeros(max(count, 0), dtype=np.uint64)
    for offset in range(RUN):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + count].astype(
            np.uint64
        )
        hashes += np.uint64(1)
    return hashes


def seen_shares(texts: list[np.ndarray], corpus: np.ndarray, chunk: int = 4_000_000) -> list[float]:
    """For each text, the share of its runs that occur in the corpus."""
    wanted = [run_hashes(ids) for ids in texts]
    everything = np.unique(np.concatenate(wanted))
    seen = np.zeros(len(everything), dtype=bool)
    for start in range(0, len(corpus), chunk):
        hashes = run_hashes(corpus[start : start + chunk + RUN - 1])
        seen |= np.isin(everything, hashes)
    return [float(seen[np.searchsorted(everything, hashes)].mean()) for hashes in wanted]


def main(
    work: Annotated[
        Path, typer.Option(help="folder of the corpus, as for tools/bundled/bundled_models.py")
    ] = Path("build/bundled"),
    assets: Path = Path("specdec_ext/assets"),
) -> None:
    """Write prompts.json and PROMPTS.md."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    held_out = {
        hashlib.sha256(text.encode()).hexdigest()[:16]: text
        for text in json.loads((work / "held_out_texts.json").read_text())
    }
    missing = [source.name for source in SOURCES if source.sha256 not in held_out]
    if missing:
        sys.exit(
            f"not among the held-out texts of {work} (is another version installed?): "
            f"{', '.join(missing)}"
        )
    entries, neighbourhoods = [], []
    for source in SOURCES:
        prompt = cut(held_out[source.sha256], tokenizer)
        entries.append({"name": source.name, "prompt": prompt, "license": source.license})
        length = len(tokenizer(prompt)["input_ids"])
        ids = np.asarray(tokenizer(held_out[source.sha256])["input_ids"])
        neighbourhoods.append(ids[: length + CONTINUATION_TOKENS])
    shares = seen_shares(neighbourhoods, np.load(work / "train.npy", mmap_mode="r"))
    for source, entry, share in zip(SOURCES, entries, shares, strict=True):
        tokens = len(tokenizer(entry["prompt"])["input_ids"])
        print(f"{source.name:<48} {tokens:4} tokens  {share:6.1%} of runs seen in training")
    leaked = [
        source.name for source, share in zip(SOURCES, shares, strict=True) if share > MAX_SEEN
    ]
    if leaked:
        sys.exit(f"more than {MAX_SEEN:.0%} seen in training: {', '.join(leaked)}")
    text = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    if len(text.encode()) > MAX_TOTAL_BYTES:
        sys.exit(
            f"prompts.json would have {len(text.encode())} bytes; at most {MAX_TOTAL_BYTES} are allowed"
        )
    (assets / "prompts.json").write_text(text, encoding="utf-8")
    rows = "".join(f"| {source.name} | {source.license} |\n" for source in SOURCES)
    (assets / "PROMPTS.md").write_text(NOTICE + rows, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
