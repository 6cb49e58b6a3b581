"""``AssistantDrafter``: drafts with an assistant model that attends to the target's own keys and values.

Such an assistant (transformers' Gemma-4 assistants) is a small decoder without a cache. It reads the
embedding of a token and a hidden state, and all of its layers attend to the keys and values of the target's
last layer of the same type. The first hidden state is the target's own, of the token before the root; the
next ones are the assistant's, of the node above. The position of every node is that of the root.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.heads.coupling import (
    RowNoise,
    best_children,
    check_temperature,
    draft_noise,
)
from specdec_ext.drafters.heads.growth import grow_tree
from specdec_ext.drafters.heads.head import default_tree, offered_shapes
from specdec_ext.drafters.heads.root_states import RootStates
from specdec_ext.models import TargetOutput
from specdec_ext.models.passes.masks import SUPPORTED_IMPLEMENTATIONS
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.pretrained import vocab_size
from specdec_ext.tree.config import Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
SLIDING = "sliding_attention"


def is_assistant(model: PreTrainedModel) -> bool:
    """Whether a model is an assistant that attends to the target's keys and values."""
    return model.config.model_type in MODEL_TYPES


class AssistantDrafter(Drafter):
    """Drafts with a Gemma-4 assistant, as transformers' ``generate(assistant_model=assistant)``.

    The assistant attends to committed tokens only. (transformers 5.23 leaves it one rejected token.) In a
    call that samples, drafts are coupled, as in :class:`specdec_ext.HeadDrafter`.

    Args:
        model: a ``Gemma4AssistantForCausalLM`` or ``Gemma4UnifiedAssistantForCausalLM``, in the dtype of the
            target and on its device.
        tree: the only shape to draft; None for the shapes that the controller chooses.
        temperature: the temperature of drafts in a call that samples, relative to the one that the call
            suggests (``Context.noise``); 0 drafts without noise, as in greedy decoding.

    Raises:
        TypeError: ``model`` is no such assistant.
        ValueError: ``temperature`` is out of range, or the assistant's checkpoint is damaged; when a call
            begins, the assistant does not fit the target.
    """

    joinable = True
    low_acceptance_hint = (
        "Check that the assistant was trained for exactly this target (not a fine-tuned or requantised "
        "version), and that the sampling temperature is not too high."
    )

    def __init__(
        self, model: PreTrainedModel, tree: TreeConfig | None = None, temperature: float = 1.0
    ):
        if not (isinstance(model, PreTrainedModel) and is_assistant(model)):
            raise TypeError(
                f"model is a {type(model).__name__}; expected a Gemma-4 assistant "
                f"({' or '.join(MODEL_TYPES)}). Other draft models draft with DraftModelDrafter(model)"
            )
        check_temperature(temperature)
        _check_ordering(model)
        self.model, self.tree, self.temperature = model, tree, temperature

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the index of the last hidden state.

        Raises:
            ValueError: the assistant does not fit the target.
        """
        _check_fit(self.model, model)
        return (-1,)

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        self._embedding = model.get_input_embeddings()
        self._vocab_size = vocab_size(model)
        layers = _layers_with_keys(model.config.get_text_config(decoder=True))
        config = self.model.config.get_text_config()
        # Layer type -> layer of the target, and number of tokens that the assistant sees.
        self._keys = {
            kind: (layers[kind], config.sliding_window + 1 if kind == SLIDING else None)
            for kind in config.layer_types
        }
        self._tree = self.tree or default_tree(model.device, len(context.rows))
        self._states = RootStates()
        self.join(context, context.rows, output)

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        self._noise = draft_noise(context, self.temperature, context.device)
        self._states.join(context, rows, output)

    def shapes(self, context: Context) -> Sequence[Shape]:
        return [self.tree] if self.tree else offered_shapes(self._tree)

    @property
    def identity(self) -> Hashable:
        return super().identity, self.model.config._name_or_path, self.temperature

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        self._states.commit(context, accepted, output)

    def propose(self, context: Context) -> DraftTree:
        if max(context.remaining) < 2:  # the last token of a row needs no draft
            return DraftTree.root(context.roots)
        tree = context.shape if isinstance(context.shape, TreeConfig) else self._tree
        with inference_mode():
            draft = _Draft(self, context, self._states.of_rows(context.rows), tree.top_k)
            return grow_tree(context.roots, tree, draft)


class _Draft:
    """The growth of one batch of trees, as :class:`specdec_ext.drafters.heads.growth.Guess`."""

    def __init__(self, drafter: AssistantDrafter, context: Context, states: Tensor, ranks: int):
        assert context.committed_keys is not None
        self._drafter, self._ranks = drafter, ranks
        self._states = states[:, None]  # ``[rows, nodes, hidden]``, of the last level
        self._noise = RowNoise.of(context, drafter._noise)
        self._positions = context.staging.stage(context.root_positions).tensor[:, None]
        self._level = 0
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}
        self._masks: dict[str, Tensor] = {}
        for kind, (layer, reach) in drafter._keys.items():
            keys, values, visible = context.committed_keys(layer, reach)
            self._shared[kind] = keys.to(states.device), values.to(states.device)
            mask = torch.zeros(visible.shape, dtype=keys.dtype, device=states.device)
            mask.masked_fill_(~visible.to(states.device), torch.finfo(mask.dtype).min)
            self._masks[kind] = mask[:, None, None]

    def __call__(self, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        drafter = self._drafter
        model: Any = drafter.model
        index = parents[..., None].expand(-1, -1, self._states.shape[2])
        embedded = drafter._embedding(tokens)
        read = torch.cat([embedded, self._states.gather(1, index)], dim=-1)
        # The model's own ``forward`` makes masks for one query and one row.
        hidden = model.model(
            inputs_embeds=model.pre_projection(read),
            attention_mask=self._masks,
            position_ids=self._positions.expand_as(tokens),
            shared_kv_states=self._shared,
            use_cache=False,
            # Otherwise, transformers 5.23 looks for per-layer inputs, which no assistant has.
            output_hidden_states=True,
        ).last_hidden_state
        self._states = model.post_projection(hidden)
        if model.masked_embedding is None:
            logits = model.lm_head(hidden)
        else:
            logits = model.masked_embedding(hidden, model.lm_head.weight)
            # Tokens that it has not scored share the lowest logit. Noise would make some of them the best.
            logits = logits.masked_fill(logits == logits.min(), -torch.inf)
        self._level += 1
        return best_children(
            logits[..., : drafter._vocab_size], self._ranks, self._noise, self._level
        )


def _layers_with_keys(config: PreTrainedConfig) -> Mapping[str, int]:
    """For each layer type of a target, the last layer that has keys of its own."""
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or []
    return {kind: layer for layer, kind in enumerate(kinds[:count])}


def _check_ordering(assistant: Any) -> None:
    """Raise ValueError if an assistant with ordered embeddings would look up tokens that do not exist."""
    if assistant.masked_embedding is None:
        return
    least, most = map(int, assistant.masked_embedding.token_ordering.aminmax())
    count = len(assistant.lm_head.weight)
    if least < 0 or most >= count:
        raise ValueError(
            f"token_ordering of the assistant holds ids from {least} to {most}; expected 0 to {count - 1}. "
            "The checkpoint is damaged"
        )


def _check_fit(assistant: Any, target: PreTrainedModel) -> None:
    """Raise ValueError unless the assistant can read this target's states, keys and values."""
    name = type(target).__name__
    if (assistant.dtype, assistant.device) != (target.dtype, target.device):
        raise ValueError(
            f"the assistant is {assistant.dtype} on {assistant.device}, the target {target.dtype} on "
            f"{target.device}; load it with from_pretrained(..., dtype=target.dtype).to(target.device)"
        )
    implementation = assistant.config._attn_implementation
    if implementation not in SUPPORTED_IMPLEMENTATIONS:
        raise ValueError(
            f"the assistant has attn_implementation={implementation!r}; load it with one of "
            f"{', '.join(SUPPORTED_IMPLEMENTATIONS)}"
        )
    config: Any = target.config.get_text_config(decoder=True)
    text: Any = assistant.config.get_text_config()
    if assistant.config.backbone_hidden_size != config.hidden_size:
        raise ValueError(
            f"the assistant reads hidden states of width {assistant.config.backbone_hidden_size}, and those "
            f"of this {name} are {config.hidden_size} wide; take the assistant of this model"
        )
    layers = _layers_with_keys(config)
    for kind, mine in zip(text.layer_types, assistant.model.layers, strict=True):
        if kind not in layers:
            raise ValueError(
                f"the assistant attends to keys of a layer of type {kind!r}, and this {name} has none; take "
                "the assistant of this model"
            )
        shapes = [
            _shape_of_keys(each) for each in (mine, target.get_decoder().layers[layers[kind]])
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "the assistant attends to {} heads of {} dimensions in layers of type {!r}, and this {} has "
                "{} heads of {} dimensions; take the assistant of this model".format(
                    *shapes[0], kind, name, *shapes[1]
                )
            )


def _shape_of_keys(layer: Any) -> tuple[int, int]:
    """Number and size of the heads of a layer's keys."""
    attention = layer.self_attn
    queries = attention.config.num_attention_heads
    return queries // attention.num_key_value_groups, attention.head_dim
