"""Draft heads of the EAGLE family: EAGLE-1, EAGLE-2, EAGLE-3, EAGLE 3.1 and P-EAGLE.

A head reads the target's hidden states of the text and continues them (Li et al. 2024 "EAGLE", "EAGLE-2";
Li et al. 2025 "EAGLE-3"); :mod:`specdec_ext.reference.draft_head` says how.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.bound_head import BoundHead
from specdec_ext.drafters.head_cache import Elements, HeadCache, at_columns, of_active_rows
from specdec_ext.heads.checkpoints.pair import check_pair
from specdec_ext.heads.config import DraftHead
from specdec_ext.models import TargetOutput
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.ops.quantise import weight_dtype
from specdec_ext.transfer import Staged
from specdec_ext.tree.config import Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

# Committed steps, and tokens of a row, after which a head that is not asked for drafts puts together, and
# reads, the features it was given: what it keeps of them is bounded. (A tap may be a view of all layers.)
MERGED_STEPS = 64
MAX_UNREAD = 512


def default_tree(device: torch.device, num_rows: int, parallel: bool = False) -> TreeConfig:
    """The shape that is drafted if none is asked for.

    On a GPU a pass of the target over 60 nodes takes hardly longer than one over a single node as long as the
    batch is small: the tree of EAGLE's own evaluations, 60 nodes on six levels (Li et al. 2024, 2025), or the
    chain of seven that P-EAGLE is evaluated with. Where every node costs time, on the CPU and in larger
    batches, a short chain accepts most per node.

    Args:
        device: of the target.
        num_rows: of the batch.
        parallel: whether the head drafts all levels at once (P-EAGLE).
    """
    if device.type == "cpu":
        return TreeConfig(depth=5 if num_rows == 1 else 3)
    if num_rows > 4:
        return TreeConfig(depth=3)
    return TreeConfig(depth=7) if parallel else TreeConfig(depth=6, top_k=10, num_nodes=60)


def offered_shapes(default: TreeConfig) -> list[TreeConfig]:
    """The chains up to seven levels, or as deep as the default shape, and that one if it is a tree."""
    chains = [TreeConfig(depth=depth) for depth in range(1, max(7, default.depth) + 1)]
    return chains if default in chains else [*chains, default]


class HeadDrafter(Drafter):
    """Drafts with a head that was trained for the target.

    The head computes in the target's dtype (in float32 where that is float16 on the CPU). A weight that it
    shares with the target is used as it is: without a factor on embeddings (Gemma), without bias or soft
    cap of logits. Its rope tables reach as far as the text, past what the head was trained for: drafts may
    get worse there, nothing fails. Of text in a caller's ``past_key_values`` there are no features; the head
    begins behind it.

    A draft is one call of the op ``draft_head``, on CUDA one launch, where the op takes such a head, tree and
    batch; else its specification drafts, in PyTorch and many times slower, and a warning says why
    (:func:`specdec_ext.ops.draft_head_refusal` tells before).

    Args:
        head: from :func:`specdec_ext.heads.checkpoints.load_draft`.
        tree: the only shape to draft; None for :func:`default_tree`, or what the controller asks for.
        weights: "int8" or "float8" has a head in bfloat16 or float16 read half the bytes, with drafts that
            are a little worse; CUDA only. "same" keeps the target's dtype.

    Raises:
        TypeError: for something else in their place.
        ValueError: for another name of a format; in a call, for one that the op does not take there.
    """

    dead_draft_advice = (
        "Check the tapped layers (the two spellings of their numbers differ by one; "
        "specdec_ext.heads.checkpoints.calibrate decides), the reading of norm_output, that the head was "
        "trained for this very target (a fine-tuned or requantised one is another) and with its "
        "tokenizer, and that sampling is not so hot that nothing can be foreseen."
    )

    def __init__(self, head: DraftHead, tree: TreeConfig | None = None, weights: str = "same"):
        if not isinstance(head, DraftHead):
            raise TypeError(
                f"head is a {type(head).__name__}; expected a DraftHead: load_draft(path) reads one"
            )
        if tree is not None and not isinstance(tree, TreeConfig):
            raise TypeError(
                f"tree is a {type(tree).__name__}; expected a TreeConfig, such as TreeConfig(depth=5)"
            )
        weight_dtype(weights)  # raises for a name that is none
        self.head, self.tree, self.weights = head, tree, weights
        self._bound: BoundHead | None = None

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The head's tapped layers, after a check, once for a model, that head and target fit.

        Raises:
            ValueError: if they do not, naming what.
        """
        if self._bound is None or not self._bound.serves(model):
            for doubt in check_pair(self.head, model):
                warnings.warn(doubt, stacklevel=2)
            self._bound = BoundHead.bind(self.head, model, self.weights)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        return self.head.config.resolved_feature_layers(layers)

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        assert self._bound is not None
        num_rows = len(context.generated)
        parallel = self.head.config.mask_token_id is not None
        self._tree = self.tree or default_tree(self._bound.device, num_rows, parallel)
        self._bound.check(self._tree, num_rows)  # now, because it may never be asked for a draft
        prompt, first_positions = _prompt_elements(context, output.taps)
        self._pending = [prompt]
        self._unread = 0  # tokens of a row at most in it, those of the prompt aside
        self._apart = 0  # steps at its end that were not put together yet
        self._active: Staged | None = None
        self._cache = HeadCache(
            self.head.config, first_positions, self._bound.device, self._bound.dtype
        )

    def shapes(self, context: Context) -> Sequence[Shape]:
        return [self.tree] if self.tree else offered_shapes(self._tree)

    @property
    def identity(self) -> Hashable:
        return super().identity, self.head.source, self.weights

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the features of the committed nodes; the head reads them when it drafts next.

        Without drafts for a while it reads ``MAX_UNREAD`` of a row at a time, so that no more are kept.
        """
        taps: Sequence[Tensor] = output.taps
        width = max(map(len, accepted.emitted))
        if accepted.path.shape[1] > 1:
            # Of a chain, and of a tree's first branch, the nodes come first as they are.
            visited = zip(accepted.paths, accepted.emitted, strict=True)
            if any(nodes[: len(row)] != [*range(len(row))] for nodes, row in visited):
                nodes = accepted.path[:, :width].clamp(min=0)
                taps = [at_columns(tap, nodes) for tap in taps]
            taps = [torch.cat([tap[:, :width] for tap in taps], dim=-1)]
        even = width == 1 or all(len(tokens) == width for tokens in accepted.emitted)
        self._pending.append(Elements(context.rows, accepted.emitted, taps, even=even))
        self._unread += width
        self._apart += 1
        if self._unread >= MAX_UNREAD:
            self._draft(self._take_pending(context), context, TreeConfig(depth=1))
        elif self._apart == MERGED_STEPS:
            self._pending.append(self._take_pending(context, MERGED_STEPS))

    def _take_pending(self, context: Context, steps: int | None = None) -> Elements:
        """What the head has not read yet, of every row of the batch; of the last ``steps`` if given."""
        taken = self._pending[-steps:] if steps else self._pending
        self._pending = self._pending[: len(self._pending) - len(taken)]
        self._apart = 0
        return of_active_rows(taken, context.rows, len(context.generated))

    def propose(self, context: Context) -> DraftTree:
        if max(context.remaining) < 2 or not self._pending:  # a row's last token needs no draft
            return DraftTree.root(context.roots)
        shape = context.shape if isinstance(context.shape, TreeConfig) else self._tree
        active = self._staged_rows(context)
        tokens, parents = self._draft(self._take_pending(context), context, shape)
        if active is not None:
            index = active.tensor.to(tokens.device)
            tokens, parents = tokens[index], parents[index]
        return DraftTree(tokens.to(context.device), parents.to(context.device))

    def _staged_rows(self, context: Context) -> Staged | None:
        """The active rows, if they are not all of the batch."""
        if len(context.rows) == len(context.generated):
            return None
        if self._active is None or self._active.values != context.rows:
            self._active = context.staging.stage(list(context.rows))
        return self._active

    @inference_mode()
    def _draft(self, new: Elements, context: Context, tree: TreeConfig) -> tuple[Tensor, Tensor]:
        """Read ``new`` and draft for every row of the batch: ``(tokens, parents)``."""
        assert self._bound is not None
        bound, cache = self._bound, self._cache
        self._unread = 0
        cache.reserve(new.counts, _draft_slots(tree), tree.depth)
        width = max(map(len, new.tokens))
        roots = [generated[-1] for generated in context.generated]
        per_row = context.staging.stage([new.counts, cache.lengths, cache.positions(), roots])
        padded = context.staging.stage([[*row, *[0] * (width - len(row))] for row in new.tokens])
        counts, lengths, positions, last = per_row.tensor.to(bound.device)
        tokens, parents, _ = bound.draft(
            tree,
            cache.cosines,
            cache.sines,
            cache.keys,
            cache.values,
            padded.tensor.to(bound.device),
            new.features.to(bound.device, bound.dtype),
            counts,
            lengths,
            positions,
            last,
        )
        cache.lengths = [a + b for a, b in zip(cache.lengths, new.counts, strict=True)]
        return tokens, parents


def _draft_slots(tree: TreeConfig) -> int:
    """Slots for the keys of drafted nodes: a level has at most as many nodes as the widest."""
    if tree.choices is None:
        return tree.top_k * tree.depth
    return max(Counter(map(len, tree.choices)).values()) * tree.depth


def _prompt_elements(context: Context, taps: Sequence[Tensor]) -> tuple[Elements, list[int]]:
    """Elements of the prompt and each row's first position.

    Args:
        taps: ``[rows, columns run, hidden]`` each, of the last columns of the prompt.
    """
    rows, first = list(context.rows), [[context.generated[row][-1]] for row in context.rows]
    if context.offset:
        # Of embeddings nobody knows the tokens: the head begins with the last of them.
        last = [taps[0].shape[1] - 1] * len(rows)
        if context.attention_mask is not None:
            valid = context.attention_mask[:, -taps[0].shape[1] :].bool().cpu()
            last = (valid * torch.arange(valid.shape[1], device="cpu")).argmax(dim=1).tolist()
        return Elements(rows, first, [tap[rows, last][:, None] for tap in taps]), [
            position - 1 for position in context.root_positions
        ]
    held, order = context.prompt_columns - taps[0].shape[1], None
    if context.attention_mask is None:
        before = [held] * len(rows)
    else:
        valid = context.attention_mask.bool()
        before = valid[:, :held].sum(dim=1).tolist()
        # Each row's features move to the left, in their order.
        longest = int(valid[:, held:].sum(dim=1).max())
        order = (~valid[:, held:]).long().argsort(dim=1, stable=True)[:, :longest]
    texts = [context.prompt(row)[count:] for row, count in zip(rows, before, strict=True)]
    tokens = [text[1:] + last for text, last in zip(texts, first, strict=True)]
    return Elements(rows, tokens, taps, order), before
