"""``breakdown``: measure where the time of a step goes, from the draft to the streamed token.

While a breakdown runs, the functions of a step are wrapped by timers; at all other times the code is not
instrumented. The time of a part excludes the parts nested in it. A timer costs half a microsecond per call,
which counts for the enclosing part. Calls of ``generate`` in other threads would be measured too, so run
nothing else meanwhile.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext import ops
from specdec_ext.decoding.call_loop import CallLoop
from specdec_ext.decoding.loop import DecodingLoop
from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import tracked
from specdec_ext.drafters import Drafter
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.generation import generate
from specdec_ext.models import Target
from specdec_ext.models.passes.direct.direct_pass import DirectPass
from specdec_ext.output import Recorder, TokenStream
from specdec_ext.preflight.extras import require
from specdec_ext.verify.sampler import Sampler
from specdec_ext.verify.stopping import StopRule

DRAFT_OP, DRAFT = "draft op", "draft, around it"
FORWARD = "target, the rest of its forward"
LAYERS, LINEARS, ATTENTION = "target, layers", "target, linears", "target, attention"
# The parts that compute the draft and the forward pass; everything else is overhead of a step.
INSIDE = (DRAFT_OP, LAYERS, LINEARS, ATTENTION, FORWARD)
PREFILL = "prefill"
# In the order of a step.
PARTS = (
    DRAFT_OP,
    DRAFT,
    LAYERS,
    LINEARS,
    ATTENTION,
    FORWARD,
    "target, around its forward",
    "verify",
    "commit",
    "stop and stream",
    "loop",
)


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Attributes:
        name: one of ``PARTS``.
        microseconds: time per step, the median over steps.
        calls: mean number of calls per step.
    """

    name: str
    microseconds: float
    calls: float


