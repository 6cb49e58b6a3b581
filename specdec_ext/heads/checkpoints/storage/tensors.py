"""Check the tensors of a checkpoint against a ``HeadConfig``, then read them.

Names, shapes and dtypes are checked before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec_ext.display.progress import tracked
from specdec_ext.heads.checkpoints.storage.files import StoredTensor
from specdec_ext.heads.config import HeadConfig
from specdec_ext.heads.weights import UnkeptTensors

# Tensors in files that a head does not use: t2d repeats d2t, the others repeat weights of the target.
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_MAX_LISTED = 20
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def head_tensors(
    config: HeadConfig,
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    source: str,
    dtype: torch.dtype | None = None,
    keep: bool = True,
) -> tuple[Mapping[str, Tensor], tuple[str, ...]]:
    """Read and check the tensors of ``config.tensor_shapes()``.

    Args:
        config: config of the head.
        stored: the tensors of the file by our names.
        names: our name -> name in the file, for messages.
        source: name of the checkpoint, for messages.
        dtype: dtype to convert to; None requires that all tensors have one dtype.
        keep: True reads them once; False reads each one when it is accessed (:class:`UnkeptTensors`).

    Returns:
        The tensors, and the names in the file of those that the head does not use.

    Raises:
        ValueError: for missing or unexpected tensors, wrong shapes or dtypes, or values that are not finite.
    """
    expected = {_in_files(name): shape for name, shape in config.tensor_shapes().items()}
    ignored = [name for name in stored if _is_ignored(name, config)]
    _check_names(expected, stored, ignored, names, source)
    floating = [name for name in expected if name != "d2t"]
    for name in expected:
        _check_shape(f"{source}: {names[name]}", name, stored[name], expected[name])
    check_dtypes({names[name]: stored[name].dtype for name in floating}, dtype, source)
    if "d2t" in stored:
        _draft_to_target(stored, config, source)  # checked even if it is not used

    def read(name: str) -> Tensor:
        if name == "draft_to_target":
            return _draft_to_target(stored, config, source)
        tensor = read_finite(stored[name], f"{source}: {names[name]}")
        return tensor.reshape(expected[name]).to(dtype)

    all_names = floating + ["draft_to_target"] * ("d2t" in expected)
    tensors: Mapping[str, Tensor] = UnkeptTensors(all_names, read)
    if keep:
        kept = {}
        with tracked(f"reading {source}", len(all_names), "tensor") as work:
            for name in all_names:
                kept[name] = read(name)
                work.advance()
        tensors = kept
    return tensors, tuple(sorted(names[name] for name in ignored))


def _in_files(name: str) -> str:
    return "d2t" if name == "draft_to_target" else name


def _is_ignored(name: str, config: HeadConfig) -> bool:
    if name in _IGNORED or name.endswith("rotary_emb.inv_freq"):
        return True
    # With a full vocabulary d2t is the identity, which is checked. Like vLLM, skip an fc that is not run.
    full = config.draft_vocab_size == config.vocab_size
    return (name == "d2t" and full) or (name in ("fc.weight", "fc.bias") and not config.has_fc)


def _check_names(
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    ignored: list[str],
    names: Mapping[str, str],
    source: str,
) -> None:
    missing = sorted(expected.keys() - stored.keys())
    surplus = sorted(names[name] for name in stored.keys() - expected.keys() - set(ignored))
    if not missing and not surplus:
        return
    parts = []
    if missing:
        parts.append(f"it lacks {_listed(missing)}")
    if surplus:
        parts.append(f"it has {_listed(surplus)}, which a head with its config does not have")
    raise ValueError(
        f"{source} does not hold the tensors of its config: {'; '.join(parts)}. Missing tensors are not "
        "initialised at random; download or export the checkpoint again"
    )


def _listed(names: list[str]) -> str:
    """List names for a message, at most 20: with a wrong number of layers hundreds are missing."""
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _check_shape(where: str, name: str, tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    shape = tensor.shape
    if name == "mask_hidden":  # stored with leading dimensions of 1
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
    if shape != expected:
        raise ValueError(
            f"{where} has shape {list(tensor.shape)}; its config requires {list(expected)}"
        )


def check_dtypes(
    found: Mapping[str, torch.dtype | None], wanted: torch.dtype | None, source: str
) -> None:
    """Refuse tensors that are not floating-point, or of different dtypes if ``wanted`` is None.

    Raises:
        ValueError: the message names an example of each dtype.
    """
    examples = {dtype: name for name, dtype in found.items()}
    for dtype, name in examples.items():
        if dtype not in _DTYPES:
            raise ValueError(
                f"{source}: {name} is {dtype or 'of a quantised type'}; expected a floating-point type of at "
                "least 16 bits"
            )
    if len(examples) > 1 and wanted is None:
        mixed = ", ".join(f"{name} is {dtype}" for dtype, name in examples.items())
        raise ValueError(f"{source} mixes dtypes: {mixed}; pass dtype=... to convert them to one")


def read_finite(stored: StoredTensor, where: str) -> Tensor:
    """Read a tensor; refuse values that are not finite, in parts to avoid a temporary of its size."""
    tensor = stored.read()
    if not all(bool(part.isfinite().all()) for part in tensor.split(4096)):
        raise ValueError(
            f"{where} holds NaN or infinity; the checkpoint is damaged or its training has diverged"
        )
    return tensor


def _draft_to_target(stored: Mapping[str, StoredTensor], config: HeadConfig, source: str) -> Tensor:
    """Return the target's id of each draft id, ``[draft_vocab]`` int64: id + d2t[id] (d2t holds offsets)."""
    offsets = stored["d2t"]
    count = config.draft_vocab_size
    if offsets.shape != (count,) or offsets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{source}: d2t has shape {list(offsets.shape)} and dtype {offsets.dtype}; its config requires "
            f"[{count}] integers"
        )
    values = offsets.read().long()
    targets = values + torch.arange(count, device=values.device)
    bad = (targets < 0) | (targets >= config.vocab_size)
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(
            f"{source}: d2t[{index}] is {int(values[index])}, so draft id {index} is target id "
            f"{int(targets[index])}, but the target's vocabulary has {config.vocab_size} tokens. d2t must "
            "hold offsets; this one may hold ids"
        )
    back = (targets.diff() <= 0).nonzero()
    if len(back):
        index = int(back[0])
        raise ValueError(
            f"{source}: d2t maps draft ids {index} and {index + 1} to {targets[index : index + 2].tolist()}; "
            "expected ascending target ids"
        )
    if "t2d" in stored:
        _check_mask(stored["t2d"], targets, config, source)
    return targets


def _check_mask(mask: StoredTensor, targets: Tensor, config: HeadConfig, source: str) -> None:
    if mask.shape != (config.vocab_size,) or mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(
            f"{source}: t2d has shape {list(mask.shape)} and dtype {mask.dtype}; its config requires "
            f"[{config.vocab_size}] bool"
        )
    if not torch.equal(mask.read().bool().nonzero().flatten(), targets):
        raise ValueError(
            f"{source}: t2d and d2t name different target tokens; one of them belongs to another head"
        )
