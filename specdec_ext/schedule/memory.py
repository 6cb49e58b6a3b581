"""What the controller knows about a drafter on a model, kept from call to call."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median_low
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from specdec_ext.drafters.base import Drafter
from specdec_ext.schedule.acceptance import LearntAcceptance
from specdec_ext.schedule.costs import WINDOW, DraftCosts, Elapsed, VerifyCosts
from specdec_ext.schedule.options import Source
from specdec_ext.schedule.savings import RealisedSavings

# Number of steps without a source after which it is probed: the first interval and the longest one.
FIRST_INTERVAL, LAST_INTERVAL = (
    {Source.PLAIN: 16, Source.MODEL: 4, Source.LOOKUP: 4},
    {Source.PLAIN: 128, Source.MODEL: 256, Source.LOOKUP: 64},
)
# The balance of a new ledger, in plain steps: what drafts may lose before they have gained anything.
FIRST_BALANCE = 10.0
# Limits of the balance, and of the loss that one step can add: a slow step may have been interrupted.
LEAST_BALANCE, MAX_BALANCE, MAX_LOSS = -4.0, 30.0, 2.0
# The credit for probes at first, and its upper limit, in plain steps.
MAX_CREDIT = 1.5
# Smallest weight of a new observation relative to all earlier ones.
FADING = 0.05
# Number of memories per model, the most recently used ones. They are distinguished by the drafter's identity,
# device, dtype, number of threads and temperature.
MEMORIES = 32


@dataclass
class LookupEstimate:
    """What a lookup adds to a plain step, averaged over recent lookups.

    Attributes:
        tokens: expected accepted tokens per row.
        wider: seconds by which passes took longer than plain ones.
        share: share of rows for which the lookup proposed something.
        count: number of lookups so far.
    """

    tokens: float = 0.5
    wider: float = 0.0
    share: float = 0.0
    count: int = 0

    def add(self, tokens: float, wider: float, share: float) -> None:
        """Add a lookup."""
        self.count += 1
        weight = max(FADING, 1 / (self.count + 1))
        self.tokens += weight * (tokens - self.tokens)
        self.wider += weight * (wider - self.wider)
        self.share += weight * (share - self.share)


@dataclass
class Ledger:
    """The measured gain of drafts over plain decoding.

    Whatever is expected of drafts, the controller chooses them only while the balance is positive. After
    that, only probes that gain something can raise it.

    Attributes:
        balance: in plain steps, so that it is valid for any batch and context length.
    """

    balance: float = FIRST_BALANCE

    def add(self, gain: float) -> None:
        """Add a step that drafted.

        Args:
            gain: plain steps saved; negative if the step took longer than its tokens are worth.
        """
        balance = self.balance + max(gain, -MAX_LOSS)
        self.balance = min(max(balance, LEAST_BALANCE), MAX_BALANCE)

    @property
    def pays(self) -> bool:
        """Whether drafts may be chosen."""
        return self.balance > 0

    @property
    def proves(self) -> bool:
        """Whether drafts have gained something in sum."""
        return self.balance > FIRST_BALANCE


@dataclass
class Experience:
    """What drafts have brought in steps of about one number of rows.

    Drafts of few rows share a pass that waits for the memory anyway; those of many rows need arithmetic, and
    may not pay.

    Attributes:
        plain_steps: number of plain steps that served as a reference.
    """

    lookup: LookupEstimate = field(default_factory=LookupEstimate)
    ledger: Ledger = field(default_factory=Ledger)
    plain_steps: int = 0


@dataclass
class Sleep:
    """The time in which a source does not pay and is not probed: calls that end in it run without it.

    Attributes:
        rows: number of rows of the calls for which this is known.
        steps: source -> number of steps to come.
    """

    rows: int = 0
    steps: dict[Source, int] = field(default_factory=dict)


@dataclass
class Memory:
    """What is known about one drafter on one model.

    Attributes:
        elapsed: seconds of all steps, by which the times in ``verify`` and ``drafts`` become old.
        experiences: number of rows, rounded up to a power of two -> what drafts have brought.
        idle: number of steps since the last plain step that served as a reference.
        slownesses: latest ratios of the time of plain steps soon after a draft to that of later ones.
        plain_interval: number of steps until plain steps are probed.
        credit: what probes may spend, in plain steps.
        misses: source -> number of consecutive steps in which all of its drafts were wrong.
        unused: source -> number of steps since its last use, at the end of the last call.
        sleep: the steps in which a source will not be used.
    """

    elapsed: Elapsed = field(default_factory=Elapsed)
    verify: VerifyCosts = field(init=False)
    drafts: DraftCosts = field(init=False)
    acceptance: LearntAcceptance = field(default_factory=LearntAcceptance)
    experiences: dict[int, Experience] = field(default_factory=dict)
    savings: RealisedSavings = field(default_factory=RealisedSavings)
    idle: int = 0
    slownesses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    plain_interval: int = FIRST_INTERVAL[Source.PLAIN]
    credit: float = MAX_CREDIT
    misses: dict[Source, int] = field(default_factory=dict)
    unused: dict[Source, int] = field(default_factory=dict)
    sleep: Sleep = field(default_factory=Sleep)

    def __post_init__(self) -> None:
        self.verify, self.drafts = VerifyCosts(self.elapsed), DraftCosts(self.elapsed)

    def has_plain_steps(self, rows: int) -> bool:
        """Whether plain steps were measured with at least about this many rows."""
        return any(
            known.plain_steps
            for size, known in self.experiences.items()
            if size >= rounded_up(rows)
        )

    def experience(self, rows: int) -> Experience:
        """What drafts have brought in steps of about this many rows.

        A new ledger begins with the balance for fewer rows, if that is lower than usual: what does not pay
        there does not pay with more.
        """
        rounded = rounded_up(rows)
        if rounded not in self.experiences:
            fewer = [known for known in self.experiences if known < rounded]
            balance = self.experiences[max(fewer)].ledger.balance if fewer else FIRST_BALANCE
            ledger = Ledger(min(balance, FIRST_BALANCE))
            self.experiences[rounded] = Experience(ledger=ledger)
        return self.experiences[rounded]

    @property
    def slowness(self) -> float:
        """The median of ``slownesses``; 1 before there is one."""
        return median_low(self.slownesses) if self.slownesses else 1.0


def rounded_up(number: int) -> int:
    """A number, rounded up to a power of two."""
    return 1 << max(0, number - 1).bit_length()


_memories: WeakKeyDictionary[PreTrainedModel, OrderedDict[Hashable, Memory]] = WeakKeyDictionary()


def memory_of(model: PreTrainedModel, drafter: Drafter, temperature: float | None = 0.0) -> Memory:
    """What is known in calls like this one; a new memory if nothing is.

    Args:
        temperature: of the call, on which acceptance depends; 0 for greedy decoding. Calls whose temperatures
            agree in the first decimal share a memory. None for the requests of engines.
    """
    home = model.device, model.dtype, torch.get_num_threads()
    key = drafter.identity, *home, None if temperature is None else round(temperature, 1)
    memories = _memories.setdefault(model, OrderedDict())
    memory = memories.setdefault(key, Memory())
    memories.move_to_end(key)
    if len(memories) > MEMORIES:
        memories.popitem(last=False)
    return memory


def forget(model: PreTrainedModel) -> None:
    """Delete what is known about all drafters on this model."""
    _memories.pop(model, None)
