"""``RetrievalDrafter``: a drafter that copies from text and knows how long a match it copies from."""

from __future__ import annotations

from specdec_ext.drafters.base import Drafter


class RetrievalDrafter(Drafter):
    """Base class of the drafters that look up what followed the last tokens."""

    @property
    def longest_match(self) -> int:
        """No match length is larger."""
        raise NotImplementedError(f"{type(self).__name__} must define longest_match")

    @property
    def match_lengths(self) -> list[int]:
        """Of the last ``propose``, per row of its tree: how many of the row's last tokens precede the copy.

        0 where nothing was proposed. A copy behind a long match is rarely wrong.
        """
        raise NotImplementedError(f"{type(self).__name__} must define match_lengths")
