"""The controller: before each step it chooses what to draft, and after the draft how much of it to verify.

Everything is an *option* with two numbers, the tokens and the seconds that it adds to a plain step. The plain
step itself adds nothing; a shape of the drafter adds its expected accepted tokens, its draft and its wider
pass; asking for what the drafter finds adds what that was worth of late. The best option has most tokens per
second over the active rows, and this rate is the price of a second wherever time is spent: a proposal is cut
where a further level costs more seconds than its tokens are worth, and dropped where none is worth it.

Costs (:mod:`specdec_ext.schedule.costs`) and acceptance (:mod:`specdec_ext.schedule.acceptance`) are learnt
from the steps themselves and kept for later calls. A proposal is judged by the text that came, verified or
not: a dropped one still tells whether its first token was right. What is not in use is tried now and then, at
intervals that double while nothing comes of it, from a credit that grows with the time that has passed.

Expectations may be wrong, so a :class:`Ledger` has the last word: what drafts have gained on plain decoding,
as measured. Without a positive balance there are plain steps and tries.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.schedule.acceptance import CHAIN, Acceptance, LearntAcceptance
from specdec_ext.schedule.costs import Curve, DraftCosts, VerifyCosts
from specdec_ext.schedule.policy import Policy, offered
from specdec_ext.schedule.report import Gain, Report
from specdec_ext.schedule.settings import Speculation
from specdec_ext.stats import SpeculationStats
from specdec_ext.tree.config import FOUND, Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

# Where drafts come from; plain steps are one of the sources.
PLAIN, MODEL = "plain", "model"
# Steps without a source after which it is tried, at first and at most.
FIRST_INTERVAL, LAST_INTERVAL = {PLAIN: 16, MODEL: 4, FOUND: 4}, {PLAIN: 128, MODEL: 64, FOUND: 64}
# Steps, over calls, without a source whose drafts were all wrong in the last steps that used it: its first
# interval, doubled for every two such steps, at most so many.
LONGEST_INTERVAL, MOST_MISSES = 1024, 20
# Steps for which a choice to draft stands while something comes of it: choosing takes time, too.
STANDS = 3
# Steps of a try of drafts that a model makes, if something comes of them: the first reads what was missed and
# tells little of what drafts cost. It ends earlier if the steps after that one lose so many plain steps.
TRIED, MOST_LOST = 4, 3.0
# A plain step takes longer behind a wider pass or a draft, which had the caches: only those behind a plain
# step are what all is measured against. Of such steps, one behind the other, that many are made before
# anything is drafted, once for a drafter on a model, and whenever they are measured again.
REFERENCE_STEPS = 2
# Credit for probes never exceeds what this many plain steps take.
MOST_CREDIT = 1.5
# Plain steps that chosen drafts may lose before anything was gained; what they have gained counts up to MOST,
# and a single step at most as MOST_LOSS: it may have been interrupted.
FIRST_BALANCE, MOST_BALANCE, MOST_LOSS = 10.0, 30.0, 2.0
# Steps without a draft after which a draft is one after a pause.
PAUSE = 8
# Share by which drafts that a model makes have to promise more than what needs none, and by which drafts
# have to be better than plain steps. Steps do not show all that they cost a call: rows of a batch that get on
# at different paces end one after the other, and the last have passes alone.
MARGIN = 0.05
# What earlier calls weigh beside the last in what tokens of rows at different paces are worth.
PACES_KEPT = 0.8
# A plain step that takes longer or shorter by this share than thought is measured again soon.
DRIFT = 0.2
# What a new finding weighs against what was found before, at least.
FADING = 0.05
# Drafters (by identity, device, dtype and number of threads) remembered for a model, the last ones used.
MEMORIES = 32


@dataclass(frozen=True)
class Candidate:
    """A shape of the drafter.

    Attributes:
        levels: below the root.
        nodes: the root included.
    """

    shape: TreeConfig
    levels: int
    nodes: int


@dataclass(slots=True)
class Option:
    """What a step may do, and what that adds to a plain step.

    Attributes:
        once: seconds that only the first of such steps adds: the drafter reads what it has missed.
    """

    source: str
    shape: Shape | None
    tokens: float
    seconds: float
    once: float = 0.0


@dataclass
class Found:
    """What asking for :data:`FOUND` was worth of late.

    Attributes:
        tokens: accepted tokens to expect, per row.
        wider: seconds by which passes took longer than plain ones.
        share: of rows for which something was found.
        count: how often it was asked for.
    """

    tokens: float = 0.5
    wider: float = 0.0
    share: float = 0.0
    count: int = 0

    def add(self, tokens: float, wider: float, share: float) -> None:
        self.count += 1
        weight = max(FADING, 1 / (self.count + 1))
        self.tokens += weight * (tokens - self.tokens)
        self.wider += weight * (wider - self.wider)
        self.share += weight * (share - self.share)


@dataclass
class Ledger:
    """What chosen drafts have gained on plain decoding, as measured.

    Whatever is expected of drafts, they are chosen only as long as the balance is positive; else it takes
    tries that gain something.

    Attributes:
        balance: in plain steps, so that it holds for any batch and context length.
    """

    balance: float = FIRST_BALANCE

    def add(self, gain: float) -> None:
        """A step that drafted: plain steps saved, negative if it took longer than its tokens are worth."""
        self.balance = min(self.balance + max(gain, -MOST_LOSS), MOST_BALANCE)

    @property
    def pays(self) -> bool:
        return self.balance > 0


@dataclass
class Paces:
    """What the tokens that drafts add are worth while other rows decode beside, told by whole calls.

    A step values a token at its share of a plain step. But rows that get on at different paces end one after
    the other: the last have passes alone, and the others have saved only what a row adds to a pass. How that
    ends is known when the call ends. Both amounts fade from call to call.

    Attributes:
        claimed: plain steps that such steps were taken to save.
        saved: plain steps that they saved.
    """

    claimed: float = 4.0
    saved: float = 4.0

    def add(self, claimed: float, saved: float) -> None:
        self.claimed = PACES_KEPT * self.claimed + claimed
        self.saved = PACES_KEPT * self.saved + saved

    @property
    def share(self) -> float:
        """Of what drafts add, 0 to 1."""
        return min(max(self.saved / self.claimed, 0.0), 1.0) if self.claimed > 0 else 1.0


@dataclass
class Memory:
    """What is known of one drafter on one model, over calls."""

    verify: VerifyCosts = field(default_factory=VerifyCosts)
    drafts: DraftCosts = field(default_factory=DraftCosts)
    acceptance: LearntAcceptance = field(default_factory=LearntAcceptance)
    found: Found = field(default_factory=Found)
    ledger: Ledger = field(default_factory=Ledger)
    paces: Paces = field(default_factory=Paces)
    plain_steps: int = 0  # of those that are a reference
    idle: int = 0  # steps since the last plain one
    plain_interval: int = FIRST_INTERVAL[PLAIN]
    credit: float | None = None
    # Of each source: steps in a row in which all of its drafts were wrong, and steps since it was used.
    misses: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)


_memories: WeakKeyDictionary[PreTrainedModel, OrderedDict[Hashable, Memory]] = WeakKeyDictionary()


def memory_of(model: PreTrainedModel, drafter: Drafter) -> Memory:
    """What earlier calls learnt with such a drafter on this model, device, dtype and number of threads."""
    place = drafter.identity, model.device, model.dtype, torch.get_num_threads()
    memories = _memories.setdefault(model, OrderedDict())
    memory = memories.setdefault(place, Memory())
    memories.move_to_end(place)
    if len(memories) > MEMORIES:
        memories.popitem(last=False)
    return memory


def forget(model: PreTrainedModel) -> None:
    """Begin anew with this model: nothing is known of any drafter."""
    _memories.pop(model, None)


class Controller(Policy):
    """``speculation="auto"``.

    Args:
        settings: what the caller pins.
        drafter: of the call.
        model: the target.
    """

    def __init__(self, settings: Speculation, drafter: Drafter, model: PreTrainedModel):
        super().__init__(drafter)
        self._settings = settings
        self._clock = settings.clock
        self._memory = memory_of(model, drafter)
        self._acceptance = Acceptance(self._memory.acceptance)
        self._gain = Gain()
        self._step = 0
        self._quiet = 0  # plain steps to come, decided already
        self._rested = 0  # of such, those that went by; they are timed together
        self._standing = 0  # further steps of what was chosen last, for as many rows
        self._rows = 0
        self._settled = False  # whether the last step was plain, for as many rows
        # source -> step in which it was used last
        self._used: dict[str, int] = {PLAIN: -self._memory.idle}
        self._interval = {**FIRST_INTERVAL, PLAIN: self._memory.plain_interval}
        self._stands: Option | None = None  # what those steps do
        self._trying = False  # whether they are a try
        self._lost = 0.0  # seconds that it has lost, the first of them aside
        self._active: Option | None = None  # what was chosen last, probes aside
        self._option: Option | None = None  # of this step
        self._probing = False
        self._price = 0.0  # tokens that a second is worth
        self._last_model_draft = -math.inf  # step
        self._read = 0  # tokens of the longest row that the drafter had read then
        self._judged: tuple[DraftTree, list[str]] | None = None

    def begin(self, context: Context, stats: SpeculationStats) -> None:
        self._stats = stats
        stats.policy = "auto"
        shapes = offered(self._drafter, context, self._settings.shapes)
        most = self._settings.max_nodes
        self._asks_found = FOUND in shapes
        fitting = [
            shape
            for shape in shapes
            if isinstance(shape, TreeConfig) and (most is None or (shape.num_nodes or 0) <= most)
        ]
        self._families: dict[str, list[Candidate]] = {}
        for shape in fitting:
            candidate = Candidate(shape, levels(shape), shape.num_nodes or 1)
            self._families.setdefault(family_of(shape), []).append(candidate)
        # Where less room is left, the shallowest shape is drafted and cut.
        self._shallowest = min(map(levels, fitting), default=0)
        self._sources = [PLAIN] if self._settings.may_rest else []
        self._sources += [FOUND] * self._asks_found + [MODEL] * bool(fitting)
        self._began = self._clock()
        self._drafted: float | None = None
        self._drafting = 0.0  # seconds that the draft of this step usually takes
        self._context, self._first_lengths = context, list(map(len, context.generated))
        self._references: dict[int, float] = {}  # seconds of a plain step by rows, the last known
        # Seconds of a plain step beside each of the steps so far, and what their further tokens were taken to
        # save: beside other rows, before it was discounted, and alone.
        self._steps = self._claimed = self._saved_alone = 0.0

    # --- before the draft

    def choose(self, context: Context) -> bool:
        self._step += 1
        self._option, self._judged, self._probing = None, None, False
        self._drafted, self._drafting = None, 0.0
        context.shape = None
        if self._rows != len(context.rows):  # all that was decided
            self._quiet = self._standing = 0
            self._settled = False
        if self._quiet:
            self._quiet -= 1
            self._rested += 1
            return False
        self._count_rest()
        room = max(context.remaining) - 1
        if room < 1:
            return False
        if self._standing and (self._trying or self._pays):
            self._standing -= 1
            option, self._probing = self._stands, self._trying
        else:
            self._trying = False
            option = self._chosen(context, room)
        if option is None:
            return False
        for source in (MODEL, FOUND) if option.source == MODEL else (option.source,):
            self._used[source], self._memory.unused[source] = self._step, 0
        self._option, context.shape = option, option.shape
        return option.source != PLAIN

    def _chosen(self, context: Context, room: int) -> Option | None:
        """What this step does, and some after it; None for a plain step that tells nothing new."""
        self._rows = len(context.rows)
        self._share = self._memory.paces.share if self._rows > 1 else 1.0
        self._verify = self._curve(context)
        if self._memory.plain_steps < REFERENCE_STEPS and self._settings.may_rest:
            self._quiet = REFERENCE_STEPS
            return None
        self._plain = self._verify(1) or 0.0
        options = self._options(context, room)
        best = self._best(options, self._rows, room)
        if (probe := self._due(options, best, self._rows, room)) is not None:
            source = probe.source
            self._interval[source] = min(2 * self._interval[source], LAST_INTERVAL[source])
            if source == PLAIN:
                self._quiet = REFERENCE_STEPS
            elif source == MODEL:
                self._standing, self._stands, self._trying = TRIED - 1, probe, True
                self._lost = 0.0
            return probe
        if self._active is None or self._active.source != best.source:
            self._interval[best.source] = FIRST_INTERVAL[best.source]
        self._active = best
        if best.source == PLAIN:
            self._rest()
            return None
        self._standing, self._stands = STANDS - 1, best
        return best

    def _curve(self, context: Context) -> Curve:
        return self._memory.verify.curve(len(context.rows), context.root_positions[0] + 1)

    @property
    def _pays(self) -> bool:
        return self._memory.ledger.pays or not self._settings.may_rest

    def _options(self, context: Context, room: int) -> list[Option]:
        """What this step may do."""
        rows, memory = context.rows, self._memory
        count = len(rows)
        options = [Option(PLAIN, None, 0.0, 0.0)] if self._settings.may_rest else []
        tokens = seconds = 0.0
        missing = 1.0  # share of rows left to the model
        if self._asks_found:
            tokens = memory.found.tokens * count * self._share
            seconds = memory.found.wider + (memory.drafts.curve(count, FOUND)(1) or 0.0)
            options.append(Option(FOUND, FOUND, tokens, seconds))
            missing -= memory.found.share
        for family, candidates in self._families.items():
            fitting = [each for each in candidates if each.levels <= max(room, self._shallowest)]
            deepest = max((each.levels for each in fitting), default=0)
            ahead = _added(
                [self._acceptance.ahead(row, family, deepest, family != CHAIN) for row in rows]
            )
            draft = memory.drafts.curve(count, family)
            once = 0.0
            if self._paused:
                reading = memory.drafts.after_pause(self._unread(context))
                once = max(0.0, (reading or 0.0) - (draft(1) or 0.0))
            for each in fitting:
                own = (draft(each.levels) or 0.0) + (self._verify(each.nodes) or 0.0) - self._plain
                gained = tokens + missing * ahead[each.levels] * self._share
                options.append(Option(MODEL, each.shape, gained, seconds + missing * own, once))
        return options

    @property
    def _paused(self) -> bool:
        """Whether a draft now is one after a pause: the first of a call, too."""
        return self._step - self._last_model_draft > PAUSE

    def _unread(self, context: Context) -> int:
        """Tokens that the drafter has to read first, up to a power of two."""
        unread = (max(context.root_positions) + 1 - self._read) * len(context.rows)
        return 1 << max(0, unread - 1).bit_length()

    def _rate(self, option: Option, rows: int, room: int) -> float:
        """Tokens per second, of steps like this to the end of the text."""
        tokens = rows + option.tokens
        once = option.once * min(1.0, tokens / (rows * room))
        return tokens / max(self._plain + option.seconds + once, 1e-9)

    def _best(self, options: list[Option], rows: int, room: int) -> Option:
        """Most tokens per second; what is in use stays unless another is better by the hysteresis."""
        rates = [self._rate(option, rows, room) for option in options]

        def favoured(i: int) -> float:
            used = self._active is not None and options[i].shape is self._active.shape
            margin = MARGIN * (options[i].source == MODEL)
            return rates[i] * (1 + self._settings.hysteresis * used - margin)

        chosen = range(len(options)) if self._pays else [0]  # plain
        best = max(chosen, key=favoured)
        self._price = rates[best]
        return options[best]

    def _due(self, options: list[Option], best: Option, rows: int, room: int) -> Option | None:
        """A source that is not in use and worth a try now; of others notes what credit they lack.

        What is tried is the cheapest, or the best if that promises more than what is in use.
        """
        self._lacking = math.inf
        for source in self._sources:
            if source == best.source or self._wait(source) > 0:
                continue
            if source == FOUND and best.source == MODEL:
                continue
            offered = [each for each in options if each.source == source]
            option = max(offered, key=lambda each: self._rate(each, rows, room))
            if self._rate(option, rows, room) <= self._price * (1 + MARGIN):
                option = min(offered, key=lambda each: each.seconds)
            seconds = self._plain + option.seconds + option.once
            lost = seconds - (rows + option.tokens) / self._price
            # What promises a gain needs no debt, either: it may have promised it before.
            lacking = min(max(lost, 0.0), MOST_CREDIT * self._plain) - self._credit()
            if lacking <= 0:
                self._probing = True
                self._stats.probes += 1
                return option
            self._lacking = min(self._lacking, lacking)
        return None

    def _wait(self, source: str) -> int:
        """Steps until a source that is not in use is due."""
        idle = self._step - self._used.get(source, 0)
        wait = self._interval[source] - idle
        if misses := self._memory.misses.get(source, 0):
            longest = min(FIRST_INTERVAL[source] << misses // 2, LONGEST_INTERVAL)
            wait = max(wait, longest - idle - self._memory.unused.get(source, 0))
        return wait

    def _credit(self) -> float:
        if self._memory.credit is None:
            self._memory.credit = MOST_CREDIT * self._plain
        return self._memory.credit

    def _rest(self) -> None:
        """Plain steps follow until something is due, or credit has grown to what is lacking."""
        waits = [LAST_INTERVAL[PLAIN]]
        for source in self._sources:
            due = self._wait(source)
            if source != PLAIN and due > 0:
                waits.append(due)
        earned = self._settings.probing * self._plain
        if self._lacking < earned * LAST_INTERVAL[PLAIN]:
            waits.append(math.ceil(self._lacking / earned))
        self._quiet = max(min(waits) - 1, 0)

    # --- behind the draft

    def cut(self, tree: DraftTree, context: Context) -> DraftTree:
        self._drafted = self._clock()
        option = self._option
        assert option is not None and option.shape is not None
        family = family_of(option.shape)
        self._missed = self._unread(context)
        kinds = [kind or family for kind in self._drafter.kinds or [""] * tree.num_rows]
        self._judged = tree, kinds
        depths = [max(row) for row in tree.depths]
        deepest = max(depths)
        columns = _columns(tree, deepest)
        branches = any(
            sum(depth > 0 for depth in row) > deep
            for row, deep in zip(tree.depths, depths, strict=True)
        )
        ahead = [
            self._acceptance.ahead(row, kind, depth, branches)[: depth + 1]
            for row, kind, depth in zip(context.rows, kinds, depths, strict=True)
        ]
        kept = self._kept(ahead, columns)
        self._count_found(ahead, kinds, kept, columns[kept])
        if kept < deepest:
            self._stats.dropped += kept == 0
            return tree.pruned([kept] * tree.num_rows)
        return tree

    def _kept(self, ahead: list[Sequence[float]], columns: list[int]) -> int:
        """How many levels are verified."""
        most = self._settings.max_nodes
        levels = [0, len(columns) - 1] if self._drafter.whole else range(len(columns))
        fitting = [level for level in levels if most is None or columns[level] <= most]
        if not self._settings.may_rest:
            return max(fitting)

        tokens = _added(ahead)

        def worth(level: int) -> float:
            wider = (self._verify(columns[level]) or 0.0) - self._plain
            return tokens[level] * self._share - self._price * wider

        return max(fitting, key=worth)

    def _count_found(
        self,
        ahead: list[Sequence[float]],
        kinds: list[str],
        kept: int,
        nodes: int,
    ) -> None:
        """What was found, rows that a model drafted for aside, at what that is taken to be worth."""
        if not self._asks_found:
            return
        tokens = [row[min(kept, len(row) - 1)] for row in ahead]
        found = [len(row) > 1 and _is_found(kind) for row, kind in zip(ahead, kinds, strict=True)]
        brought = sum(each for each, copied in zip(tokens, found, strict=True) if copied)
        part = brought / sum(tokens) if sum(tokens) > 0 else 0.0
        wider = (self._verify(nodes) or 0.0) - self._plain
        self._memory.found.add(brought / len(kinds), part * wider, sum(found) / len(kinds))

    # --- behind the step

    def learn(self, accepted: Accepted, context: Context, nodes: int) -> None:
        if self._rested:
            return
        now, rows = self._clock(), len(accepted.emitted)
        began, self._began = self._began, now
        drafted = began if self._drafted is None else self._drafted
        verify = self._curve(context)
        self._memory.idle += 1
        if nodes == 1 and self._settled:
            self._count_plain(verify(1), now - drafted)
        if nodes > 1 or self._settled:
            verify.add(nodes, now - drafted)
        # A lookup leaves the caches as they are.
        self._settled = nodes == 1 and (self._option is None or self._option.source != MODEL)
        if self._judged is not None:
            self._drafting = self._learn_draft(drafted - began, accepted, context)
        took, emitted = now - began, sum(map(len, accepted.emitted))
        spent = 0.0
        if self._probing:
            margin = MARGIN * (self._drafted is not None)
            tokens = rows + (emitted - rows) * self._share
            spent = max(0.0, took - tokens / self._price / (1 + margin))
        reference = verify(1)
        self._earn(took, reference, spent)
        if self._trying and self._standing < TRIED - 1:
            self._lost += spent
            if self._lost > MOST_LOST * (reference or 0.0):
                self._standing = 0
        worth = self._worth(emitted, rows, reference or 0.0)
        plain = took if self._drafted is None else worth
        self._gain.add(took, plain)
        if reference and (plain > took or not self._probing):  # the loss of a probe is paid for
            # Not what an interruption or a first call took.
            usual = self._drafting + (verify(nodes) or 0.0)
            saved = plain if self._drafted is None else plain / (1 + MARGIN)
            self._memory.ledger.add((saved - min(took, 2 * usual)) / reference)
        self._stats.count_shape(self._label(nodes))

    def _count_rest(self) -> None:
        """Learn from the plain steps since the last one that was looked at."""
        steps, self._rested = self._rested, 0
        if not steps:
            return
        now = self._clock()
        took, self._began = now - self._began, now
        self._count_plain(self._verify(1), took / steps, steps)
        self._verify.add(1, took / steps)
        self._earn(took, self._verify(1))
        self._worth(steps * self._rows, self._rows, self._verify(1) or 0.0, steps)
        self._gain.add(took, took)
        self._stats.count_shape(self._label(1), steps)

    def _count_plain(self, expected: float | None, seconds: float, steps: int = 1) -> None:
        """Steps since the reference was measured, over calls: they say when it is measured again."""
        memory = self._memory
        memory.idle = 0
        memory.plain_steps += steps
        self._used[PLAIN] = self._step
        if expected and abs(seconds / expected - 1) > DRIFT:
            self._interval[PLAIN] = FIRST_INTERVAL[PLAIN]

    def _earn(self, took: float, plain: float | None, spent: float = 0.0) -> None:
        """Credit for probes."""
        if self._memory.credit is not None and plain:
            earned = self._memory.credit + self._settings.probing * took - spent
            self._memory.credit = min(earned, MOST_CREDIT * plain)

    def _learn_draft(self, seconds: float, accepted: Accepted, context: Context) -> float:
        """Returns the seconds that such a draft usually takes."""
        assert self._judged is not None and self._option is not None
        tree, kinds = self._judged
        shape = self._option.shape
        if shape == FOUND or all(map(_is_found, kinds)):
            curve, size = self._memory.drafts.curve(len(kinds), FOUND), 1
        else:
            assert isinstance(shape, TreeConfig)
            if self._paused:
                curve, size = self._memory.drafts.after_pause, self._missed
            else:
                curve = self._memory.drafts.curve(len(kinds), family_of(shape))
                size = levels(shape)
            self._last_model_draft = self._step
            self._read = max(context.root_positions)
        curve.add(size, seconds)
        texts = zip(tree.token_lists, tree.parent_lists, accepted.emitted, strict=True)
        hits = misses = 0
        for row, kind, (tokens, parents, emitted) in zip(context.rows, kinds, texts, strict=True):
            matched, missed = judged(tokens, parents, emitted)
            self._acceptance.add(row, kind, matched, missed)
            hits, misses = hits + (matched > 0), misses + missed
        source, missed_before = self._option.source, self._memory.misses
        if hits or misses:
            missed_before[source] = (
                0 if hits else min(missed_before.get(source, 0) + 1, MOST_MISSES)
            )
        if misses and not hits and not (self._trying and self._standing == TRIED - 1):
            self._standing = 0
        if self._probing and hits:  # something came of it: once more, at once
            self._interval[source] = 1
        return curve(size) or 0.0

    def _label(self, nodes: int) -> str:
        if self._judged is None or self._option is None:
            return "plain"
        asked = name_of(self._option.shape) if self._option.shape else ""
        if nodes == 1:
            deepest = max(max(row) for row in self._judged[0].depths)
            return f"{asked}, dropped" if deepest else f"{asked}, nothing proposed"
        return asked

    def _worth(self, emitted: int, rows: int, reference: float, steps: int = 1) -> float:
        """Seconds that plain decoding would need for the tokens of a step."""
        plain = steps * reference
        added = emitted * reference / rows - plain
        self._references[rows] = reference
        self._steps += plain
        if rows == 1:
            self._saved_alone += added
            return plain + added
        self._claimed += added
        return plain + added * self._memory.paces.share

    def _compare_paces(self) -> None:
        """Hold what the tokens of the call were taken to save against its plain decoding as a whole."""
        counts = zip(self._context.generated, self._first_lengths, strict=True)
        lengths = sorted(len(row) - first for row, first in counts)
        reference = self._references.get(len(lengths), 0.0)
        if not reference or not self._claimed:
            return
        cost, whole = reference, 0.0
        for ended, (before, length) in enumerate(pairwise([0, *lengths])):
            cost = self._references.get(len(lengths) - ended, cost)
            whole += (length - before) * cost
        saved = whole - self._steps - self._saved_alone
        self._memory.paces.add(self._claimed / reference, saved / reference)

    def end(self) -> None:
        self._count_rest()
        self._compare_paces()
        for source in self._sources:
            before = self._memory.unused.get(source, 0)
            self._memory.unused[source] = before + self._step - self._used.get(source, 0)
        self._memory.plain_interval = self._interval[PLAIN]
        self._stats.report = Report.of(
            self._memory.verify, self._memory.drafts, self._memory.acceptance, self._gain
        )


def family_of(shape: Shape) -> str:
    """Shapes of one family share acceptance and draft costs: all chains; every tree by itself."""
    if isinstance(shape, str):
        return shape
    return CHAIN if shape.top_k == 1 else name_of(shape)


def name_of(shape: Shape) -> str:
    if isinstance(shape, str):
        return "what is found"
    if shape.top_k == 1:
        return f"chain of {levels(shape)}"
    return f"tree of {shape.num_nodes} nodes, {shape.depth} levels"


def levels(shape: TreeConfig) -> int:
    """Below the root; of a chain that ``num_nodes`` cuts off fewer than its depth."""
    return len(shape.links) if shape.top_k == 1 else shape.depth


def _added(rows: Sequence[Sequence[float]]) -> Sequence[float]:
    """Of tokens to expect by levels the sums over rows, a shorter one's last for all further levels."""
    if len(rows) == 1:
        return rows[0]
    levels = range(max(map(len, rows)))
    return [sum(row[min(level, len(row) - 1)] for row in rows) for level in levels]


