"""``HeadDrafter``: draft heads of the EAGLE family (EAGLE-1, EAGLE-2, EAGLE-3, EAGLE 3.1 and P-EAGLE).

A head reads the target's hidden states of the text and predicts the next ones (Li et al. 2024, "EAGLE" and
"EAGLE-2"; Li et al. 2025, "EAGLE-3"). The formulas are in :mod:`specdec_ext.reference.draft_head`.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import DraftAhead, Drafter
from specdec_ext.drafters.heads.bound_head import BoundHead
from specdec_ext.drafters.heads.coupling import check_temperature, draft_noise
from specdec_ext.drafters.heads.head_cache import HeadCache, draft_slots
from specdec_ext.drafters.heads.unread import PendingFeatures, UnreadText
from specdec_ext.heads.checkpoints.pair import check_pair
from specdec_ext.heads.config import DraftHead
from specdec_ext.models import TargetOutput
from specdec_ext.models.base import CommittedRound, FixedDraft
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.ops.quantise import weight_dtype
from specdec_ext.transfer import Staged
from specdec_ext.tree.config import Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted


@cache
def default_tree(device: torch.device, num_rows: int, parallel: bool = False) -> TreeConfig:
    """The shape that is drafted if the controller does not choose one of :func:`offered_shapes`.

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


@cache
def offered_shapes(default: TreeConfig) -> tuple[TreeConfig, ...]:
    """Chains of up to seven levels, or as many as ``default`` has, and ``default`` itself if it is a tree."""
    chains = tuple(TreeConfig(depth=depth) for depth in range(1, max(7, default.depth) + 1))
    return chains if default in chains else (*chains, default)


