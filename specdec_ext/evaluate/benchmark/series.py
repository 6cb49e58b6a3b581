"""Interleaved measurements: all contestants take turns on every prompt in one run."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count, zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import tracked
from specdec_ext.display.text import counted
from specdec_ext.evaluate.benchmark.latency import Arrivals, Latency
from specdec_ext.evaluate.benchmark.memory import peak_bytes, reset_peak
from specdec_ext.evaluate.compare import ComparedRuns, compare_runs
from specdec_ext.evaluate.measuring import Call, take_turns, wall_seconds
from specdec_ext.evaluate.speedup import Speedup, bootstrap
from specdec_ext.stats import SpeculationStats

_log = logging.getLogger(__name__)

# A tokenizer's output: ``input_ids [batch, length]``, ``attention_mask`` and further inputs of the model.
Prompt = Mapping[str, Tensor]


@dataclass(repr=False)
class Series(Summarised):
    """Results of one contestant; the lists have one entry per prompt.

    Attributes:
        name: name of the contestant.
        seconds: wall time (median over the repeats).
        masks: ``[batch, length]`` attention mask of the prompt, 0 at padding.
        new_tokens: number of generated tokens, over all rows.
        texts: ``[batch, length]`` generated ids, prompt included.
        peaks: peak bytes of every call, see :func:`peak_bytes`; empty where they are unknown.
        speculation_stats: counters of the timed call; empty for contestants that have none.
        latencies: of an additional streamed call; empty if streaming was not measured.
        fixed: counters of an additional call that drafted in every step, if there was one. Drafters are
            compared by these, because under "auto" each one drafts in different steps.
        failures: why calls failed, one message per failed call.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    texts: list[Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    speculation_stats: list[SpeculationStats] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    fixed: list[SpeculationStats] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def summary(self) -> str:
        if not self.seconds:
            return f"{self.name}: not run yet"
        rate = f"{self.median_tokens_per_second:.1f} tokens/s"
        return f"{self.name}: {rate}, the median over {counted(len(self.seconds), 'prompt')}"

    def tables(self) -> Iterable[Table]:
        if not self.seconds:
            return
        numbers = {
            "tokens per second": self.median_tokens_per_second,
            "mean acceptance length": self.fixed_acceptance_length or self.mean_acceptance_length,
            "emitted per step": self.emitted_per_step,
        }
        yield Table([(name, f"{value:.2f}") for name, value in numbers.items() if value])

    @property
    def tokens_per_second(self) -> list[float]:
        return [count / time for count, time in zip(self.new_tokens, self.seconds, strict=True)]

    @property
    def median_tokens_per_second(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Tokens of the prompts over the time to the first token, the median over calls; None if unknown."""
        rates = [each.prompt_tokens / each.first for each in self.latencies if each.prompt_tokens]
        return _median(rates)

    @property
    def generated_per_second(self) -> float | None:
        """New tokens over the time after the first token, over all rows, the median over prompts."""
        return _median([each.rows / each.per_token for each in self.latencies if each.per_token])

    @property
    def peak(self) -> int | None:
        return max(self.peaks, default=None)

    def only(self, places: Sequence[int]) -> Series:
        """The results of some of the prompts, without lists that are not by prompt."""
        lists = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if isinstance(getattr(self, each.name), list)
        }
        kept: dict[str, Any] = {
            name: [values[place] for place in places] if len(values) == len(self.seconds) else []
            for name, values in lists.items()
        }
        return replace(self, **kept)

    def speedup(self, baseline: Series) -> Speedup:
        """Ratio of the two medians of tokens per second, with its interval over prompts."""
        return bootstrap(self.tokens_per_second, baseline.tokens_per_second)

    def total(self, name: str) -> Any:
        """Sum over all calls of the integer counter ``name`` of ``SpeculationStats``."""
        return sum(getattr(stats, name) for stats in self.speculation_stats)

    @property
    def mean_acceptance_length(self) -> float | None:
        drafts = self.total("drafts")
        return 1 + self.total("accepted_tokens") / drafts if drafts else None

    @property
    def fixed_acceptance_length(self) -> float | None:
        """Mean acceptance length of the calls that drafted in every step."""
        drafts = sum(stats.drafts for stats in self.fixed)
        accepted = sum(stats.accepted_tokens for stats in self.fixed)
        return 1 + accepted / drafts if drafts else None

    @property
    def policy(self) -> str:
        """ "auto" or "fixed", as the timed calls ran; "" without a drafter."""
        known = {stats.policy for stats in self.speculation_stats} - {"none"}
        return "/".join(sorted(known))

    @property
    def emitted_per_step(self) -> float | None:
        steps = self.total("steps")
        return self.total("emitted_tokens") / steps if steps else None

    @property
    def milliseconds_per_step(self) -> dict[str, float]:
        """Milliseconds per row and step of each phase except prefill; empty without counters."""
        steps = self.total("steps")
        phases = self.speculation_stats[0].seconds if steps else {}
        return {
            phase: 1e3 * sum(stats.seconds[phase] for stats in self.speculation_stats) / steps
            for phase in phases
            if phase != "prefill"
        }

    def break_even(self, plain: Series) -> float | None:
        """Cost of a step in steps of ``plain``: speculation pays if a step emits more tokens than this.

        Equals ``1 + eps`` with ``eps = (draft + verify - plain) / plain``.
        """
        step = sum(self.milliseconds_per_step.values())
        plain_step = sum(plain.milliseconds_per_step.values())
        return step / plain_step if step and plain_step else None

    def total_per_position(self, name: str) -> list[int]:
        """Sum over all calls of the per-position counter ``name`` of ``SpeculationStats``."""
        counters = (getattr(stats, name) for stats in self.speculation_stats)
        return [sum(counts) for counts in zip_longest(*counters, fillvalue=0)]

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of all drafts whose first i tokens were accepted, i = 1, 2, ..."""
        drafts = self.total("drafts")
        return [count / drafts for count in self.total_per_position("accepted_per_position")]

    @property
    def unique_4grams(self) -> float:
        """``unique_ngram_fraction`` of all rows' completions."""
        return unique_ngram_fraction(
            [
                row
                for text, mask in zip(self.texts, self.masks, strict=True)
                for row in text[:, mask.shape[1] :].tolist()
            ]
        )

    def more(self) -> dict[str, Any]:
        """Further entries of the contestant's record."""
        return {}

    def equals(self, other: Series) -> list[bool]:
        """Whether the texts of each call are the same in both."""
        return [
            torch.equal(mine, theirs) for mine, theirs in zip(self.texts, other.texts, strict=True)
        ]

    def compared_to(self, baseline: Series, model: PreTrainedModel) -> list[ComparedRuns]:
        """Compare each row's greedy text with the baseline's, in order.

        The two may have been measured in batches of different sizes, of the same rows in the same order; of
        more rows than the other has, the first ones are compared.
        """
        return [
            compare_runs(model, expected, text, length)
            for (expected, length), (text, _) in zip(baseline.rows(), self.rows(), strict=False)
        ]

    def rows(self) -> list[tuple[Tensor, int]]:
        """The ids of each row without padding, which is on the left, and the length of its prompt."""
        found = []
        for texts, masks in zip(self.texts, self.masks, strict=True):
            for text, mask in zip(texts, masks, strict=True):
                length = int(mask.sum())
                found.append((text[len(mask) - length :], length))
        return found


@dataclass
class Race:
    """Contestants and the prompts that each of them continues.

    Attributes:
        contestants: name -> function of a prompt that returns ids or an HF output.
        prompts: every contestant is called with each of them.
        fixed: by name, variants of contestants that draft in every step; called once per prompt for their
            counters.
        keeps_going: whether a contestant that raises an error leaves the race, and the others go on.
        results: by name, without those that left.
        errors: by name, why contestants left.
        turns: number of prompts that all contestants have continued.
    """

    contestants: Mapping[str, Callable[..., Any]]
    prompts: Sequence[Prompt]
    fixed: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    keeps_going: bool = False
    results: dict[str, Series] = field(init=False)
    errors: dict[str, Exception] = field(default_factory=dict)
    turns: int = 0

    def __post_init__(self) -> None:
        self.results = {name: Series(name) for name in self.contestants}

    def calls(self, repeats: int, streamed: bool) -> int:
        """Number of calls, warm-up not counted."""
        return len(self.prompts) * (len(self.contestants) * (repeats + streamed) + len(self.fixed))

    def warm_up(self) -> None:
        """Call each contestant once."""
        for name, run in self.contestants.items():
            with self._may_leave(name):
                run(self.prompts[0])

    @contextmanager
    def _may_leave(self, name: str) -> Iterator[None]:
        """Let a contestant whose call raises an error leave the race, if it keeps going."""
        try:
            yield
        except Exception as error:
            if not self.keeps_going:
                raise
            _log.info("%s failed and is measured no more", name, exc_info=True)
            del self.results[name]
            # The traceback would keep the tensors of the call in memory.
            self.errors[name] = error.with_traceback(None)

    def turn(
        self, number: int, repeats: int, streamed: bool, announce: Callable[[str], None]
    ) -> None:
        """Let all contestants continue prompt ``number``.

        The order rotates with the number, so that every contestant runs equally often in every place.
        """
        prompt = self.prompts[number]
        ids = prompt["input_ids"]
        mask = prompt.get("attention_mask", torch.ones_like(ids)).cpu()
        outputs, times, peaks = self._timed(prompt, repeats, number, announce)
        for name, series in self.results.items():
            output = outputs[name]
            text = output if isinstance(output, Tensor) else output.sequences
            series.seconds.append(statistics.median(times[name]))
            series.masks.append(mask)
            series.new_tokens.append(text.shape[0] * (text.shape[1] - ids.shape[1]))
            series.texts.append(text)
            series.peaks += peaks[name]
            if (stats := getattr(output, "speculation_stats", None)) is not None:
                series.speculation_stats.append(stats)
        self.turns += 1
        for name in list(self.results) if streamed else ():
            announce(f"{name}, streamed")
            with self._may_leave(name):
                arrivals = Arrivals(int(mask.sum()))
                self.contestants[name](prompt, streamer=arrivals)
                self.results[name].latencies.append(arrivals.latency())
        for name in [each for each in self.fixed if each in self.results]:
            announce(f"{name}, acceptance")
            with self._may_leave(name):
                self.results[name].fixed.append(self.fixed[name](prompt).speculation_stats)

    def _timed(
        self, prompt: Prompt, repeats: int, first: int, announce: Callable[[str], None]
    ) -> tuple[dict[str, Any], dict[str, list[float]], dict[str, list[int]]]:
        """Run every contestant ``repeats`` times on one prompt: last outputs, seconds, peak bytes."""
        device = prompt["input_ids"].device
        outputs: dict[str, Any] = {}
        peaks: dict[str, list[int]] = {name: [] for name in self.results}

        def call(name: str) -> None:
            outputs[name] = self.contestants[name](prompt)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        def measure(name: str, run: Call) -> float:
            announce(name)
            seconds = math.nan
            if name not in self.results:  # it left in an earlier repeat
                return seconds
            with self._may_leave(name):
                reset_peak(device)
                seconds = wall_seconds(name, run)
                if (peak := peak_bytes(device)) is not None:
                    peaks[name].append(peak)
            return seconds

        calls = {name: partial(call, name) for name in self.results}
        return outputs, take_turns(calls, repeats, measure, first=first), peaks


def interleave(
    contestants: Mapping[str, Callable[..., Any]],
    prompts: Sequence[Prompt],
    repeats: int = 1,
    streamed: bool = False,
    fixed: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, Series]:
    """Run every contestant on every prompt in turn, after one warm-up call of each contestant.

    Args:
        contestants, prompts, fixed: see :class:`Race`.
        repeats, streamed: as for :func:`run_races`.
    """
    race = Race(contestants, prompts, fixed or {})
    run_races([race], repeats, streamed)
    return race.results


def run_races(races: Sequence[Race], repeats: int = 1, streamed: bool = False) -> bool:
    """Run all races at once: each one's next prompt in turn, after a warm-up call of every contestant.

    A race that has no contestants left ends. Races that keep going keep the turns before an interrupt.

    Args:
        repeats: calls per prompt, of which the median time is used.
        streamed: also call each contestant once per prompt with a streamer that records when tokens arrive;
            contestants must then take ``streamer=``.

    Returns:
        Whether they were interrupted.

    Raises:
        KeyboardInterrupt: before the end of the first turn, or if not all races keep going.
    """
    numbers = count()
    with tracked("measuring", sum(race.calls(repeats, streamed) for race in races), "call") as work:

        def announce(name: str) -> None:
            work.update(next(numbers), name)

        for race in races:
            race.warm_up()
        try:
            for number in range(max(len(race.prompts) for race in races)):
                for race in races:
                    if number < len(race.prompts) and race.results:
                        race.turn(number, repeats, streamed, announce)
        except KeyboardInterrupt:
            if not (all(race.keeps_going for race in races) and any(race.turns for race in races)):
                raise
            return True
    return False


def unique_ngram_fraction(texts: Sequence[Sequence[Hashable]], n: int = 4) -> float:
    """Share of distinct n-grams among all, mean over texts; near 0 for text that repeats itself."""
    fractions = []
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        if grams:
            fractions.append(len(set(grams)) / len(grams))
    return statistics.fmean(fractions) if fractions else 1.0


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
