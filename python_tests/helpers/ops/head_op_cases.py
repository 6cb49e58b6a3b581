"""Drafts by the op ``draft_head`` on any device, to compare with the specification in ``head_cases``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterable
from functools import cached_property
from typing import Any

import pytest
import torch
from helpers.drafters.head_cases import Run, elements, head_of
from helpers.ops.op_cases import to
from torch import Tensor

from specdec_ext import ops
from specdec_ext.heads.config import DraftHead
from specdec_ext.ops.quantise import quantise, weight_dtype
from specdec_ext.tree.config import TreeConfig

_CHOICES = "0 1 3 00 01 10 000 002 101 1010"  # ranks on the path to each node
STATIC = TreeConfig(choices=[tuple(map(int, path)) for path in _CHOICES.split()])
SHAPES = {
    "chain": TreeConfig(4),
    "cut-chain": TreeConfig(6, num_nodes=3),
    "padded-chain": TreeConfig(2, num_nodes=5),
    "static": STATIC,
    "dynamic": TreeConfig(4, 3, 12),
    "wide": TreeConfig(2, 32, 40),
}
# (new columns, new elements per row) of several calls. Some rows have nothing new; the last call is longer
# than a chunk of the CPU op and than two passes of the kernel.
ROUNDS = [(9, [9, 4, 7]), (3, [1, 0, 3]), (2, [0, 2, 1]), (70, [2, 70, 1])]
EMULATED_ROUNDS = [(4, [3, 1, 4]), (2, [1, 0, 2])]


def some_emulated(cases: Iterable[Any], emulated: Container[Any]) -> list[Any]:
    """Mark cases as slow on emulated kernels, except those in ``emulated``."""
    return [
        case
        if case in emulated
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow_emulated
        )
        for case in cases
    ]


@dataclasses.dataclass
class OpRun(Run):
    """A :class:`Run` through the op; results come back to the CPU.

    Attributes:
        device: where the op runs.
        weights: format of the packed weights.
    """

    device: str = "cpu"
    weights: str = "same"

    @classmethod
    def start(
        cls,
        head: DraftHead,
        rows: int,
        *,
        device: str = "cpu",
        weights: str = "same",
        **options: Any,
    ) -> OpRun:
        run = super().start(head, rows, **options)
        run.device, run.weights = device, weights
        run.keys, run.values = run.keys.to(device), run.values.to(device)
        return run

    def draft(
        self, tree: TreeConfig, tokens: Tensor, features: Tensor, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if counts is None:
            counts = torch.full((len(tokens),), tokens.shape[1])
        drafted = ops.draft_head(**self.arguments(tokens, features, counts), tree=tree)
        self.lengths, self.positions = self.lengths + counts, self.positions + counts
        return tuple(each.cpu() for each in drafted)

    @cached_property
    def packed(self) -> ops.PackedHead:
        is_own = self.lm_head is self.head.tensors.get("lm_head.weight")
        return ops.PackedHead.pack(
            self.head.to(self.device, self.embedding.dtype),
            self.embedding.to(self.device),
            None if is_own else self.lm_head.to(self.device),
            self.weights,
        )

    def arguments(self, tokens: Tensor, features: Tensor, counts: Tensor) -> dict[str, Any]:
        """All arguments of the op except the tree."""
        roots = torch.zeros_like(counts)
        if tokens.shape[1] > 0:
            roots = tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        tensors = dict(
            cosines=self.cosines,
            sines=self.sines,
            keys=self.keys,
            values=self.values,
            tokens=tokens,
            features=features,
            counts=counts,
            lengths=self.lengths,
            positions=self.positions,
            roots=roots,
        )
        on_device: dict[str, Any] = {
            name: tensor.to(self.device) for name, tensor in tensors.items()
        }
        if self.noise is not None:
            on_device["noise"] = ops.DraftNoise(*to(self.device, self.noise))
        return {"head": self.packed, **on_device}


def drafts_of(
    head: DraftHead, tree: TreeConfig, *, rows: int = 1, new: int, device: str
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The first draft, by the op and by the specification."""
    runs = OpRun.start(head, rows, device=device), Run.start(head, rows)
    return [run.draft(tree, *elements(head, rows, new)) for run in runs]


def poisoned(features: Tensor, counts: list[int]) -> Tensor:
    """Fill unused elements with NaN."""
    padding = torch.arange(features.shape[1]) >= torch.tensor(counts)[:, None]
    return features.masked_fill(padding[..., None], torch.nan)


def committed(run: Run) -> list[Tensor]:
    """The used keys and values of each row."""
    return [
        cache[:, row, :, :length].cpu()
        for row, length in enumerate(run.lengths.tolist())
        for cache in (run.keys, run.values)
    ]


