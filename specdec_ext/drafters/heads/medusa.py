"""``MedusaDrafter``: Medusa heads (Cai et al. 2024), one for each of the next tokens.

The heads do not see each other's guesses, so all nodes of a level have the same best children, whatever their
paths. The tree is a chain, a static tree, or the best nodes by the product of probabilities. The last one is
the selection of EAGLE-2 (Li et al. 2024); it is exact here, because no path changes a distribution.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.heads.bound_head import draft_home
from specdec_ext.drafters.heads.coupling import RowNoise, check_temperature, draft_noise
from specdec_ext.drafters.heads.growth import grow_tree
from specdec_ext.drafters.heads.root_states import RootStates
from specdec_ext.heads.checkpoints.pair import check_pair
from specdec_ext.heads.medusa import MedusaHeads, likely_choices
from specdec_ext.models import TargetOutput
from specdec_ext.tree.config import Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted


def default_tree(device: torch.device, num_heads: int) -> TreeConfig:
    """The shape that is drafted by default: a static tree of 16 nodes on the CPU, of 64 elsewhere.

    It is the best tree for heads whose accuracy is 60 % for the first guess of the first head, a fifth less
    for each further head, and a third of that for each further rank. These numbers are assumed. For heads of
    known accuracy, :func:`specdec_ext.heads.medusa.likely_choices` makes a better tree.
    """
    accuracies = [[0.6 * 0.8**head * 3.0**-rank for rank in range(10)] for head in range(num_heads)]
    return TreeConfig(choices=likely_choices(accuracies, 16 if device.type == "cpu" else 64))


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads that were trained for the target.

    The heads compute in the target's dtype, or in float32 if that is float16 on the CPU. In a call that
    samples, drafts are coupled, as in :class:`specdec_ext.HeadDrafter`.

    Args:
        heads: heads from :func:`specdec_ext.heads.checkpoints.load_draft`.
        tree: the only shape to draft, with at most one level per head; None for :func:`default_tree`, or the
            shapes that the controller chooses.
        temperature: the temperature of drafts in a call that samples, relative to the one that the call
            suggests (``Context.noise``); 0 drafts without noise, as in greedy decoding.

    Raises:
        ValueError: ``tree`` has more levels than there are heads, or ``temperature`` is out of range.
    """

    joinable = True
    low_acceptance_hint = (
        "Check that the heads were trained for exactly this target (not a fine-tuned or requantised version) "
        "and its tokenizer, and that the sampling temperature is not too high."
    )

    def __init__(
        self,
        heads: MedusaHeads,
        tree: TreeConfig | None = None,
        temperature: float = 1.0,
    ):
        check_temperature(temperature)
        self.heads, self.tree, self.temperature = heads, tree, temperature
        self._home: tuple[torch.device, torch.dtype] | None = None
        self._checked: weakref.ref[PreTrainedModel] | None = None
        if tree is not None:
            _check_tree(tree, heads)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the index of the last hidden state, and move the heads to the target's device and dtype.

        The first call for a model checks that heads and target fit.

        Raises:
            ValueError: heads and target do not fit; the message names the difference.
        """
        if self._checked is None or self._checked() is not model:
            for doubt in check_pair(self.heads, model):
                warnings.warn(doubt, stacklevel=2)
            self._checked = weakref.ref(model)
        home = draft_home(model)
        if self._home != home:
            self._heads, self._home = self.heads.to(*home), home
        return (-1,)

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        self._tree = self.tree or default_tree(model.device, self.heads.config.num_heads)
        self._states = RootStates()
        self.join(context, context.rows, output)

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        self._noise = draft_noise(context, self.temperature, context.device)
        self._states.join(context, rows, output)

    def shapes(self, context: Context) -> Sequence[Shape]:
        if self.tree:
            return [self.tree]
        chains = [TreeConfig(depth=depth) for depth in range(1, self.heads.config.num_heads + 1)]
        return [*chains, self._tree]

    @property
    def identity(self) -> Hashable:
        return super().identity, self.heads.source, self.temperature

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        self._states.commit(context, accepted, output)

    def propose(self, context: Context) -> DraftTree:
        if max(context.remaining) < 2:  # the last token of a row needs no draft
            return DraftTree.root(context.roots)
        states = self._states.of_rows(context.rows)
        tree = context.shape if isinstance(context.shape, TreeConfig) else self._tree
        _check_tree(tree, self.heads)
        log_probs, tokens = self._guesses(states, tree, context)
        heads = iter(range(tree.depth))

        def guess(parents: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
            head = next(heads)  # one for each level
            shape = -1, nodes.shape[1], -1
            return log_probs[:, head, None].expand(shape), tokens[:, head, None].expand(shape)

        return grow_tree(context.roots, tree, guess)

    def _guesses(self, states: Tensor, tree: TreeConfig, context: Context) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids of the best guesses, ``[rows, heads, ranks]``, best first.

        With noise, the log-probabilities are given the noise, as in the op ``draft_head``.
        """
        noise = RowNoise.of(context, self._noise)
        config, tensors = self._heads.config, self._heads.tensors
        product = ops.linear if states.device.type == "cpu" else linear
        states = states.to(tensors["lm_heads.0.weight"].dtype)
        best = []
        for head in range(tree.depth):
            x = states
            for layer in range(config.num_layers):
                block = f"blocks.{head}.{layer}"
                x = x + silu(product(x, tensors[f"{block}.weight"], tensors.get(f"{block}.bias")))
            lm_head = tensors[f"lm_heads.{0 if config.shared_lm_head else head}.weight"]
            logits = product(x, lm_head, None)
            if noise is not None:
                ids = tensors.get("draft_to_target")
                logits = ops.couple_logits(logits, noise.noise, noise.positions + (1 + head), ids)
            log_probs = logits.float().log_softmax(dim=-1)
            best.append(log_probs.topk(min(tree.top_k, config.draft_vocab_size), dim=-1))
        ids = torch.stack([each.indices for each in best], dim=1)
        if "draft_to_target" in tensors:
            ids = tensors["draft_to_target"][ids]
        return torch.stack([each.values for each in best], dim=1), ids


def _check_tree(tree: TreeConfig, heads: MedusaHeads) -> None:
    if tree.depth > heads.config.num_heads:
        raise ValueError(
            f"tree has depth {tree.depth}, but {heads.source} has {heads.config.num_heads} heads, one for "
            "each level; pass a smaller depth"
        )
