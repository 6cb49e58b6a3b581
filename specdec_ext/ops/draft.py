"""Drafting with a head of the EAGLE family: one call per draft."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext.head import DraftHead, HeadConfig
from specdec_ext.ops import _library
from specdec_ext.tree_config import TreeConfig


class HeadDraft(NamedTuple):
    """Trees as in :class:`specdec_ext.DraftTree`, with scores.

    Attributes:
        tokens: ``[rows, nodes]`` int64; 0 where a node is absent.
        parents: ``[rows, nodes]`` int64; -1 for node 0, -2 where a node is absent.
        scores: ``[rows, nodes]`` float32; cumulative log-probability over the draft vocabulary, 0 for
            node 0 and -inf where a node is absent.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor


@dataclass(frozen=True)
class PackedHead:
    """A draft head as the op reads it; made once per head and target.

    Attributes:
        config: of the head.
        weights: in the order of ``csrc/ops/draft_head_weights.h``; what the head has not is an empty tensor.
        layout: sizes and flags.
        scalars: ``[rms_norm_eps, logit_scale]``.
    """

    config: HeadConfig
    weights: list[Tensor]
    layout: list[int]
    scalars: list[float]

    @classmethod
    def pack(cls, head: DraftHead, embedding: Tensor, lm_head: Tensor) -> PackedHead:
        """Lay the head's weights out for the op.

        Matrices are copied into the order in which the op reads them; the embedding, of which it takes
        single rows, is used where it is if it is contiguous.

        Args:
            head: its tensors in float32 or bfloat16, on the CPU.
            embedding: ``[tokens, hidden]`` of the same dtype, the head's own or the target's, which may have
                more tokens or fewer than the head was made for: vocabularies are often padded.
            lm_head: ``[draft_vocab, hidden]``, likewise.

        Raises:
            ValueError: for a shape, dtype or device that is not as above.
        """
        config = head.config
        dtype = head.tensors["layers.0.mlp.down_proj.weight"].dtype
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{head.source} has weights in {dtype}; the CPU op takes torch.float32 and "
                "torch.bfloat16: convert it with DraftHead.to"
            )
        windows = config.sliding_windows
        shapes = {
            "embedding": (embedding, (len(embedding), config.hidden_size)),
            "lm_head": (lm_head, (config.draft_vocab_size, config.hidden_size)),
        }
        for name, (tensor, shape) in shapes.items():
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.device.type == "cpu":
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {dtype} "
                    f"{shape} on the CPU, for {head.source}"
                )
        weights = [_panels(lm_head), _draft_to_target(head, len(embedding))]
        weights += _head_weights(head, dtype)
        for index in range(config.num_layers):
            weights += _layer_weights(head, index, dtype)
        layout = [
            config.kind == "eagle1",
            config.norm_before_residual,
            config.norm_output,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.num_features,
            config.feature_width,
            -1 if config.mask_token_id is None else config.mask_token_id,
            config.draft_vocab_size,
            *(window or 0 for window in windows),
        ]
        return cls(
            config,
            [embedding.detach().contiguous(), *_in_huge_pages(weights)],
            [int(number) for number in layout],
            [config.rms_norm_eps, config.logit_scale],
        )


def _draft_to_target(head: DraftHead, num_tokens: int) -> Tensor:
    """The target's ids, empty if the draft's are the same and as many."""
    count = head.config.draft_vocab_size
    same = torch.arange(0 if count == num_tokens else count)
    return head.tensors.get("draft_to_target", same)


def _head_weights(head: DraftHead, dtype: torch.dtype) -> list[Tensor]:
    groups = [
        ["input_norm.weight"],
        [f"fc_norm.{index}.weight" for index in range(head.config.num_features)],
        ["fc.weight"],
        ["fc.bias"],
        ["layers.0.hidden_norm.weight"],
        ["norm.weight"],
        ["mask_hidden"],
    ]
    return [_packed(head, group, dtype) for group in groups]


def _layer_weights(head: DraftHead, index: int, dtype: torch.dtype) -> list[Tensor]:
    groups = [
        ["input_layernorm.weight"],
        ["self_attn.q_proj.weight"],
        ["self_attn.q_proj.bias"],
        ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        ["self_attn.k_proj.bias", "self_attn.v_proj.bias"],
        ["self_attn.q_norm.weight"],
        ["self_attn.k_norm.weight"],
        ["self_attn.o_proj.weight"],
        ["self_attn.o_proj.bias"],
        ["post_attention_layernorm.weight"],
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        ["mlp.down_proj.weight"],
    ]
    return [_packed(head, [f"layers.{index}.{name}" for name in group], dtype) for group in groups]


