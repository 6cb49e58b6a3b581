"""Find the files of a checkpoint in a folder or on the hub, and read them without trusting them.

Weights are safetensors, or files that ``torch.load(weights_only=True)`` accepts: a pickle that contains
anything but tensors is refused, not executed. Names, shapes and dtypes are read before the tensors, so a file
whose header claims absurd sizes is refused before memory is allocated.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec_ext.heads.checkpoints.config.fields import Fields, shown
from specdec_ext.heads.checkpoints.storage.hub import on_disk

_CONFIG, _INDEX = "config.json", ".index.json"
# If a folder holds several kinds of weights, the first of this list is used.
_PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.pt",
)
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_JSON_BYTES = 2**26
_MAX_PICKLE_BYTES = 2**26  # for names and shapes; the archive stores tensors separately


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that has not been read yet; ``dtype`` is None for a type without a plain torch dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        source: the path or hub id that the caller gave.
        config: contents of its config.json.
        tensors: the tensors by their name in the file.
    """

    source: str
    config: Fields
    tensors: dict[str, StoredTensor]


def open_checkpoint(
    path: str | Path, revision: str | None = None, token: str | bool | None = None
) -> Checkpoint:
    """Open the checkpoint in a folder, of a weight file, or on the hub; tensors are not read yet.

    Args:
        path: folder, weight file, or hub id such as ``"org/name"``.
        revision: branch, tag or commit on the hub.
        token: access token for the hub, as in ``huggingface_hub.snapshot_download``.

    Raises:
        OSError: if the path or hub id does not exist.
        ValueError: for files that can't be read.
    """
    config_file, weights = _places(path, revision, token)
    source = str(path)
    config = Fields(read_json(config_file), f"{source}/{config_file.name}")
    return Checkpoint(source, config, _stored_tensors(weights))


def checkpoint_files(
    path: str | Path, revision: str | None = None, token: str | bool | None = None
) -> list[Path]:
    """Return config.json and the weight files of a checkpoint, with those that an index lists.

    Args:
        path, revision, token: as for :func:`open_checkpoint`; a hub id is downloaded.

    Raises:
        OSError: if the checkpoint, or one of its files, does not exist.
        ValueError: if the weight files can't be told.
    """
    config_file, weights = _places(path, revision, token)
    files = [config_file, weights]
    if weights.name.endswith(_INDEX):
        files += _shards(weights, _listed(weights))
    if not config_file.is_file():
        raise _missing(config_file)
    return files


def _places(path: str | Path, revision: str | None, token: str | bool | None) -> tuple[Path, Path]:
    """The files with the config and with the weights, or with the index of the weights."""
    if not str(path):
        raise ValueError(
            "the path of the checkpoint is empty; expected a folder, a file or a hub id"
        )
    given = on_disk(path, revision, token)
    if given is not None and given.is_file():
        return given.parent / _CONFIG, given
    folder = given or _downloaded(str(path), revision, token)
    return folder / _CONFIG, _weights_in(folder, str(path))


def _downloaded(name: str, revision: str | None, token: str | bool | None) -> Path:
    """Download config and weights of a hub repository; pickles only if it has no safetensors."""
    options: dict[str, Any] = {"revision": revision, "token": token}
    try:
        folder = Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], **options)
        )
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["*.json", "*.bin", "*.pt"], **options)
    except (OSError, ValueError) as error:
        raise OSError(
            f"{name!r} is neither a file nor a folder, and can't be downloaded from the hub: {error}"
        ) from error
    return folder


