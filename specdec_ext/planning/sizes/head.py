"""``HeadMemory``: the memory of a draft head, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from specdec_ext.drafters.heads.bound_head import draft_dtype
from specdec_ext.drafters.heads.head import default_tree
from specdec_ext.drafters.heads.head_cache import STEP, draft_slots
from specdec_ext.drafters.heads.medusa import default_tree as medusa_tree
from specdec_ext.drafters.heads.unread import MAX_PENDING, MERGED_NODES
from specdec_ext.heads.config import HeadConfig
from specdec_ext.heads.medusa import MedusaConfig
from specdec_ext.ops.packed_head import reads_panels
from specdec_ext.planning.sizes.language_model import LanguageModel
from specdec_ext.tree.config import TreeConfig

DRAFT_TO_TARGET = "draft_to_target"
_IDS = torch.int64
_ANGLES = torch.float32


@dataclass(frozen=True)
class HeadMemory:
    """A draft head without weights.

    Attributes:
        config: its config.
        target: the target.
        device: the target's device.
        weights_dtype: dtype of the matrices; that of the target, or one of 8 bits.
    """

    config: HeadConfig | MedusaConfig
    target: LanguageModel
    device: torch.device
    weights_dtype: torch.dtype | None = None

    def check(self, source: str) -> None:
        """Refuse a head that does not fit to the target.

        Raises:
            ValueError: the target has another width, or codes in place of an output matrix that is shared.
        """
        config, hidden = self.config, self.target.config.hidden_size
        width = config.hidden_size
        if isinstance(config, HeadConfig):
            width = config.target_hidden_size
        if width != hidden:
            raise ValueError(
                f"{source} reads hidden states of width {width}, but those of {self.target.source} have "
                f"{hidden}; pass a head of this target"
            )
        if "lm_head" in self._used and not self.target.has_plain_lm_head:
            raise ValueError(
                f"{source} has no lm_head of its own, and that of {self.target.source} is quantised; leave "
                "the lm_head as it is (quantize(..., head=None)), or use a head with its own"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the head computes."""
        return draft_dtype(self.device, self.target.dtype)

    def default_tree(self, rows: int) -> TreeConfig:
        """The shape that is drafted by default."""
        if isinstance(self.config, MedusaConfig):
            return medusa_tree(self.device, self.config.num_heads)
        return default_tree(self.device, rows, self.config.mask_token_id is not None)

    @property
    def weights(self) -> int:
        """Bytes of the head's own weights, and of copies of the target's that it needs."""
        shapes, matrices = self.config.tensor_shapes(), self.weights_dtype or self.dtype
        own = 0
        for name, shape in shapes.items():
            is_matrix = len(shape) > 1 and name != "embed_tokens.weight"
            dtype = matrices if is_matrix else self.dtype
            own += prod(shape) * (_IDS if name == DRAFT_TO_TARGET else dtype).itemsize
        return own + sum(self._copied.values())

    @property
    def _used(self) -> dict[str, int]:
        """Bytes of the target's weights that the head uses, by their name."""
        config, size = self.config, self.target.dtype.itemsize
        if isinstance(config, MedusaConfig):
            return {}
        used = {}
        if not config.own_embedding:
            used["embedding"] = self.target.vocab_size * config.hidden_size * size
        if not config.own_lm_head:
            used["lm_head"] = config.draft_vocab_size * config.hidden_size * size
        return used

    @property
    def shared(self) -> dict[str, int]:
        """Bytes of the target's weights that the head uses in place, by their name."""
        return {name: size for name, size in self._used.items() if name not in self._copied}

    @property
    def _copied(self) -> dict[str, int]:
        """Bytes of the head's copies of weights of the target: lm_head, in panels on the CPU or in 8 bits."""
        size = self._used.get("lm_head")
        if size is None or (self.weights_dtype is None and not reads_panels(self.device)):
            return {}
        matrices = self.weights_dtype or self.target.dtype
        return {"lm_head": size * matrices.itemsize // self.target.dtype.itemsize}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of the head's keys and values of one token."""
        if isinstance(self.config, MedusaConfig):
            return 0
        layers, heads = self.config.num_layers, self.config.num_kv_heads
        return 2 * layers * heads * self.config.head_dim * self.dtype.itemsize

    def cache(self, rows: int, tokens: int, tree: TreeConfig) -> int:
        """Bytes of the head's cache and rope tables in a text of ``tokens`` tokens per row."""
        if isinstance(self.config, MedusaConfig):
            return 0
        slots = tokens + draft_slots(tree) + STEP
        tables = (tokens + tree.depth + STEP) * self.config.head_dim * _ANGLES.itemsize
        return rows * slots * self.bytes_per_slot + tables

    def features(self, rows: int, tokens: int) -> int:
        """Bytes of the target's auxiliary hidden states of ``tokens`` tokens per row."""
        width = self.config.hidden_size
        if isinstance(self.config, HeadConfig):
            width = self.config.feature_width
        return rows * tokens * width * self.target.dtype.itemsize

    def pending(self, rows: int) -> int:
        """Bytes of the auxiliary hidden states that steps may keep while nothing is drafted."""
        if isinstance(self.config, MedusaConfig):
            return 0
        return self.features(rows, MERGED_NODES + MAX_PENDING)
