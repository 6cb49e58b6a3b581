"""``mixed``: add a share of older texts to new ones, so that a head keeps what it has learned before."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_ext.training.data.batches import Example


def mixed(new: Sequence[Example], old: Sequence[Example], share: float) -> list[Example]:
    """Return all new examples, and old ones as this share of the whole.

    The old examples are evenly spread over ``old``, and repeated if there are too few of them.

    Args:
        new: texts of the new domain.
        old: texts of the old domain; at least one.
        share: of all examples, in [0, 1).

    Raises:
        ValueError: for a share out of range, or no old examples.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the share of old texts is {share}; expected at least 0 and less than 1")
    if not old:
        raise ValueError("there are no old texts to mix in; expected at least one")
    count = round(len(new) * share / (1 - share))
    whole, rest = divmod(count, len(old))
    return [*new, *list(old) * whole, *(old[i * len(old) // rest] for i in range(rest))]
