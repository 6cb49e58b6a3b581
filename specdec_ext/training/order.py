"""Which examples a step reads: a function of the seed and the step, so that a resumed run sees the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Batches whose examples are sorted by length together: little padding, and still a random order.
_SORTED_TOGETHER = 16


def epoch_batches(lengths: Sequence[int], size: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch, ``size`` indices of ``lengths`` each; a rest that fills none is left out.

    Args:
        lengths: of the examples, in tokens; at least ``size`` of them.
        size: of a batch, over all processes.
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
