"""``RequestBatch``: the requests that an engine decodes together, each of which is a call of its own.

All requests that ops alone can verify are verified together, each row with its own noise and filters. The
others, with processors that read the text for example, are verified one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.decoding.call import Batch, count_row
from specdec_ext.engine.request import Request
from specdec_ext.models import Target, TargetOutput
from specdec_ext.models.base import CommittedRound, RoundTexts, RowRule
from specdec_ext.ops import DraftNoise
from specdec_ext.stats import SpeculationStats
from specdec_ext.transfer import Latest
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.filters import filter_arguments
from specdec_ext.verify.sampler import Accepted, SpoiltLogits
from specdec_ext.verify.walks import CommittedWalk, FinishedWalk


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
        self._root_positions = Latest(target.staging)
        # Places of rows that are verified or drawn together, and nodes of each -> their arguments of the ops.
        self._arguments: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def join(self, request: Request, place: int) -> None:
        """Add a request that has emitted its first token; its row becomes the last active one."""
        context = self.context
        context.share(place, request.call.context)
        context.rows = [*context.rows, place]
        self.requests[place] = request
        self._arguments.clear()
        self._root_positions.forget()
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

    @property
    def keeps_passes(self) -> bool:
        return any(each.call.keeps_passes for each in self.requests.values())

    def decides(self) -> bool:
        return all(self.requests[place].rule is not None for place in self.context.rows)

    def texts(self, known: int) -> RoundTexts:
        """The text of the active rows. An end that not all of them have is the host's to find."""
        context = self.context
        calls = [self.requests[place].call for place in context.rows]
        new = [call.context.sequences()[0] for call in calls[known:]]
        eos = set.intersection(*(set(call.stop.eos_ids) for call in calls))
        return RoundTexts(
            pad_sequence(new, batch_first=True),
            [call.context.columns(0) for call in calls],
            [call.stop.max_length for call in calls],
            sorted(eos),
            (len(context.generated), context.max_length),
            self._rules(context.rows),
        )

    def stage(self) -> None:
        self._root_positions.of(self.context.root_positions)
        for place in self.context.rows:
            call = self.requests[place].call
            call.sampler.stage(call.context)

    def check(self, tree: DraftTree, source: str) -> None:
        pass  # rule "match" verifies every tree

    def count(self, tree: DraftTree, accepted: Accepted) -> None:
        for i, place in enumerate(self.context.rows):
            if place not in self.requests:  # it has left after this round was started
                continue
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
        another error emits nothing, and its request has the error. What a request has emitted that has left
        since the round was started is dropped.
        """
        rows = self.context.rows
        if committed is None:
            walks = self._walks(tree, output.logits, self._together(rows))
        else:
            walks = self._committed_walks(committed)
        results = []
        for i, place in enumerate(rows):
            result = None
            if place in self.requests:
                # A tree on the device need not be read: all of its nodes were verified.
                own = tree.of_row(i) if committed is None else tree
                result = self._verified(
                    place, walks.get(i), own, output.of_row(i, own.num_nodes), target
                )
            results.append(result or Accepted.nothing())
        emitted = [each.emitted[0] for each in results]
        drafted = [each.drafted[0] for each in results]
        ended = [each.ended[0] for each in results]
        if committed is not None:
            positions = self._root_positions
            return Accepted.of_round(
                committed, self.context, emitted, drafted, ended, positions, is_latest
            )
        paths = [each.paths[0] for each in results]
        paths = [path + [-1] * (tree.num_nodes - len(path)) for path in paths]
        stage = self.context.staging.stage
        path, kept = stage(paths), stage([len(tokens) - 1 for tokens in emitted])
        return Accepted(path.tensor, kept.tensor, emitted, drafted, ended, paths)

    def _verified(
        self,
        place: int,
        walk: FinishedWalk | CommittedWalk | None,
        tree: DraftTree,
        output: TargetOutput,
        target: Target,
    ) -> Accepted | None:
        """What a request emits; None if its drafts or an error prevent it.

        Args:
            walk: its walk, if ops have verified its tree.
            tree, output: of its row.
        """
        request = self.requests[place]
        try:
            if walk is None:
                accepted = request.call.verify(tree, output, target)
            else:
                accepted = request.call.follow(walk, tree, output, target)
            if request.takes_drafts:
                self.undrafted.discard(place)
            return accepted
        except SpoiltLogits:
            self.undrafted.add(place)
            self.stats.reruns += 1
            request.call.stats.reruns += 1
        except Exception as error:
            request.error = error
        return None

    def _walks(
        self, tree: DraftTree, logits: Tensor, together: list[int]
    ) -> dict[int, FinishedWalk | CommittedWalk]:
        """Verify these rows with one call of each op."""
        if not together:
            return {}
        context = self.context
        if len(together) < len(context.rows):
            logits = logits[context.staging.stage(together).tensor]
            tree = tree.of_rows(together)
        places = [context.rows[i] for i in together]
        positions = [context.root_positions[i] for i in together]
        on_host = self._match(tree, logits, places, positions).on_host()
        tokens = tree.token_lists
        return {i: FinishedWalk([tokens[j]], on_host.of_row(j)) for j, i in enumerate(together)}

    def _committed_walks(
        self, committed: CommittedRound
    ) -> dict[int, FinishedWalk | CommittedWalk]:
        """The walks of a round that was committed on the device.

        Raises:
            SpoiltLogits: drafts may have spoilt the logits of a row, so no row has emitted anything.
        """
        entry, rows = committed.entry, self.context.rows
        if any(entry.status) and committed.tree.num_nodes > 1:
            for place, status in zip(rows, entry.status, strict=True):
                if status and place in self.requests:
                    self.requests[place].call.stats.reruns += 1
            raise SpoiltLogits
        return {i: CommittedWalk(entry.of_row(i)) for i in range(len(rows))}

    def _together(self, places: Sequence[int]) -> list[int]:
        """Which of these rows ops alone can verify."""
        return [i for i, place in enumerate(places) if self.requests[place].rule is not None]

    def _rules(self, places: Sequence[int]) -> list[RowRule]:
        """How ops verify the rows of these places, all of which have a rule."""
        return [rule for place in places if (rule := self.requests[place].rule) is not None]

    def _match(
        self,
        tree: DraftTree,
        logits: Tensor,
        places: Sequence[int],
        root_positions: Sequence[int],
    ) -> ops.MatchResult:
        """Verify the trees of these places, all of which have a rule."""
        key = (*places, tree.num_nodes)
        if key not in self._arguments:
            self._arguments[key] = self._arguments_of(places, tree.num_nodes)
        arguments = self._arguments[key]
        noise, filters = arguments[:4], arguments[4:]
        if filters:
            logits = ops.sample_filter(logits.flatten(0, 1), *filters).view(logits.shape)
        positions = self._root_positions.of(list(root_positions)).tensor
        return ops.verify_match(logits, tree.tokens, tree.parents, positions, *noise)

    def _arguments_of(self, places: Sequence[int], nodes: int) -> tuple[Tensor, ...]:
        """The last arguments of ``ops.verify_match``, and those of ``ops.sample_filter`` if it is needed."""
        device = self.context.device
        rules = self._rules(places)
        noise = zip(*(rule[:3] for rule in rules), strict=True)
        numbers = (torch.tensor(values, device=device) for values in noise)
        counters = torch.zeros(len(places), dtype=torch.int32, device=device)
        filters = filter_arguments([rule[3:] for rule in rules], device)
        return *numbers, counters, *(value.repeat_interleave(nodes) for value in filters)

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
