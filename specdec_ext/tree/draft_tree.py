"""``DraftTree``: the data structure that every drafter proposes and the target verifies.

Node 0 is the root, the last committed token of a row. A chain is a tree in which every node has at most one
child. Plain decoding is a tree of one node. All rows of a batch have the same number of nodes; in a row that
proposes fewer, the others are inactive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.display import Summarised, Table
from specdec_ext.display.text import counted
from specdec_ext.transfer import Staged, Staging
from specdec_ext.tree.config import MAX_NODES
from specdec_ext.tree.view import MAX_NODES_DRAWN, TreeView, plot, render, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT_PARENT = -1
INACTIVE = -2
MAX_ROWS_SHOWN = 6  # columns of a table that fits 80 columns


def _where(
    kept: list[list[bool]], rows: list[list[int]], other: int, width: int
) -> list[list[int]]:
    """``torch.where`` for lists, cut to ``width`` columns."""
    return [
        [value if keep else other for value, keep in zip(row[:width], flags, strict=False)]
        for row, flags in zip(rows, kept, strict=True)
    ]


class TreeBuilder:
    """Builds the tree of one row. Paths with a common prefix share the nodes of the prefix.

    Args:
        root: token of the root.
        max_nodes: largest number of nodes, the root included; further nodes are left out.

    Attributes:
        tokens, parents: token and parent of every node, the root first.
    """

    def __init__(self, root: int, max_nodes: int | None = None):
        self.tokens, self.parents = [root], [ROOT_PARENT]
        self._max_nodes = max_nodes
        self._children: dict[tuple[int, int], int] = {}

    def child(self, node: int, token: int) -> int | None:
        """Return the child of ``node`` with this token, adding it if needed; None if there is no room."""
        key = (node, int(token))
        if key not in self._children:
            if len(self.tokens) == self._max_nodes:
                return None
            self._children[key] = len(self.tokens)
            self.tokens.append(key[1])
            self.parents.append(node)
        return self._children[key]

    def add(self, path: Iterable[int], node: int = 0) -> int:
        """Add ``path`` below ``node`` as far as there is room; returns the last node of it."""
        for token in path:
            below = self.child(node, token)
            if below is None:
                break
            node = below
        return node


@dataclass(frozen=True)
class DraftTree(Summarised):
    """A batch of token trees, on the CPU or on the device of the target.

    Attributes:
        tokens: ``[rows, nodes]`` int64; ``tokens[:, 0]`` are the roots.
        parents: ``[rows, nodes]`` int64; ``parents[r, i] < i``, -1 for the root, -2 for an inactive node.
        draft_probs: ``[rows, nodes, vocab]`` float32 over the target's vocabulary, or None. At each node, the
            distribution from which its children were sampled, without replacement and in node order. The
            values at leaves are never read. Verification rules other than "match" need it.
    """

    tokens: Tensor
    parents: Tensor
    draft_probs: Tensor | None = None

    @classmethod
    def root(cls, tokens: Tensor, values: Sequence[int] | None = None) -> DraftTree:
        """Trees of one node each: plain decoding.

        Args:
            tokens: ``[rows]``.
            values: the same tokens as a list, if they are known on the host; this avoids a copy.
        """
        tokens = tokens[:, None]
        tree = cls(tokens, torch.full_like(tokens, ROOT_PARENT))
        # These are known without reading the tensors.
        vars(tree).update(depths=[[0] for _ in range(tree.num_rows)], is_chain=True)
        if values is None:
            return tree
        return tree._knowing([[token] for token in values], [[ROOT_PARENT] for _ in values])

    @classmethod
    def chain(
        cls,
        roots: Tensor,
        drafts: Tensor,
        counts: Tensor | None = None,
        draft_probs: Tensor | None = None,
    ) -> DraftTree:
        """Chains of ``drafts [rows, length]`` after ``roots [rows]``; row r uses its first ``counts[r]``.

        ``draft_probs [rows, length, vocab]`` are the distributions from which the drafts were sampled.
        """
        length = drafts.shape[1]
        order = torch.arange(-1, length, device=drafts.device)
        parents = order.expand(len(drafts), -1)
        if counts is not None:
            parents = torch.where(order < counts[:, None], parents, INACTIVE)
        if draft_probs is not None:
            draft_probs = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))  # the last is a leaf
        return cls(torch.cat([roots[:, None], drafts], dim=1), parents, draft_probs)

    @classmethod
    def from_paths(
        cls, roots: Tensor, paths: Sequence[Sequence[Sequence[int]]], max_nodes: int | None = None
    ) -> DraftTree:
        """Merge the candidate continuations of each row into a tree.

        Args:
            roots: ``[rows]``.
            paths: for every row a list of token sequences, best first; common prefixes share their nodes.
            max_nodes: largest number of nodes per row, the root included; further nodes are left out.
        """
        builders = []
        for root, row_paths in zip(roots.tolist(), paths, strict=True):
            builders.append(TreeBuilder(root, max_nodes))
            for path in row_paths:
                builders[-1].add(path)
        return cls.from_builders(builders)

    @classmethod
    def from_builders(cls, builders: Sequence[TreeBuilder]) -> DraftTree:
        """The trees of these builders, one row each, on the CPU."""
        width = max((len(builder.tokens) for builder in builders), default=1)
        tokens, parents = [], []
        for builder in builders:
            unused = width - len(builder.tokens)
            tokens.append([*builder.tokens, *[0] * unused])
            parents.append([*builder.parents, *[INACTIVE] * unused])
        return cls.of_lists(tokens, parents, width)

    @classmethod
    def of_lists(
        cls, tokens: list[list[int]], parents: list[list[int]], width: int = -1
    ) -> DraftTree:
        """Trees on the CPU. ``width`` is the number of nodes per row, needed only if there are no rows."""
        tree = cls(
            torch.tensor(tokens, dtype=torch.long, device="cpu").view(len(tokens), width),
            torch.tensor(parents, dtype=torch.long, device="cpu").view(len(tokens), width),
        )
        return tree._knowing(tokens, parents)

    @classmethod
    def merged(
        cls, trees: Sequence[DraftTree], max_nodes: int | None = None, is_cut: bool = True
    ) -> DraftTree:
        """Merge several trees of the same rows into one; common prefixes share their nodes.

        The result has no ``draft_probs``. On the CPU it has as many nodes as its largest row needs. On CUDA
        the host reads nothing, and the result has as many nodes as it may need.

        Args:
            trees: one to eight trees on one device, the most important first.
            max_nodes: largest number of nodes per row, the root included, by default that of the ops; the
                last nodes of the last trees are left out.
            is_cut: False for as many nodes as the result may need on the CPU, too.

        Raises:
            ValueError: the trees of a row have different roots, which is found on the CPU only.
        """
        nodes = min(1 + sum(tree.num_nodes - 1 for tree in trees), max_nodes or MAX_NODES)
        merged = cls(
            *ops.merge_trees(
                [tree.tokens for tree in trees], [tree.parents for tree in trees], nodes
            )
        )
        if merged.tokens.device.type != "cpu" or not is_cut:
            return merged
        used = (merged.parents != INACTIVE).any(0).sum()  # the first ones
        width = max(int(used), 1)
        return cls(merged.tokens[:, :width], merged.parents[:, :width])

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """Nodes per row, root and inactive ones included."""
        return self.tokens.shape[1]

    @cached_property
    def _lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents on the host; from a device they come in one copy."""
        if self.tokens.device.type == "cpu":
            return self.tokens.tolist(), self.parents.tolist()
        tokens, parents = torch.stack([self.tokens, self.parents]).tolist()
        return tokens, parents

    def _knowing(self, tokens: list[list[int]], parents: list[list[int]]) -> DraftTree:
        """Return this tree, with tokens and parents that are already known on the host."""
        vars(self)["_lists"] = tokens, parents
        return self

    @property
    def is_known(self) -> bool:
        """Whether the values of tokens and parents are known as lists."""
        return "_lists" in vars(self)

    @property
    def token_lists(self) -> list[list[int]]:
        """``tokens`` as lists, which are faster than tensors for small trees."""
        return self._lists[0]

    @property
    def parent_lists(self) -> list[list[int]]:
        """``parents`` as lists."""
        return self._lists[1]

    def filled(self, num_nodes: int) -> DraftTree:
        """This tree without ``draft_probs``, filled up to ``num_nodes`` with inactive nodes."""
        missing = num_nodes - self.num_nodes
        if missing == 0:
            return self
        pad = torch.nn.functional.pad
        return DraftTree(
            pad(self.tokens, (0, missing)), pad(self.parents, (0, missing), value=INACTIVE)
        )

    def of_rows(self, rows: Sequence[int]) -> DraftTree:
        """The trees of these rows, without ``draft_probs``."""
        index = torch.tensor(rows, device=self.tokens.device)
        return DraftTree(self.tokens[index], self.parents[index])._knowing(
            [self.token_lists[row] for row in rows], [self.parent_lists[row] for row in rows]
        )

    def of_row(self, row: int) -> DraftTree:
        """The tree of this row, without ``draft_probs`` and without inactive nodes at its end."""
        last = max(node for node, depth in enumerate(self.depths[row]) if depth >= 0)
        part = slice(row, row + 1), slice(0, last + 1)
        return DraftTree(self.tokens[part], self.parents[part])._knowing(
            [self.token_lists[row][: last + 1]], [self.parent_lists[row][: last + 1]]
        )

    def with_roots(self, parents: Tensor) -> DraftTree:
        """This tree with ``parents [rows]`` of node 0; with parent -2, the tree of a row is inactive."""
        parents = torch.cat([parents[:, None], self.parents[:, 1:]], dim=1)
        return DraftTree(self.tokens, parents, self.draft_probs)

    def on_host(self) -> DraftTree:
        """This tree on the CPU, without ``draft_probs`` if it comes from a device, in one copy."""
        return self if self.tokens.device.type == "cpu" else DraftTree.of_lists(*self._lists)

    def on(self, staging: Staging) -> DraftTree:
        """This tree on the device of ``staging``; from the host, it is staged for the next copy."""
        if self.tokens.device == staging.device:
            return self
        tokens, parents = staging.stage(self.tokens.cpu()), staging.stage(self.parents.cpu())
        probs = None if self.draft_probs is None else self.draft_probs.to(staging.device)
        return DraftTree(tokens.tensor, parents.tensor, probs)._knowing(*self._lists)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no active node of any row has a sibling."""
        return all(
            parent in (node, INACTIVE)
            for parents in self.parent_lists
            for node, parent in enumerate(parents[1:])
        )

    @cached_property
    def depths(self) -> list[list[int]]:
        """Depth of every node: 0 for the root, -1 for inactive nodes and all nodes below them."""
        depths = []
        for parents in self.parent_lists:
            row = [0 if parents[0] == ROOT_PARENT else -1]
            for parent in parents[1:]:
                above = -1 if parent == INACTIVE else row[parent]
                row.append(-1 if above < 0 else above + 1)
            depths.append(row)
        return depths

    @cached_property
    def branches(self) -> list[list[list[int]]]:
        """For each row, the nodes from the root to each active leaf, in the order of the leaves."""
        branches = []
        for parents, depths in zip(self.parent_lists, self.depths, strict=True):
            inner = {parent for parent, depth in zip(parents, depths, strict=True) if depth > 0}
            row = []
            for node, depth in enumerate(depths):
                if depth >= 0 and node not in inner:
                    branch = [node]
                    while branch[-1]:
                        branch.append(parents[branch[-1]])
                    row.append(branch[::-1])
            branches.append(row)
        return branches

    def validated(
        self, roots: Sequence[int], vocab_size: int, source: str, num_logits: int | None = None
    ) -> DraftTree:
        """Check that a tree from a drafter is valid, and return it.

        Args:
            roots: the last committed token of each row.
            vocab_size: drafted tokens must be in ``[0, vocab_size)``.
            source: the name of the drafter, for the message.
            num_logits: the required width of ``draft_probs``; ``vocab_size`` by default.

        Raises:
            ValueError: the message names the drafter, what was expected and what was given.
        """
        for name, tensor in (("tokens", self.tokens), ("parents", self.parents)):
            if tensor.dtype != torch.long or tensor.ndim != 2 or tensor.shape[0] != len(roots):
                raise ValueError(
                    f"{source} returned a DraftTree whose {name} are {tensor.dtype} {tuple(tensor.shape)}; "
                    f"expected torch.int64 of shape ({len(roots)}, nodes), one row per active row"
                )
        if self.tokens.shape != self.parents.shape or self.num_nodes < 1:
            raise ValueError(
                f"{source} returned a DraftTree with tokens {tuple(self.tokens.shape)} and parents "
                f"{tuple(self.parents.shape)}; expected equal shapes with at least the root"
            )
        expected = list(roots)
        if (given := [tokens[0] for tokens in self.token_lists]) != expected:
            raise ValueError(
                f"{source} returned a DraftTree whose roots are {given}; node 0 must be "
                f"the last committed token of each row, {expected} (context.roots)"
            )
        rows = zip(self.token_lists, self.parent_lists, strict=True)
        for row, (tokens, parents) in enumerate(rows):
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                if not (0 <= parent < node or parent == (INACTIVE if node else ROOT_PARENT)):
                    raise ValueError(
                        f"{source} returned a DraftTree with parents[{row}, {node}] = {parent}; "
                        "expected -1 for node 0, -2 for an inactive node, else the number of an earlier "
                        "node"
                    )
                if not 0 <= token < vocab_size and parent != INACTIVE:
                    raise ValueError(
                        f"{source} drafted token {token} (row {row}, node {node}); the target's "
                        f"vocabulary is [0, {vocab_size})"
                    )
        self._check_draft_probs(vocab_size if num_logits is None else num_logits, source)
        return self

    def _check_draft_probs(self, num_logits: int, source: str) -> None:
        if self.draft_probs is None:
            return
        expected = (*self.tokens.shape, num_logits)
        if self.draft_probs.dtype != torch.float32 or self.draft_probs.shape != expected:
            raise ValueError(
                f"{source} returned a DraftTree whose draft_probs are {self.draft_probs.dtype} "
                f"{tuple(self.draft_probs.shape)}; expected torch.float32 of shape {expected}"
            )
        rows = torch.arange(self.num_rows, device=self.parents.device)[:, None]
        tokens = self.tokens.clamp(0, num_logits - 1)  # an inactive node's token may be anything
        drawn_from = self.draft_probs[rows, self.parents.clamp(min=0), tokens]
        wrong = (self.parents >= 0) & ~(drawn_from > 0)
        if wrong.any():
            row, node = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{source} returned a DraftTree in which token {self.tokens[row, node]} (row {row}, node "
                f"{node}) has draft probability {drawn_from[row, node]:g}; draft_probs must contain, at a "
                "node's parent, the distribution that the node was sampled from"
            )

    def first_chain(self) -> DraftTree:
        """The chain of first children: the root's first child, that node's first child, and so on.

        It is for targets that can't score siblings. If siblings were sampled, the first of them is a draw
        from the full distribution.
        """
        if self.is_chain:
            return self
        paths = []
        for parents in self.parent_lists:
            path = [0]
            while path[-1] in parents:
                path.append(parents.index(path[-1]))
            paths.append(path)
        width = max(map(len, paths))
        device = self.tokens.device
        counts = torch.tensor([len(path) - 1 for path in paths], device=device)
        index = torch.tensor([path + [0] * (width - len(path)) for path in paths], device=device)
        tokens = self.tokens.gather(1, index)
        draft_probs = None
        if self.draft_probs is not None:
            rows = torch.arange(self.num_rows, device=device)[:, None]
            draft_probs = self.draft_probs[rows, index][:, :-1]
        return DraftTree.chain(tokens[:, 0], tokens[:, 1:], counts, draft_probs)

    def pruned(self, max_depths: Sequence[int], limits: Staged | None = None) -> DraftTree:
        """Remove the nodes of row r that are deeper than ``max_depths[r]``, and columns that no row uses.

        So drafters need not know how many tokens a row may still emit. Nodes beyond these would cost time,
        and might need positions that the model does not have.

        Args:
            max_depths: largest depth of each row.
            limits: the same numbers, staged for the device; this avoids a copy for a tree on the device.
        """
        if all(
            min(row) >= 0 and max(row) <= max(limit, 0)
            for row, limit in zip(self.depths, max_depths, strict=True)
        ):
            return self
        kept = [
            [node == 0 or 0 < depth <= limit for node, depth in enumerate(row)]
            for row, limit in zip(self.depths, max_depths, strict=True)
        ]
        width = max((node + 1 for row in kept for node, keep in enumerate(row) if keep), default=1)
        if width == 1:
            return DraftTree.root(self.tokens[:, 0], [row[0] for row in self.token_lists])
        tokens, parents = self.tokens[:, :width], self.parents[:, :width]
        draft_probs = None if self.draft_probs is None else self.draft_probs[:, :width]
        if not all(all(row[:width]) for row in kept):
            # The token of an inactive node is not verified, but it is embedded, so it must be a valid id.
            keep = self._kept(kept, max_depths, limits)[:, :width]
            tokens = torch.where(keep, tokens, 0)
            parents = torch.where(keep, parents, INACTIVE)
        return DraftTree(tokens, parents, draft_probs)._knowing(
            _where(kept, self.token_lists, 0, width),
            _where(kept, self.parent_lists, INACTIVE, width),
        )

    def _kept(
        self, kept: list[list[bool]], max_depths: Sequence[int], limits: Staged | None
    ) -> Tensor:
        """``kept`` on the device of the tree; computed there from the parents, which avoids a copy."""
        if self.parents.device.type == "cpu":
            return torch.tensor(kept, device="cpu")
        depths = ops.tree_mask(self.parents, self.parents[:, 0]).depths
        if len(set(max_depths)) == 1:
            return (depths >= 0) & (depths <= max(max_depths[0], 0))
        limit = limits.tensor if limits else torch.tensor(max_depths, device=depths.device)
        return (depths >= 0) & (depths <= limit.clamp(min=0)[:, None])

    def summary(self) -> str:
        sizes = [sum(depth > 0 for depth in depths) for depths in self.depths]
        levels = max(max(depths) for depths in self.depths)
        if not levels:
            return f"no draft, only {counted(self.num_rows, 'root')}"
        if self.num_rows > 1:
            kind = "chains" if self.is_chain else "trees"
            tokens = f"{min(sizes)} to {counted(max(sizes), 'token')}"
            return f"{self.num_rows} {kind} of {tokens}, at most {counted(levels, 'level')} deep"
        tokens = counted(sizes[0], "token")
        if self.is_chain:
            return f"chain of {tokens}"
        return f"tree of {tokens}, {counted(levels, 'level')} deep"

    def sentences(self) -> Iterable[str]:
        yield f"A draft of {counted(self.num_rows, 'row')}: {self.summary()}."
        yield (
            "Node 0 of each row is the root, the last committed token. The target scores all nodes in one "
            "pass, and the part of a branch that agrees with the target is emitted. render(tokenizer) draws "
            "the words."
        )

    def tables(self) -> Iterable[Table]:
        levels = max(max(depths) for depths in self.depths)
        rows = [
            (str(level), *(str(depths.count(level)) for depths in self.depths[:MAX_ROWS_SHOWN]))
            for level in range(levels + 1)
        ]
        headings = [f"row {row}" for row in range(self.num_rows)][:MAX_ROWS_SHOWN]
        yield Table(rows, ("level", *headings), "nodes in each level")

    def _repr_html_(self) -> str:
        # A parent comes before its children, so the first nodes are a tree, too.
        first = DraftTree(*(each[:1, :MAX_NODES_DRAWN] for each in (self.tokens, self.parents)))
        return f"<p>{self}</p>{svg(first._view(None, 0, None))}"

    def render(
        self, tokenizer: Any = None, row: int = 0, path: Sequence[int] | Tensor | None = None
    ) -> str:
        """Draw row ``row`` as text, one line per node.

        ::

            0: 'The' ✓
            ├─ 1: ' cat' ✓
            │  └─ 3: ' sat'
            └─ 2: ' dog'

        Args:
            tokenizer: decodes ids to text; None shows the ids.
            row: row of the tree.
            path: accepted nodes, the root included; entries of -1 are ignored (``Accepted.path[row]``, the
                path of ``ops.verify_match``). None marks no nodes.

        Raises:
            ValueError: for a row or a node that does not exist.
        """
        return render(self._view(tokenizer, row, path))

    def plot(
        self,
        tokenizer: Any = None,
        row: int = 0,
        path: Sequence[int] | Tensor | None = None,
        ax: Axes | None = None,
    ) -> Figure:
        """Draw row ``row`` as a matplotlib figure, into ``ax`` if given; arguments as in :meth:`render`."""
        return plot(self._view(tokenizer, row, path), ax)

    def _view(self, tokenizer: Any, row: int, path: Sequence[int] | Tensor | None) -> TreeView:
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row={row}; the tree has rows 0 to {self.num_rows - 1}")
        nodes = [] if path is None else path.tolist() if isinstance(path, Tensor) else path
        accepted, depths = {node for node in nodes if node >= 0}, self.depths[row]
        unknown = accepted - {node for node, depth in enumerate(depths) if depth >= 0}
        if unknown:
            raise ValueError(
                f"path contains the nodes {sorted(unknown)}, which row {row} does not have"
            )
        tokens, parents = self.tokens[row].tolist(), self.parents[row].tolist()
        return TreeView(tokens, parents, depths, accepted, tokenizer)
