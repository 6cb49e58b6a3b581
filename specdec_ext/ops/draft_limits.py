"""``draft_head_refusal``: the limits of the op ``draft_head``. Beyond them, its specification drafts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specdec_ext.heads.config import HeadConfig
from specdec_ext.tree.config import TreeConfig

# Limits of the CUDA kernel, from csrc/include/specdec/draft_head/plan.h.
_MAX_LAYERS, _MAX_HEAD_DIM, _MAX_DEPTH, _MAX_TOP_K, _MAX_ROWS = 8, 256, 64, 32, 128


def draft_head_refusal(
    config: HeadConfig,
    device: torch.device,
    dtype: torch.dtype,
    tree: TreeConfig,
    num_rows: int,
    weights: str = "same",
) -> str | None:
    """Return why :func:`specdec_ext.ops.draft_head` can't draft this, or None if it can.

    The CPU op supports float32 and bfloat16. The CUDA op also supports float16, and 8-bit weights with both
    16-bit dtypes. Its limits are 8 layers, head_dim 256, tree depth 64, top_k 32 (for a static tree the
    largest rank plus one) and 128 rows; rows of the head's matrices must be multiples of 16 bytes.

    Args:
        config: config of the head.
        device: device of the draft.
        dtype: dtype of the draft.
        tree: the shape to draft.
        num_rows: number of rows of the batch.
        weights: format of the weights, as for :meth:`specdec_ext.ops.PackedHead.pack`.
    """
    if device.type == "cpu":
        reasons = _cpu_reasons(dtype, weights)
    elif device.type == "cuda":
        reasons = _cuda_reasons(config, dtype, tree, num_rows, weights)
    else:
        return f"it supports the CPU and CUDA, not {device}"
    return next(reasons, None)


def _cpu_reasons(dtype: torch.dtype, weights: str) -> Iterator[str]:
    if dtype not in (torch.float32, torch.bfloat16):
        yield f"on the CPU it supports torch.float32 and torch.bfloat16, not {dtype}"
    if weights != "same":
        yield f"on the CPU it does not support {weights} weights"


def _cuda_reasons(
    config: HeadConfig, dtype: torch.dtype, tree: TreeConfig, num_rows: int, weights: str
) -> Iterator[str]:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        yield f"it supports torch.float32, torch.bfloat16 and torch.float16, not {dtype}"
    if weights != "same" and dtype == torch.float32:
        yield f"it supports {weights} weights with torch.bfloat16 and torch.float16, not with {dtype}"
    unit = 16 // dtype.itemsize
    matrix_unit = unit if weights == "same" else 16
    for name, given, step in (
        ("hidden_size", config.hidden_size, matrix_unit),
        ("intermediate_size", config.intermediate_size, matrix_unit),
        ("feature_width", config.feature_width, matrix_unit),
        ("target_hidden_size", config.target_hidden_size, unit),
        ("num_heads * head_dim", config.num_heads * config.head_dim, matrix_unit),
        ("head_dim", config.head_dim, 8),
    ):
        if given % step:
            yield f"on CUDA {name} must be a multiple of {step}, not {given}"
    for name, given, limit in (
        ("head_dim", config.head_dim, _MAX_HEAD_DIM),
        ("num_layers", config.num_layers, _MAX_LAYERS),
        ("the depth of trees", tree.levels, _MAX_DEPTH),
        ("the top_k of trees", tree.top_k, _MAX_TOP_K),
        ("the batch", num_rows, _MAX_ROWS),
    ):
        if given > limit:
            yield f"on CUDA {name} must be at most {limit}, not {given}"
