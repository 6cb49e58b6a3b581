"""``compare_servers``: the latency and speed of servers, and of one server with and without drafts.

A contestant is a server, or one of our servers that is asked for plain decoding. In each turn, a contestant
answers all questions, a number of them at a time: as one is answered, the next is sent. Tokens per second are
those of a request, from sending it to the end of its answer, times the number of requests at a time. Of
several turns, the request with the median time is used for each question; latencies are those of all turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, zip_longest
from typing import Any

import torch

from specdec_ext.display.progress import tracked
from specdec_ext.display.text import counted
from specdec_ext.evaluate.benchmark.client import CHAT, COMPLETIONS, OPTIONAL, Server
from specdec_ext.evaluate.benchmark.prompts import Conversation, Question, questions
from specdec_ext.evaluate.benchmark.reply import Reply
from specdec_ext.evaluate.benchmark.report import Report
from specdec_ext.evaluate.benchmark.series import Series, unique_ngram_fraction
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.evaluate.measuring import Call, take_turns
from specdec_ext.stats import SpeculationStats

PLAIN = "plain"
SHOWN = 20  # characters of each of two texts that differ


@dataclass(repr=False)
class ServedSeries(Series):
    """Results of a contestant on a server; the lists of ``Series`` have one entry per question, or are empty.

    Attributes:
        streams: number of requests at a time.
        places: the number of each question.
        replies: for each question, the replies of all turns, without those that failed.
        turns: the number of the turn of each of these replies, from 0.
        latencies: of all requests that succeeded.
        throughput: new tokens of all requests over the wall time, for each turn.
        requests: number of requests, failed ones included.
        prompt_tokens, cached_tokens: over all requests; ``cached_tokens`` is None if the server does not say.
    """

    streams: int = 1
    places: list[int] = field(default_factory=list)
    replies: list[list[Reply]] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def unique_4grams(self) -> float:
        """``unique_ngram_fraction`` of the words of all texts."""
        return unique_ngram_fraction([turns[0].split() for turns in self.answers])

    @property
    def answers(self) -> list[list[str]]:
        """For each question, the texts of all turns."""
        return [[reply.text for reply in turns] for turns in self.replies]

    def more(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "throughput": statistics.median(self.throughput),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }


@dataclass
class Turn:
    """What a contestant answered in one turn.

    Attributes:
        replies: in the order of the questions.
        seconds: wall time.
        counted: what the server's counters of speculation grew by; None without them.
    """

    replies: list[Reply]
    seconds: float
    counted: SpeculationStats | None = None


@dataclass(frozen=True)
class ServedContestant:
    """A server and the fields of its requests."""

    server: Server
    fields: dict[str, Any]

    def turn(self, asked: Sequence[Question], streams: int, **options: Any) -> Turn:
        # Our server tells the statistics of each request.
        before = None if self.server.is_ours else self.server.counters()
        began = time.perf_counter()
        replies = self.server.ask_all(asked, streams, **self.fields, **options)
        seconds = time.perf_counter() - began
        after = None if before is None else self.server.counters()
        return Turn(replies, seconds, _grown(before, after))


class UnansweredError(ValueError):
    """No question was answered by all contestants.

    Attributes:
        failing: the contestants of which a request failed.
    """

    def __init__(self, message: str, failing: Iterable[str]):
        super().__init__(message)
        self.failing = frozenset(failing)


# The turns of each contestant by its name.
_Turns = dict[str, list[Turn]]


@dataclass
class _Cell:
    """A number of streams and a temperature, and what was measured there.

    Attributes:
        streams, temperature: the setting.
        turns: of each contestant that answered the warm-up.
        errors: by name, why the other contestants did not.
    """

    streams: int
    temperature: float
    turns: _Turns = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def leave_out(self) -> None:
        """Move contestants that answered nothing to the errors, and forget those without a turn."""
        self.turns = {name: turns for name, turns in self.turns.items() if turns}
        for name, error in _first_errors(self.turns).items():
            if all(reply.error for turn in self.turns[name] for reply in turn.replies):
                self.errors[name] = error
                del self.turns[name]


def compare_servers(
    servers: Sequence[Server],
    conversations: Sequence[Conversation],
    *,
    streams: Sequence[int] = (1,),
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 128,
    repeats: int = 3,
    speculation: Sequence[str] = (),
    chat: bool | None = None,
) -> list[Report]:
    """A report for each number of streams and temperature, all of which are measured in turn.

    Our own servers also decode without drafts. Other servers can't be asked to: pass one that runs without
    speculation as the first. Before anything is measured, each contestant answers as many questions as there
    are streams. A contestant that answers nothing at one number of streams and temperature is named there in
    ``Report.errors``, and everything else is measured. After an interrupt (Ctrl-C), the reports have the
    turns before it.

    Args:
        servers: those that are compared, not connected yet.
        conversations: what is asked. Later turns follow the greedy answers of the first server.
        streams: numbers of requests at a time.
        temperatures: of the sampling; 0 is greedy.
        max_new_tokens: most tokens of an answer.
        repeats: turns of each contestant.
        speculation: values of our servers' field ``speculation``; () leaves it to the server.
        chat: whether to ask for chat completions; None does if all conversations are chats and the server
            answers.

    Raises:
        ValueError: if a server can't be measured, or if no question was answered by all contestants.
    """
    connect(servers, conversations, chat)
    for server in servers:
        if speculation and not server.is_ours:
            raise ValueError(
                f"--speculation: {server.name} is not specdec serve and drafts as it was started; leave the "
                "option out"
            )
    asked, cut = ask(servers[0], conversations, max_new_tokens)
    contestants, plain = _contestants(servers, speculation)
    reports = compare_contestants(
        contestants,
        asked,
        plain=plain,
        streams=streams,
        temperatures=temperatures,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        keep_going=True,
    )
    remarks = remarks_on(servers, cut)
    if plain is None:
        remarks.append(
            "no contestant is known to decode without drafts; pass a server without speculation as the first "
            "--url, then ratios are to it"
        )
    for report in reports:
        report.remarks += remarks
    return reports


def compare_contestants(
    contestants: Mapping[str, ServedContestant],
    asked: Sequence[Question],
    *,
    plain: str | None,
    streams: Sequence[int],
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    keep_going: bool = False,
) -> list[Report]:
    """A report for each number of streams and temperature, all of which are measured in turn.

    Args:
        contestants: by name; ratios are to the first of them without ``plain``.
        asked: what each of them answers in each turn.
        plain: name of the contestant that is known to decode without drafts; None if there is none.
        streams, temperatures, max_new_tokens, repeats: as for :func:`compare_servers`.
        keep_going: whether contestants that answer nothing are named in the report, and an interrupt ends the
            turns; otherwise, both are raised.

    Raises:
        UnansweredError: if no question was answered by all contestants.
    """
    servers = list(dict.fromkeys(each.server for each in contestants.values()))
    cells = [_Cell(*each) for each in product(streams, temperatures)]
    is_interrupted = _measure(cells, contestants, asked, max_new_tokens, repeats, keep_going)
    if is_interrupted and not any(turns for cell in cells for turns in cell.turns.values()):
        raise KeyboardInterrupt
    reports, lost = [], []
    failing: set[str] = set()
    reference: ServedSeries | None = None  # greedy texts do not depend on the number of streams
    for cell in cells:
        if keep_going:
            cell.leave_out()
        number, temperature, turns = cell.streams, cell.temperature, cell.turns
        settings = {
            "streams": number,
            "prompts": len(asked),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "model": ", ".join(dict.fromkeys(str(each.model) for each in servers)),
            "url": ", ".join(each.name for each in servers),
        }
        places = _answered(turns)
        if not places:
            errors = cell.errors | _first_errors(turns)
            if not errors:  # interrupted before the first turn
                continue
            if keep_going:
                reports.append(_report(settings, {}, asked, errors))
            failing |= errors.keys()
            lost.append(
                f"streams {number}, temperature {temperature:g}: no prompt was answered by all contestants. "
                f"{_listed(errors)}"
            )
            continue
        series = {name: _of_turns(name, each, places, number) for name, each in turns.items()}
        report = _report(settings, series, asked, cell.errors, plain)
        if is_interrupted:
            done = min(len(each) for each in turns.values())
            report.interrupt(f"after {done} of {counted(repeats, 'turn')}")
        if not temperature:
            reference = reference or series[report.baseline]
            _compare(report, series, reference, asked)
        elif all(server.is_ours for server in servers):
            _compare(report, series, series[report.baseline], asked)
        reports.append(report)
    if not any(report.series for report in reports):
        raise UnansweredError("; ".join(lost), failing)
    return reports


def connect(
    servers: Sequence[Server], conversations: Sequence[Conversation], chat: bool | None
) -> None:
    """Connect all servers, which are then asked in the same way.

    Args:
        servers, conversations, chat: as for :func:`compare_servers`.

    Raises:
        ValueError: if a server does not answer, or can't be measured.
    """
    endpoints = [CHAT] if chat else [COMPLETIONS]
    if chat is None and all(each.is_chat for each in conversations):
        endpoints = [CHAT, COMPLETIONS]
    for server in servers:
        server.connect(Question("", "", conversations[0].turns[:1]), endpoints)
        endpoints = [server.endpoint]


def ask(
    server: Server, conversations: Sequence[Conversation], max_new_tokens: int
) -> tuple[list[Question], list[str]]:
    """The questions of :func:`questions`; later turns follow the greedy answers of a server."""
    return questions(conversations, partial(_answer, server, max_new_tokens))


def _report(
    settings: dict[str, Any],
    series: Mapping[str, ServedSeries],
    asked: Sequence[Question],
    errors: dict[str, str],
    plain: str | None = None,
) -> Report:
    plain = plain if plain in series else None
    baseline = plain or next(iter(series), "")
    machine = f"client: {machine_line(torch.device('cpu'))}"
    report = Report(machine, settings, dict(series), baseline, plain, errors=errors)
    if not series:
        return report
    report.remarks += _findings(series, settings)
    if any(each.category for each in asked):
        report.categories = [asked[place].category for place in series[baseline].places]
    return report


def _answer(server: Server, max_new_tokens: int, messages: Sequence[str]) -> str | None:
    question = Question("", "", tuple(messages))
    (reply,) = server.ask_all([question], 1, ends=True, max_tokens=max_new_tokens)
    return None if reply.error else reply.text


def _contestants(
    servers: Sequence[Server], speculation: Sequence[str]
) -> tuple[dict[str, ServedContestant], str | None]:
    """The contestants, and the name of the one that is known to decode without drafts."""
    made, plain = {}, None
    for server in servers:
        prefix, name = f"{server.name}, ", server.name
        if len(servers) == 1:
            prefix, name = "", "server"
        if server.is_ours:
            plain = plain or f"{prefix}{PLAIN}"
            made[f"{prefix}{PLAIN}"] = ServedContestant(server, {"speculation": "none"})
        for policy in speculation:
            made[f"{prefix}{policy}"] = ServedContestant(server, {"speculation": policy})
        if not speculation:
            made[name] = ServedContestant(server, {})
    return made, plain


def _measure(
    cells: Sequence[_Cell],
    contestants: Mapping[str, ServedContestant],
    asked: Sequence[Question],
    max_new_tokens: int,
    repeats: int,
    keep_going: bool,
) -> bool:
    """Let all contestants take turns in all cells, and return whether they were interrupted."""
    calls: dict[str, Call] = {}
    places: dict[str, list[Turn]] = {}
    for cell in cells:
        streams, temperature = cell.streams, cell.temperature
        for name, each in contestants.items():
            call = partial(
                each.turn, streams=streams, max_tokens=max_new_tokens, temperature=temperature
            )
            warmed_up = call(asked[:streams])
            if all(reply.error for reply in warmed_up.replies):
                errors = _first_errors({name: [warmed_up]})
                if not keep_going:
                    raise UnansweredError(f"no request succeeds. {_listed(errors)}", errors)
                cell.errors |= errors
                continue
            full = f"{name}, {counted(streams, 'stream')}, temperature {temperature:g}"
            calls[full] = partial(call, asked)
            places[full] = cell.turns[name] = []
    if not calls:
        return False
    with tracked("measuring", len(calls) * repeats, "turn") as work:

        def measure(name: str, call: Call) -> None:
            places[name].append(call())
            work.advance(note=name)

        try:
            for repeat in range(repeats):
                # The order rotates, so that no contestant is always the first.
                take_turns(calls, 1, measure, first=repeat)
        except KeyboardInterrupt:
            if not keep_going:
                raise
            return True
    return False


def _answered(turns: _Turns) -> list[int]:
    """The numbers of the questions that every contestant has answered in at least one turn."""
    numbers = range(len(next(iter(turns.values()))[0].replies)) if turns else ()
    return [
        place
        for place in numbers
        if all(any(not turn.replies[place].error for turn in found) for found in turns.values())
    ]


def _first_errors(turns: _Turns) -> dict[str, str]:
    """The first error of each contestant that has one."""
    errors = {
        name: [reply.error for turn in found for reply in turn.replies if reply.error]
        for name, found in turns.items()
    }
    return {name: found[0] for name, found in errors.items() if found}


def _listed(errors: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in errors.items())


def _of_turns(name: str, turns: list[Turn], places: list[int], streams: int) -> ServedSeries:
    series = ServedSeries(name, streams=min(streams, len(turns[0].replies)), places=places)
    told = []
    for place in places:
        succeeded = [number for number, turn in enumerate(turns) if not turn.replies[place].error]
        good = [turns[number].replies[place] for number in succeeded]
        middle = sorted(good, key=lambda reply: reply.seconds)[(len(good) - 1) // 2]
        series.seconds.append(middle.seconds / series.streams)
        series.new_tokens.append(middle.tokens)
        series.replies.append(good)
        series.turns.append(succeeded)
        told.append(_sum([reply.stats for reply in good]))
    counts = _sum([turn.counted for turn in turns])
    series.speculation_stats = [each for each in told if each] or ([counts] if counts else [])
    for turn in turns:
        good = [reply for reply in turn.replies if not reply.error]
        series.latencies += [replace(reply.latency, rows=series.streams) for reply in good]
        series.throughput.append(sum(reply.tokens for reply in good) / turn.seconds)
        series.requests += len(turn.replies)
        series.failures += [reply.error for reply in turn.replies if reply.error]
        series.prompt_tokens += sum(reply.prompt_tokens for reply in good)
        for reply in good:
            if reply.cached_tokens is not None:
                series.cached_tokens = (series.cached_tokens or 0) + reply.cached_tokens
    return series


def _sum(stats: Iterable[SpeculationStats | None]) -> SpeculationStats | None:
    """The sum of those that are known; None if there are none."""
    known = [each for each in stats if each is not None]
    total = SpeculationStats()
    for each in known:
        total.add(each)
    return total if known else None


def _grown(
    before: SpeculationStats | None, after: SpeculationStats | None
) -> SpeculationStats | None:
    """What counters grew by; None if they are not known, or were reset in between."""
    if before is None or after is None or after.drafts < before.drafts:
        return None
    grown = SpeculationStats(drafter="server")
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        setattr(grown, name, getattr(after, name) - getattr(before, name))
    grown.accepted_per_position = [
        now - then
        for now, then in zip_longest(
            after.accepted_per_position, before.accepted_per_position, fillvalue=0
        )
    ]
    return grown


def _compare(
    report: Report,
    series: Mapping[str, ServedSeries],
    reference: ServedSeries,
    asked: Sequence[Question],
) -> None:
    """Compare the texts of all turns with the reference's first ones, and note what differs."""
    report.expected = reference.name
    expected = {
        place: texts[0] for place, texts in zip(reference.places, reference.answers, strict=True)
    }
    for name, each in series.items():
        found = {
            place: next((text for text in texts if text != expected[place]), None)
            for place, texts in zip(each.places, each.answers, strict=True)
            if place in expected
        }
        differing = {place: text for place, text in found.items() if text is not None}
        report.same_text[name] = f"{len(found) - len(differing)}/{len(found)}"
        for place, text in differing.items():
            report.differences.append(
                f"{name}, prompt {asked[place].name}: {_difference(expected[place], text)} from the text of "
                f"{reference.name}"
            )


