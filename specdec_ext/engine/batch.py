"""``RequestBatch``: the requests that an engine decodes together, each of which is a call of its own.

All requests that ops alone can verify are verified together, each row with its own noise and filters. The
others, with processors that read the text for example, are verified one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.decoding.call import Batch, count_row
from specdec_ext.engine.request import Request
from specdec_ext.models import Target, TargetOutput
from specdec_ext.models.base import CommittedRound
from specdec_ext.ops import DraftNoise
from specdec_ext.stats import SpeculationStats
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.filters import filter_arguments
from specdec_ext.verify.sampler import Accepted, SpoiltLogits
from specdec_ext.verify.walks import FinishedWalk


class RequestBatch(Batch):
    """The active requests of an engine. A request has one row, whose number is its *place*.

    Args:
        target: scores trees.
        places: the most requests at a time.
        max_length: the most tokens of a request, its prompt included.
        stats: receives the statistics of all requests.
    """

    def __init__(self, target: Target, places: int, max_length: int, stats: SpeculationStats):
        self.context = Context(
            torch.zeros(places, 0, dtype=torch.long, device=target.model.device),
            None,
            0,
            max_length,
            self._draw,
            _refuse_sampled_drafts,
            staging=target.staging,
            committed_keys=target.committed_keys,
        )
        self.context.rows = []
        self.stats = stats
        self.requests: dict[int, Request] = {}  # by place
        self.undrafted: set[int] = set()
        # Places of rows that are verified or drawn together -> their arguments of the ops.
        self._arguments: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def join(self, request: Request, place: int) -> None:
        """Add a request that has emitted its first token; its row becomes the last active one."""
        context = self.context
        context.share(place, request.call.context)
        context.rows = [*context.rows, place]
        self.requests[place] = request
        self._arguments.clear()
        if not request.takes_drafts:
            self.undrafted.add(place)
        context.noise = self._draft_noise()

    def _draft_noise(self) -> DraftNoise:
        """The noise for coupled drafts of all places. Those whose request does not sample have none."""
        noise = torch.zeros(2, len(self.context.generated), dtype=torch.long, device="cpu")
        temperatures = torch.zeros(noise.shape[1], device="cpu")
        for place, request in self.requests.items():
            sampler = request.call.sampler
            temperatures[place] = sampler.draft_temperature
            noise[0, place], noise[1, place] = sampler.noise[0]
        device = self.context.device
        return DraftNoise(temperatures.to(device), noise[0].to(device), noise[1].to(device))

    def leave(self, place: int) -> Request:
        """Remove a request. Its row stays until the loop removes it."""
        self.undrafted.discard(place)
        return self.requests.pop(place)

    def going(self) -> list[int]:
        return [place for place in self.context.rows if place in self.requests]

    def stage(self) -> None:
        for place in self.context.rows:
            call = self.requests[place].call
            call.sampler.stage(call.context)

    def check(self, tree: DraftTree, source: str) -> None:
        pass  # rule "match" verifies every tree

    def count(self, tree: DraftTree, accepted: Accepted) -> None:
        for i, place in enumerate(self.context.rows):
            call = self.requests[place].call
            count_row(self.stats, tree, accepted, i)
            count_row(call.stats, tree, accepted, i)
            call.alarm.check()

    def verify(
        self,
        tree: DraftTree,
        output: TargetOutput,
        target: Target,
        committed: CommittedRound | None = None,
        is_latest: bool = True,
    ) -> Accepted:
        """Verify the tree of each row. What goes wrong in one row does not disturb the others.

        A row whose drafts have spoilt its logits emits nothing, and its next tree has no drafts. A row with
        another error emits nothing, and its request has the error.
        """
        rows = self.context.rows
        together = self._together(rows)
        walks = dict(zip(together, self._walks(tree, output.logits, together), strict=True))
        results = []
        for i, place in enumerate(rows):
            request = self.requests[place]
            own = tree.of_row(i)
            scores = output.of_row(i, own.num_nodes)
            try:
                if i in walks:
                    results.append(request.call.follow(walks[i], own, scores, target))
                else:
                    results.append(request.call.verify(own, scores, target))
                if request.takes_drafts:
                    self.undrafted.discard(place)
                continue
            except SpoiltLogits:
                self.undrafted.add(place)
                self.stats.reruns += 1
                request.call.stats.reruns += 1
            except Exception as error:
                request.error = error
            results.append(Accepted.nothing())
        emitted = [each.emitted[0] for each in results]
        paths = [each.paths[0] for each in results]
        paths = [path + [-1] * (tree.num_nodes - len(path)) for path in paths]
        stage = self.context.staging.stage
        path, kept = stage(paths), stage([len(tokens) - 1 for tokens in emitted])
        return Accepted(
            path.tensor,
            kept.tensor,
            emitted,
            [each.drafted[0] for each in results],
            [each.ended[0] for each in results],
            paths,
        )

    def _walks(self, tree: DraftTree, logits: Tensor, together: list[int]) -> list[FinishedWalk]:
        """Verify these rows with one call of each op."""
        if not together:
            return []
        context = self.context
        if len(together) < len(context.rows):
            logits = logits[context.staging.stage(together).tensor]
            tree = tree.of_rows(together)
        places = [context.rows[i] for i in together]
        positions = [context.root_positions[i] for i in together]
        on_host = self._match(tree, logits, places, positions).on_host()
        tokens = tree.token_lists
        return [FinishedWalk([tokens[j]], on_host.of_row(j)) for j in range(len(together))]

    def _together(self, places: Sequence[int]) -> list[int]:
        """Which of these rows ops alone can verify."""
        return [i for i, place in enumerate(places) if self.requests[place].rule is not None]

    def _match(
        self, tree: DraftTree, logits: Tensor, places: Sequence[int], root_positions: Sequence[int]
    ) -> ops.MatchResult:
        """Verify the trees of these places, all of which have a rule."""
        key = tuple(places)
        if key not in self._arguments:
            self._arguments[key] = self._arguments_of(places)
        arguments = self._arguments[key]
        noise, filters = arguments[:4], arguments[4:]
        if filters:
            each = (value.repeat_interleave(tree.num_nodes) for value in filters)
            logits = ops.sample_filter(logits.flatten(0, 1), *each).view(logits.shape)
        positions = self.context.staging.stage(list(root_positions)).tensor
        return ops.verify_match(logits, tree.tokens, tree.parents, positions, *noise)

    def _arguments_of(self, places: Sequence[int]) -> tuple[Tensor, ...]:
        """The last arguments of ``ops.verify_match``, and those of ``ops.sample_filter`` if it is needed."""
        device = self.context.device
        rules = [rule for place in places if (rule := self.requests[place].rule) is not None]
        noise = zip(*(rule[:3] for rule in rules), strict=True)
        numbers = (torch.tensor(values, device=device) for values in noise)
        counters = torch.zeros(len(places), dtype=torch.int32, device=device)
        return *numbers, counters, *filter_arguments([rule[3:] for rule in rules], device)

    def _draw(self, logits: Tensor, positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """:attr:`Context.draw` of the requests."""
        together = self._together(rows)
        tokens = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
        if together:
            index = self.context.staging.stage(together).tensor
            roots, before = DraftTree.root(tokens[index]), [positions[i] - 1 for i in together]
            result = self._match(roots, logits[index, None], [rows[i] for i in together], before)
            tokens[index] = result.next_token.clamp(min=0)
        for i in {*range(len(rows))}.difference(together):
            sampler = self.requests[rows[i]].call.sampler
            tokens[i : i + 1] = sampler.draw(logits[i : i + 1], [positions[i]], [0])
        return tokens


def _refuse_sampled_drafts(*_: object) -> NoReturn:
    raise ValueError(
        "an engine verifies with the rule 'match', which needs no sampled drafts; use a drafter without "
        "sampled=True"
    )
