"""Dump the target's hidden states to disk once, and read them from there in every epoch.

A dump is a folder of safetensors shards. Each shard holds some texts one after the other: their ``lengths
[texts]``, ``tokens [tokens]``, ``features [tokens, feature_width]`` and ``last_hidden [tokens,
target_hidden]``, the latter two in the target's dtype. Teacher logits would be many times as large, so they
are computed from the last hidden states when needed, as in SpecForge. ``dump.json`` records the target, the
feature layers and the texts, and the size and hash of every finished shard. An interrupted dump is continued,
a damaged shard is written again, and a dump of another target, other layers or other texts is refused.

A token takes ``(feature_width + target_hidden) * bytes of an element``: 32 KiB with three auxiliary hidden
states of a 16-bit target of hidden size 4096.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec_ext.display import Summarised
from specdec_ext.display.progress import Work, tracked
from specdec_ext.preflight.outputs import free_bytes
from specdec_ext.training.data.batches import Batch, Example, OnlineFeatures, pad
from specdec_ext.training.data.fingerprint import fingerprint

_log = logging.getLogger(__name__)

FORMAT = 1
INDEX = "dump.json"
SHARD_BYTES = 2**28
SPARE_BYTES = 2**28  # left free on the disk for other programs


@dataclass(frozen=True)
class DumpSize(Summarised):
    """The disk space that a dump needs.

    Attributes:
        tokens: number of tokens of all texts.
        bytes_per_token: bytes of hidden states and token id.
        done: bytes that are written already.
        free: free bytes on the disk.
    """

    tokens: int
    bytes_per_token: int
    done: int
    free: int

    @property
    def total(self) -> int:
        """Bytes of the whole dump."""
        return self.tokens * self.bytes_per_token

    def summary(self) -> str:
        there = f", of which {self.done / 1e9:.2f} GB are written" if self.done else ""
        return (
            f"{self.tokens:,} tokens x {self.bytes_per_token:,} bytes = {self.total / 1e9:.2f} GB{there}; "
            f"{self.free / 1e9:.2f} GB are free"
        )


def dump_size(
    target: PreTrainedModel, layers: Sequence[int], examples: Sequence[Example], folder: str | Path
) -> DumpSize:
    """Return the disk space that :func:`dump_features` needs; runs the target on two tokens.

    The arguments are those of :func:`dump_features`.

    Raises:
        ValueError: for no texts, or a folder with a different dump.
    """
    return _Dump(target, layers, examples, Path(folder)).size()


def dump_features(
    target: PreTrainedModel,
    layers: Sequence[int],
    examples: Sequence[Example],
    folder: str | Path,
    *,
    batch: int = 8,
) -> DumpedFeatures:
    """Write the target's hidden states of all texts, as far as they are missing, and open the dump.

    Only one process at a time may write to a folder. Existing shards are read once to find damage.

    Args:
        target: the target in eval mode.
        layers: feature layers, as in :class:`~specdec_ext.training.data.batches.OnlineFeatures`.
        examples: the texts; their loss masks are not stored.
        folder: a new folder, or that of an earlier dump with the same target, layers and texts.
        batch: number of texts per pass of the target.

    Raises:
        ValueError: for no texts, a folder with a different dump, or too little space on the disk.
        OSError: for files that can't be written.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}; expected at least 1")
    dump = _Dump(target, layers, examples, Path(folder))
    size = dump.size()
    if size.total - size.done + SPARE_BYTES > size.free:
        raise ValueError(
            f"the disk of {folder} has too little space for the hidden states: {size}, and "
            f"{SPARE_BYTES / 1e9:.2f} GB must stay free. Pass another folder, fewer or shorter texts, or "
            "train without a dump"
        )
    _log.info("hidden states in %s: %s", folder, size)
    dump.write(batch)
    return DumpedFeatures(target, layers, folder)


