"""The decoding loop on a simulated clock, without a model: passes and drafts take prescribed times.

The text is random. A drafter proposes the right next token with a prescribed probability by position. The
loop and the policy are those of ``generate``; the target and the sampler are stand-ins, and no real clock is
read.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace

import torch
from transformers import GenerationConfig

from specdec_ext import Drafter, DraftTree, SpeculationConfig, SpeculationStats, Support
from specdec_ext.context import Context
from specdec_ext.decoding.call import Call
from specdec_ext.decoding.call_loop import CallLoop
from specdec_ext.models import TargetOutput
from specdec_ext.models.base import NO_LIMIT
from specdec_ext.output import Recorder
from specdec_ext.schedule.controller import Controller
from specdec_ext.tree.config import LOOKUP, TreeConfig
from specdec_ext.verify.sampler import Accepted

VOCAB = 1000
PROMPT_TOKENS = 101
# Seconds, and the usual options of a drafter of chains.
MS = 1e-3
CHAINS = {"depths": (1, 2, 3, 4, 5, 6, 7)}
OUTPUT = TargetOutput(torch.zeros(1, 1, VOCAB))


def verify(rows: int, nodes: int) -> float:
    """Seconds of a pass: 3 ms, plus 12 % per further node, plus 35 % per further row."""
    return 3 * MS * (1 + 0.12 * (nodes - 1)) * (1 + 0.35 * (rows - 1))


def head_cost(depth: int) -> float:
    """Seconds of a head's chain."""
    return (0.3 + 0.18 * depth) * MS


def lookup_cost(depth: int) -> float:
    """Seconds of a lookup."""
    return 0.04 * MS


def always(chance: float):
    """The same conditional acceptance at each position, for ``right`` of a drafter."""
    return lambda row, position: [chance] * 10


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class WorldDrafter(Drafter):
    """Proposes chains of the offered depths, or a chain by lookup in a share of the steps.

    Args:
        right: ``right(row, position in the text) -> [a_1, a_2, ...]``, the conditional acceptances.
        seconds: the time of a draft by depth.
        depths: depths of the offered chains; if empty, the drafter proposes by lookup.
        found: share of steps in which a lookup finds a proposal.
        length: length of a lookup's proposal.
    """

    def __init__(self, world, right, seconds, depths=(), found=1.0, length=8):
        self.world, self.right, self.seconds = world, right, seconds
        self.depths, self.found, self.length = depths, found, length
        self.asked = []
        self.resting, self.rests = False, []  # (resting, tokens of row 0) of each change

    def rest(self, resting):
        self.resting = resting
        self.rests.append((resting, len(self.world.context.generated[0])))

    def shapes(self, context):
        return [TreeConfig(depth=depth) for depth in self.depths] or [LOOKUP]

    def propose(self, context):
        shape, rng = context.shape, self.world.random
        depth = shape.depth if isinstance(shape, TreeConfig) else self.length
        self.asked.append(depth)
        self.world.clock.now += self.seconds(depth)
        paths = []
        for row in context.rows:
            done = len(context.generated[row])
            path = []
            if rng.random() < self.found:
                for i, chance in enumerate(self.right(row, done)[:depth]):
                    token = self.world.texts[row][done + i]
                    path.append(token if rng.random() < chance else (token + 1) % VOCAB)
            paths.append([path])
        return DraftTree.from_paths(context.roots, paths)


class WorldTarget:
    """A target whose passes take the world's time; it has no cache and its logits are never read."""

    vocab_size, offset, start = VOCAB, 0, 0
    commits_rounds = False
    support = Support(chain=True, tree=True, batch=True, rollback="compact")

    def __init__(self, world):
        self.model, self._world = world.model, world
        self.draft_room = [NO_LIMIT] * world.rows

    def context_room(self, position):
        return NO_LIMIT

    def record_hidden_states(self, layers):
        pass

    def prefill(self, ids, mask):
        return OUTPUT

    def forward(self, tree):
        world = self._world
        world.clock.now += world.verify(tree.num_rows, tree.num_nodes) * world.noise(world.random)
        return OUTPUT

    def commit(self, path, num_accepted, on_host):
        pass

    def reorder(self, order, active, roots=None):
        self.draft_room = [NO_LIMIT] * active

    def finish(self, last_tokens, columns):
        pass


class WorldSampler:
    """Follows chains as far as they agree with the prescribed texts."""

    host_processors = ()

    def __init__(self, texts, lengths):
        self._texts, self._lengths = texts, lengths

    def decides(self, stop, rows):
        return False

    def check(self, tree, source):
        pass

    def verify(self, tree, logits, context, stop, record=None, commit=None):
        emitted, drafted, ended = [], [], []
        for tokens, depths, row in zip(
            tree.tokens.tolist(), tree.depths, context.rows, strict=True
        ):
            done = len(context.generated[row])
            right = self._texts[row][done : min(done + tree.num_nodes, self._lengths[row])]
            count = 0
            while count < min(max(depths), len(right)) and tokens[count + 1] == right[count]:
                count += 1
            emitted.append(right[: count + 1])
            drafted.append(count)
            context.extend(row, emitted[-1])
            ended.append(len(context.generated[row]) == self._lengths[row])
        path = torch.zeros(len(emitted), tree.num_nodes, dtype=torch.long)
        return Accepted(path, path[:, 0], emitted, drafted, ended)


class World:
    """Makes drafters and runs calls.

    Args:
        verify: seconds of a pass by (rows, nodes), including everything around the pass.
        rows: size of the batch.
        seed: seed of texts, drafts and noise.
        noise: draws the factor that multiplies the seconds of a pass.
    """

    def __init__(
        self,
        verify: Callable[[int, int], float],
        rows: int = 1,
        seed: int = 0,
        noise: Callable[[random.Random], float] = lambda rng: rng.lognormvariate(0, 0.05),
    ):
        self.clock, self.random, self.rows = Clock(), random.Random(seed), rows
        self.verify, self.noise = verify, noise
        self.model = torch.nn.Linear(1, 1)
        self.model.device, self.model.dtype = torch.device("cpu"), torch.float32

    def drafter(self, right, seconds, **options):
        return WorldDrafter(self, right, seconds, **options)

    def run(self, drafter, tokens, settings=None, policy=None, lengths=None) -> SpeculationStats:
        """Generate; ``stats.seconds["verify"]`` is the simulated time of the whole call."""
        lengths = lengths or [tokens] * self.rows
        self.texts = [[self.random.randrange(VOCAB) for _ in range(n + 64)] for n in lengths]
        settings = dataclasses.replace(settings or SpeculationConfig(), clock=self.clock)
        stop = SimpleNamespace(pads=True, max_length=PROMPT_TOKENS + max(lengths))
        prompt = torch.zeros(self.rows, PROMPT_TOKENS, dtype=torch.long)
        self.context = Context(prompt, None, 0, stop.max_length, draw=None, sample=None)
        policy = policy or Controller(settings, drafter, self.model)
        sampler = WorldSampler(self.texts, lengths)
        recorder = Recorder(GenerationConfig(), self.rows)
        call = Call.beginning(drafter, self.context, sampler, stop, recorder)
        loop = CallLoop(WorldTarget(self), drafter, call, policy)
        began = self.clock.now
        loop.run()
        loop.stats.report = policy.report()
        loop.stats.seconds["verify"] = self.clock.now - began
        return loop.stats


def speed(world: World, drafter, tokens: int = 128, **kwargs) -> float:
    """The speed of one call relative to plain decoding."""
    plain = (tokens - 1) * world.verify(world.rows, 1)
    return plain / world.run(drafter, tokens, **kwargs).seconds["verify"]
