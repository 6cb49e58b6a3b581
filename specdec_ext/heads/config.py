"""``DraftHead``: a draft head of the EAGLE family in the canonical form of this package.

Published formats differ in names, defaults and spellings; ``specdec_ext.heads.checkpoints`` reads them into
this form and writes them from it. The members of the family are options, not classes: EAGLE-2 is EAGLE-1 with
a dynamic tree, EAGLE 3.1 is EAGLE-3 with ``fc_norm`` and ``norm_output``, P-EAGLE is EAGLE-3 with
``mask_token_id``.

The forward pass of one element, which consists of the embedding e of token x[t+1] and the target's auxiliary
hidden states g of position t (Li et al. 2024, 2025; DeepSeek-AI 2024, "DeepSeek-V3", section 2.2):

    eagle1   h = fc(cat(e, g))                          every step; no norm before layer 0 and none at the end
    mtp      h = fc(cat(embedding_norm(e), hidden_norm(g)))    every step
             logits = lm_head(norm(out)); feedback = norm(out)
    eagle3   h = fc(fc_norm_i(input_norm(g)_i))         first step only, later ones take the feedback as h
             layer 0 attends over cat(input_layernorm(e), hidden_norm(h)), width 2 * hidden_size
             logits = lm_head(norm(out)); feedback = norm(out) if norm_output else out

The complete specification is :mod:`specdec_ext.reference.draft_head`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec_ext.display.text import byte_size
from specdec_ext.heads.weights import DraftWeights

Kind = Literal["eagle1", "eagle3", "mtp"]
# With their articles, for messages.
NAMES = {"eagle1": "an EAGLE-1", "eagle3": "an EAGLE-3", "mtp": "an MTP"}


@dataclass(frozen=True)
class HeadConfig:
    """Everything that determines the computation of a head; sizes are in elements.

    Attributes:
        kind: ``"eagle1"``, ``"eagle3"`` or ``"mtp"``.
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, num_layers: of the head's decoder
            layers.
        vocab_size: vocabulary size of the target.
        draft_vocab_size: rows of ``lm_head``; fewer than ``vocab_size`` if the head drafts only a part of the
            vocabulary.
        target_hidden_size: width of one auxiliary hidden state of the target.
        num_features: number of auxiliary hidden states that the head reads, concatenated.
        feature_layers: which hidden states these are (``Drafter.feature_layers``). None if the checkpoint
            does not say; then the default for the target's depth is used.
        has_fc: whether ``fc`` maps the auxiliary hidden states to ``hidden_size``; if False, they are used
            unchanged.
        max_positions: the number of positions that the head was trained for.
        rope_parameters: as in transformers: ``rope_type``, ``rope_theta``, and the fields of the type.
        sliding_windows: per layer the number of tokens that a token attends to, None for all.
        own_embedding, own_lm_head: False if the head uses the target's.
        fc_bias, qkv_bias, o_bias: whether these matrices have a bias.
        qk_norm: whether queries and keys are normed per head.
        fc_norm: whether each auxiliary hidden state has an RMS norm of its own before ``fc`` (EAGLE 3.1).
        norm_before_fc: whether the concatenated auxiliary hidden states are normed before ``fc``.
        norm_before_residual: whether the residual of the first layer is the normed hidden state.
        norm_output: whether the normed output is fed back (EAGLE 3.1, MTP).
        logit_scale: factor on the logits.
        mask_token_id: the token in P-EAGLE's parallel slots, None for other heads.
    """

    kind: Kind
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_features: int
    feature_layers: tuple[int, ...] | None = None
    has_fc: bool = True
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    sliding_windows: tuple[int | None, ...] = (None,)
    own_embedding: bool = False
    own_lm_head: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        """Refuse contradictory fields; :class:`DraftHead` compares the sizes with the tensors.

        Raises:
            ValueError: the message names the fields.
        """
        feeds_features_back = self.feeds_fc or not self.has_fc
        for holds, rule in (
            (
                len(self.sliding_windows) == self.num_layers,
                f"sliding_windows={self.sliding_windows} must have an entry for each of the "
                f"num_layers={self.num_layers} layers",
            ),
            (
                len(self.feature_layers or ()) in (0, self.num_features),
                f"feature_layers={self.feature_layers} must have num_features={self.num_features} entries",
            ),
            (
                self.num_heads % self.num_kv_heads == 0,
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}",
            ),
            (
                all(window is None or window > 0 for window in self.sliding_windows),
                f"sliding_windows={self.sliding_windows} must be positive, or None for all tokens",
            ),
            (
                "rope_theta" in self.rope_parameters,
                f"rope_parameters={dict(self.rope_parameters)} must have a rope_theta",
            ),
            (
                self.mask_token_id is None or 0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id={self.mask_token_id} must be in [0, vocab_size={self.vocab_size})",
            ),
            (
                self.has_fc or not self.feeds_fc,
                f"has_fc=False, but {NAMES[self.kind]} head has an fc",
            ),
            (
                self.norm_output or self.kind != "mtp",
                "norm_output=False, but an MTP head feeds its normed output back",
            ),
            (
                self.feature_width == self.hidden_size or not feeds_features_back,
                f"num_features={self.num_features} times target_hidden_size={self.target_hidden_size} must "
                f"equal hidden_size={self.hidden_size}, because {NAMES[self.kind]} head"
                f"{' without fc' if not self.feeds_fc else ''} feeds its own output back in place of the "
                "target's hidden states",
            ),
        ):
            if not holds:
                raise ValueError(rule)

    @property
    def feeds_fc(self) -> bool:
        """Whether ``fc`` reads the embedding, too, and the feedback in place of features in drafting."""
        return self.kind in ("eagle1", "mtp")

    @property
    def feature_width(self) -> int:
        """Width of the concatenated auxiliary hidden states."""
        return self.num_features * self.target_hidden_size

    def resolved_feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Return ``feature_layers``, or the default for a target of n = ``num_target_layers`` layers.

        The default is the last hidden state if ``num_features`` is 1, else EAGLE-3's inputs of layers 2,
        n // 2 and n - 3.
        """
        if self.feature_layers is not None:
            return self.feature_layers
        if self.num_features == 1:
            return (-1,)
        return 2, num_target_layers // 2, num_target_layers - 3

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of a head with this config; it has no others."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, hidden)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (self.feature_width,)
        if self.fc_norm:
            for index in range(self.num_features):
                shapes[f"fc_norm.{index}.weight"] = (self.target_hidden_size,)
        if self.kind == "mtp":
            shapes |= {"embedding_norm.weight": (hidden,), "hidden_norm.weight": (hidden,)}
        if self.has_fc:
            embedding = hidden if self.feeds_fc else 0
            shapes["fc.weight"] = (hidden, embedding + self.feature_width)
            if self.fc_bias:
                shapes["fc.bias"] = (hidden,)
        for index in range(self.num_layers):
            first = index == 0
            width = 2 * hidden if first and self.kind == "eagle3" else hidden
            layer: dict[str, tuple[int, ...]] = {}
            if first and self.kind == "eagle3":
                layer["hidden_norm.weight"] = (hidden,)
            if not (first and self.kind == "eagle1"):
                layer["input_layernorm.weight"] = (hidden,)
            for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                layer[f"self_attn.{name}.weight"] = (rows, width)
                if self.qkv_bias:
                    layer[f"self_attn.{name}.bias"] = (rows,)
            layer["self_attn.o_proj.weight"] = (hidden, queries)
            if self.o_bias:
                layer["self_attn.o_proj.bias"] = (hidden,)
            if self.qk_norm:
                layer["self_attn.q_norm.weight"] = (self.head_dim,)
                layer["self_attn.k_norm.weight"] = (self.head_dim,)
            layer["post_attention_layernorm.weight"] = (hidden,)
            layer["mlp.gate_proj.weight"] = (inner, hidden)
            layer["mlp.up_proj.weight"] = (inner, hidden)
            layer["mlp.down_proj.weight"] = (hidden, inner)
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        if self.kind != "eagle1":
            shapes["norm.weight"] = (hidden,)
        if self.own_lm_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
        if self.draft_vocab_size != self.vocab_size:
            shapes["draft_to_target"] = (self.draft_vocab_size,)
        if self.mask_token_id is not None:
            shapes["mask_hidden"] = (self.feature_width if self.has_fc else hidden,)
        return shapes


@dataclass(frozen=True, repr=False)
class DraftHead(DraftWeights):
    """Config and tensors of an EAGLE-family head.

    Attributes:
        config: determines the computation.
        tensors, source, record: see :class:`DraftWeights`.
    """

    config: HeadConfig
    source: str = "a head made in memory"

    @property
    def _kind(self) -> str:
        if self.config.kind == "eagle1":
            return "EAGLE-1 head"
        if self.config.kind == "mtp":
            return "MTP head"
        if self.config.mask_token_id is not None:
            return "P-EAGLE head"
        return f"EAGLE{' 3.1' if self.config.fc_norm and self.config.norm_output else '-3'} head"

    def _facts(self) -> Iterable[tuple[str, str]]:
        config, layers = self.config, self.config.feature_layers
        elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        yield "keys and values", f"{byte_size(elements * self._dtype.itemsize)} per token"
        read = self.record.layers_from
        if layers:
            read = f"{', '.join(map(str, layers))} ({read})"
        yield "hidden states read", read