class HeadDrafter(Drafter):
    """Drafts with a head that was trained for the target.

    The head computes in the target's dtype, or in float32 if that is float16 on the CPU. Weights shared with
    the target are used without the target's further operations, such as a factor on embeddings (Gemma), a
    bias or a soft cap of logits. The rope tables are extended to the length of the text; beyond the head's
    training length, drafts may become worse. A cache of the caller contains no features of its text, so the
    head begins after it.

    In a call that samples, drafts are coupled: they share the noise of the verification
    (:func:`specdec_ext.ops.couple_logits`), so that more of them are accepted.

    A draft is one call of the op ``draft_head``, which is one launch on CUDA. If the op does not support the
    head, tree or batch, its PyTorch specification drafts instead. This is many times slower, and a warning
    gives the reason; :func:`specdec_ext.ops.draft_head_refusal` returns it in advance.

    Args:
        head: a head from :func:`specdec_ext.heads.checkpoints.load_draft`.
        tree: the only shape to draft; None for :func:`default_tree`, or the shapes that the controller
            chooses.
        weights: format of the head's matrices. "int8" has a half or a quarter of the bytes of the target's
            dtype, for slightly worse drafts; on the CPU they are faster. "float8" is for CUDA. "same" keeps
            the target's dtype. "auto" is "int8" on the CPU and "same" on CUDA.
        temperature: the temperature of drafts in a call that samples, relative to the one that the call
            suggests (``Context.noise``); 0 drafts without noise, as in greedy decoding.

    Raises:
        TypeError: for a ``head`` or ``tree`` of another type.
        ValueError: for an unknown format or a ``temperature`` out of range; during a call, for a format that
            the op does not support there.
    """

    joinable = True
    low_acceptance_hint = (
        "Check that the head was trained for exactly this target (not a fine-tuned or requantised version) "
        "and its tokenizer, that the feature layers are right (two conventions of numbering differ by one; "
        "specdec_ext.evaluate.calibrate.calibrate decides), that norm_output is right, and that the sampling "
        "temperature is not too high."
    )

    def __init__(
        self,
        head: DraftHead,
        tree: TreeConfig | None = None,
        weights: str = "auto",
        temperature: float = 1.0,
    ):
        if not isinstance(head, DraftHead):
            raise TypeError(
                f"head is a {type(head).__name__}; expected a DraftHead, as load_draft(path) returns it"
            )
        if tree is not None and not isinstance(tree, TreeConfig):
            raise TypeError(
                f"tree is a {type(tree).__name__}; expected a TreeConfig, such as TreeConfig(depth=5)"
            )
        if weights != "auto":
            weight_dtype(weights)  # raises for an unknown name
        check_temperature(temperature)
        self.head, self.tree, self.weights = head, tree, weights
        self.temperature = temperature
        self._bound: BoundHead | None = None

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the feature layers of the head. The first call for a model checks that head and target fit.

        If the head's checkpoint is ambiguous, that call calibrates it
        (:func:`specdec_ext.evaluate.calibrate.calibrated`).

        Raises:
            ValueError: head and target do not fit; the message names the difference.
        """
        if self._bound is None or not self._bound.serves(model):
            if self.head.record.ambiguous:
                # Imported here, because it drafts with bound heads itself.
                from specdec_ext.evaluate.calibrate import calibrated

                self.head = calibrated(self.head, model)
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
        self._unread = UnreadText(num_rows)
        self._cache: HeadCache | None = None
        self._resting = False
        self._active: Staged | None = None
        # The last round that the head read on the device.
        self._read_ahead: CommittedRound | None = None
        self.join(context, context.rows, output)

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        assert self._bound is not None
        self._noise = draft_noise(context, self.temperature, self._bound.device)
        if self._resting:
            return
        self._unread.join(context, rows, output.aux_hidden_states)
        if self._cache is not None:
            self._cache.clear(rows)
            self._cache.set_noise(self._noise)

    def shapes(self, context: Context) -> Sequence[Shape]:
        return [self.tree] if self.tree else offered_shapes(self._tree)

    @property
    def identity(self) -> Hashable:
        return super().identity, self.head.source, self.weights, self.temperature

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the features of this step; the head reads those of committed nodes at its next draft.

        If a row has ``MAX_PENDING`` pending tokens, the head reads them now, so that no more are kept.
        """
        if self._resting:
            return
        if accepted.committed is not None and accepted.committed is self._read_ahead:
            assert self._cache is not None
            counts = [0] * len(context.generated)
            for row, emitted in zip(context.rows, accepted.emitted, strict=True):
                counts[row] = len(emitted)
            self._cache.count(counts)
        elif self._unread.add(context, accepted, output):
            self._draft(self._take_unread(context), context, TreeConfig(depth=1))

    def rest(self, resting: bool) -> None:
        """Begin a rest: forget the text, because reading it later costs more than it brings."""
        self._resting = resting
        if resting:
            self._unread.forget()
            self._cache = None

    def _take_unread(self, context: Context) -> PendingFeatures:
        """Remove and join the unread elements of all rows; there is a cache for them afterwards."""
        assert self._bound is not None
        if self._cache is not None and (latest := self._unread.take_latest(context)) is not None:
            return latest
        new = self._unread.take(context)
        if self._cache is None:
            self._cache = self._bound.cache_for(self, len(context.generated))
            self._cache.begin(self._noise)
        if 0 in self._cache.lengths:
            for row, position in zip(context.rows, context.root_positions, strict=True):
                if not self._cache.lengths[row]:
                    # A row's last element has the features of the token before its root.
                    self._cache.first_positions[row] = position - new.counts[row]
        return new

    def propose(self, context: Context) -> DraftTree:
        if not self._unread or max(context.remaining) < 2:  # the last token of a row needs no draft
            return DraftTree.root(context.roots)
        active = self._staged_rows(context)
        tokens, parents = self._draft(self._take_unread(context), context, self._shape(context))
        if active is not None:
            index = active.tensor.to(tokens.device)
            tokens, parents = tokens[index], parents[index]
        return DraftTree(tokens.to(context.device), parents.to(context.device))

    def nodes_ahead(self, last: CommittedRound, context: Context) -> int | None:
        if self._unread or self._resting or self._cache is None or last.new_features is None:
            return None
        assert self._bound is not None
        return self._shape(context).num_nodes if self._bound.device == context.device else None

    def prepare_ahead(self, last: CommittedRound, context: Context) -> FixedDraft | str:
        bound, cache, shape = self._bound, self._cache, self._shape(context)
        assert bound is not None and cache is not None
        width = self._width_ahead(last, shape)
        cache.reserve([width] * cache.num_rows, draft_slots(shape), shape.depth)
        cache.stage(context.rows, context.staging)
        self._read_ahead = last
        if reason := bound.refusal(shape, cache.num_rows):
            return f"the op draft_head can't draft this: {reason}"
        key = HeadDrafter, shape, width, self._is_everyone(context), cache.noise is None
        return FixedDraft(key, (bound, *cache.memory))

    def _width_ahead(self, last: CommittedRound, shape: TreeConfig) -> int:
        """Number of columns of new elements that a draft ahead reads: a power of two, for few recordings."""
        return 1 << (max(last.tree.num_nodes, shape.num_nodes or 1) - 1).bit_length()

    def draft_ahead(self, last: CommittedRound, context: Context) -> DraftAhead:
        cache, shape = self._cache, self._shape(context)
        assert cache is not None and last.new_features is not None
        width, active = self._width_ahead(last, shape), len(context.rows)
        texts, features = last.new_tokens[:, :width], last.new_features[:, :width]
        numbers = cache.after_round(last.numbers)
        if self._is_everyone(context):
            return DraftAhead(DraftTree(*self._run(shape, texts, features, *numbers)))
        # Rows keep their places in the cache of the head; a row that has ended gets nothing new.
        texts, features = cache.of_all_rows(texts), cache.of_all_rows(features)
        drafted = self._run(shape, texts, features, *numbers)
        return DraftAhead(DraftTree(*(cache.of_active_rows(each, active) for each in drafted)))

    def _is_everyone(self, context: Context) -> bool:
        """Whether the active rows are all rows of the batch, in their order."""
        return context.rows == list(range(len(context.generated)))

    def _shape(self, context: Context) -> TreeConfig:
        return context.shape if isinstance(context.shape, TreeConfig) else self._tree

    def _staged_rows(self, context: Context) -> Staged | None:
        """The active rows, or None if these are all rows of the batch, in their order."""
        if self._is_everyone(context):
            return None
        if self._active is None or self._active.values != context.rows:
            self._active = context.staging.stage(list(context.rows))
        return self._active

    def _draft(
        self, new: PendingFeatures, context: Context, tree: TreeConfig
    ) -> tuple[Tensor, Tensor]:
        """Read ``new`` and draft for every row of the batch; returns ``(tokens, parents)``."""
        bound, cache = self._bound, self._cache
        assert bound is not None and cache is not None
        cache.reserve(new.counts, draft_slots(tree), tree.depth)
        width = max(map(len, new.tokens))
        if new.committed is not None:
            cache.stage(context.rows, context.staging)
            texts = new.committed.new_tokens[:, :width]
            numbers: Sequence[Tensor] = cache.after_round(new.committed.numbers)
        else:
            # Rows that have not begun have no root, and nothing is read or drafted for them.
            roots = [generated[-1] if generated else 0 for generated in context.generated]
            per_row = context.staging.stage([new.counts, cache.lengths, cache.positions(), roots])
            padded = context.staging.stage(
                [[*row, *[0] * (width - len(row))] for row in new.tokens]
            )
            texts = padded.tensor.to(bound.device)
            numbers = per_row.tensor.to(bound.device).unbind()
        drafted = self._run(tree, texts, new.features, *numbers)
        cache.count(new.counts)
        return drafted

    @inference_mode()
    def _run(
        self, tree: TreeConfig, texts: Tensor, features: Tensor, *numbers: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read new elements and draft after the last tokens; returns ``(tokens, parents)``.

        The arguments are those of ``ops.draft_head``, ``numbers`` from ``counts`` on. The host has to count
        the elements itself.
        """
        bound, cache = self._bound, self._cache
        assert bound is not None and cache is not None
        tokens, parents, _ = bound.draft(
            tree,
            cache.cosines,
            cache.sines,
            cache.keys,
            cache.values,
            texts,
            features.to(bound.device, bound.dtype),
            *numbers,
            noise=cache.noise,
        )
        return tokens, parents