class DumpedFeatures:
    """Makes batches like ``OnlineFeatures``, but reads the hidden states from a dump.

    The values are those that the target computed in the batches of the dump; other batches give the same up
    to rounding. Hidden states at padding are 0.

    Args:
        target: the target of the dump; batches are on its device.
        layers: feature layers of the dump.
        folder: folder of the dump.

    Raises:
        ValueError: for a folder without a finished dump of this target and these layers.
    """

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], folder: str | Path):
        folder = Path(folder)
        index = _read_index(folder)
        if index is None:
            raise ValueError(
                f"{folder} is not a dump of hidden states (it has no {INDEX}); make one with dump_features"
            )
        _check_same(folder, index, {"target": fingerprint(target), "layers": list(layers)})
        unfinished = [i for i in range(index["shards"]) if not _has_size(folder, index, i)]
        if unfinished:
            raise ValueError(
                f"the dump in {folder} lacks {len(unfinished)} of {index['shards']} shards; call "
                "dump_features to write them"
            )
        self._device = target.device
        self._folder = folder
        self._shards: list[Any] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        for number in range(index["shards"]):
            self._open(folder / _shard_name(number))

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """Make the batch of some of the dumped texts.

        Raises:
            ValueError: for a text that is not in the dump.
        """
        tokens, loss_mask, lengths = pad(examples)
        features, last_hidden = zip(*(self._read(each) for each in examples), strict=True)
        return Batch(
            tokens.to(self._device),
            loss_mask.to(self._device),
            lengths,
            pad_sequence(list(features), batch_first=True).to(self._device),
            pad_sequence(list(last_hidden), batch_first=True).to(self._device),
        )

    def _open(self, path: Path) -> None:
        try:
            shard = safe_open(path, framework="pt")
            lengths, tokens = shard.get_tensor("lengths"), shard.get_tensor("tokens")
            sizes = {shard.get_slice(name).get_shape()[0] for name in ("features", "last_hidden")}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} can't be read ({error}); call dump_features again") from error
        if sizes != {len(tokens)} or int(lengths.sum()) != len(tokens):
            raise ValueError(
                f"{path} is damaged, its lengths do not match its tensors; call dump_features again"
            )
        start = 0
        for text in tokens.split(lengths.tolist()):
            self._places[_name(text)] = len(self._shards), start
            start += len(text)
        self._shards.append(shard)

    def _read(self, example: Example) -> tuple[Tensor, Tensor]:
        place = self._places.get(_name(example.tokens))
        if place is None:
            raise ValueError(
                f"a text of {len(example.tokens)} tokens is not in the dump in {self._folder}; pass all "
                "training texts to dump_features"
            )
        number, start = place
        rows = slice(start, start + len(example.tokens))
        shard = self._shards[number]
        return shard.get_slice("features")[rows], shard.get_slice("last_hidden")[rows]


