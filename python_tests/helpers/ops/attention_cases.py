"""Cases of ``tree_attention``: caches in which every slot that no node may see holds NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from helpers.ops.op_cases import generator, random_parents
from torch import Tensor

from specdec_ext import ops
from specdec_ext.reference.tree_attention import ancestor_nodes


@dataclass(frozen=True)
class Shape:
    """Sizes of a case; row b's prefix has ``prefixes[b]`` tokens."""

    prefixes: tuple[int, ...]
    nodes: int
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64


@dataclass(frozen=True)
class Case:
    """The contents of a row's list of keys, without a layout: ``prefix`` and ``tree`` are (key, value) with
    shapes ``[batch][kv_heads, length, head_dim]`` and ``[batch, kv_heads, nodes, head_dim]``."""

    query: Tensor
    prefix: tuple[list[Tensor], list[Tensor]]
    tree: tuple[Tensor, Tensor]
    parents: Tensor

    @property
    def ancestors(self) -> Tensor:
        return ops.tree_mask(
            self.parents, torch.zeros(len(self.parents), dtype=torch.long)
        ).ancestors

    def only_rows(self, rows: list[int]) -> Case:
        prefix = tuple([tensors[row] for row in rows] for tensors in self.prefix)
        return Case(self.query[rows], prefix, tuple(t[rows] for t in self.tree), self.parents[rows])

    def only_nodes(self, nodes: list[int], parents: Tensor) -> Case:
        """The same prefix with a subset of the nodes and new parents."""
        tree = tuple(tensor[:, :, nodes] for tensor in self.tree)
        return replace(self, query=self.query[:, :, nodes], tree=tree, parents=parents)


def random_case(
    shape: Shape, dtype: torch.dtype = torch.float32, *, illegal: float = 0.0, seed: int = 0
) -> Case:
    rng = generator(seed)
    batch = len(shape.prefixes)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng).to(dtype)

    prefix = tuple(
        [random(shape.kv_heads, length, shape.head_dim) for length in shape.prefixes]
        for _ in range(2)
    )
    tree = tuple(random(batch, shape.kv_heads, shape.nodes, shape.head_dim) for _ in range(2))
    return Case(
        query=random(batch, shape.heads, shape.nodes, shape.head_dim) * 2,
        prefix=prefix,
        tree=tree,
        parents=random_parents(batch, shape.nodes, seed, illegal=illegal),
    )


def static_arguments(case: Case, *, start: int = 3, gap: int = 5, window: int = 0) -> dict:
    """Arguments with a static cache: row b's prefix begins in slot ``start + b``, the tree ``gap`` slots
    after its end. Keys that a window hides from all nodes are not stored."""
    batch, _, nodes, head_dim = case.query.shape
    lengths = torch.tensor([keys.shape[1] for keys in case.prefix[0]], dtype=torch.long)
    starts = torch.arange(batch) + start
    blocks = starts + lengths + gap
    slots = int(blocks.max()) + nodes + 2 if batch else 7
    caches = []
    for prefix, tree in zip(case.prefix, case.tree, strict=True):
        cache = torch.full(
            (batch, tree.shape[1], slots, head_dim), torch.nan, dtype=case.query.dtype
        )
        for row in range(batch):
            hidden = max(0, int(lengths[row]) - window + 1) if window > 0 else 0
            first, end = int(starts[row]), int(starts[row] + lengths[row])
            cache[row, :, first + hidden : end] = prefix[row][:, hidden:]
            active = case.ancestors[row].ne(0).any(-1)
            block = cache[row, :, blocks[row] : blocks[row] + nodes]
            block[:, active] = tree[row][:, active]
        caches.append(cache)
    return {
        "query": case.query,
        "key": caches[0],
        "value": caches[1],
        "ancestors": case.ancestors,
        "prefix_starts": starts,
        "prefix_lengths": lengths,
        "block_starts": blocks,
        "page_table": None,
        "scale": head_dim**-0.5,
        "window": window,
        "softcap": 0.0,
    }


def paged(arguments: dict, page_size: int, seed: int = 0) -> dict:
    """The same slots, scattered over the pages of a pool that also has unused pages."""
    batch, _, slots, _ = arguments["key"].shape
    pages = -(-slots // page_size)
    order = torch.randperm(batch * pages + 2, generator=generator(seed))[: batch * pages]
    table = order.view(batch, pages)
    result = {**arguments, "page_table": table}
    for name in ("key", "value"):
        cache = arguments[name]
        padded = torch.nn.functional.pad(
            cache, (0, 0, 0, pages * page_size - slots), value=torch.nan
        )
        split = padded.unflatten(2, (pages, page_size)).transpose(1, 2).flatten(0, 1)
        pool = torch.full((batch * pages + 2, *split.shape[1:]), torch.nan, dtype=cache.dtype)
        pool[table.flatten()] = split
        result[name] = pool
    return result


def run(arguments: dict, device: str = "cpu") -> Tensor:
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return ops.tree_attention(**moved).cpu()


def decode_path(
    case: Case, row: int, node: int, window: int, softcap: float, device: str
) -> Tensor:
    """Decode the path to a node token by token; returns ``[depth + 1, heads, head_dim]``.

    After each step, the token joins the prefix.
    """
    path = ancestor_nodes(case.ancestors[row, node])
    current = case.only_rows([row])
    outputs = []
    for step in path:
        one = current.only_nodes([step], torch.tensor([[-1]]))
        arguments = static_arguments(one, start=1, gap=2, window=window)
        outputs.append(run({**arguments, "softcap": softcap}, device)[0, 0])
        grown = tuple(
            [torch.cat([prefix[0], tree[0][:, step : step + 1]], dim=1)]
            for prefix, tree in zip(current.prefix, current.tree, strict=True)
        )
        current = replace(current, prefix=grown)
    return torch.stack(outputs)
