"""Tensors of a checkpoint checked against a ``HeadConfig``, then read.

Order matters: names, shapes and dtypes are compared before a byte of a tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec_ext.heads.checkpoints.files import StoredTensor
from specdec_ext.heads.config import HeadConfig
from specdec_ext.heads.weights import UnkeptTensors

# Files may have these; a head has no use for them. t2d repeats d2t, the others repeat the target.
_WITHOUT_USE = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
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
    """The tensors of ``config.tensor_shapes()``, checked.

    Args:
        config: what the head is to be.
        stored: by our name.
        names: our name -> the file's, for messages.
        source: of the checkpoint.
        dtype: to convert to, else they must be of one dtype.
        keep: read them once and keep them, or whenever they are asked for; :class:`UnkeptTensors`.

    Returns:
        The tensors; the file's names of those that were left out.

    Raises:
        ValueError: for tensors that are missing, too many, or not as they must be.
    """
    expected = {_in_files(name): shape for name, shape in config.tensor_shapes().items()}
    ignored = [name for name in stored if _has_no_use(name, config)]
    _check_names(expected, stored, ignored, names, source)
    floating = [name for name in expected if name != "d2t"]
    for name in expected:
        _check_shape(f"{source}: {names[name]}", name, stored[name], expected[name])
    check_dtypes({names[name]: stored[name].dtype for name in floating}, dtype, source)
    if "d2t" in stored:
        _draft_to_target(stored, config, source)  # checked even where it is of no use

    def read(name: str) -> Tensor:
        if name == "draft_to_target":
            return _draft_to_target(stored, config, source)
        tensor = stored[name].read()
        if not is_finite(tensor):
            raise ValueError(
                f"{source}: {names[name]} holds NaN or infinity; the checkpoint is damaged or its training "
                "has diverged"
            )
        return tensor.reshape(expected[name]).to(dtype)

    all_names = floating + ["draft_to_target"] * ("d2t" in expected)
    tensors: Mapping[str, Tensor] = UnkeptTensors(all_names, read)
    if keep:
        tensors = dict(tensors)
    return tensors, tuple(sorted(names[name] for name in ignored))


def _in_files(name: str) -> str:
    return "d2t" if name == "draft_to_target" else name


def _has_no_use(name: str, config: HeadConfig) -> bool:
    if name in _WITHOUT_USE or name.endswith("rotary_emb.inv_freq"):
        return True
    # d2t of a full vocabulary is the identity (and checked to be); vLLM, too, skips fc where it isn't run.
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
        parts.append(f"it has {_listed(surplus)}, which no head of its config has")
    raise ValueError(
        f"{source} does not hold the tensors of its config: {'; '.join(parts)}. Nothing is filled in at "
        "random; fetch or export the checkpoint again"
    )


def _listed(names: list[str]) -> str:
    """Names for a message: a config with the target's number of layers lacks hundreds."""
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _check_shape(where: str, name: str, tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    shape = tensor.shape
    if name == "mask_hidden":  # stored with leading dimensions of 1
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
    if shape != expected:
        raise ValueError(
            f"{where} is {list(tensor.shape)}; by its config it must be {list(expected)}"
        )


def check_dtypes(
    found: Mapping[str, torch.dtype | None], wanted: torch.dtype | None, source: str
) -> None:
    examples = {dtype: name for name, dtype in found.items()}
    for dtype, name in examples.items():
        if dtype not in _DTYPES:
            raise ValueError(
                f"{source}: {name} is {dtype or 'of a quantised type'}; expected a floating-point type of 16 "
                "bits or more"
            )
    if len(examples) > 1 and wanted is None:
        mixed = ", ".join(f"{name} is {dtype}" for dtype, name in examples.items())
        raise ValueError(f"{source} mixes types: {mixed}; pass dtype=... to convert them to one")


def is_finite(tensor: Tensor) -> bool:
    """Without a temporary as large as an embedding."""
    return all(bool(part.isfinite().all()) for part in tensor.split(4096))


def _draft_to_target(stored: Mapping[str, StoredTensor], config: HeadConfig, source: str) -> Tensor:
    """``[draft_vocab]`` int64: files hold offsets, target = id + d2t[id]."""
    offsets = stored["d2t"]
    count = config.draft_vocab_size
    if offsets.shape != (count,) or offsets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{source}: d2t is {list(offsets.shape)} {offsets.dtype}; by its config it must be [{count}] "
            "integers"
        )
    values = offsets.read().long()
    targets = values + torch.arange(count, device=values.device)
    bad = (targets < 0) | (targets >= config.vocab_size)
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(
            f"{source}: d2t[{index}] is {int(values[index])}, so draft id {index} is target id "
            f"{int(targets[index])}; the target's vocabulary has {config.vocab_size} (files hold offsets; "
            "does it hold ids?)"
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
            f"{source}: t2d is {list(mask.shape)} {mask.dtype}; by its config it must be "
            f"[{config.vocab_size}] bool"
        )
    if not torch.equal(mask.read().bool().nonzero().flatten(), targets):
        raise ValueError(
            f"{source}: t2d and d2t name different target tokens; one of them belongs to another head"
        )