def assert_equal_drafts(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def assert_same_draft(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert_equal_drafts(actual[:2], expected[:2])
    torch.testing.assert_close(actual[2], expected[2], rtol=2e-5, atol=2e-3)


def noise_of(*temperatures: float) -> ops.DraftNoise:
    """The noise of rows with these temperatures; 0: none."""
    rows = torch.arange(len(temperatures))
    return ops.DraftNoise(torch.tensor(temperatures), rows * 2**40 - 5, 3 - rows)


def check_against_reference(
    head: DraftHead,
    tree: TreeConfig,
    device: str,
    rounds: list[tuple[int, list[int]]],
    noise: ops.DraftNoise | None = None,
) -> None:
    """Compare several drafts in turn, with NaN in all unused elements."""
    rows = len(rounds[0][1])
    ours = OpRun.start(head, rows, capacity=150, device=device)
    theirs = Run.start(head, rows, capacity=150)
    ours.noise = theirs.noise = noise
    for seed, (new, counts) in enumerate(rounds):
        tokens, features = elements(head, rows, new, seed)
        drafted = ours.draft(tree, tokens, poisoned(features, counts), torch.tensor(counts))
        assert_same_draft(drafted, theirs.draft(tree, tokens, features, torch.tensor(counts)))
    for actual, expected in zip(committed(ours), committed(theirs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def check_rows_are_independent(
    head: DraftHead, tree: TreeConfig, rounds: list[tuple[int, list[int]]], **options: Any
) -> None:
    """Check that three rows have the bits together that each has alone, in drafts and in the cache."""
    together = OpRun.start(head, rows=3, **options)
    alone = [OpRun.start(head, rows=1, **options) for _ in range(3)]
    for seed, (new, counts) in enumerate(rounds):
        tokens, features = elements(head, 3, new, seed)
        drafted = together.draft(tree, tokens, features, torch.tensor(counts))
        for row, (run, count) in enumerate(zip(alone, counts, strict=True)):
            part = slice(row, row + 1)
            own = run.draft(tree, tokens[part, :count], features[part, :count])
            if count > 0:
                assert_equal_drafts([each[part] for each in drafted], own)
    own_caches = [cache for run in alone for cache in committed(run)]
    for ours, theirs in zip(committed(together), own_caches, strict=True):
        assert torch.equal(ours, theirs)


def path_scores(drafted: tuple[Tensor, ...]) -> dict[tuple[int, ...], float]:
    """Score by path of tokens; the batch has one row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(drafted[0][0].tolist(), drafted[1][0].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, drafted[2][0].tolist(), strict=True))


# Matrices that have 8 bits in the formats int8 and float8.
_MATRICES = ("_proj.weight", "fc.weight", "lm_head.weight")


def with_exact_weights(head: DraftHead, weights: str) -> DraftHead:
    """The head with matrices that 8 bits hold exactly: numbers of the format times a power of two for each
    output, with the largest number of the format in each row."""
    dtype = weight_dtype(weights)
    assert dtype is not None
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    tensors = dict(head.tensors)
    for name, tensor in head.tensors.items():
        if not name.endswith(_MATRICES):
            continue
        numbers, scales = quantise(tensor, dtype)
        exact = numbers.float()
        exact[:, -1] = largest
        # Neighbours have very different scales, so a scale of another output changes the result.
        spread = torch.tensor([1.0, 0.25, 2.0]).repeat(len(scales))[: len(scales)]
        factors = scales.log2().floor().exp2() * spread
        tensors[name] = (exact * factors[:, None]).to(tensor.dtype)
        assert torch.equal(tensors[name].float(), exact * factors[:, None])
    return dataclasses.replace(head, tensors=tensors)


def errors_with_8_bit_weights(
    name: str, weights: str, dtype: torch.dtype, device: str, seeds: int
) -> tuple[float, float]:
    """The sum of the scores' errors, of the op and of the reference in ``dtype``.

    The weights are exact. The errors of one head's scores depend on each other, so the sum is over ``seeds``
    heads.
    """
    sizes = dict(hidden_size=272, target_hidden_size=272, vocab_size=16, draft_vocab_size=3)
    paths = [path for n in (1, 2) for path in itertools.product(range(3), repeat=n)]
    tree = TreeConfig(choices=paths)
    errors = [0.0, 0.0]
    for seed in range(seeds):
        head = head_of(name, seed, dtype, own_lm_head=True, **sizes)
        head = with_exact_weights(head, weights)
        exact_head = head.to("cpu", torch.float64)
        ours = OpRun.start(head, 1, device=device, weights=weights)
        assert ours.packed.weights[1].dtype == weight_dtype(weights)
        reference, exact = Run.start(head, 1), Run.start(exact_head, 1)
        exact.embedding = reference.embedding.double()
        more_than_a_pass_takes = 36
        tokens, features = elements(head, 1, more_than_a_pass_takes if seed == 0 else 3, seed)
        expected = path_scores(exact.draft(tree, tokens, features.double()))
        for i, run in enumerate((ours, reference)):
            scores = path_scores(run.draft(tree, tokens, features))
            assert scores.keys() == expected.keys()
            errors[i] += sum(abs(scores[path] - expected[path]) for path in expected)
    return errors[0], errors[1]