def _difference(expected: str, text: str) -> str:
    """Where two texts begin to differ."""
    common = min(len(expected), len(text))
    at = next((i for i in range(common) if expected[i] != text[i]), common)
    shown = (repr(each[at : at + SHOWN]) for each in (text, expected))
    return f"differs at character {at} ({' instead of '.join(shown)})"


def remarks_on(servers: Sequence[Server], cut: Sequence[str]) -> list[str]:
    """What has to be known about the servers and the questions."""
    form = "chat completions" if servers[0].endpoint == CHAT else "completions"
    remarks = [f"requests are {form}"]
    for server in servers:
        if server.counts_events:
            remarks.append(
                f"{server.name} counts no tokens in streams; each chunk is taken for one token, because its "
                "answer to the first prompt has as many tokens as chunks"
            )
        for name, loss in OPTIONAL.items():
            if loss and name not in server.fields:
                remarks.append(f"{server.name} refuses {name}: {loss}")
    if cut:
        remarks.append(
            f"{counted(len(cut), 'conversation')} without later turns, because an earlier one failed: "
            f"{', '.join(cut[:5])}"
        )
    return remarks


def _findings(series: Mapping[str, ServedSeries], settings: Mapping[str, Any]) -> list[str]:
    """What makes the numbers of a report less than they seem."""
    found = []
    streams, asked = settings["streams"], settings["prompts"]
    if asked < streams:
        found.append(f"only {asked} requests at a time, because there are no more prompts")
    kept = len(next(iter(series.values())).places)
    if kept < asked:
        found.append(
            f"{asked - kept} of {asked} prompts are left out of all ratios, because a contestant has not "
            "answered them"
        )
    for name, each in series.items():
        if each.cached_tokens and each.prompt_tokens:
            found.append(
                f"{name}: {each.cached_tokens / each.prompt_tokens:.0%} of the prompt tokens came from its "
                "cache of earlier prompts, which makes TTFT shorter; start the server without that cache "
                "(specdec serve --prefix-tokens 0)"
            )
        if any(not latency.counts for latency in each.latencies):
            found.append(
                f"{name} does not tell the tokens of each chunk, so ITL is not known for all"
            )
        lengths = sorted(each.new_tokens)
        if {lengths[0], lengths[-1]} != {settings["max_new_tokens"]}:
            found.append(f"{name}: answers have {lengths[0]} to {lengths[-1]} tokens")
    return found
