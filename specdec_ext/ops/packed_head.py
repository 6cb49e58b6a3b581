"""``PackedHead``: a draft head as the op ``draft_head`` reads it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext.head import DraftHead, HeadConfig
from specdec_ext.ops.quantise import quantise, weight_dtype

# Where the matrices are among the weights of a head, and among those of a layer.
_HEAD_MATRICES, _LAYER_MATRICES = (1, 5), (1, 5, 8, 9)
_HEAD_TENSORS = _LAYER_TENSORS = 10


@dataclass(frozen=True)
class PackedHead:
    """A draft head as the op reads it; made once per head and target.

    Attributes:
        config: of the head.
        weights: in the order of ``csrc/ops/draft_head_weights.h``; what the head has not is an empty tensor.
        layout: sizes and flags.
        scalars: ``[rms_norm_eps, logit_scale]``.
        sync: on CUDA, where the blocks of a launch wait for each other. Calls that may run at the same time,
            on different streams, need a PackedHead each: ``dataclasses.replace(head, sync=None)`` shares the
            weights, and its calls make a buffer of their own each time.
    """

    config: HeadConfig
    weights: list[Tensor]
    layout: list[int]
    scalars: list[float]
    sync: Tensor | None = None

    @classmethod
    def pack(
        cls, head: DraftHead, embedding: Tensor, lm_head: Tensor, weights: str = "same"
    ) -> PackedHead:
        """Lay the head's weights out for the op.

        On the CPU all but the embedding are copied, matrices into the order in which the op reads them.
        On CUDA projections with the same input become one matrix each, a copy; the others, embedding
        and lm_head are used where they are if they are contiguous and aligned to 16 bytes.

        Args:
            head: its tensors in float32, bfloat16 or float16 (on CUDA).
            embedding: ``[tokens, hidden]`` of the same dtype and device, the head's own or the target's,
                which may have more tokens or fewer than the head was made for: vocabularies are often padded.
            lm_head: ``[draft_vocab, hidden]``, likewise.
            weights: "int8" or "float8" (e4m3) rounds fc, lm_head and the matrices of the layers to 8 bits,
                with a float32 scale for each output such that its largest weight is the largest number of
                the format; on CUDA, for heads in bfloat16 or float16. Drafts change a little, what is
                generated does not. "same" keeps the dtype.

        Raises:
            ValueError: for a shape, dtype or device that is not as above.
        """
        dtype, config = weight_dtype(weights), head.config
        _check_pack(head, embedding, lm_head)
        tensors = [embedding, lm_head, _draft_to_target(head, embedding)]
        tensors += _head_weights(head, embedding)
        for index in range(config.num_layers):
            tensors += _layer_weights(head, index, embedding)
        if dtype is not None:
            tensors = _quantised(tensors, config.num_layers, dtype)
        elif reads_panels(embedding.device):
            tensors = _in_panels(tensors, config)
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
            *(window or 0 for window in config.sliding_windows),
        ]
        return cls(
            config,
            [_laid_out(tensor.detach()) for tensor in tensors],
            [int(number) for number in layout],
            [config.rms_norm_eps, config.logit_scale],
            _sync_buffer(config, embedding.device),
        )

    @property
    def num_bytes(self) -> int:
        """Of memory that the weights take, those shared with the target included; of a tensor that is
        there twice, an embedding tied to lm_head, once."""
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in self.weights}
        return sum(sizes.values())


def _check_pack(head: DraftHead, embedding: Tensor, lm_head: Tensor) -> None:
    config = head.config
    like = head.tensors["layers.0.mlp.down_proj.weight"]
    if like.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{head.source} has weights in {like.dtype}; the op takes torch.float32, torch.bfloat16 and, on "
            "CUDA, torch.float16: convert it with DraftHead.to"
        )
    shapes = {
        "embedding": (embedding, (len(embedding), config.hidden_size)),
        "lm_head": (lm_head, (config.draft_vocab_size, config.hidden_size)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {like.dtype} "
                f"{shape} on {like.device}, for {head.source}"
            )


def reads_panels(device: torch.device) -> bool:
    """Whether the op there takes matrices in panels (``specdec/panels.h``) and not row by row."""
    return device.type == "cpu"


def _matrices(num_layers: int) -> list[int]:
    """Their indices in the list of weights."""
    layers = range(_HEAD_TENSORS, _HEAD_TENSORS + num_layers * _LAYER_TENSORS, _LAYER_TENSORS)
    return [*_HEAD_MATRICES, *(first + i for first in layers for i in _LAYER_MATRICES)]


def _quantised(tensors: list[Tensor], num_layers: int, dtype: torch.dtype) -> list[Tensor]:
    """Weights with matrices in 8 bits, and the scales behind them."""
    tensors, scales = list(tensors), []
    for index in _matrices(num_layers):
        tensors[index], scale = quantise(tensors[index], dtype)
        scales.append(scale)
    return tensors + scales


def _in_panels(tensors: list[Tensor], config: HeadConfig) -> list[Tensor]:
    """Weights with matrices in panels; queries of a projection before keys and values."""
    tensors = list(tensors)
    queries = config.num_heads * config.head_dim
    for index in _matrices(config.num_layers):
        matrix = tensors[index]
        is_projection = (
            index >= _HEAD_TENSORS
            and (index - _HEAD_TENSORS) % _LAYER_TENSORS == _LAYER_MATRICES[0]
        )
        parts = [matrix[:queries], matrix[queries:]] if is_projection else [matrix]
        if matrix.numel() > 0:
            tensors[index] = torch.cat([_panels(part) for part in parts])
    return [tensors[0], *_in_huge_pages(tensors[1:])]


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


def _laid_out(tensor: Tensor) -> Tensor:
    """As the op reads it, itself if possible."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


