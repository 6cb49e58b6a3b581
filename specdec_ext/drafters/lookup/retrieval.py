"""``RetrievalDrafter``: the base class of drafters that look up text and copy what followed."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.tree.config import Lookup

# Kinds of lookups by the number of matching tokens.
_LOOKUPS = (
    Lookup("no match"),
    Lookup("copy, match of 1"),
    Lookup("copy, match of 2"),
    *[Lookup("copy, match of 3 to 4")] * 2,
    *[Lookup("copy, match of 5 to 8")] * 4,
    Lookup("copy, match of over 8"),
)


class RetrievalDrafter(Drafter):
    """Base class of drafters that find an earlier match of the last tokens and copy what followed it."""

    @property
    def longest_match(self) -> int:
        """The largest possible match length."""
        raise NotImplementedError(f"{type(self).__name__} must define longest_match")

    @property
    def lookups(self) -> Sequence[Lookup]:
        """The class of match lengths of each row's copy."""
        return lookups_of(self.match_lengths)

    def lookups_ahead(self, context: Context, match_lengths: Sequence[int]) -> Sequence[Lookup]:
        return lookups_of(match_lengths)

    @property
    def match_lengths(self) -> list[int]:
        """For each row of the last proposal, how many of the row's last tokens matched before the copy.

        It is 0 if nothing was proposed. A copy after a long match is rarely wrong.
        """
        raise NotImplementedError(f"{type(self).__name__} must define match_lengths")


def lookups_of(match_lengths: Sequence[int]) -> list[Lookup]:
    """The classes of these match lengths."""
    return [_LOOKUPS[min(length, len(_LOOKUPS) - 1)] for length in match_lengths]
