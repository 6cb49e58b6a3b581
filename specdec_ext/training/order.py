"""The examples of each training step: a function of seed and step, so a resumed run reads the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Number of batches whose examples are sorted by length together: little padding, but still a random order.
_SORTED_TOGETHER = 16


def epoch_batches(lengths: Sequence[int], size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of an epoch, each of ``size`` indices of examples; an incomplete batch is left out.

    Args:
        lengths: lengths of the examples in tokens; at least ``size`` of them.
        size: number of examples of a batch, over all processes.
        seed: seed of the order.
        epoch: number of the epoch; each has another order.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator, device="cpu").tolist()
    together = size * _SORTED_TOGETHER
    batches = []
    for start in range(0, len(order), together):
        part = sorted(order[start : start + together], key=lambda index: lengths[index])
        batches += [part[at : at + size] for at in range(0, len(part) - size + 1, size)]
    shuffled = torch.randperm(len(batches), generator=generator, device="cpu").tolist()
    return [batches[index] for index in shuffled]
