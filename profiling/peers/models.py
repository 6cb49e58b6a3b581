"""The models of the race as checkpoints that every program can convert, and their prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from baselines.random_targets import random_llama, random_prompts
from safetensors import safe_open

from peers.cases import LONG_PROMPT, NEW
from peers.storage import built
from specdec_ext import assets

BUNDLED = "bundled"
# Name, by the number of parameters -> name in ``baselines.random_targets.SHAPES``. All are Llamas, which
# every program reads.
RANDOM = {"135m": "135m", "494m": "500m", "1100m": "1.1b"}
MODELS = (BUNDLED, *RANDOM)
POSITIONS = 4096
assert POSITIONS > LONG_PROMPT + NEW
SPREAD = 0.04  # standard deviation of random weights: with the usual 0.02, all logits are almost the same
VOCAB = 4096  # of the bundled tokenizer; random prompts have these ids, which are in every model's tokenizer
Prompts = list[list[int]]  # a batch: rows of one length
FILES = ("tokenizer.json", "tokenizer_config.json")


def checkpoint(name: str, place: Path) -> Path:
    """The folder of a model in bfloat16 with its tokenizer; it is made if it is not there.

    Args:
        name: one of ``MODELS``.
        place: folder of all checkpoints.
    """
    make = _copy_bundled if name == BUNDLED else lambda folder: _make_random(name, folder)
    return built(place / name, make)


def _copy_bundled(folder: Path) -> None:
    """The bundled target, with a config that allows long prompts: some programs refuse them otherwise."""
    shutil.copytree(_bundled(), folder)
    _change(folder / "config.json", max_position_embeddings=POSITIONS)


def _make_random(name: str, folder: Path) -> None:
    model = random_llama(RANDOM[name], torch.bfloat16, SPREAD)
    # Exporters want these ids to be there.
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model.config.update({**ids, "max_position_embeddings": POSITIONS})
    model.generation_config.update(**ids)
    model.save_pretrained(folder)
    for file in FILES:
        shutil.copy(_bundled() / file, folder)
    tokenizer = json.loads((folder / FILES[0]).read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab |= {
        f"<{number}>": number for number in range(model.config.vocab_size) if number not in known
    }
    (folder / FILES[0]).write_text(json.dumps(tokenizer), "utf-8")


def _bundled() -> Path:
    return assets.FOLDER / "tiny-python-target"


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values, indent=2), "utf-8")


def weights_of_a_step(folder: Path) -> int:
    """Number of the weights that a step of decoding reads: all, but of an untied embedding one row."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if "lm_head.weight" in sizes:
        del sizes["model.embed_tokens.weight"]
    return sum(torch.Size(shape).numel() for shape in sizes.values())


def prompts_of(name: str, rows: int, length: int, count: int) -> list[Prompts]:
    """``count`` batches of ``rows`` prompts, each of exactly ``length`` ids.

    A prompt for the bundled model is the end of several held-out texts in a row, so that it ends where a
    block opens. Other models get random ids.
    """
    if name != BUNDLED:
        made = random_prompts(VOCAB, rows, length, count)
        return [prompt["input_ids"].tolist() for prompt in made]
    tokenizer = assets.load_tokenizer()
    texts = [tokenizer(each["prompt"]).input_ids for each in assets.held_out_prompts()]
    prompts = [_ending(texts, number, length) for number in range(rows * count)]
    return [prompts[first : first + rows] for first in range(0, len(prompts), rows)]


def _ending(texts: Sequence[list[int]], number: int, length: int) -> list[int]:
    """The last ``length`` ids of the texts up to ``number``, counted around."""
    ids: list[int] = []
    while len(ids) < length:
        ids = texts[number % len(texts)] + ids
        number -= 1
    return ids[-length:]