def _packed(head: DraftHead, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    """The tensors one below the other, or an empty one if the head has none of them; a matrix in panels."""
    tensors = [head.tensors[name] for name in names if name in head.tensors]
    joined = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
    return _panels(joined) if joined.dim() == 2 else joined


def _panels(weight: Tensor) -> Tensor:
    """``[panels, units, 32, elements of a unit]`` of ``weight [outs, ins]``; see ``specdec/panels.h``."""
    unit = 4 // weight.element_size()
    padded = F.pad(weight, (0, -weight.shape[1] % unit, 0, -len(weight) % 32))
    return padded.view(-1, 32, padded.shape[1] // unit, unit).transpose(1, 2).contiguous()


def _in_huge_pages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies side by side, in huge pages where the system has them.

    The target's weights pass through the caches between two drafts and drive out what translates the
    addresses of small pages: reading the head's weights from memory then takes a third longer.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return [tensor.detach().contiguous() for tensor in tensors]
    page, line = 2 << 20, 64
    ends = list(accumulate(-(-tensor.nbytes // line) * line for tensor in tensors))
    mapping = mmap.mmap(-1, ends[-1] + page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % page :]
    copies = []
    for tensor, begin in zip(tensors, [0, *ends], strict=False):
        place = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(place.copy_(tensor.detach()))
    return copies


@cache
def _shape(tree: TreeConfig) -> tuple[Tensor, int, int, int]:
    """What the op takes of a tree: ``choices [choices, 2]``, (parent, rank) of the nodes of a chain or static
    tree and none of a dynamic one; levels below the root, fewer than ``tree.depth`` in a chain that
    ``num_nodes`` cuts off; ``top_k``; nodes.
    """
    choices = torch.tensor(tree.links, dtype=torch.long).view(-1, 2)
    depths = [0]
    for parent, _ in tree.links:
        depths.append(depths[parent] + 1)
    return choices, max(depths) if tree.links else tree.depth, tree.top_k, tree.num_nodes


def draft_head(
    head: PackedHead,
    cosines: Tensor,
    sines: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    features: Tensor,
    counts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    roots: Tensor,
    tree: TreeConfig,
) -> HeadDraft:
    """Extend a head's cache by what was committed, and draft a tree below it. CPU only.

    The specification is :func:`specdec_ext.reference.draft_head.draft_head`. A row of the result depends
    on that row alone and has the same bits alone, in any batch, with any number of threads, and whether its
    elements come in one call or in several. Products accumulate in float32, norms, rotation, softmax and
    logits are float32, and what goes from one product to the next is rounded to the dtype once.

    Args:
        head: as :meth:`PackedHead.pack` made it; its dtype is that of features, keys and values.
        cosines: ``[positions, rotary / 2]`` float32 (:func:`specdec_ext.rope.rope_tables`), for all positions
            up to that of the last level.
        sines: likewise.
        keys: ``[layers, rows, kv_heads, capacity, head_dim]``, the head's cache, written in place: the
            new elements at slots ``lengths[r]`` and up. What lies behind them after the call, drafted
            nodes, is of no use.
        values: likewise.
        tokens: ``[rows, new]`` int64; element i of row r is this token with ``features[r, i]``, those of
            the position before it.
        features: ``[rows, new, feature_width]``, contiguous in the last dimension.
        counts: ``[rows]`` int64, elements that count; what lies behind them is not read. A row with none
            gets its root alone.
        lengths: ``[rows]`` int64, slots in use.
        positions: ``[rows]`` int64, position of the first new element.
        roots: ``[rows]`` int64, the last committed tokens.
        tree: what to draft. ``capacity`` must have room for the new elements and, behind them, for
            the nodes that are expanded: at most ``top_k`` for each level but the last.

    Raises:
        ValueError: naming the argument. Nothing is written then, unless ``draft_to_target`` has a token
            outside the target's vocabulary.
    """
    return HeadDraft(
        *_library.native.draft_head(
            head.weights,
            head.layout,
            head.scalars,
            cosines,
            sines,
            keys,
            values,
            tokens,
            features,
            counts,
            lengths,
            positions,
            roots,
            *_shape(tree),
        )
    )


@torch.library.register_fake("specdec::draft_head")
def _draft_head_fake(
    weights: list[Tensor],
    layout: list[int],
    scalars: list[float],
    cosines: Tensor,
    sines: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    features: Tensor,
    counts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    roots: Tensor,
    choices: Tensor,
    depth: int,
    top_k: int,
    nodes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (features.shape[0], nodes)
    return (
        roots.new_empty(shape),
        roots.new_empty(shape),
        torch.empty(shape, dtype=torch.float32, device=features.device),
    )
