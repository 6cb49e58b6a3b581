"""``Replay``: rollback of recurrent states, from which a token can't be removed.

A row with a rejected draft gets back the states from before the pass. The tokens that it has accepted since
then are *unread*. The next pass reads them before its drafts, as a chain that is known to be correct, so they
take no pass of their own.

Siblings in a tree can't share a state either. Every branch of a tree is a separate row of the pass, with a
copy of its row's states (``passes/branches.py``). If a whole branch was accepted, the row takes over the
states of that branch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.models.base import MAX_UNREAD, NO_LIMIT, TargetOutput
from specdec_ext.models.cache.slot_cache import SlotCache
from specdec_ext.models.passes.branches import Branches, padded
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.models.slots.layout import RowLayout
from specdec_ext.models.slots.runner import PassRunner
from specdec_ext.tree.draft_tree import DraftTree


class Replay:
    """Scores trees with a model that has recurrent states, and restores the states after rejected drafts.

    The slots of a row (``RowLayout``) are those of the tokens that its states have read; its unread tokens
    have none.

    Args:
        runner: runs the passes.
        cache: holds the states, and keys and values if the model has attention as well.
        draftable: False if no drafts may be scored. Attentions are recorded by slot, and unread tokens have
            no final slot yet.

    Attributes:
        unread: the unread tokens of each row of the batch, without its root.
        width: number of columns of the last pass.
    """

    def __init__(self, runner: PassRunner, cache: SlotCache, draftable: bool):
        self._runner, self._cache, self._draftable = runner, cache, draftable
        self.unread: list[list[int]] = []
        self.width = 0
        self._branches: Branches | None = None  # of the last pass, if a row had several
        self._saved = False  # whether the states were saved before the last pass

    def start(self, num_rows: int) -> None:
        """Begin with rows whose states have read the whole prompt."""
        self.unread = [[] for _ in range(num_rows)]

    def draft_room(self, num_rows: int) -> list[int]:
        """Maximum depth of the next tree of each active row."""
        lengths = [len(tokens) for tokens in self.unread[:num_rows]]
        if max(lengths) < MAX_UNREAD:
            return [NO_LIMIT if self._draftable else 0] * num_rows
        # The row with the most unread tokens reads them and its root, and then has none left.
        return [max(lengths) - length for length in lengths]

    def score(self, tree: DraftTree, rows: RowLayout) -> TargetOutput:
        """Score the nodes of ``tree`` after the unread tokens of the active rows."""
        unread = self.unread[: tree.num_rows]
        branches = Branches.of(tree, unread)
        # Without drafts, and with equally many unread tokens in each row, every row keeps the whole block.
        kept_whole = tree.num_nodes == 1 and len(set(map(len, unread))) == 1
        output = self._read(branches, rows, tree.tokens.device, save=not kept_whole)
        return output if tree.is_chain and not any(unread) else branches.nodes(output)

    def read_unread(self, rows: RowLayout, device: torch.device) -> None:
        """Run a pass over unread tokens alone, as many as every row with unread tokens has."""
        width = min(len(tokens) for tokens in self.unread if tokens)
        branches = Branches.known([tokens[:width] for tokens in self.unread])
        self._read(branches, rows, device, save=True)

    def _read(
        self, branches: Branches, rows: RowLayout, device: torch.device, save: bool
    ) -> TargetOutput:
        """Score a chain for each branch; outputs after the end of a shorter chain are arbitrary."""
        chains = padded(branches.tokens, device)
        counts = torch.tensor([len(tokens) - 1 for tokens in branches.tokens], device=device)
        tree = DraftTree.chain(chains[:, 0], chains[:, 1:], counts)
        origins = torch.tensor(branches.origins, device=device)
        self.width, self._saved = tree.num_nodes, save
        self._branches = branches if branches.split else None
        if save:
            with inference_mode():
                self._cache.states.branch(origins)
        if branches.split:
            self._cache.branch(origins, tree.num_nodes)
            rows = rows.select(branches.origins, origins)
        return self._runner.score(tree, rows)

    def commit(
        self, tree: DraftTree, paths: list[list[int]], num_accepted: list[int]
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Restore the states of rows that did not accept the whole block (in a tree: a whole branch).

        Args:
            tree: the tree that was scored.
            paths, num_accepted: the accepted nodes of each row, as in :meth:`Target.commit`.

        Returns:
            Path and number of accepted nodes in the block that was read, which begins with the unread tokens;
            -1 for rows whose states were restored. Then these numbers as a list.
        """
        device, width, branches = tree.tokens.device, self.width, self._branches
        whole, origins = [], list(range(len(paths)))
        for row, (tokens, path, accepted) in enumerate(
            zip(tree.token_lists, paths, num_accepted, strict=True)
        ):
            unread = self.unread[row]
            unread += [tokens[node] for node in path[: accepted + 1]]
            whole.append(len(unread) >= width)
            if whole[-1]:
                del unread[:width]
            if branches is not None:
                origins[row] = branches.rows[row][path[accepted]]
        kept, taken = torch.tensor(whole, device=device), torch.tensor(origins, device=device)
        if branches is not None or not all(whole):
            assert self._saved
            with inference_mode():
                self._cache.states.join(taken, kept)
        if branches is not None:
            self._cache.join(taken, width)
        chain = torch.arange(width, device=device).expand(len(whole), -1)
        counts = [width - 1 if each else -1 for each in whole]
        return chain, torch.where(kept, width, 0) - 1, counts

    def reorder(self, order: Sequence[int], active: int) -> None:
        """Move row ``order[i]`` to row i; the states of rows after the first ``active`` are put aside."""
        with inference_mode():
            self._cache.states.reorder(order, active)
        self.unread = [self.unread[i] for i in order]