def _weights_in(folder: Path, source: str) -> Path:
    for name in _PREFERRED:
        if (folder / name).is_file():
            return folder / name
    for suffix in (".safetensors", ".bin", ".pt"):
        found = sorted(path for path in folder.glob(f"*{suffix}") if path.is_file())
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{source} has {len(found)} files *{suffix} and no index of them: "
                f"{', '.join(path.name for path in found[:4])}; pass the path of one of them"
            )
    raise OSError(
        f"{source} has no weight file; expected one of {', '.join(_PREFERRED)} or a single file "
        "*.safetensors, *.bin or *.pt"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        OSError: if the file does not exist.
        ValueError: if it holds anything but a JSON object, or is too large.
    """
    if not path.is_file():
        raise _missing(path)
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes; expected at most {_MAX_JSON_BYTES} for a config or "
            "index"
        )
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _missing(path: Path) -> OSError:
    return OSError(f"{path} is missing; a checkpoint has this file beside its weights")


def _stored_tensors(weights: Path) -> dict[str, StoredTensor]:
    if weights.name.endswith(_INDEX):
        return _sharded(weights)
    if weights.suffix == ".safetensors":
        return _safetensors(weights)
    return _pickled(weights)


def _sharded(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files that an index lists."""
    listed = _listed(index)
    tensors: dict[str, StoredTensor] = {}
    for file in _shards(index, listed):
        shard = _stored_tensors(file)
        if shard.keys() & tensors.keys():
            raise ValueError(
                f"{index}: tensor {min(shard.keys() & tensors.keys())} is in two files"
            )
        tensors |= shard
    if tensors.keys() != listed.keys():
        different = ", ".join(sorted(tensors.keys() ^ listed.keys())[:8])
        raise ValueError(
            f"{index} and its files differ: {different} are only in the index or only in a file"
        )
    return tensors


def _listed(index: Path) -> Mapping[str, Any]:
    """Tensor -> file, as an index lists them."""
    listed = Fields(read_json(index), str(index)).section("weight_map").values
    if not listed:
        raise ValueError(
            f"{index} lists no tensors; expected weight_map with the file of each tensor"
        )
    return listed


def _shards(index: Path, listed: Mapping[str, Any]) -> list[Path]:
    """The files that an index lists."""
    names = set()
    for value in listed.values():
        # An index must not refer to files outside of its folder.
        if not isinstance(value, str) or Path(value).name != value or value.endswith(".json"):
            raise ValueError(f"{index}: {value!r} is not the name of a weight file beside it")
        names.add(value)
    for name in sorted(names):
        if not (index.parent / name).is_file():
            raise OSError(f"{index} lists {name!r}, which is missing; download it again")
    return [index.parent / name for name in sorted(names)]


def _safetensors(path: Path) -> dict[str, StoredTensor]:
    tensors = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, file is not a dict
                part = file.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(part.get_dtype())
                read = partial(_read_safetensor, path, name)
                tensors[name] = StoredTensor(tuple(part.get_shape()), dtype, read)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or not a safetensors file: {error}; download it again"
        ) from error
    return tensors


def _read_safetensor(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _check_archive(path: Path) -> None:
    """Refuse a zip archive with compressed or oversized members, which torch does not write."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(
            f"{path} is damaged or not a torch file: {error}; download it again"
        ) from error
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"{path} is not a torch file: {shown(member.filename)} in it is compressed, from "
                f"{member.file_size} bytes; download it again"
            )
        if member.filename.endswith(".pkl") and member.file_size > _MAX_PICKLE_BYTES:
            raise ValueError(
                f"{path}: {shown(member.filename)} has {member.file_size} bytes; expected at most "
                f"{_MAX_PICKLE_BYTES} for the names of a checkpoint"
            )


def _pickled(path: Path) -> dict[str, StoredTensor]:
    _check_archive(path)
    try:
        # torch files from before 2020 are not zip archives and can't be memory-mapped.
        content = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError as error:
        raise ValueError(
            f"{path} is refused: it is not a torch file, or it holds objects other than tensors, and reading "
            "such a pickle can run any code. Use a safetensors version, or convert the file yourself if you "
            f"trust it. ({str(error).splitlines()[0]})"
        ) from error
    except Exception as error:  # a damaged pickle may raise any exception
        raise ValueError(
            f"{path} is damaged or not a torch file: {error}; download it again"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(
            f"{path} holds a {type(content).__name__}; expected a dict of names and tensors"
        )
    tensors = {}
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{path}: {name} is a {type(value).__name__}; expected a tensor")
        # A nested tensor has no shape.
        odd = value.is_nested or value.is_quantized or value.layout is not torch.strided
        if odd or value.device.type != "cpu":
            raise ValueError(f"{path}: {name} is not a dense tensor")
        # A pickle sets the strides, so a few bytes can claim to be a tensor of any size.
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(
                f"{path}: {name} claims the shape {tuple(value.shape)}, for which the file has too few bytes"
            )
        tensors[name] = StoredTensor(tuple(value.shape), value.dtype, value.contiguous)
    return tensors
