"""``PackedHead``: a draft head in the memory layout of the op ``draft_head``."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext._host import DRAFT_TILE_OUTS, DRAFT_UNIT_BYTES
from specdec_ext.heads.config import DraftHead, HeadConfig
from specdec_ext.ops.quantise import quantise, weight_dtype

# Indices of the matrices among the weights of a head, and among those of a layer.
_HEAD_MATRICES, _LAYER_MATRICES = (1, 5), (1, 5, 8, 9)
_HEAD_TENSORS, _LAYER_TENSORS = 11, 10
# Index of gate and up, whose tiles alternate.
_GATE_UP = 8
# Groups of a layer's tensors that are concatenated, in the order of the op.
_LAYER_GROUPS = (
    ("input_layernorm.weight",),
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ("self_attn.q_norm.weight",),
    ("self_attn.k_norm.weight",),
    ("self_attn.o_proj.weight",),
    ("self_attn.o_proj.bias",),
    ("post_attention_layernorm.weight",),
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ("mlp.down_proj.weight",),
)
# Returns a weight when it is needed, so that a weight from a file is in memory only while it is used.
Source = Callable[[], Tensor]


@dataclass(frozen=True)
class PackedHead:
    """A draft head in the memory layout of the op; made once per head and target.

    Attributes:
        config: config of the head.
        weights: in the order of ``csrc/ops/draft_head/weights.h``; missing weights are empty tensors.
        layout: sizes and flags.
        scalars: ``[rms_norm_eps, logit_scale]``.
        sync: on CUDA, the memory with which the blocks of a launch wait for each other. Calls that may run at
            the same time, on different streams, need different ones; see :meth:`with_own_sync`.
    """

    config: HeadConfig
    weights: list[Tensor]
    layout: list[int]
    scalars: list[float]
    sync: Tensor | None = None

    @classmethod
    def pack(
        cls,
        head: DraftHead,
        embedding: Tensor,
        lm_head: Tensor | None = None,
        weights: str = "same",
    ) -> PackedHead:
        """Pack the weights of a head for the op.

        On the CPU, all weights except the embedding are copied, and matrices are reordered into panels. On
        CUDA, the head's matrices are copied into tiles. The embedding, a given lm_head and vectors are not
        copied if they are contiguous and aligned to 16 bytes. So a head whose tensors stay on the GPU in this
        dtype has its matrices there twice; of :class:`~specdec_ext.heads.weights.UnkeptTensors` only the
        tiles stay.

        Args:
            head: a head in float32, bfloat16 or, on CUDA, float16.
            embedding: ``[tokens, hidden]`` of the same dtype and device, the head's own or the target's. The
                target may have more or fewer tokens than the head was made for, because vocabularies are
                often padded.
            lm_head: ``[draft_vocab, hidden]`` of the same dtype and device, the target's, which on CUDA is
                read in place; None for the head's own.
            weights: "int8" or "float8" (e4m3) rounds fc, lm_head and the matrices of the layers to 8 bits,
                with a float32 scale per output, chosen so that the output's largest weight becomes the
                largest number of the format. On CUDA both are for heads in bfloat16 or float16; the CPU has
                "int8". Drafts change slightly, the generated text does not. "same" keeps the dtype.

        Raises:
            ValueError: for an unexpected shape, dtype, device or format.
        """
        dtype, config = weight_dtype(weights), head.config
        _check_pack(head, embedding, lm_head)
        sources = _sources(head, embedding, lm_head)
        if reads_panels(embedding.device):
            tensors = [embedding.detach(), *_in_panels(sources, config, dtype)[1:]]
        else:
            tensors = _for_kernel(sources, config, dtype, keeps_lm_head=lm_head is not None)
        return cls(
            config,
            [_laid_out(tensor) for tensor in tensors],
            layout_of(config),
            [config.rms_norm_eps, config.logit_scale],
            _sync_buffer(config, embedding.device),
        )

    def with_own_sync(self) -> PackedHead:
        """A head with the same weights for calls that may run at the same time as calls of this one."""
        return replace(self, sync=None if self.sync is None else torch.zeros_like(self.sync))

    @property
    def num_bytes(self) -> int:
        """Memory of the weights in bytes, with those shared with the target.

        An embedding tied to lm_head is counted once.
        """
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in self.weights}
        return sum(sizes.values())


def layout_of(config: HeadConfig) -> list[int]:
    """The sizes and flags of a head, in the order of ``csrc/ops/draft_head/weights.h``."""
    return [
        int(config.feeds_fc),
        int(config.norm_before_residual),
        int(config.norm_output),
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.num_features,
        config.feature_width,
        -1 if config.mask_token_id is None else config.mask_token_id,
        config.draft_vocab_size,
        *(window or 0 for window in config.sliding_windows),
    ]


def _check_pack(head: DraftHead, embedding: Tensor, lm_head: Tensor | None) -> None:
    config = head.config
    like = head.tensors["layers.0.mlp.down_proj.weight"]
    if like.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{head.source} has weights in {like.dtype}; the op supports torch.float32, torch.bfloat16 and, "
            "on CUDA, torch.float16: convert the head with DraftHead.to"
        )
    shapes = {"embedding": (embedding, (len(embedding), config.hidden_size))}
    if lm_head is None and not config.own_lm_head:
        raise ValueError(
            f"{head.source} has no lm_head of its own; pass the target's as lm_head=..."
        )
    if lm_head is not None:
        shapes["lm_head"] = (lm_head, (config.draft_vocab_size, config.hidden_size))
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {like.dtype} "
                f"{shape} on {like.device}, for {head.source}"
            )


def reads_panels(device: torch.device) -> bool:
    """Whether the op on this device reads matrices in panels (``specdec/cpu/panels.h``) instead of tiles."""
    return device.type == "cpu"


def _matrices(num_layers: int) -> list[int]:
    """Indices of the matrices in the list of weights."""
    layers = range(_HEAD_TENSORS, _HEAD_TENSORS + num_layers * _LAYER_TENSORS, _LAYER_TENSORS)
    return [*_HEAD_MATRICES, *(first + i for first in layers for i in _LAYER_MATRICES)]


def _rounded(matrix: Tensor, dtype: torch.dtype | None, scales: list[Tensor]) -> Tensor:
    """The matrix in ``dtype``, with its scales added to the list; as it is if there is no dtype."""
    if dtype is None:
        return matrix
    numbers, scale = quantise(matrix, dtype)
    scales.append(scale)
    return numbers


def _for_kernel(
    sources: Sequence[Source], config: HeadConfig, dtype: torch.dtype | None, keeps_lm_head: bool
) -> list[Tensor]:
    """The weights with matrices in tiles, one after the other; rounded to ``dtype``, their scales follow.

    With ``keeps_lm_head``, lm_head stays as it is if it is not rounded.
    """
    matrices, tensors = _matrices(config.num_layers), []
    scales: list[Tensor] = []
    for index, source in enumerate(sources):
        tensor = source().detach()
        if index in matrices:
            tensor = _rounded(tensor, dtype, scales)
        is_kept = keeps_lm_head and dtype is None and index == _HEAD_MATRICES[0]
        if index in matrices and tensor.numel() and not is_kept:
            in_layer = (index - _HEAD_TENSORS) % _LAYER_TENSORS
            tensor = _in_tiles(tensor, is_paired=index > _HEAD_TENSORS and in_layer == _GATE_UP)
        tensors.append(tensor)
    return tensors + scales


def _in_tiles(weight: Tensor, is_paired: bool) -> Tensor:
    """Reorder ``weight [outs, ins]`` into tiles, ``[tiles, units, 8, elements of a unit]``.

    See ``specdec/draft_head/plan.h``. In a pair, tiles of the first and of the second half alternate.
    """
    parts = weight.contiguous().view(torch.uint8).chunk(2 if is_paired else 1)
    tiles = torch.stack([_panels(part, DRAFT_TILE_OUTS, DRAFT_UNIT_BYTES) for part in parts], dim=1)
    return tiles.flatten(0, 1).view(weight.dtype)


def _in_panels(
    sources: Sequence[Source], config: HeadConfig, dtype: torch.dtype | None
) -> list[Tensor]:
    """Copy the weights into contiguous memory, with matrices in panels and queries before keys and values.

    Matrices are rounded to ``dtype``, if it is given; then their scales follow. Each weight is requested
    twice and none is kept, so only the copies take memory. The first weight, the embedding, is not copied;
    its entry here is empty.
    """
    matrices, queries = _matrices(config.num_layers), config.num_heads * config.head_dim

    def parts(index: int, weight: Tensor) -> list[Tensor]:
        if index not in matrices or weight.numel() == 0:
            return [weight if index else weight[:0]]
        in_layer = (index - _HEAD_TENSORS) % _LAYER_TENSORS
        if index >= _HEAD_TENSORS and in_layer == _LAYER_MATRICES[0]:
            return [_panels(weight[:queries]), _panels(weight[queries:])]
        return [_panels(weight)]

    def like(index: int) -> Tensor:
        weight = sources[index]().to("meta")
        if index in matrices:
            weight = weight.to(dtype or weight.dtype)
        return _stacked(parts(index, weight))

    everything = range(len(sources))
    places = _in_huge_pages([like(index) for index in everything])
    scales: list[Tensor] = []
    for index, place in zip(everything, places, strict=True):
        weight = sources[index]().detach()
        if index in matrices:
            weight = _rounded(weight, dtype, scales)
        first = 0
        for part in parts(index, weight):
            place[first : first + len(part)] = part
            first += len(part)
    return places + scales


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _panels(weight: Tensor, outs: int = 32, unit_bytes: int = 4) -> Tensor:
    """Reorder ``weight [outs, ins]`` into panels, ``[panels, units, outs of a panel, elements of a unit]``.

    See ``specdec/cpu/panels.h``, whose panels are the default. The result is a view of the weight if its
    sizes are multiples of those of a panel.
    """
    unit = unit_bytes // weight.element_size()
    missing = -weight.shape[1] % unit, -len(weight) % outs
    padded = F.pad(weight, (0, missing[0], 0, missing[1])) if any(missing) else weight
    return padded.reshape(-1, outs, padded.shape[1] // unit, unit).transpose(1, 2)


def _in_huge_pages(like: Sequence[Tensor]) -> list[Tensor]:
    """Allocate contiguous memory for tensors like these, in huge pages if the system has them.

    Between two drafts, the target's weights evict the address translations of small pages from the
    processor's caches. Reading the head's weights from small pages would then take a third longer.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in like]
    page, line = 2 << 20, 64
    ends = list(accumulate(-(-tensor.nbytes // line) * line for tensor in like))
    mapping = mmap.mmap(-1, ends[-1] + page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % page :]
    return [
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, begin in zip(like, [0, *ends], strict=False)
    ]


def _laid_out(tensor: Tensor) -> Tensor:
    """The tensor with contiguous and aligned memory; not copied if it has that already."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


def sync_bytes(config: HeadConfig) -> int:
    """Size of a sync buffer: barrier and counters of ``csrc/include/specdec/draft_head/scratch.h``."""
    panels = -(-config.head_dim // 64)
    return 256 + 128 * config.num_heads * panels


def _sync_buffer(config: HeadConfig, device: torch.device) -> Tensor | None:
    if device.type != "cuda":
        return None
    return torch.zeros(sync_bytes(config), dtype=torch.uint8, device=device)


def _joined(head: DraftHead, names: Sequence[str], like: Tensor) -> Tensor:
    """The tensors concatenated, or an empty tensor if the head has none of them."""
    tensors = [head.tensors[name] for name in names if name in head.tensors]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors) if tensors else like.new_empty(0)


def _draft_to_target(head: DraftHead, embedding: Tensor) -> Tensor:
    """Target id of each draft id; empty if both vocabularies are equal."""
    count = head.config.draft_vocab_size
    same = torch.arange(0 if count == len(embedding) else count, device=embedding.device)
    return head.tensors.get("draft_to_target", same)


def _sources(head: DraftHead, embedding: Tensor, lm_head: Tensor | None) -> list[Source]:
    """The sources of all weights, in the order of ``csrc/ops/draft_head/weights.h``."""
    groups = [
        ["input_norm.weight"],
        [f"fc_norm.{index}.weight" for index in range(head.config.num_features)],
        ["fc.weight"],
        ["fc.bias"],
        ["embedding_norm.weight"],
        ["layers.0.hidden_norm.weight", "hidden_norm.weight"],
        ["norm.weight"],
        ["mask_hidden"],
    ]
    for index in range(head.config.num_layers):
        groups += [[f"layers.{index}.{name}" for name in group] for group in _LAYER_GROUPS]
    return [
        lambda: embedding,
        lambda: head.tensors["lm_head.weight"] if lm_head is None else lm_head,
        partial(_draft_to_target, head, embedding),
        *(partial(_joined, head, group, embedding) for group in groups),
    ]
