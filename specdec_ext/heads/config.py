"""``DraftHead``: a draft head of the EAGLE family in the one form that this package computes with.

Published formats differ in names, defaults and spellings; ``specdec_ext.heads.checkpoints`` reads them into
this form and writes them from it. EAGLE-2 is EAGLE-1 with a dynamic tree, EAGLE 3.1 is EAGLE-3 with
``fc_norm`` and ``norm_output``, P-EAGLE is EAGLE-3 with ``mask_token_id``: options, not classes.

The forward of one element (embedding e of token x[t+1], features g of position t; Li et al. 2024, 2025):

    eagle1   h = fc(cat(e, g))                          every step; no norm before layer 0 and none at the end
    eagle3   h = fc(fc_norm_i(input_norm(g)_i))         first step only, later ones take the feedback as h
             layer 0 attends over cat(input_layernorm(e), hidden_norm(h)), width 2 * hidden_size
             logits = lm_head(norm(out)); feedback = norm(out) if norm_output else out

See :mod:`specdec_ext.reference.draft_head` for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec_ext.heads.weights import DraftWeights


@dataclass(frozen=True)
class HeadConfig:
    """Everything that decides what a head computes; sizes in elements.

    Attributes:
        kind: ``"eagle1"`` or ``"eagle3"``.
        vocab_size: of the target.
        draft_vocab_size: rows of ``lm_head``; fewer than ``vocab_size`` where the head drafts a part of it.
        target_hidden_size: width of one tapped feature.
        num_features: how many are tapped, side by side.
        feature_layers: the tapped hidden states (``Drafter.feature_layers``), or None where the checkpoint
            does not say: the default for the target's depth.
        has_fc: whether ``fc`` maps the features to ``hidden_size``. False: they are taken as they are.
        rope_parameters: as in transformers: ``rope_type``, ``rope_theta``, and what the type needs.
        sliding_windows: per layer, tokens that are seen, None for all.
        own_embedding, own_lm_head: False where the target's is used.
        norm_before_residual: the first layer's residual is the normed hidden state.
        norm_output: the normed output is fed back (EAGLE 3.1).
        logit_scale: factor on the logits.
        mask_token_id: of P-EAGLE's parallel slots, else None.
    """

    kind: Literal["eagle1", "eagle3"]
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
        """Refuse what contradicts itself; sizes are compared with the tensors by :class:`DraftHead`.

        Raises:
            ValueError: naming the fields.
        """
        feeds_features_back = self.kind == "eagle1" or not self.has_fc
        for holds, rule in (
            (
                len(self.sliding_windows) == self.num_layers,
                f"sliding_windows={self.sliding_windows} must have an entry for each of the "
                f"num_layers={self.num_layers} layers",
            ),
            (
                len(self.feature_layers or ()) in (0, self.num_features),
                f"feature_layers={self.feature_layers} must be num_features={self.num_features} layers",
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
            (self.has_fc or self.kind != "eagle1", "an EAGLE-1 head has an fc; has_fc is False"),
            (
                self.feature_width == self.hidden_size or not feeds_features_back,
                f"num_features={self.num_features} of target_hidden_size={self.target_hidden_size} must have "
                f"the width hidden_size={self.hidden_size}, which an EAGLE-1 head or one without fc feeds "
                "back in their place",
            ),
        ):
            if not holds:
                raise ValueError(rule)

    @property
    def feature_width(self) -> int:
        return self.num_features * self.target_hidden_size

    def resolved_feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """``feature_layers``, or the default: a single one is the last hidden state, three are EAGLE-3's, the
        inputs of layers 2, n // 2 and n - 3."""
        if self.feature_layers is not None:
            return self.feature_layers
        if self.num_features == 1:
            return (-1,)
        return 2, num_target_layers // 2, num_target_layers - 3

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a head of this config has, and no other."""
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
        if self.has_fc:
            embedding = hidden if self.kind == "eagle1" else 0
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
        if self.kind == "eagle3":
            shapes["norm.weight"] = (hidden,)
        if self.own_lm_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
        if self.draft_vocab_size != self.vocab_size:
            shapes["draft_to_target"] = (self.draft_vocab_size,)
        if self.mask_token_id is not None:
            shapes["mask_hidden"] = (self.feature_width if self.has_fc else hidden,)
        return shapes


@dataclass(frozen=True)
class HeadRecord:
    """What a checkpoint tells about a head, or about Medusa heads, beside what they compute.

    Attributes:
        format: of the checkpoint, in words.
        layers_from: what ``HeadConfig.feature_layers`` was taken from, in words.
        target_name: the target it was made for.
        target_revision: commit of that target on the hub.
        target_fingerprint: of that target's weights (``checkpoints.weights_fingerprint``).
        tokenizer_fingerprint: of that target's tokenizer (``checkpoints.tokenizer_fingerprint``).
        ambiguous: fields of ``HeadConfig`` whose reading is a guess, as the checkpoint leaves two open.
        tied: its ``lm_head`` is an embedding that it shares with the target.
        ignored: tensors of the file that this head has no use for.
    """

    format: str = "none"
    layers_from: str = "HeadConfig"
    target_name: str | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None
    tokenizer_fingerprint: str | None = None
    ambiguous: tuple[str, ...] = ()
    tied: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class DraftHead(DraftWeights):
    """A head's config and tensors.

    Attributes:
        config: what it computes.
        record: what its checkpoint told about it.
    """

    config: HeadConfig
    source: str = "a head made in memory"
    record: HeadRecord = HeadRecord()
