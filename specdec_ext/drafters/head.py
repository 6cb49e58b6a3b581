"""``HeadDrafter``: draft heads of the EAGLE family (EAGLE-1, EAGLE-2, EAGLE-3, EAGLE 3.1 and P-EAGLE).

A head reads the target's hidden states of the text and predicts the next ones (Li et al. 2024, "EAGLE" and
"EAGLE-2"; Li et al. 2025, "EAGLE-3"). The formulas are in :mod:`specdec_ext.reference.draft_head`.
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

# Limits of the features that are kept while no drafts are requested. After this many steps the pending
# features are copied into one tensor, because a feature tensor may be a view of the states of all layers.
MERGED_STEPS = 64
# If the pending tokens of any row reach this number, the head reads them.
MAX_UNREAD = 512


def default_tree(device: torch.device, num_rows: int, parallel: bool = False) -> TreeConfig:
    """The shape that is drafted by default.

    On a GPU with a small batch, a target pass over 60 nodes takes hardly longer than one over a single node.
    There the default is the tree of EAGLE's evaluations, 60 nodes on six levels (Li et al. 2024, 2025), or
    the chain of seven of P-EAGLE's evaluation. On the CPU and with larger batches every node costs time, and
    the default is a short chain, which has the most accepted tokens per node.

    Args:
        device: device of the target.
        num_rows: number of rows of the batch.
        parallel: whether the head drafts all levels at once (P-EAGLE).
    """
    if device.type == "cpu":
        return TreeConfig(depth=5 if num_rows == 1 else 3)
    if num_rows > 4:
        return TreeConfig(depth=3)
    return TreeConfig(depth=7) if parallel else TreeConfig(depth=6, top_k=10, num_nodes=60)


def offered_shapes(default: TreeConfig) -> list[TreeConfig]:
    """Chains of up to seven levels, or as many as ``default`` has, and ``default`` itself if it is a tree."""
    chains = [TreeConfig(depth=depth) for depth in range(1, max(7, default.depth) + 1)]
    return chains if default in chains else [*chains, default]


class HeadDrafter(Drafter):
    """Drafts with a head that was trained for the target.

    The head computes in the target's dtype, or in float32 if that is float16 on the CPU. Weights shared with
    the target are used without the target's further operations, such as a factor on embeddings (Gemma), a
    bias or a soft cap of logits. The rope tables are extended to the length of the text; beyond the head's
    training length, drafts may become worse. The caller's ``past_key_values`` contain no features of their
    text, so the head begins after it.

    A draft is one call of the op ``draft_head``, which is one launch on CUDA. If the op does not support the
    head, tree or batch, its PyTorch specification drafts instead. This is many times slower, and a warning
    gives the reason; :func:`specdec_ext.ops.draft_head_refusal` returns it in advance.

    Args:
        head: a head from :func:`specdec_ext.heads.checkpoints.load_draft`.
        tree: the only shape to draft; None for :func:`default_tree`, or the shapes that the controller
            chooses.
        weights: format of the head's matrices. "int8" and "float8" halve the bytes that a head in bfloat16 or
            float16 reads, with slightly worse drafts; CUDA only. "same" keeps the target's dtype.

    Raises:
        TypeError: for a ``head`` or ``tree`` of another type.
        ValueError: for an unknown format; during a call, for a format that the op does not support there.
    """

    low_acceptance_hint = (
        "Check that the head was trained for exactly this target (not a fine-tuned or requantised version) "
        "and its tokenizer, that the tapped layers are right (two conventions of numbering differ by one; "
        "specdec_ext.evaluate.calibrate.calibrate decides), that norm_output is right, and that the sampling "
        "temperature is not too high."
    )

    def __init__(self, head: DraftHead, tree: TreeConfig | None = None, weights: str = "same"):
        if not isinstance(head, DraftHead):
            raise TypeError(
                f"head is a {type(head).__name__}; expected a DraftHead, as load_draft(path) returns it"
            )
        if tree is not None and not isinstance(tree, TreeConfig):
            raise TypeError(
                f"tree is a {type(tree).__name__}; expected a TreeConfig, such as TreeConfig(depth=5)"
            )
        weight_dtype(weights)  # raises for an unknown name
        self.head, self.tree, self.weights = head, tree, weights
        self._bound: BoundHead | None = None

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the layers that the head taps. The first call for a model checks that head and target fit.

        Raises:
            ValueError: head and target do not fit; the message names the difference.
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
        # Checked here, because a draft may never be requested.
        self._bound.check(self._tree, num_rows)
        prompt, first_positions = _prompt_elements(context, output.taps)
        self._pending = [prompt]
        self._unread = 0  # largest number of pending tokens of a row, without the prompt
        self._apart = 0  # number of pending steps that are not merged yet
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
        """Keep the features of the committed nodes; the head reads them at its next draft.

        If a row has ``MAX_UNREAD`` pending tokens, the head reads them now, so that no more are kept.
        """
        taps: Sequence[Tensor] = output.taps
        width = max(map(len, accepted.emitted))
        if accepted.path.shape[1] > 1:
            # The path of a chain or of a tree's first branch is nodes 0, 1, 2, ..., which need no gather.
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
        """Remove and merge the pending elements of all rows, or those of the last ``steps`` steps."""
        taken = self._pending[-steps:] if steps else self._pending
        self._pending = self._pending[: len(self._pending) - len(taken)]
        self._apart = 0
        return of_active_rows(taken, context.rows, len(context.generated))

    def propose(self, context: Context) -> DraftTree:
        if (
            max(context.remaining) < 2 or not self._pending
        ):  # the last token of a row needs no draft
            return DraftTree.root(context.roots)
        shape = context.shape if isinstance(context.shape, TreeConfig) else self._tree
        active = self._staged_rows(context)
        tokens, parents = self._draft(self._take_pending(context), context, shape)
        if active is not None:
            index = active.tensor.to(tokens.device)
            tokens, parents = tokens[index], parents[index]
        return DraftTree(tokens.to(context.device), parents.to(context.device))

    def _staged_rows(self, context: Context) -> Staged | None:
        """The active rows, or None if all rows of the batch are active."""
        if len(context.rows) == len(context.generated):
            return None
        if self._active is None or self._active.values != context.rows:
            self._active = context.staging.stage(list(context.rows))
        return self._active

    @inference_mode()
    def _draft(self, new: Elements, context: Context, tree: TreeConfig) -> tuple[Tensor, Tensor]:
        """Read ``new`` and draft for every row of the batch; returns ``(tokens, parents)``."""
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
    """Number of cache slots for drafted nodes: the depth times the width of the widest level."""
    if tree.choices is None:
        return tree.top_k * tree.depth
    return max(Counter(map(len, tree.choices)).values()) * tree.depth


def _prompt_elements(context: Context, taps: Sequence[Tensor]) -> tuple[Elements, list[int]]:
    """The elements of the prompt, and the position of each row's first element.

    Args:
        context: the prompt and each row's first token.
        taps: tapped hidden states, ``[rows, columns run, hidden]`` each, of the last columns of the prompt.
    """
    rows, first = list(context.rows), [[context.generated[row][-1]] for row in context.rows]
    if context.offset:
        # The tokens of embeddings are unknown, so the head begins at the last column of the prompt.
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
        # Paddings are left out: the features of each row move to the left.
        longest = int(valid[:, held:].sum(dim=1).max())
        order = (~valid[:, held:]).long().argsort(dim=1, stable=True)[:, :longest]
    texts = [context.prompt(row)[count:] for row, count in zip(rows, before, strict=True)]
    tokens = [text[1:] + last for text, last in zip(texts, first, strict=True)]
    return Elements(rows, tokens, taps, order), before