def _is_found(kind: str) -> bool:
    """Whether a proposal of this kind was found, rather than drafted in a shape that was asked for."""
    return kind != CHAIN and not kind.startswith("tree of ")


def _columns(tree: DraftTree, deepest: int) -> list[int]:
    """Nodes per row of the tree cut to 0, 1, ..., ``deepest`` levels."""
    last = [0] * (deepest + 1)
    for depths in tree.depths:
        for node, depth in enumerate(depths):
            if depth >= 0 and node > last[depth]:
                last[depth] = node
    for depth in range(1, deepest + 1):
        last[depth] = max(last[depth], last[depth - 1])
    return [node + 1 for node in last]


def judged(
    tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]
) -> tuple[int, bool]:
    """How many levels of a proposal the text took, and whether the proposal went on without it.

    It did where the text has another token than those proposed, or none was proposed behind a branch that is
    shorter than others: acceptance is of the levels of whole proposals.
    """
    node, depths = 0, [0] * len(parents)
    for child in range(1, len(parents)):
        depths[child] = depths[parents[child]] + 1 if parents[child] >= 0 else 0
    deepest = max(depths)
    for level, token in enumerate(emitted):
        children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
        if not children:
            return level, level < deepest
        taken = [child for child in children if tokens[child] == token]
        if not taken:
            return level, True
        node = taken[0]
    return len(emitted), False
