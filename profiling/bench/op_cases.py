"""Every op with realistic inputs, for ``ops.py`` and the GPU check.

A ``Case`` is one row of the benchmark. ``Case.make`` returns its ``Work``: the arguments on a device, the
same computation in PyTorch, and the bytes that the op must move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from baselines import torch_ops
from baselines.draft_calls import DraftCall, RandomHead
from baselines.heads import head_config
from baselines.torch_ops import LEVELS
from torch import Tensor

from specdec_ext import ops
from specdec_ext.heads.config import HeadConfig
from specdec_ext.ops import Adjustment
from specdec_ext.tree.config import TreeConfig

ACCEPTED = 4  # draft tokens accepted in the verification cases, so that 5 nodes are visited
MOVED = 8  # tokens that kv_compact moves
PAGE_SIZE = 16  # slots per page
TOP_K, DRAFT_DEPTH = 10, 5  # of the dynamic trees, which have 10 + 4 * 100 candidates


@dataclass(frozen=True)
class Model:
    """The dimensions of a model that matter to the ops."""

    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int


MODELS = {
    "llama3-8b": Model(128_256, 32, 32, 8, 128, 4096, 14_336),
    "llama3-70b": Model(128_256, 80, 64, 8, 128, 8192, 28_672),
    "qwen3-32b": Model(151_936, 64, 64, 8, 128, 5120, 25_600),
    "small": Model(4096, 6, 4, 2, 64, 256, 704),
}


@dataclass(frozen=True)
class Work:
    """One call of an op, ready to run.

    Attributes:
        arguments: the op's arguments: tensors, lists of tensors and numbers.
        baseline: the same computation in PyTorch, as a function without arguments.
        moved_bytes: bytes moved if every needed input is read once and every output is written once. An op
            that reads less, such as verify_match on the CPU, can exceed 100 % of the bandwidth.
        agree: whether the op's result and the baseline's are the same, as far as both compute them.
        changed: tensors that both change in place; these are compared instead of the results.
    """

    arguments: tuple[Any, ...]
    baseline: Callable[[], Any]
    moved_bytes: int
    agree: Callable[[Any, Any], bool]
    changed: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes:
        op: name in the table; its first word is the function in ``specdec_ext.ops``.
        nodes: nodes per row; for linear and sample_filter, the number of rows.
        prefix: number of committed tokens, for tree_attention, draft_head, ngram_draft and adjust_logits.
        keywords: keyword-only arguments of the op.
    """

    op: str
    name: str
    dtype: torch.dtype
    batch: int
    nodes: int
    build: Callable[[Case, Inputs], Work]
    devices: tuple[str, ...] = ("cpu", "cuda")
    prefix: int = 0
    keywords: Callable[[Model], dict[str, Any]] = lambda model: {}

    @property
    def function(self) -> str:
        return self.op.split()[0]

    @property
    def paged(self) -> bool:
        return self.op.endswith(" paged")

    @property
    def label(self) -> str:
        return f"{self.name} at {self.prefix}" if self.prefix else self.name

    @property
    def is_built(self) -> bool:
        return hasattr(ops, self.function)

    @property
    def model(self) -> Model:
        return MODELS[self.name]

    def reduced(self) -> Case:
        """The same case on little data."""
        nodes, prefix = min(self.nodes, MOVED), min(self.prefix, 64)
        return replace(self, name="small", batch=1, nodes=nodes, prefix=prefix)

    def make(self, device: torch.device, seed: int = 0) -> Work:
        """Arguments and baseline; another seed gives other values with the same shapes."""
        return self.build(self, Inputs(device, seed))

    def run(self, arguments: Iterable[Any]) -> Any:
        return getattr(ops, self.function)(*arguments, **self.keywords(self.model))

    def agrees(self, device: torch.device) -> bool:
        """Whether op and baseline agree on little data; drafts by a head are compared in float32."""
        case = self.reduced()
        if case.function == "draft_head":
            case = replace(case, dtype=torch.float32)
        ours, theirs = case.make(device, seed=3), case.make(device, seed=3)
        result, expected = case.run(ours.arguments), theirs.baseline()
        return ours.agree(ours.changed or result, theirs.changed or expected)