def sync_bytes(config: HeadConfig) -> int:
    """Of a sync buffer: the barrier and the counters of ``csrc/include/specdec/draft_scratch.h``."""
    panels = -(-config.head_dim // 64)
    return 256 + 128 * config.num_heads * panels


def _sync_buffer(config: HeadConfig, device: torch.device) -> Tensor | None:
    if device.type != "cuda":
        return None
    return torch.zeros(sync_bytes(config), dtype=torch.uint8, device=device)


def _joined(head: DraftHead, names: Sequence[str], like: Tensor) -> Tensor:
    """The tensors one below the other, or an empty one if the head has none of them."""
    tensors = [head.tensors[name] for name in names if name in head.tensors]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors) if tensors else like.new_empty(0)


def _draft_to_target(head: DraftHead, embedding: Tensor) -> Tensor:
    """The target's ids, empty if the draft's are the same and as many."""
    count = head.config.draft_vocab_size
    same = torch.arange(0 if count == len(embedding) else count, device=embedding.device)
    return head.tensors.get("draft_to_target", same)


def _head_weights(head: DraftHead, like: Tensor) -> list[Tensor]:
    groups = [
        ["input_norm.weight"],
        [f"fc_norm.{index}.weight" for index in range(head.config.num_features)],
        ["fc.weight"],
        ["fc.bias"],
        ["layers.0.hidden_norm.weight"],
        ["norm.weight"],
        ["mask_hidden"],
    ]
    return [_joined(head, group, like) for group in groups]


def _layer_weights(head: DraftHead, index: int, like: Tensor) -> list[Tensor]:
    projections = [f"self_attn.{name}_proj" for name in "qkv"]
    groups = [
        ["input_layernorm.weight"],
        [f"{name}.weight" for name in projections],
        [f"{name}.bias" for name in projections],
        ["self_attn.q_norm.weight"],
        ["self_attn.k_norm.weight"],
        ["self_attn.o_proj.weight"],
        ["self_attn.o_proj.bias"],
        ["post_attention_layernorm.weight"],
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        ["mlp.down_proj.weight"],
    ]
    return [_joined(head, [f"layers.{index}.{name}" for name in group], like) for group in groups]
