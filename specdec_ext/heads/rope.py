"""Rotary position tables of draft heads, for every rope type that transformers supports.

Row p of a table belongs to position p and has the frequencies that transformers uses for a text of p + 1
tokens. A row therefore does not change when the table grows, and a key that was rotated once stays correct.
For "dynamic" and "longrope", whose frequencies depend on the length of the text, this equals decoding token
by token. (In one pass over a prompt, transformers rotates all tokens by the length of the whole prompt.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_ext.heads.config import HeadConfig


def rope_tables(
    config: HeadConfig, num_positions: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of the positions 0 .. ``num_positions`` - 1, including attention scaling.

    Args:
        config: config of the head; ``rope_parameters``, ``head_dim`` and ``max_positions`` are used.
        num_positions: number of rows; may exceed ``config.max_positions``.
        dtype: float32, or float64 for a reference.

    Returns:
        Two tensors ``[num_positions, rotary / 2]``. The first ``rotary`` of ``head_dim`` elements are
        rotated, element i together with ``rotary / 2 + i``. ``rotary`` is ``head_dim``, unless
        ``rope_parameters["partial_rotary_factor"]`` is less than 1.

    Raises:
        ValueError: for a rope type that transformers does not support.
    """
    frequencies, scaling = _frequencies(config, num_positions)
    positions = torch.arange(num_positions, dtype=dtype, device="cpu")[:, None]
    angles = positions * frequencies.to(dtype)
    return angles.cos() * scaling, angles.sin() * scaling


def _frequencies(config: HeadConfig, num_positions: int) -> tuple[Tensor, float]:
    """Return inverse frequencies ``[num_positions or 1, rotary / 2]`` float32 and the attention scaling."""
    parameters = dict(config.rope_parameters)
    kind = parameters.get("rope_type", "default")
    partial = parameters.pop("partial_rotary_factor", 1.0)
    if kind == "default":
        rotary = int(config.head_dim * partial)
        exponents = torch.arange(0, rotary, 2, dtype=torch.float32, device="cpu") / rotary
        return (1.0 / parameters["rope_theta"] ** exponents)[None], 1.0
    # Imported here because default tables need only torch.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"rope_parameters has the unknown rope_type {kind!r}; expected 'default' or one of "
            f"{sorted(ROPE_INIT_FUNCTIONS)}"
        )
    options: dict[str, Any] = {"rope_parameters": parameters, "partial_rotary_factor": partial}
    like: Any = LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,  # LlamaConfig needs a multiple of the heads
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        **options,
    )

    def of_length(length: int) -> tuple[Tensor, float]:
        device = torch.device("cpu")
        with device:  # some rope types allocate a part of their tensors on the default device
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](like, device, seq_len=length)
        return frequencies, float(scaling)

    short, scaling = of_length(1)
    if kind == "dynamic":
        beyond = range(config.max_positions, num_positions)
        rows = [short.expand(min(config.max_positions, num_positions), -1)]
        return torch.cat(rows + [of_length(position + 1)[0][None] for position in beyond]), scaling
    if kind == "longrope":
        border = like.rope_parameters["original_max_position_embeddings"]
        is_long = torch.arange(num_positions, device="cpu")[:, None] >= border
        return torch.where(is_long, of_length(border + 1)[0], short), scaling
    return short[None], scaling
