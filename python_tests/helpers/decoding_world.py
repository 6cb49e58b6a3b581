"""A simulation of the decoding loop without a model, in which steps take prescribed times.

The text is random. A drafter proposes the right next token with a prescribed probability by position, and
functions give the times of passes and drafts. No real clock is read.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace

import torch

from specdec_ext import Drafter, DraftTree, SpeculationConfig, SpeculationStats
from specdec_ext.schedule.controller import Controller
from specdec_ext.tree.config import LOOKUP, TreeConfig
from specdec_ext.verify.sampler import Accepted

VOCAB = 1000


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class WorldDrafter(Drafter):
    """Proposes chains of the offered depths, or a chain by lookup in a share of the steps.

    Args:
        right: ``right(row, position in the text) -> [a_1, a_2, ...]``, the conditional acceptances.
        depths: depths of the offered chains; if empty, the drafter proposes by lookup.
        found: share of steps in which a lookup finds a proposal.
    """

    def __init__(self, world, right, seconds, depths=(), found=1.0, length=8):
        self.world, self.right, self.seconds = world, right, seconds
        self.depths, self.found, self.length = depths, found, length
        self.asked = []
        self.resting, self.rests = False, []  # (resting, tokens of row 0) of each change

    def rest(self, resting):
        self.resting = resting
        self.rests.append((resting, self.world.written))

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
        return DraftTree.from_paths(torch.tensor(context.roots), paths)


class World:
    """Args: seconds of a pass by (rows, nodes), all around it included; noise multiplies it."""

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
        """Generate; ``stats.seconds["verify"]`` is the time of the whole call."""
        lengths = lengths or [tokens] * self.rows
        self.texts = [[self.random.randrange(VOCAB) for _ in range(n + 64)] for n in lengths]
        settings = dataclasses.replace(settings or SpeculationConfig(), clock=self.clock)
        context = SimpleNamespace(rows=list(range(self.rows)), shape=None)
        context.generated = [[text[0]] for text in self.texts]
        stats = SpeculationStats()
        policy = policy or Controller(settings, drafter, self.model)
        policy.begin(context, stats)
        began, self.written = self.clock.now, 1
        while context.rows:
            context.roots = [context.generated[row][-1] for row in context.rows]
            context.remaining = [lengths[row] - len(context.generated[row]) for row in context.rows]
            context.root_positions = [100 + len(context.generated[row]) for row in context.rows]
            tree = DraftTree.root(torch.tensor(context.roots))
            if policy.choose(context):
                tree = drafter.propose(context)
                tree = policy.cut(tree.pruned([left - 1 for left in context.remaining]), context)
            self.clock.now += self.verify(len(context.rows), tree.num_nodes) * self.noise(
                self.random
            )
            accepted = self._follow(tree, context)
            for row, depths in enumerate(tree.depths):
                stats.count_step(
                    sum(depth > 0 for depth in depths),
                    max(depths),
                    accepted.drafted[row],
                    len(accepted.emitted[row]),
                )
            self.written = len(context.generated[0])
            policy.learn(accepted, context, tree.num_nodes)
            context.rows = [
                row for row in context.rows if len(context.generated[row]) < lengths[row]
            ]
        policy.end()
        stats.report = policy.report()
        stats.seconds["verify"] = self.clock.now - began
        return stats

    def _follow(self, tree, context):
        emitted, drafted = [], []
        for i, row in enumerate(context.rows):
            done = len(context.generated[row])
            right = self.texts[row][done : done + tree.num_nodes + 1]
            tokens, depth = tree.tokens[i].tolist(), max(tree.depths[i])
            count = 0
            while count < depth and tokens[count + 1] == right[count]:
                count += 1
            emitted.append(right[: count + 1])
            drafted.append(count)
            context.generated[row] += emitted[-1]
        path = torch.zeros(len(emitted), tree.num_nodes, dtype=torch.long)
        return Accepted(path, path[:, 0], emitted, drafted, [False] * len(emitted))
