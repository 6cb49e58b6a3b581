"""``fingerprint``: a short hash of a model's weights; it prevents using results of another target."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLED = (
    256  # elements of each tensor that are hashed; all others enter through the sum of their bits
)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that depend on names, shapes, dtypes and all elements of the weights.

    Each tensor is read once, on its own device.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
        sample = bits[:: max(1, len(bits) // _SAMPLED)][:_SAMPLED].tolist()
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {total} {sample}".encode())
    return digest.hexdigest()[:16]
