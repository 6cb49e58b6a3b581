"""``Conversation``: messages, the prompt that they make, and the cache of the last answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_ext.display import Table
from specdec_ext.stats import SpeculationStats

if TYPE_CHECKING:
    from torch import LongTensor, Tensor

    from specdec_ext.cli.shared.common import Model
    from specdec_ext.cli.shared.stream import TextStreamer

Messages = list[dict[str, str]]


@dataclass
class Counts:
    """What one or several answers cost.

    Attributes:
        answers: number of answers.
        prompt_tokens: tokens of their prompts.
        reused_tokens: those of them whose keys and values were in the cache.
        new_tokens: generated tokens.
        seconds: wall time.
        stats: the statistics of their calls, added up.
    """

    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, other: Counts) -> None:
        """Add the counts of other answers."""
        for name in ("answers", "prompt_tokens", "reused_tokens", "new_tokens", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.stats.add(other.stats)

    def column(self) -> tuple[str, ...]:
        """The values of the rows of :func:`counts_table`."""
        return (
            f"{self.answers}",
            f"{self.prompt_tokens}",
            f"{self.reused_tokens}",
            f"{self.new_tokens}",
            f"{self.new_tokens / self.seconds:.1f}" if self.seconds else "",
            f"{self.stats.steps}",
            f"{self.stats.accepted_tokens} of {self.stats.draft_tokens}",
            f"{self.stats.mean_acceptance_length:.2f}",
        )


_ROWS = (
    "answers",
    "prompt tokens",
    "of them from the cache",
    "new tokens",
    "tokens/s, prompt included",
    "steps",
    "draft tokens accepted",
    "mean acceptance length",
)


def counts_table(last: Counts, session: Counts) -> Table:
    """The costs of the last finished answer beside those of all finished answers."""
    rows = list(zip(_ROWS, last.column(), session.column(), strict=True))
    return Table(rows, ("", "last finished answer", "session"))


class Conversation:
    """A chat with one model. Each answer is that of ``specdec_ext.generate`` to the whole conversation.

    The cache of the last answer is cut to the tokens with which the next prompt begins, so only the others
    are read. A chat template may change earlier messages, and an answer may be tokenized otherwise than it
    was generated; then less of the cache is kept.

    Args:
        model: the target.
        render: turns messages (role and content) into a prompt, ``[1, length]`` ids.

    Attributes:
        system: the system prompt, or None.
        turns: questions and answers so far.
        last: counts of the last finished answer.
        session: counts of all finished answers.
    """

    def __init__(self, model: Model, render: Callable[[Messages], LongTensor]):
        self._model, self._render = model, render
        self.system: str | None = None
        self.turns: Messages = []
        self.last, self.session = Counts(), Counts()
        self.reset()

    def reset(self) -> None:
        """Forget all turns; the system prompt and the counts stay."""
        self.turns.clear()
        self._cache: Any = None
        self._cached: Any = (
            None  # [slots] ids of the tokens in the cache; after an interrupt it is empty
        )

    @property
    def messages(self) -> Messages:
        """The system prompt, if there is one, and all turns."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def ask(self, text: str, streamer: TextStreamer, **kwargs: Any) -> None:
        """Generate the answer to ``text`` and add both to the conversation.

        Args:
            text: the user's message.
            streamer: receives the answer as it comes.
            **kwargs: arguments of :func:`specdec_ext.generate`.

        Raises:
            KeyboardInterrupt: the answer was interrupted.
            ValueError: the prompt can't be rendered or read.

        After any exception, the part of the answer that had come belongs to the conversation. If none had
        come, the conversation is as before.
        """
        from specdec_ext.models.compat import cache_of

        self.turns.append({"role": "user", "content": text})
        began, finished = time.perf_counter(), False
        try:
            out, prompt_tokens, reused = self._generate(streamer, kwargs)
            finished = True
            self._cache, self._cached = cache_of(out), out.sequences[0, :-1]
        finally:
            if finished or streamer.text:
                self.turns.append({"role": "assistant", "content": streamer.text})
            else:
                self.turns.pop()
        self.last = Counts(
            1,
            prompt_tokens,
            reused,
            out.sequences.shape[1] - prompt_tokens,
            time.perf_counter() - began,
            out.speculation_stats,
        )
        self.session.add(self.last)

    def _generate(self, streamer: TextStreamer, kwargs: dict[str, Any]) -> tuple[Any, int, int]:
        """The output, and how many tokens the prompt has and the cache held of them."""
        import specdec_ext
        from specdec_ext.models.compat import CACHE

        ids = self._render(self.messages)
        # Without a mask, transformers would take padding tokens in the prompt for padding.
        kwargs = {**kwargs, "attention_mask": ids.new_ones(ids.shape)}
        reused = self._reusable(ids[0])
        if reused:
            kwargs[CACHE] = self._cache
        out = specdec_ext.generate(
            self._model, ids, streamer=streamer, return_dict_in_generate=True, **kwargs
        )
        return out, ids.shape[1], reused

    def _reusable(self, prompt: Tensor) -> int:
        """Cut the cache to the tokens with which the prompt begins; return their number, 0 without any."""
        from specdec_ext.models.cache.reuse import keep_slots

        if self._cache is None:
            return 0
        length = min(
            len(self._cached), len(prompt) - 1
        )  # the last token must be read, for its logits
        differs = (self._cached[:length] != prompt[:length]).nonzero()
        common = int(differs[0]) if len(differs) else length
        return common if keep_slots(self._cache, common) else 0