class _Dump:
    """A dump that is being written."""

    def __init__(
        self,
        target: PreTrainedModel,
        layers: Sequence[int],
        examples: Sequence[Example],
        folder: Path,
    ):
        if not examples:
            raise ValueError("examples is empty; expected at least one text")
        self._features = OnlineFeatures(target, layers)
        self._examples, self._folder = examples, folder
        probe = self._features([Example(examples[0].tokens[:2], examples[0].loss_mask[:2])])
        states = (probe.features, probe.last_hidden)
        self._bytes = 8 + sum(state.shape[-1] * state.element_size() for state in states)
        self._tokens = sum(len(example.tokens) for example in examples)
        digest = hashlib.sha256()
        for example in examples:
            digest.update(_name(example.tokens))
        made_of = {
            "target": fingerprint(target),
            "layers": list(layers),
            "texts": digest.hexdigest(),
        }
        index = _read_index(folder)
        if index is None:
            index = {"format": FORMAT, **made_of, "shard_bytes": SHARD_BYTES, "files": {}}
        else:
            _check_same(folder, index, made_of)
        self._shards = self._cut(index["shard_bytes"])
        index["shards"] = len(self._shards)
        self._index = index

    def size(self) -> DumpSize:
        numbers = range(len(self._shards))
        done = sum(
            self._index["files"][str(number)]["bytes"]
            for number in numbers
            if _has_size(self._folder, self._index, number)
        )
        return DumpSize(self._tokens, self._bytes, done, free_bytes(self._folder))

    def write(self, batch: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = range(len(self._shards))
        with tracked("checking the shards", len(numbers), "shard") as work:
            todo = []
            for number in numbers:
                if not self._is_whole(number):
                    todo.append(number)
                work.advance()
        missing = sum(len(example.tokens) for number in todo for example in self._shards[number])
        done = self._tokens - missing
        with tracked("collecting hidden states", self._tokens, "token", done) as work:
            for number in todo:
                self._write_shard(number, batch, work)

    def _cut(self, shard_bytes: int) -> list[list[Example]]:
        """Split the texts, in their order, into shards of at most ``shard_bytes`` (or of one text)."""
        shards: list[list[Example]] = []
        filled = shard_bytes
        for example in self._examples:
            size = len(example.tokens) * self._bytes
            if filled + size > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(example)
            filled += size
        return shards

    def _is_whole(self, number: int) -> bool:
        if not _has_size(self._folder, self._index, number):
            return False
        wanted = self._index["files"][str(number)]["sha256"]
        return _file_hash(self._folder / _shard_name(number)) == wanted

    def _write_shard(self, number: int, batch: int, work: Work) -> None:
        examples = self._shards[number]
        states: list[tuple[Tensor, Tensor]] = [2 * (torch.empty(0, device="cpu"),)] * len(examples)
        by_length = sorted(range(len(examples)), key=lambda index: len(examples[index].tokens))
        for start in range(0, len(by_length), batch):
            rows = by_length[start : start + batch]
            made = self._features([examples[row] for row in rows])
            features, last_hidden = made.features.cpu(), made.last_hidden.cpu()
            for place, row in enumerate(rows):
                length = len(examples[row].tokens)
                states[row] = (
                    features[place, :length].clone(),
                    last_hidden[place, :length].clone(),
                )
                work.advance(length)
        path = self._folder / _shard_name(number)
        partial = path.with_suffix(".partial")
        save_file(
            {
                "lengths": torch.tensor(
                    [len(example.tokens) for example in examples], device="cpu"
                ),
                "tokens": torch.cat([example.tokens for example in examples]),
                "features": torch.cat([features for features, _ in states]),
                "last_hidden": torch.cat([last_hidden for _, last_hidden in states]),
            },
            partial,
        )
        entry = {"bytes": partial.stat().st_size, "sha256": _file_hash(partial)}
        _replace(partial, path)
        self._index["files"][str(number)] = entry
        partial = self._folder / f"{INDEX}.partial"
        partial.write_text(json.dumps(self._index, indent=1))
        _replace(partial, self._folder / INDEX)


def _name(tokens: Tensor) -> bytes:
    return hashlib.sha256(tokens.to(torch.int64).contiguous().numpy().tobytes()).digest()


def _shard_name(number: int) -> str:
    return f"hidden-{number:05}.safetensors"


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_bytes())
        known = index["format"] == FORMAT
        sound = (
            isinstance(index["files"], dict)
            and all(
                isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
                for entry in index["files"].values()
            )
            and all(
                isinstance(index[name], int) and index[name] > 0
                for name in ("shards", "shard_bytes")
            )
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}); delete the folder, or pass another one"
        ) from error
    if not known or not sound:
        raise ValueError(
            f"{path} is damaged or of the unsupported format {index['format']!r} (expected {FORMAT}); delete "
            "the folder, or pass another one"
        )
    return index


def _check_same(folder: Path, index: dict[str, Any], made_of: dict[str, Any]) -> None:
    other = [name for name, value in made_of.items() if index.get(name) != value]
    if other:
        raise ValueError(
            f"{folder} holds a dump with different {' and '.join(other)}; pass another folder, or delete "
            "this one"
        )


def _has_size(folder: Path, index: dict[str, Any], number: int) -> bool:
    entry = index["files"].get(str(number))
    path = folder / _shard_name(number)
    return entry is not None and path.exists() and path.stat().st_size == entry["bytes"]


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _replace(partial: Path, path: Path) -> None:
    """Flush ``partial`` to the disk, then rename it to ``path``."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