class Inputs:
    """Seeded tensors on one device."""

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device)

    def full(self, value: float, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def parents(self, batch: int, nodes: int) -> Tensor:
        """Parents of a chain of LEVELS nodes whose nodes also have all other nodes as children."""
        spine = min(nodes, LEVELS)
        order = torch.arange(nodes, device=self.device)
        parents = torch.where(order < spine, order - 1, order % max(1, spine - 1))
        return parents.expand(batch, nodes).contiguous()

    def cache_layout(self, case: Case, slots: int) -> tuple[tuple[int, ...], Tensor | None]:
        """Shape of a key or value cache with ``slots`` per row, and the page table if the cache is paged."""
        model = case.model
        if not case.paged:
            return (case.batch, model.kv_heads, slots, model.head_dim), None
        pages = -(-slots // PAGE_SIZE)
        table = self.permutation(case.batch * pages).view(case.batch, pages)
        return (case.batch * pages, model.kv_heads, PAGE_SIZE, model.head_dim), table

    def rows(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """``root_positions``, ``seeds``, ``row_ids``."""
        positions = 1000 + self.integers(1000, batch)
        return positions, self.integers(1 << 30, batch), torch.arange(batch, device=self.device)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Equal except for the rounding of bfloat16."""
    return torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)


def tree_mask(case: Case, inputs: Inputs) -> Work:
    arguments = (inputs.parents(case.batch, case.nodes), inputs.rows(case.batch)[0])
    outputs = ops.tree_mask(*arguments)

    def agree(ours: Any, theirs: Any) -> bool:
        bits = ours.ancestors[..., :1] >> torch.arange(case.nodes, device=inputs.device)
        return equal(((bits & 1).bool(), *ours[1:]), theirs)

    moved = bytes_of(*arguments, *outputs)
    return Work(arguments, lambda: torch_ops.tree_mask(*arguments), moved, agree)


def build_dynamic_tree(case: Case, inputs: Inputs) -> Work:
    """The candidates of EAGLE-2: each of the best TOP_K nodes of a level has TOP_K children."""
    parents = [inputs.full(-1, case.batch, TOP_K)]
    scores = [-inputs.normal(case.batch, TOP_K).abs()]
    first = 0
    for _ in range(DRAFT_DEPTH - 1):
        width = scores[-1].shape[1]
        beam = inputs.permutation(width)[:TOP_K].sort().values
        parents.append((first + beam).repeat_interleave(TOP_K).expand(case.batch, -1))
        steps = -inputs.normal(case.batch, TOP_K * TOP_K).abs()
        scores.append(scores[-1][:, beam].repeat_interleave(TOP_K, 1) + steps)
        first += width
    candidates = torch.cat(scores, 1), torch.cat(parents, 1)
    tokens = inputs.integers(case.model.vocab, *candidates[0].shape)
    roots = inputs.integers(case.model.vocab, case.batch)
    arguments = (candidates[0], tokens, candidates[1], roots, case.nodes)
    return Work(
        arguments,
        lambda: torch_ops.build_dynamic_tree(*arguments),
        bytes_of(*arguments[:4]) + 3 * 8 * case.batch * case.nodes,
        lambda ours, theirs: equal((*ours[:2], ours[2][:, 1:]), theirs),
    )


def merge_trees(case: Case, inputs: Inputs) -> Work:
    """A tree of a head and a copy that shares its beginning."""
    sizes = case.nodes - LEVELS // 2, LEVELS
    parents = [inputs.parents(case.batch, size) for size in sizes]
    tokens = [inputs.integers(case.model.vocab, case.batch, size) for size in sizes]
    tokens[1][:, : LEVELS // 2] = tokens[0][:, : LEVELS // 2]
    arguments = (tokens, parents, case.nodes)
    return Work(
        arguments,
        lambda: torch_ops.merge_trees(*arguments),
        bytes_of(*tokens, *parents) + 2 * 8 * case.batch * case.nodes,
        equal,
    )


def ngram_draft(case: Case, inputs: Inputs) -> Work:
    """A chain from a text whose last three tokens occurred in the middle."""
    tokens = inputs.integers(case.model.vocab, case.batch, case.prefix)
    tokens[:, -3:] = tokens[:, case.prefix // 2 :][:, :3]
    arguments = (tokens, inputs.full(case.prefix, case.batch), case.nodes, 2, 6, 1)
    return Work(
        arguments,
        lambda: torch_ops.ngram_draft(*arguments),
        bytes_of(tokens) + 2 * 8 * case.batch * case.nodes,
        equal,
    )


def verify_match(stochastic: bool) -> Callable[[Case, Inputs], Work]:
    baseline = torch_ops.verify_match_sampled if stochastic else torch_ops.verify_match_greedy

    def build(case: Case, inputs: Inputs) -> Work:
        logits, tokens, parents = verification_inputs(case, inputs)
        flags = inputs.full(stochastic, case.batch, dtype=torch.bool)
        counters = inputs.full(0, case.batch, dtype=torch.int32)
        arguments = (logits, tokens, parents, *inputs.rows(case.batch), flags, counters)
        return Work(arguments, lambda: baseline(*arguments), bytes_of(logits), accepts_the_planted)

    return build


def accepts_the_planted(ours: Any, theirs: tuple[Iterable[int], Iterable[int]]) -> bool:
    """Whether both accept what :func:`verification_inputs` has planted, and emit the same next token."""
    accepted, token = ([*map(int, each)] for each in theirs)
    same = (ours.num_accepted.tolist(), ours.next_token.tolist()) == (accepted, token)
    return same and set(accepted) == {ACCEPTED} and not ours.status.any()


def verification_inputs(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, tokens and parents with which exactly the first ACCEPTED draft nodes are accepted."""
    vocab = case.model.vocab
    parents = inputs.parents(case.batch, case.nodes)
    # Siblings differ. No tree contains the last token of the vocabulary, which node ACCEPTED predicts.
    tokens = torch.stack([inputs.permutation(vocab - 1)[: case.nodes] for _ in range(case.batch)])
    logits = inputs.normal(case.batch, case.nodes, vocab, dtype=case.dtype)
    wanted = torch.cat([tokens[:, 1 : ACCEPTED + 1], torch.full_like(tokens[:, :1], vocab - 1)], 1)
    logits[:, : ACCEPTED + 1].scatter_(2, wanted[..., None], 60.0)
    return logits, tokens, parents


def verify_sampled_draft(rule: str) -> Callable[[Case, Inputs], Work]:
    """Rules 2 to 4; before normalisation, the draft distribution gives each child a probability of 0.1."""
    baseline = getattr(torch_ops, rule)

    def build(case: Case, inputs: Inputs) -> Work:
        logits, tokens, parents = verification_inputs(case, inputs)
        draft = inputs.normal(*logits.shape).softmax(-1)
        rows = torch.arange(case.batch, device=inputs.device)[:, None]
        draft[rows, parents[:, 1:], tokens[:, 1:]] = 0.1
        draft /= draft.sum(-1, keepdim=True)
        arguments = (logits, draft, tokens, parents, *inputs.rows(case.batch))
        moved = bytes_of(logits, draft)
        return Work(arguments, lambda: baseline(*arguments), moved, accepts_the_planted)

    return build


def sample_filter(case: Case, inputs: Inputs) -> Work:
    rows, vocab = case.nodes, case.model.vocab
    logits = inputs.normal(rows, vocab, dtype=case.dtype) * 4
    arguments = (
        logits,
        inputs.full(0.8, rows, dtype=torch.float32),
        inputs.full(50, rows),
        inputs.full(0.95, rows, dtype=torch.float32),
        inputs.full(0.02, rows, dtype=torch.float32),
    )
    moved = bytes_of(logits) + 4 * rows * vocab
    return Work(arguments, lambda: torch_ops.sample_filter(*arguments), moved, torch.allclose)


def adjust_logits(case: Case, inputs: Inputs) -> Work:
    """A bias, a repetition penalty, a ban of 3-grams and suppressed tokens; texts of few different tokens."""
    vocab, penalty, size = case.model.vocab, 1.2, 3
    logits = inputs.normal(case.batch, case.nodes, vocab, dtype=case.dtype) * 4
    parents = inputs.parents(case.batch, case.nodes)
    tokens = inputs.integers(64, case.batch, case.nodes)
    text = inputs.integers(64, case.batch, case.prefix)
    bias = inputs.normal(vocab) * (inputs.normal(vocab) > 2)
    suppressed = inputs.normal(vocab) > 2
    kinds = (Adjustment.ADD, Adjustment.PENALISE, Adjustment.BAN, Adjustment.OVERWRITE)
    overwrite = torch.where(suppressed, -torch.inf, torch.nan)
    arguments = (
        logits,
        tokens,
        parents,
        text,
        inputs.full(case.prefix, case.batch),
        inputs.full(0, case.batch),
        inputs.full(penalty, case.batch, dtype=torch.float32),
        inputs.full(size, case.batch),
        torch.tensor([(kind, 0, 1 << 62) for kind in kinds], device=inputs.device),
        torch.stack([bias, bias, bias, overwrite]),
    )
    # By a number, CUDA would multiply by the rounded reciprocal.
    divisor = inputs.full(penalty, 1, dtype=torch.float32)
    baseline = (logits, tokens, parents, text, divisor, size, bias, suppressed)
    return Work(
        arguments,
        lambda: torch_ops.adjust_logits(*baseline),
        bytes_of(logits, text) + 4 * logits.numel(),
        torch.equal,
    )


def kv_compact(case: Case, inputs: Inputs) -> Work:
    """Moves the keys and values of MOVED tokens in every layer from scattered to earlier slots."""
    model, slots = case.model, 512
    shape, page_table = inputs.cache_layout(case, slots)
    caches = [inputs.normal(*shape, dtype=case.dtype) for _ in range(2 * model.layers)]
    path = inputs.full(-1, case.batch, case.nodes)
    path[:, :MOVED] = torch.stack(
        [inputs.permutation(case.nodes)[:MOVED].sort().values for _ in range(case.batch)]
    )
    starts = inputs.full(slots - case.nodes, case.batch)
    places = (starts, starts - MOVED)
    accepted = inputs.full(MOVED - 1, case.batch)
    row = model.kv_heads * model.head_dim * case.dtype.itemsize
    return Work(
        (caches, path, accepted, *places, page_table),
        lambda: torch_ops.kv_compact(caches, path[:, :MOVED], *places, page_table),
        2 * case.batch * MOVED * len(caches) * row,
        equal,
        caches,
    )


def tree_attention(case: Case, inputs: Inputs) -> Work:
    model, prefix, batch, nodes = case.model, case.prefix, case.batch, case.nodes
    query = inputs.normal(batch, model.heads, nodes, model.head_dim, dtype=case.dtype)
    shape, page_table = inputs.cache_layout(case, prefix + nodes)
    key, value = (inputs.normal(*shape, dtype=case.dtype) for _ in range(2))
    parents, lengths = inputs.parents(batch, nodes), inputs.full(prefix, batch)
    ancestors = ops.tree_mask(parents, lengths).ancestors
    places = (inputs.full(0, batch), lengths, lengths.clone())
    seen = torch_ops.tree_mask(parents, lengths)[0][:, None]
    mask = torch.cat([seen.new_ones(batch, 1, nodes, prefix), seen], -1)
    scale = softmax_scale(model)
    return Work(
        (query, key, value, ancestors, *places, page_table),
        lambda: torch_ops.tree_attention(query, key, value, mask, page_table, **scale),
        bytes_of(query, query) + 2 * batch * (prefix + nodes) * bytes_of(key[:1, :, 0]),
        close,
    )


def softmax_scale(model: Model) -> dict[str, float]:
    return {"scale": model.head_dim**-0.5}


def linear(case: Case, inputs: Inputs) -> Work:
    model = case.model
    rows = inputs.normal(case.nodes, model.hidden, dtype=case.dtype)
    weight = inputs.normal(model.intermediate, model.hidden, dtype=case.dtype)
    return Work(
        (rows, weight, None),
        lambda: torch_ops.linear(rows, weight),
        bytes_of(rows, weight) + case.dtype.itemsize * case.nodes * model.intermediate,
        close,
    )


def draft_config(name: str) -> HeadConfig:
    """Config of an EAGLE-3 head for a model."""
    m = MODELS[name]
    sizes = m.hidden, m.intermediate, m.heads, m.kv_heads, m.vocab
    return head_config(*sizes, head_dim=m.head_dim, draft_vocab=min(m.vocab // 2, 32_000))


def draft_tree(case: Case) -> TreeConfig:
    if case.op == "draft_head tree":
        return TreeConfig(depth=8, top_k=5, num_nodes=case.nodes)
    return TreeConfig(depth=case.nodes - 1)


@lru_cache(maxsize=2)  # memory has room for few of the largest heads
def draft_model(name: str, dtype: torch.dtype, device: torch.device) -> RandomHead:
    """A head with random weights, which do not depend on the case's seed."""
    return RandomHead(draft_config(name), dtype, device)


def draft_head(case: Case, inputs: Inputs) -> Work:
    """A chain, a dynamic tree, a chain with 8-bit weights, or a chain with one launch per phase."""
    kind = case.op.split()[1]
    call = DraftCall.make(
        draft_model(case.name, case.dtype, inputs.device),
        draft_tree(case),
        case.prefix,
        case.batch,
        kind if kind in ("int8", "float8") else "same",
        int(inputs.generator.initial_seed()),
    )
    is_exact = call.weights == "same" and case.dtype == torch.float32

    def agree(ours: Any, theirs: Any) -> bool:
        return not is_exact or equal(ours[:2], theirs)

    return Work(call.arguments, call.theirs, call.needed_bytes, agree)


def phase_launches(model: Model) -> dict[str, bool]:
    return {"phase_launches": True}


I64, F32, BF16 = torch.int64, torch.float32, torch.bfloat16
LARGE_VOCABS = ("llama3-8b", "qwen3-32b", "small")  # llama3-70b's vocabulary is llama3-8b's

CASES = [
    Case("tree_mask", "llama3-8b", I64, 1, 64, tree_mask),
    Case("tree_mask", "small", I64, 32, 64, tree_mask),
    Case("build_dynamic_tree", "llama3-8b", F32, 1, 60, build_dynamic_tree),
    Case("build_dynamic_tree", "small", F32, 32, 60, build_dynamic_tree),
    Case("merge_trees", "llama3-8b", I64, 1, 64, merge_trees),
    Case("merge_trees", "small", I64, 32, 64, merge_trees),
    Case("ngram_draft", "llama3-8b", I64, 1, 11, ngram_draft, prefix=8192),
    Case("ngram_draft", "llama3-8b", I64, 1, 11, ngram_draft, prefix=131_072),
    Case("ngram_draft", "small", I64, 32, 11, ngram_draft, prefix=2048),
    *(
        Case(f"verify_match {mode}", name, BF16, 1, nodes, verify_match(mode == "sampled"))
        for mode in ("greedy", "sampled")
        for name in LARGE_VOCABS
        for nodes in (8, 64)
    ),
    *(
        Case(op, name, BF16, 1, nodes, verify_sampled_draft(op))
        for op, nodes in (("verify_rejection", 8), ("verify_block", 8), ("verify_recursive", 64))
        for name in LARGE_VOCABS
    ),
    *(
        Case("sample_filter", name, BF16, 1, nodes, sample_filter)
        for name in LARGE_VOCABS
        for nodes in (8, 64)
    ),
    *(
        Case("adjust_logits", name, BF16, 1, nodes, adjust_logits, prefix=2048)
        for name in LARGE_VOCABS
        for nodes in (8, 64)
    ),
    *(Case("kv_compact", name, BF16, 1, 64, kv_compact) for name in MODELS),
    *(Case("kv_compact paged", name, BF16, 1, 64, kv_compact) for name in ("llama3-8b", "small")),
    *(
        Case(op, name, BF16, 1, nodes, tree_attention, prefix=prefix, keywords=softmax_scale)
        for op, names in (
            ("tree_attention", MODELS),
            ("tree_attention paged", ("llama3-8b", "small")),
        )
        for name in names
        for nodes, prefix in ((16, 2048), (64, 8192))
    ),
    *(
        Case(f"draft_head {kind}", "small", BF16, batch, nodes, draft_head, prefix=512)
        for kind, nodes in (("chain", 6), ("tree", 60))
        for batch in (1, 4)
    ),
    *(
        Case(f"draft_head {kind}", "llama3-8b", BF16, 1, nodes, draft_head, ("cuda",), prefix=2048)
        for kind, nodes in (("chain", 6), ("tree", 60))
    ),
    *(
        Case(f"draft_head {weights}", name, BF16, 1, 6, draft_head, ("cuda",), prefix=2048)
        for name in ("small", "llama3-8b")
        for weights in ("int8", "float8")
    ),
    *(
        Case("draft_head phases", name, BF16, 1, 6, draft_head, ("cuda",), 2048, phase_launches)
        for name in ("small", "llama3-8b")
    ),
    *(
        Case("linear", name, dtype, 1, rows, linear, devices=("cpu",))
        for name in ("llama3-8b", "small")
        for dtype in (F32, BF16)
        for rows in (1, 8)
    ),
    *(
        Case("linear", name, BF16, 1, 8, linear, devices=("cpu",))
        for name in ("llama3-70b", "qwen3-32b")
    ),
]
OPS = list(dict.fromkeys(case.function for case in CASES))
