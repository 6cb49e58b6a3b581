"""``RetrievalDrafter``: a drafter that copies from text and knows how long a match it copies from."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_ext.drafters.base import Drafter

# By the number of tokens that match.
_KINDS = (
    "nothing found",
    "copy behind 1",
    "copy behind 2",
    *["copy behind 3 to 4"] * 2,
    *["copy behind 5 to 8"] * 4,
    "copy behind more than 8",
)


class RetrievalDrafter(Drafter):
    """Base class of the drafters that look up what followed the last tokens."""

    @property
    def longest_match(self) -> int:
        """No match length is larger."""
        raise NotImplementedError(f"{type(self).__name__} must define longest_match")

    @property
    def kinds(self) -> Sequence[str]:
        """Copies behind matches of about one length."""
        return [_KINDS[min(length, len(_KINDS) - 1)] for length in self.match_lengths]

    @property
    def match_lengths(self) -> list[int]:
        """Of the last ``propose``, per row of its tree: how many of the row's last tokens precede the copy.

        0 where nothing was proposed. A copy behind a long match is rarely wrong.
        """
        raise NotImplementedError(f"{type(self).__name__} must define match_lengths")
