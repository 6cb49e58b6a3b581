"""The controller of ``speculation="auto"``: what each step drafts, and how much of the draft is verified.

Before a step, the controller compares options (:mod:`specdec_ext.schedule.options`). Each option adds a
number of expected tokens and a number of seconds to a plain step:

- a plain step adds nothing;
- a shape of the drafter adds its expected accepted tokens, its draft and the additional time of a wider pass;
- a lookup adds what recent lookups added.

The controller chooses the option with the most tokens per second over all active rows. This rate is the
*price* of a second. After the draft, it keeps the number of levels whose tokens are worth most at this price,
and drops the proposal if no level is worth its time.

Costs (:mod:`specdec_ext.schedule.costs`) and acceptance (:mod:`specdec_ext.schedule.acceptance`) are learnt
from the steps themselves and kept for later calls (:mod:`specdec_ext.schedule.memory`). A proposal is
compared with the text that follows, verified or not: even a dropped proposal shows whether its first token
was right.

A source that is not in use is *probed* from time to time, at intervals that double as long as probes bring
nothing. Probes spend a credit that grows with the elapsed time.

Estimates can be wrong. A :class:`~specdec_ext.schedule.memory.Ledger` therefore records the measured gain of
drafts over plain decoding. While its balance is not positive, there are only plain steps and probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.report import Decision, Report
from specdec_ext.schedule.acceptance import Acceptance, judged
from specdec_ext.schedule.costs import TRUSTED, Curve
from specdec_ext.schedule.memory import (
    FIRST_INTERVAL,
    LAST_INTERVAL,
    MAX_CREDIT,
    MAX_LOSS,
    Sleep,
    memory_of,
    rounded_up,
)
from specdec_ext.schedule.options import CHAIN, Kind, Option, Source, kind_of, name_of
from specdec_ext.schedule.policy import Policy, offered
from specdec_ext.schedule.report import Gain, decision_of, report_of
from specdec_ext.schedule.savings import CallSavings
from specdec_ext.schedule.settings import SpeculationConfig
from specdec_ext.stats import SpeculationStats
from specdec_ext.tree.config import LOOKUP, Lookup, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

# If all drafts of a source were wrong in its last steps, it is probed after its first interval, doubled for
# every two such steps, up to this number of steps, which are counted over calls. At most MAX_MISSES such
# steps are counted.
LONGEST_INTERVAL, MAX_MISSES = 1024, 16
# Steps for which a chosen draft is held while it brings something, because choosing takes time, too. A lookup
# that is chosen again is held twice as long, up to the second number: drafts are cut by what they promise.
HELD_STEPS, MAX_HELD_STEPS = 8, 32
# Steps of a probe of a model's drafts, if they bring something. The first step includes the time in which the
# drafter reads the tokens it has not seen, so it says little about the cost of drafts. The probe ends early
# when the other steps have lost this many plain steps. After MAX_MISSES wrong drafts, a probe is one step.
PROBE_STEPS, MAX_PROBE_LOSS = 4, 3.0
# So many plain steps after the prompt or a draft are slower than later ones, because those displace data from
# the processor's caches. The first one is not a reference, because it includes the choice. The time of the
# others is divided by their usual slowness, which is not measured if it seems to be larger than this. A
# measurement of the reference takes this many plain steps; the first one for a number of rows takes fewer if
# the text is short.
SETTLING_STEPS, MAX_SLOWNESS = 5, 1.5
SHORT_TEXT, SHORT_FIRST_STEPS = 32, 3  # tokens, steps
# After so many steps in a row in which all of its drafts were wrong, a drafter rests until AWAKE_STEPS before
# the next probe, in which it keeps some text to draft from.
HOPELESS, AWAKE_STEPS = 4, 64
# Most levels of a draft after a long part of a prompt.
SHORT_LEVELS = 2
# A draft after this many steps without one is a draft after a pause.
PAUSE = 8
# Drafts of a model must promise this share more than options without one, and drafts must be this share
# better than plain steps. A step does not show all that it costs the call: rows of a batch that advance at
# different paces end one after another, and the last rows have passes of their own.
MARGIN = 0.05
# Plain steps must promise this share more than drafts that have gained so far: estimates are of different
# times, and the speed of a machine changes. Drafts that begin to lose end the advantage.
PROVEN = 0.15
# Relative change of a plain step's time after which it is soon measured again.
DRIFT = 0.2
# If plain steps become this many times as fast, what probes have spent before does not count.
FASTER = 1.5


class Controller(Policy):
    """The policy of ``speculation="auto"``.

    Args:
        settings: what the caller pins.
        drafter: the drafter of the call.
        model: the target.
        temperature: of the call; 0 for greedy decoding, None for requests of any temperatures.
    """

    def __init__(
        self,
        settings: SpeculationConfig,
        drafter: Drafter,
        model: PreTrainedModel,
        temperature: float | None = 0.0,
    ):
        super().__init__(drafter)
        self._settings = settings
        self._clock = settings.clock
        self._memory = memory_of(model, drafter, temperature)
        self._acceptance = Acceptance(self._memory.acceptance)
        self._savings = CallSavings(self._memory.savings)
        self._gain = Gain()
        self._stopped: float | None = None  # when the clock was stopped
        self._step = 0
        self._hurries = self._is_short = False  # whether the next draft is short, and this one
        self._rows = 0  # active rows at the last choice
        # Plain steps that are already decided: the number to come, and the number done but not timed yet.
        self._skip = self._skipped = 0
        # An option is held for some steps, as long as no row ends.
        self._held: Option | None = None
        self._hold = 0  # steps to come
        self._held_steps = HELD_STEPS
        self._held_is_probe = False
        self._asleep: set[Source] = set()  # sources without which this call runs
        self._is_plain = False  # whether this call runs as plain decoding
        self._resting = False  # whether the drafter rests
        self._due: dict[Source, float] = {}  # source of a due probe -> the credit that it needs
        self._probe_loss = 0.0  # seconds that a held probe has lost, its first step aside
        self._settling = SETTLING_STEPS  # slower plain steps to come
        self._after_draft = self._after_probe = False  # whether they follow a draft, and a probe
        self._slow: float | None = None  # seconds of each slower step, if plain steps follow
        self._last_used = {Source.PLAIN: -self._memory.idle}  # source -> step
        self._interval = {**FIRST_INTERVAL, Source.PLAIN: self._memory.plain_interval}
        self._current: Option | None = None  # the last choice that was not a probe
        self._option: Option | None = None  # the option of this step
        self._probing = False  # whether this step is a probe
        self._price = 0.0  # tokens per second
        self._rates: list[float] = []  # of the options that were compared last
        # The last decision as the arguments of decision_of; what they refer to does not change.
        self._decision: tuple[int, float, bool, list[Option], list[float], Option] | None = None
        self._last_model_draft = -math.inf  # step
        self._read = 0  # tokens of the longest row that the drafter had read at its last draft
        # The proposal of this step, with the kind of each row.
        self._proposal: tuple[DraftTree, list[Kind]] | None = None

    def drafter_of(self, rows: int, steps: int) -> Drafter | None:
        sleep = self._memory.sleep
        if not self._settings.may_rest or sleep.rows != rows:
            return self._drafter
        asleep = {source for source, until in sleep.steps.items() if until > steps}
        if len(asleep) == len(sleep.steps) > 0 and not self._drafter.keeps_outputs:
            self._asleep, self._is_plain = asleep, True
            return None
        if Source.MODEL in asleep and (lookup := self._drafter.lookup_part) is not None:
            self._asleep, self._drafter = {Source.MODEL}, lookup
        return self._drafter

    def begin(self, context: Context, stats: SpeculationStats) -> None:
        self._stats = stats
        stats.policy = "auto"
        self._context, self._first_lengths = context, list(map(len, context.generated))
        self._step_began = self._clock()
        if self._is_plain:
            self._look_up_steps(len(context.rows), context.root_positions[0] + 1)
            return
        shapes = offered(self._drafter, context, self._settings.shapes)
        most = self._settings.max_nodes
        self._offers_lookup = any(isinstance(shape, Lookup) for shape in shapes)
        fitting = [
            shape
            for shape in shapes
            if isinstance(shape, TreeConfig) and (most is None or (shape.num_nodes or 0) <= most)
        ]
        self._shapes: dict[Kind, list[TreeConfig]] = {}
        for shape in fitting:
            self._shapes.setdefault(kind_of(shape), []).append(shape)
        # If less room is left than any shape needs, the shallowest shape is drafted and cut.
        self._shallowest = min((shape.levels for shape in fitting), default=0)
        # Plain steps, if allowed, come first.
        self._sources = [Source.PLAIN] if self._settings.may_rest else []
        self._sources += [Source.LOOKUP] * self._offers_lookup + [Source.MODEL] * bool(fitting)
        self._draft_ended: float | None = None
        self._repeated = False
        self._longest_draft = 0.0

    # --- before the draft

    @property
    def decided(self) -> bool | None:
        if self._skip or self._is_plain:
            return False
        holds = self._hold and (self._held_is_probe or self._pays) and self._option is not None
        return True if holds else None

    def hurry(self) -> None:
        self._hurries = self._settings.may_rest

    def choose(self, context: Context) -> bool:
        same_rows = self._rows == len(context.rows)
        hurries, self._hurries = self._hurries, False
        if self._skip and same_rows:
            # Nothing else happens here: while drafts do not pay, this is almost every step.
            self._skip -= 1
            self._skipped += 1
            return False
        self._step += 1
        self._option, self._proposal, self._probing = None, None, False
        self._draft_ended, self._longest_draft = None, 0.0
        self._repeated = False
        context.shape = None
        if not same_rows:  # earlier decisions were made for other rows
            self._skip = self._hold = 0
        self._learn_skipped()
        if not same_rows:
            self._unsettle(after_draft=False)
        room = max(context.remaining) - 1
        if room < 1:
            return False
        if self._hold and (self._held_is_probe or self._pays):
            self._hold -= 1
            option, self._probing = self._held, self._held_is_probe
        else:
            self._held_is_probe = False
            option = self._chosen(context, room)
        if option is None:
            return False
        self._is_short = hurries and not self._probing
        if self._is_short:
            option = self._shortened(option)
        self._use(option)
        context.shape = option.shape
        return option.source is not Source.PLAIN

    def _shortened(self, option: Option) -> Option:
        """The option, if it is a shape of the drafter with few levels of its kind."""
        shape = option.shape
        if not isinstance(shape, TreeConfig) or shape.levels <= SHORT_LEVELS:
            return option
        shapes = self._shapes[kind_of(shape)]
        return replace(option, shape=min(shapes, key=lambda each: abs(each.levels - SHORT_LEVELS)))

    def repeat(self) -> None:
        if self._skip:
            self._skip -= 1
            self._skipped += 1
            return
        assert self._option is not None
        self._step += 1
        self._hold = max(0, self._hold - 1)
        self._proposal = None
        # The time of a draft ahead is part of the round.
        self._draft_ended, self._repeated = None, True
        self._use(self._option)

    def _use(self, option: Option) -> None:
        """Note that this step uses ``option``."""
        used = [option.source]
        if option.source is Source.MODEL:
            used.append(Source.LOOKUP)
        for source in used:
            self._last_used[source], self._memory.unused[source] = self._step, 0
        self._option = option

    def _chosen(self, context: Context, room: int) -> Option | None:
        """Choose the option for this step and some after it; None for a plain step that is not a probe."""
        self._rows = len(context.rows)
        self._look_up_steps(self._rows, context.root_positions[0] + 1)
        if self._settings.may_rest and (steps := self._steps_to_measure(room)):
            self._skip = steps - 1
            return None
        unread = self._unread(context) if self._paused else 0
        options = self._options(context.rows, room, unread)
        best = self._best(options, self._rows, room)
        self._decision = self._rows, self._plain, self._pays, options, self._rates, best
        if (probe := self._due_probe(options, best, self._rows, room)) is not None:
            source = probe.source
            self._interval[source] = min(2 * self._interval[source], LAST_INTERVAL[source])
            if source is Source.PLAIN:
                self._skip = SETTLING_STEPS - 1
            elif source is Source.MODEL:
                self._hold, self._held, self._held_is_probe = PROBE_STEPS - 1, probe, True
                self._probe_loss = 0.0
            return probe
        if self._current is None or self._current.source is not best.source:
            self._interval[best.source] = FIRST_INTERVAL[best.source]
        self._current = best
        if best.source is Source.PLAIN:
            waits = [self._steps_until_probe(each) for each in self._sources[1:]]
            # The slower steps are timed apart from those after them.
            longest = self._settling or LAST_INTERVAL[Source.PLAIN]
            self._skip = int(max(1, min([longest, *waits]))) - 1
        else:
            same = self._held is not None and self._held.source is best.source is Source.LOOKUP
            self._held_steps = min(2 * self._held_steps, MAX_HELD_STEPS) if same else HELD_STEPS
            self._hold, self._held = self._held_steps - 1, best
        self._let_rest(best, context)
        return None if best.source is Source.PLAIN else best

    def _steps_to_measure(self, room: int) -> int:
        """Number of plain steps that must be measured now, 0 for none.

        Args:
            room: number of tokens to come.
        """
        # Rows end one after another. For fewer rows than at first, the estimate from more is good enough.
        is_first = self._step == 1 or not self._memory.has_plain_steps(self._rows)
        if is_first and not self._experience.plain_steps:
            return SHORT_FIRST_STEPS if room < SHORT_TEXT else SETTLING_STEPS
        # The first time after slower steps, steps after them show how slow they are.
        return SETTLING_STEPS if self._slow is not None and not self._memory.slownesses else 0

    def _look_up_steps(self, rows: int, length: int) -> None:
        """Look up what is known about steps with this number of rows and this context length."""
        self._share = self._memory.savings.share if rows > 1 else 1.0
        self._experience = self._memory.experience(rows)
        self._verify = self._memory.verify.curve(rows, length)
        self._plain = self._verify(1) or 0.0

    def _curve(self, context: Context) -> Curve:
        return self._memory.verify.curve(len(context.rows), context.root_positions[0] + 1)

    @property
    def _begins_probe(self) -> bool:
        """Whether this step is the first one of a probe of a model's drafts."""
        return self._held_is_probe and self._hold == PROBE_STEPS - 1

    @property
    def _pays(self) -> bool:
        return self._experience.ledger.pays or not self._settings.may_rest

    def _options(self, rows: Sequence[int], room: int, unread: int) -> list[Option]:
        """All options of a step; a plain step, if allowed, comes first.

        Args:
            rows: the active rows.
            room: most tokens that a draft may add to a row.
            unread: tokens that the drafter reads first, as after a pause; 0 if there was no pause.
        """
        memory, known, count = self._memory, self._experience.lookup, len(rows)
        options = [Option(Source.PLAIN, None, 0.0, 0.0)] if self._settings.may_rest else []
        tokens = seconds = 0.0
        missing = 1.0  # share of rows without a lookup, for which the model drafts
        if self._offers_lookup:
            tokens, wider = known.tokens * count * self._share, known.wider
            lookup = memory.drafts.curve(count, LOOKUP)(1) or 0.0
            options.append(Option(Source.LOOKUP, LOOKUP, tokens, wider + lookup))
            missing -= known.share
            # The time of the model's drafts includes the lookup that found nothing.
            seconds = wider + known.share * lookup
        for kind, shapes in self._shapes.items():
            fitting = [shape for shape in shapes if shape.levels <= max(room, self._shallowest)]
            deepest = max((shape.levels for shape in fitting), default=0)
            ahead = _summed(
                [self._acceptance.ahead(row, kind, deepest, kind != CHAIN) for row in rows]
            )
            draft = memory.drafts.curve(count, kind)
            once = 0.0
            if unread:
                reading = memory.drafts.after_pause(unread)
                once = max(0.0, (reading or 0.0) - (draft(1) or 0.0))
            for shape in fitting:
                verify = self._verify(shape.num_nodes or 1) or 0.0
                own = (draft(shape.levels) or 0.0) + verify - self._plain
                gained = tokens + missing * ahead[shape.levels] * self._share
                options.append(Option(Source.MODEL, shape, gained, seconds + missing * own, once))
        return options

    @property
    def _paused(self) -> bool:
        """Whether a draft now would be one after a pause, as the first draft of a call is."""
        return self._step - self._last_model_draft > PAUSE

    def _unread(self, context: Context) -> int:
        """Number of tokens that the drafter would read before a draft, rounded up to a power of two."""
        return rounded_up((max(context.root_positions) + 1 - self._read) * len(context.rows))

    def _rate(self, option: Option, rows: int, room: int) -> float:
        """Tokens per second if all steps to the end of the text were like this one."""
        tokens = rows + option.tokens
        once = option.once * min(1.0, tokens / (rows * room))
        return tokens / max(self._plain + option.seconds + once, 1e-9)

    def _best(self, options: list[Option], rows: int, room: int) -> Option:
        """The option with the highest rate, where the current shape is favoured by ``hysteresis``."""
        rates = self._rates = [self._rate(option, rows, room) for option in options]

        def favoured(i: int) -> float:
            used = self._current is not None and options[i].shape is self._current.shape
            margin = MARGIN * (options[i].source is Source.MODEL)
            margin += PROVEN * (
                options[i].source is Source.PLAIN and self._experience.ledger.proves
            )
            return rates[i] * (1 + self._settings.hysteresis * used - margin)

        allowed = range(len(options)) if self._pays else [0]  # plain
        best = max(allowed, key=favoured)
        self._price = rates[best]
        return options[best]

    def _due_probe(
        self, options: list[Option], best: Option, rows: int, room: int
    ) -> Option | None:
        """An option of a source that is not in use, if a probe of it is due and there is credit for it.

        The probe is the cheapest option of the source, or the best one if that promises more than ``best``.
        """
        self._due = {}
        for source in self._sources:
            if source is best.source or self._wait(source) > 0:
                continue
            if source is Source.LOOKUP and best.source is Source.MODEL:
                continue
            of_source = [each for each in options if each.source is source]
            option = max(of_source, key=lambda each: self._rate(each, rows, room))
            if self._rate(option, rows, room) <= self._price * (1 + MARGIN):
                option = min(of_source, key=lambda each: each.seconds)
            seconds = self._plain + option.seconds + option.once
            lost = seconds - (rows + option.tokens) / self._price
            # An option that promises a gain may not go into debt either: earlier promises may have been
            # false.
            needed = min(max(lost, 0.0) / self._plain, MAX_CREDIT) if self._plain else 0.0
            if needed <= self._memory.credit:
                self._probing = True
                self._stats.probes += 1
                return option
            self._due[source] = needed
        return None

    def _wait(self, source: Source) -> int:
        """Number of steps until a probe of a source that is not in use is due."""
        idle = self._step - self._last_used.get(source, 0)
        return max(self._interval[source] - idle, self._wait_after_misses(source, idle))

    def _wait_after_misses(self, source: Source, idle: int) -> int:
        """The same if only the source's wrong drafts, which count over calls, delay the probe.

        Args:
            idle: number of steps of this call since the source was used.
        """
        misses = self._memory.misses.get(source, 0)
        longest = min(FIRST_INTERVAL[source] << misses // 2, LONGEST_INTERVAL) if misses else 0
        return longest - idle - self._memory.unused.get(source, 0)

    def _steps_asleep(self) -> dict[Source, int]:
        """Number of steps after this call in which a call like this one does not use a source."""
        steps = dict.fromkeys(self._sources[1:], 0)
        if self._current is None or self._current.source is Source.MODEL:
            return steps
        current = self._current.source
        for source in steps:
            credited = self._steps_until_credit(self._due.get(source, 0.0))
            wait = max(self._wait_after_misses(source, 0), credited)
            steps[source] = int(max(0, min(LONGEST_INTERVAL, wait))) * (source is not current)
        if any(steps.values()):
            first = self._first_source()
            used = steps if first is Source.MODEL else [first]
            steps |= {source: 0 for source in used if source in steps}
        return steps

    def _first_source(self) -> Source:
        """The source that the next call begins with if it is like this one; only its rows are unknown."""
        context, rows = self._context, range(len(self._first_lengths))
        columns = context.prompt_columns
        self._acceptance, self._current = Acceptance(self._memory.acceptance), None
        self._look_up_steps(len(rows), columns + 1)
        room = context.max_length - columns - 1
        options = self._options(rows, room, unread=rounded_up((columns + 1) * len(rows)))
        return self._best(options, len(rows), room).source

    def _let_rest(self, best: Option, context: Context) -> None:
        """Let a drafter whose drafts were always wrong rest, unless it is probed soon after these steps."""
        misses = self._memory.misses.get(Source.MODEL, 0)
        hopeless = misses >= HOPELESS and best.source is not Source.MODEL
        resting = hopeless and self._steps_until_probe(Source.MODEL) > self._skip + AWAKE_STEPS
        if resting != self._resting:
            self._resting = resting
            self._drafter.rest(resting)
            self._read = max(context.root_positions)  # what came before will not be read

    def _steps_until_probe(self, source: Source) -> float:
        """Plain steps until a probe of a source is due or the credit suffices for it."""
        if (due := self._wait(source)) > 0:
            return due
        return self._steps_until_credit(self._due.get(source, math.inf))

    def _steps_until_credit(self, needed: float) -> float:
        """Plain steps until the credit suffices for a probe that needs this much; infinite if too many."""
        earned, missing = self._settings.probing, needed - self._memory.credit
        if missing <= 0:
            return 0
        return math.ceil(missing / earned) if missing < earned * LONGEST_INTERVAL else math.inf

    # --- after the draft

    def verified(
        self, tree: DraftTree, lookups: Callable[[], Sequence[Lookup | None]] | None
    ) -> None:
        self._propose(tree, lookups() if lookups else None)

    def _propose(self, tree: DraftTree, lookups: Sequence[Lookup | None] | None) -> list[Kind]:
        """Note the proposal of this step; returns the kinds of its rows."""
        assert self._option is not None and self._option.shape is not None
        requested = kind_of(self._option.shape)
        kinds = [lookup or requested for lookup in lookups or [None] * tree.num_rows]
        self._proposal = tree, kinds
        return kinds

    def cut(self, tree: DraftTree, context: Context) -> DraftTree:
        self._draft_ended = self._clock()
        self._tokens_read = self._unread(context)
        kinds = self._propose(tree, self._drafter.lookups)
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
        most = SHORT_LEVELS if self._is_short and not self._drafter.whole else deepest
        kept = self._kept(ahead, columns[: most + 1])
        self._estimate_lookup(ahead, kinds, kept, columns[kept])
        if kept < deepest:
            return tree.pruned([kept] * tree.num_rows)
        return tree

    def _kept(self, ahead: list[Sequence[float]], columns: list[int]) -> int:
        """The number of levels to verify."""
        most = self._settings.max_nodes
        levels = [0, len(columns) - 1] if self._drafter.whole else range(len(columns))
        fitting = [level for level in levels if most is None or columns[level] <= most]
        if not self._settings.may_rest:
            return max(fitting)

        tokens = _summed(ahead)

        def worth(level: int) -> float:
            wider = (self._verify(columns[level]) or 0.0) - self._plain
            return tokens[level] * self._share - self._price * wider

        return max(fitting, key=worth)

    def _estimate_lookup(
        self, ahead: list[Sequence[float]], kinds: list[Kind], kept: int, nodes: int
    ) -> None:
        """Update the estimate of lookups with the rows of this step that have one."""
        if not self._offers_lookup:
            return
        tokens = [row[min(kept, len(row) - 1)] for row in ahead]
        copied = [
            len(row) > 1 and isinstance(kind, Lookup)
            for row, kind in zip(ahead, kinds, strict=True)
        ]
        brought = sum(each for each, copy in zip(tokens, copied, strict=True) if copy)
        part = brought / sum(tokens) if sum(tokens) > 0 else 0.0
        wider = (self._verify(nodes) or 0.0) - self._plain
        self._experience.lookup.add(brought / len(kinds), part * wider, sum(copied) / len(kinds))

    # --- after the step

    def learn(self, accepted: Accepted, context: Context, nodes: int) -> None:
        if self._skipped:
            return
        now, rows = self._clock(), len(accepted.emitted)
        began, self._step_began = self._step_began, now
        if not all(accepted.emitted):  # the step has cost as much as one of more rows
            self._count_step(nodes)
            return
        drafted = self._proposal is not None
        draft_ended = began if self._draft_ended is None else self._draft_ended
        verify = self._curve(context)
        self._memory.idle += 1
        if nodes > 1 and not self._repeated:
            verify.add(nodes, now - draft_ended)
        # A lookup that is dropped leaves the processor's caches as they are.
        if nodes > 1 or (self._option is not None and self._option.source is Source.MODEL):
            self._unsettle(after_draft=True)
        reference = verify(1)
        if drafted:
            drafting = draft_ended - began
            self._longest_draft = self._learn_draft(drafting, accepted, context, reference)
        took, emitted = now - began, sum(map(len, accepted.emitted))
        longest_pass = _credible(verify, nodes, verify.count(nodes) < TRUSTED, reference)
        charged = min(took, self._longest_draft + longest_pass)
        spent = 0.0 if drafted else self._settle(1, took, reference)
        if self._probing:
            margin = MARGIN * drafted
            tokens = rows + (emitted - rows) * self._share
            spent = max(0.0, charged - tokens / self._price / (1 + margin))
        self._earn(took, reference, spent)
        if self._held_is_probe and self._hold < PROBE_STEPS - 1:
            self._probe_loss += spent
            if self._probe_loss > MAX_PROBE_LOSS * (reference or 0.0):
                self._hold = 0
        worth = self._savings.plain_time(emitted, rows, reference or 0.0)
        plain = worth if drafted else took
        self._count_gain(took, plain)
        # Credit has paid for what a probe of a model's drafts loses in its first step.
        if drafted and reference and (plain > took or not self._begins_probe):
            self._experience.ledger.add((plain / (1 + MARGIN) - charged) / reference)
        self._count_step(nodes)

    def _learn_skipped(self) -> None:
        """Learn from the plain steps since the last step that was timed; they are timed together."""
        steps, self._skipped = self._skipped, 0
        if not steps:
            return
        self._step += steps
        now = self._clock()
        took, self._step_began = now - self._step_began, now
        self._learn_plain(took / steps, steps)
        self._earn(took, self._verify(1), self._settle(steps, took, self._verify(1)))
        self._savings.plain_time(steps * self._rows, self._rows, self._verify(1) or 0.0, steps)
        self._count_gain(took, took)
        self._stats.count_plain(steps)

    def _count_gain(self, took: float, plain: float) -> None:
        self._gain.add(took, plain)
        self._stats.timed_seconds += took
        self._stats.plain_seconds += plain

    def _unsettle(self, after_draft: bool) -> None:
        """Note that the next plain steps are slower than others."""
        self._settling, self._slow = SETTLING_STEPS, None
        self._after_draft, self._after_probe = after_draft, after_draft and self._probing

    def _settle(self, steps: int, took: float, reference: float | None) -> float:
        """Count plain steps, of which the first may be slower; returns what slower ones cost a probe.

        Args:
            steps: their number.
            took: seconds of all of them.
            reference: usual seconds of a plain step.
        """
        slower = min(steps, self._settling)
        self._settling -= slower
        if not self._after_probe or not reference:
            return 0.0
        # Limited, because a step may have been interrupted.
        return slower * min(max(took / steps - reference, 0.0), (MAX_SLOWNESS - 1) * reference)

    def _learn_plain(self, seconds: float, steps: int) -> None:
        """Learn from plain steps that are a reference; if their time has changed, measure it again soon.

        Args:
            seconds: of each step.
            steps: their number.
        """
        memory, expected = self._memory, self._verify(1)
        if not self._settling:
            if self._slow and 0 < self._slow < MAX_SLOWNESS * seconds:
                memory.slownesses.append(self._slow / seconds)
            self._slow = None
        elif self._after_draft and self._settling == steps == SETTLING_STEPS - 1:
            self._slow = seconds
            seconds /= memory.slowness
        elif expected is not None:  # otherwise a reference that is too slow is better than none
            return
        self._renew(seconds)
        self._verify.add(1, seconds, steps)
        memory.idle = 0
        self._experience.plain_steps += steps
        self._last_used[Source.PLAIN] = self._step
        if expected and abs(seconds / expected - 1) > DRIFT:
            self._interval[Source.PLAIN] = FIRST_INTERVAL[Source.PLAIN]

    def _renew(self, seconds: float) -> bool:
        """Restore the credit if the machine has become faster: its earlier costs say nothing about the next.

        Args:
            seconds: of a plain step.

        Returns:
            Whether it has become faster.
        """
        faster = seconds * FASTER < self._plain
        if faster:
            self._memory.credit = MAX_CREDIT
        return faster

    def _earn(self, took: float, plain: float | None, spent: float = 0.0) -> None:
        """Count the elapsed time, add a share of it to the credit for probes, and subtract what was spent."""
        self._memory.elapsed.seconds += took
        if plain:
            earned = (self._settings.probing * took - spent) / plain
            self._memory.credit = min(self._memory.credit + earned, MAX_CREDIT)

    def _learn_draft(
        self, seconds: float, accepted: Accepted, context: Context, plain: float | None
    ) -> float:
        """Learn the cost and the acceptance of a draft.

        Args:
            seconds: of the draft.
            plain: seconds of a plain step, if known.

        Returns:
            The longest time that such a draft takes by itself, in seconds.
        """
        assert self._proposal is not None and self._option is not None
        tree, kinds = self._proposal
        shape = self._option.shape
        if isinstance(shape, Lookup) or all(isinstance(kind, Lookup) for kind in kinds):
            curve, size = self._memory.drafts.curve(len(kinds), LOOKUP), 1
        else:
            assert isinstance(shape, TreeConfig)
            if self._paused:
                curve, size = self._memory.drafts.after_pause, self._tokens_read
            else:
                curve = self._memory.drafts.curve(len(kinds), kind_of(shape))
                size = shape.levels
            self._last_model_draft = self._step
            self._read = max(context.root_positions)
        if not self._repeated:
            curve.add(size, seconds)
        texts = zip(tree.token_lists, tree.parent_lists, accepted.emitted, strict=True)
        hits = misses = 0
        for row, kind, (tokens, parents, emitted) in zip(context.rows, kinds, texts, strict=True):
            matched, missed = judged(tokens, parents, emitted)
            self._acceptance.add(row, kind, matched, missed)
            hits, misses = hits + (matched > 0), misses + missed
        source, missed_before = self._option.source, self._memory.misses
        if hits or misses:
            missed_before[source] = 0 if hits else min(missed_before.get(source, 0) + 1, MAX_MISSES)
        hopeless = missed_before.get(source, 0) == MAX_MISSES
        if misses and not hits and (hopeless or not self._begins_probe):
            self._hold, self._held = 0, None
        if self._probing and hits:  # successful: probe the source again at once
            self._interval[source] = 1
        is_new = len(curve.sizes) == 1 and curve.count(size) == 1
        return _credible(curve, size, is_new, plain)

    def _count_step(self, nodes: int) -> None:
        """Count this step, in which ``nodes`` nodes per row were scored, in the statistics."""
        if self._proposal is None or self._option is None or self._option.shape is None:
            self._stats.count_plain()
            return
        proposed = any(max(row) > 0 for row in self._proposal[0].depths)
        self._stats.count_draft(name_of(self._option.shape), proposed, verified=nodes > 1)

    def join(self, rows: Sequence[int]) -> None:
        self._acceptance.forget(rows)

    def stop_clock(self) -> None:
        self._stopped = self._clock()

    def start_clock(self) -> None:
        if self._stopped is not None:
            self._step_began += self._clock() - self._stopped
            self._stopped = None

    def end(self) -> None:
        memory = self._memory
        counts = zip(self._context.generated, self._first_lengths, strict=True)
        lengths = [len(row) - first for row, first in counts]
        steps = max(lengths)
        asleep = {each: memory.sleep.steps[each] - steps for each in self._asleep}
        for source in asleep:
            memory.unused[source] = memory.unused.get(source, 0) + steps
        if self._is_plain:
            self._stats.count_plain(steps)
            took = self._clock() - self._step_began
            self._earn(took, took / steps if steps else None)
            if steps and self._renew(took / steps):
                asleep = dict.fromkeys(asleep, 0)
            memory.sleep.steps = asleep
            return
        self._learn_skipped()
        self._savings.end(lengths)
        for source in self._sources:
            before = memory.unused.get(source, 0)
            memory.unused[source] = before + self._step - self._last_used.get(source, 0)
        memory.plain_interval = self._interval[Source.PLAIN]
        memory.sleep = Sleep(len(lengths), self._steps_asleep() | asleep)

    def decision(self) -> Decision | None:
        return None if self._decision is None else decision_of(*self._decision)

    def report(self) -> Report:
        memory = self._memory
        report = report_of(memory.verify, memory.drafts, memory.acceptance, self._gain)
        report.decision = self.decision()
        return report


def _credible(curve: Curve, size: int, is_new: bool, plain: float | None) -> float:
    """The longest time that such a step takes by itself; in a longer one it was interrupted, or a first call.

    Args:
        is_new: whether the size was measured too rarely to know its usual time.
        plain: seconds of a plain step, if known.
    """
    longest = 2 * (curve(size) or 0.0)
    return min(longest, MAX_LOSS * plain) if is_new and plain else longest


def _summed(rows: Sequence[Sequence[float]]) -> Sequence[float]:
    """Expected tokens by number of levels, summed over rows; a shorter row keeps its last value."""
    if len(rows) == 1:
        return rows[0]
    levels = range(max(map(len, rows)))
    return [sum(row[min(level, len(row) - 1)] for row in rows) for level in levels]


def _columns(tree: DraftTree, deepest: int) -> list[int]:
    """Nodes per row of the tree if it is cut to 0, 1, ..., ``deepest`` levels."""
    last = [0] * (deepest + 1)
    for depths in tree.depths:
        for node, depth in enumerate(depths):
            if depth >= 0 and node > last[depth]:
                last[depth] = node
    for depth in range(1, deepest + 1):
        last[depth] = max(last[depth], last[depth - 1])
    return [node + 1 for node in last]
