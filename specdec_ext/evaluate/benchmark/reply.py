"""``Reply``: what a client saw of one streamed request; what a server sends is checked before it is used."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from specdec_ext.display.text import one_line
from specdec_ext.evaluate.benchmark.latency import Latency
from specdec_ext.heads.checkpoints.config.fields import Fields, shown
from specdec_ext.stats import SpeculationStats, consistent
from specdec_ext.tree.config import MAX_NODES

MAX_MESSAGE = 200  # characters of a server's error that are shown


@dataclass
class Reply:
    """What a client saw of one request.

    Attributes:
        began, ended: when it was sent and when its answer was complete, in seconds.
        arrivals: (time, tokens) of each arrival; all tokens are 0 without ``counts``.
        events: for each arrival, the number of events with text; several may arrive together.
        counts: whether the server tells with each event how many tokens there are so far.
        text: the whole text.
        tokens: number of new tokens.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that the server kept from earlier ones; None if it does not say.
        stats: what the server tells about speculation; None if it tells nothing.
        error: why the request failed; "" if it did not.
        status: HTTP status; 0 without an answer.
    """

    began: float
    ended: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    counts: bool = False
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    stats: SpeculationStats | None = None
    error: str = ""
    status: int = 0

    @property
    def seconds(self) -> float:
        """From the request to the end of its answer."""
        return self.ended - self.began

    @property
    def latency(self) -> Latency:
        """The latency; ``counts`` is empty where the tokens of each arrival are not known."""
        read = max(0, self.prompt_tokens - (self.cached_tokens or 0))
        arrivals = self.arrivals
        if not self.counts:
            if not self.has_one_event_per_token(self.tokens):
                whole = Latency.of(self.began, arrivals, read)
                return replace(whole, counts=(), tokens=self.tokens)
            arrivals = [(at, events) for (at, _), events in zip(arrivals, self.events, strict=True)]
        return Latency.of(self.began, arrivals, read)

    def has_one_event_per_token(self, tokens: int) -> bool:
        """Whether this number of tokens agrees with one per event; the last token may have no text."""
        return sum(self.events) in (tokens, tokens - 1)

    def add(self, at: float, event: dict[str, Any]) -> bool:
        """Add an event of the stream that arrived at a time, and return whether it ends the text.

        Raises:
            ValueError: it is not what a stream of one text has, or the server reports an error in it.
        """
        if event.get("error") is not None:
            raise ValueError(f"the server reports: {_message(event)}")
        choices = event.get("choices", [])
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            raise ValueError(
                f"the server sent choices {shown(choices)}; expected a list of objects"
            )
        sent = Fields(event, "the server's event")
        text = "".join(_text(Fields(each, "the server's choice")) for each in choices)
        tokens = 0
        if not self.arrivals:
            # Other servers send the usage once, at the end.
            self.counts = bool(choices) and "usage" in sent
        if "usage" in sent:
            before, usage = self.tokens, sent.section("usage")
            self.tokens = usage.integer("completion_tokens", 0, low=0)
            if self.tokens < before:
                raise ValueError(f"the server counts {self.tokens} tokens after {before}")
            tokens = self.tokens - before if self.counts else 0
            self.prompt_tokens = usage.integer("prompt_tokens", 0, low=0)
            details = usage.section("prompt_tokens_details")
            if "cached_tokens" in details:
                self.cached_tokens = details.integer("cached_tokens", low=0)
        metrics = sent.section("metrics")
        if "speculative_decoding" in metrics:
            self.stats = _told_stats(metrics.section("speculative_decoding"))
        self.text += text
        if tokens or (text and not self.counts):
            if self.arrivals and self.arrivals[-1][0] == at:
                tokens += self.arrivals.pop()[1]
                self.events[-1] += 1
            else:
                self.events.append(1)
            self.arrivals.append((at, tokens))
        return any(each.get("finish_reason") is not None for each in choices)


def parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object that a server sent.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the server sent no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the server sent {shown(found)}; expected an object")
    return found


def _text(choice: Fields) -> str:
    """The text of a choice of either endpoint; a chat's reasoning belongs to it."""
    if "delta" not in choice:
        return choice.text("text") or ""
    delta = choice.section("delta")
    names = ("reasoning_content", "reasoning", "content")
    return "".join(delta.text(name) or "" for name in names)


def _told_stats(told: Fields) -> SpeculationStats:
    """Statistics of one request, as vLLM and our server send them."""
    exactly = told.integers("acceptance_histogram") or []
    if len(exactly) > MAX_NODES or any(count < 0 for count in exactly):
        raise ValueError(f"the server's acceptance_histogram is {shown(exactly)}; expected counts")
    stats = SpeculationStats(
        drafter="server",
        drafts=told.integer("num_spec_steps", 0, low=0),
        draft_tokens=told.integer("num_draft_tokens", 0, low=0),
        accepted_tokens=told.integer("num_accepted_draft_tokens", 0, low=0),
    )
    up_to = [sum(exactly[position:]) for position in range(1, len(exactly))]
    reached = told.integers("reached_per_position")
    if reached is None:  # vLLM does not tell them
        stats.accepted_per_position = [count for count in up_to if count]
        return stats
    if not consistent(stats.drafts, reached, up_to):
        raise ValueError(
            f"the server's reached_per_position is {shown(reached)} for the acceptance_histogram "
            f"{shown(exactly)} of {stats.drafts} drafts; expected counts that agree"
        )
    stats.accepted_per_position, stats.reached_per_position = up_to, reached
    return stats


def message_of(raw: bytes) -> str:
    """The message of an error's body, in one line."""
    try:
        return _message(parsed(raw))
    except ValueError:
        return one_line(raw[:MAX_MESSAGE].decode(errors="replace"))


def _message(answer: dict[str, Any]) -> str:
    """The message of an error in one of the forms that servers use."""
    error = answer.get("error", answer)
    found = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    return one_line(found if isinstance(found, str) else shown(found))[:MAX_MESSAGE]
