"""The limits of the op ``draft_head``, beyond which its specification drafts, and its default weights."""

from __future__ import annotations

import torch

from specdec_ext.heads.config import HeadConfig
from specdec_ext.ops import _library
from specdec_ext.ops.packed_head import layout_of
from specdec_ext.tree.config import TreeConfig

# The dtypes in which the op drafts.
_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


def default_weights(device: torch.device, dtype: torch.dtype) -> str:
    """The format of a head's weights with which it drafts fastest: "int8" on the CPU, otherwise "same".

    With a dtype that the op does not support, its specification drafts, which has "same" alone.
    """
    return "int8" if device.type == "cpu" and dtype in _DTYPES["cpu"] else "same"


def draft_head_refusal(
    config: HeadConfig,
    device: torch.device,
    dtype: torch.dtype,
    tree: TreeConfig,
    num_rows: int,
    weights: str = "same",
) -> str | None:
    """Return why :func:`specdec_ext.ops.draft_head` can't draft this, or None if it can.

    The CPU op supports float32 and bfloat16, both also with weights of int8. The CUDA op supports float16,
    too, and 8-bit weights with both 16-bit dtypes. Its limits are 8 layers, head_dim 256, tree depth 64,
    top_k 32 (for a static tree the largest rank plus one) and 128 rows; rows of the head's matrices must be
    multiples of 16 bytes.

    Args:
        config: config of the head.
        device: device of the draft.
        dtype: dtype of the draft.
        tree: the shape to draft.
        num_rows: number of rows of the batch.
        weights: format of the weights, as for :meth:`specdec_ext.ops.PackedHead.pack`.
    """
    if device.type not in _DTYPES:
        return f"it supports the CPU and CUDA, not {device}"
    where = "CUDA" if device.type == "cuda" else "the CPU"
    if dtype not in _DTYPES[device.type]:
        return f"on {where} it supports {', '.join(map(str, _DTYPES[device.type]))}, not {dtype}"
    if device.type == "cpu":
        return None if weights != "float8" else "on the CPU it supports weights of int8, not float8"
    refusal: str | None = _library.native.draft_head_refusal(
        layout_of(config), dtype.itemsize, weights != "same", tree.levels, tree.top_k, num_rows
    )
    return refusal
