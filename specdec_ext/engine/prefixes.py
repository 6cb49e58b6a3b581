"""``PrefixCache``: beginnings of prompts that an engine has read, for later requests."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

from specdec_ext.models import TargetOutput
from specdec_ext.models.slots import PromptPart, SlotTarget


class PrefixCache:
    """Parts of prompts that have been read, for requests whose prompts begin with the same tokens.

    It holds whole parts of the size in which prompts are read, so a part has the bits that reading it again
    would give. Of a session's earlier turn, it holds the prompt, not the answer: passes with other numbers of
    tokens have computed that. The parts that were not used for the longest time are dropped.

    Args:
        part_size: number of tokens of each pass over a prompt.
        max_tokens: the most tokens to hold.
    """

    def __init__(self, part_size: int, max_tokens: int):
        self.part_size, self._max_parts = part_size, max_tokens // part_size
        self._parts: OrderedDict[bytes, PromptPart] = (
            OrderedDict()
        )  # the part used last is the last

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it holds."""
        return len(self._parts) * self.part_size

    def find(self, ids: Sequence[int]) -> list[PromptPart]:
        """The parts with which a prompt begins; they leave at least its last token to be read."""
        known = [*takewhile(self._parts.__contains__, self._keys(ids[:-1]))]
        self._use(known)
        return [self._parts[key] for key in known]

    def keep(self, ids: Sequence[int], target: SlotTarget, output: TargetOutput) -> None:
        """Hold the parts of a prompt.

        Args:
            ids: the prompt.
            target: has read it, and nothing else.
            output: of the prompt.
        """
        keys = [*self._keys(ids)][: self._max_parts]
        for i, key in enumerate(keys):
            if key not in self._parts:
                begin = i * self.part_size
                self._parts[key] = target.prompt_part(begin, begin + self.part_size, output)
        self._use(keys)
        while len(self._parts) > self._max_parts:
            self._parts.popitem(last=False)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Move the parts of a prompt to the end, its first part last: no part outlives those before it."""
        for key in reversed(keys):
            self._parts.move_to_end(key)

    def _keys(self, ids: Sequence[int]) -> Iterator[bytes]:
        """A key for each whole part, which depends on the tokens before it, too."""
        key = b""
        for begin in range(0, len(ids) - self.part_size + 1, self.part_size):
            part = array("q", ids[begin : begin + self.part_size])
            key = hashlib.sha256(key + part.tobytes()).digest()
            yield key