@dataclass(frozen=True, repr=False)
class Breakdown(Summarised):
    """Times of the parts of a step; a step is one pass of the target after the prefill.

    Attributes:
        parts: the measured parts, in the order of ``PARTS``.
        steps: number of measured steps.
        tokens_per_step: emitted tokens per step, over all rows.
        title: drafter and dtype.
        machine: machine, versions and commit.
    """

    parts: tuple[Part, ...]
    steps: int
    tokens_per_step: float
    title: str
    machine: str

    @property
    def microseconds(self) -> float:
        """Microseconds of a whole step."""
        return sum(part.microseconds for part in self.parts)

    @property
    def outside(self) -> float:
        """Microseconds of a step outside the target's forward and the draft op."""
        return sum(part.microseconds for part in self.parts if part.name not in INSIDE)

    def summary(self) -> str:
        largest = max(self.parts, key=lambda part: part.microseconds)
        return (
            f"{self.title}: a step takes {self.microseconds:.0f} us, of which {largest.name} "
            f"{largest.microseconds:.0f} us"
        )

    def sentences(self) -> Iterable[str]:
        yield f"{self.title} | {self.machine}"
        yield (
            f"{self.steps} steps, {self.tokens_per_step:.2f} tokens each. {self.outside:.0f} us of a step "
            "are outside the target's forward and the draft op: the overhead of a step."
        )

    def tables(self) -> Iterable[Table]:
        rows = [
            (
                part.name,
                f"{part.microseconds:.1f}",
                f"{part.microseconds / self.microseconds:.1%}",
                f"{part.calls:.1f}",
            )
            for part in self.parts
        ]
        whole = [
            ("a step", f"{self.microseconds:.1f}", "", ""),
            (
                "outside target forward and draft op",
                f"{self.outside:.1f}",
                f"{self.outside / self.microseconds:.1%}",
                "",
            ),
        ]
        headings = "part of a step", "us", "share", "calls"
        yield Table([*rows, *whole], headings, marked=[len(rows)])

    def plot(self, path: str | Path, others: Sequence[Breakdown] = ()) -> None:
        """Save a stacked bar as an image file, with one more bar for each of ``others``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        otherwise = "Breakdown.explain() shows the same as text"
        figures = require("matplotlib.figure", "Breakdown.plot", otherwise)
        matplotlib = require("matplotlib", "Breakdown.plot", otherwise)
        bars = [self, *others]
        figure = figures.Figure(figsize=(10, 1.8 + 0.8 * len(bars)), layout="constrained")
        ax = figure.subplots()
        ends = [0.0] * len(bars)
        colours = matplotlib.colormaps["tab20"]
        for index, name in enumerate(PARTS):
            times = [
                sum(part.microseconds for part in bar.parts if part.name == name) for bar in bars
            ]
            if any(times):
                ax.barh(range(len(bars)), times, left=ends, label=name, color=colours(index))
            ends = [end + time for end, time in zip(ends, times, strict=True)]
        ax.set_yticks(range(len(bars)), [bar.title for bar in bars])
        ax.invert_yaxis()
        ax.set_xlabel("microseconds of a step")
        figure.legend(loc="outside lower center", ncols=3, fontsize="small")
        figure.savefig(path)


def breakdown(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    drafter: str | PreTrainedModel | Drafter | None,
    max_new_tokens: int,
    name: str | None = None,
    **kwargs: Any,
) -> Breakdown:
    """Generate for every prompt, after one warm-up call, and measure the parts of each step.

    Args:
        model: the target.
        prompts: ids ``[batch, length]``; one call each.
        drafter: as for :func:`specdec_ext.generate`.
        max_new_tokens: new tokens per call.
        name: name of the drafter in the title; by default its class.
        **kwargs: further arguments of :func:`specdec_ext.generate`; decoding is greedy by default.

    Raises:
        ValueError: if there are no prompts, or if ``max_new_tokens`` leaves no step after the prefill.
    """
    if not prompts:
        raise ValueError("prompts is empty; expected at least one [batch, length] tensor of ids")
    kwargs = {"do_sample": False, **kwargs, "return_dict_in_generate": True}
    clock = _Clock()
    steps: list[_Step] = []
    tokens = 0
    with _measured(model, clock), tracked("timing the parts", len(prompts) + 1, "call") as work:
        for turn, prompt in enumerate([prompts[0], *prompts]):
            work.update(turn)
            clock.begin()
            out: Any = generate(
                model, prompt, drafter=drafter, max_new_tokens=max_new_tokens, **kwargs
            )
            if turn > 0:
                steps += clock.steps
                tokens += out.speculation_stats.emitted_tokens
    if not steps:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no step to measure after the prompt; expected 2 or more"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    return Breakdown(
        tuple(
            Part(
                part,
                1e6 * statistics.median(step.seconds[part] for step in steps),
                statistics.mean(step.calls[part] for step in steps),
            )
            for part in PARTS
            if any(step.seconds[part] for step in steps)
        ),
        len(steps),
        tokens / len(steps),
        f"{name or out.speculation_stats.drafter}, {dtype}",
        machine_line(model.device),
    )


# The first function of every step.
_FIRST = DecodingLoop._propose


class _Step:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)


class _Clock:
    """Measures the parts of each step; nested parts are not counted twice."""

    def begin(self) -> None:
        """Prepare for a call of ``generate``; times before its first step are discarded."""
        self.steps: list[_Step] = []
        self._step = _Step()
        self._open: list[str] = []
        self._since = 0.0

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._step.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Wrap ``function`` so that its calls are timed as ``part``; calls within the prefill are not."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if PREFILL in self._open:
                return function(*args, **kwargs)
            self._charge()
            if function is _FIRST:
                self._step = _Step()
                self.steps.append(self._step)
            self._open.append(part)
            self._step.calls[part] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._open.pop()

        return call


@contextmanager
def _measured(model: PreTrainedModel, clock: _Clock) -> Iterator[None]:
    """Wrap the functions of all parts with timers of ``clock``."""
    targets, drafters = _subclasses(Target), _subclasses(Drafter)
    functions: list[tuple[Any, str, str]] = [
        (CallLoop, "run", "loop"),
        (DecodingLoop, "_propose", DRAFT),
        (ops, "draft_head", DRAFT_OP),
        (ops, "decoder_layers", LAYERS),
        (ops, "linear", LINEARS),
        (ops, "tree_attention", ATTENTION),
        (DirectPass, "__call__", FORWARD),
        (Sampler, "verify", "verify"),
        (StopRule, "ended", "stop and stream"),
        (TokenStream, "advance", "stop and stream"),
        (Recorder, "step", "stop and stream"),
        *((target, "prefill", PREFILL) for target in targets),
        *((target, "forward", "target, around its forward") for target in targets),
        *((target, "commit", "commit") for target in targets),
        *((target, "finish", PREFILL) for target in targets),
        *((drafter, "start", PREFILL) for drafter in drafters),
        *((drafter, "commit", DRAFT) for drafter in drafters),
    ]
    with ExitStack() as stack:
        for owner, name, part in functions:
            if name in vars(owner):
                stack.enter_context(_replaced(owner, name, clock.timed(vars(owner)[name], part)))
        stack.enter_context(_forward_measured(model, clock))
        yield


def _forward_measured(model: PreTrainedModel, clock: _Clock) -> Any:
    """Time the forward pass of ``model``, not that of other models of its class such as a draft model."""
    kind: Any = type(model)
    own = kind.__call__
    timed = clock.timed(own, FORWARD)

    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (timed if self is model else own)(self, *args, **kwargs)

    return _replaced(kind, "__call__", call)


def _subclasses(base: type[Any]) -> list[type[Any]]:
    classes: list[type[Any]] = [base]
    for child in base.__subclasses__():
        classes += _subclasses(child)
    return classes


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
