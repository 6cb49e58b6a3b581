"""Tiny random multimodal models, with prompts that contain an image or a sound."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers.models import zoo
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

MEDIA = 90  # the token that stands for a piece of an image or sound
SIZE, PATCH = 8, 4  # an image has 8 x 8 pixels and 4 patches
BEFORE, AFTER = 3, (5, 2)  # tokens of text before the image, and after it by row


def pixels(rows: int, *between: int, size: int = SIZE) -> Tensor:
    return torch.randn(rows, *between, 3, size, size, generator=torch.Generator().manual_seed(5))


@dataclass
class Kind:
    """A kind of model and the parts of its prompts.

    Attributes:
        pieces: number of tokens that stand for an image in the text.
        media: makes the inputs with an image per row.
        config: differences from the shrunk default.
        types: name of the input that distinguishes image tokens from text, if the model needs one.
        around: the tokens directly before and after the image.
    """

    pieces: int
    media: Callable[[int], dict[str, Tensor]]
    config: dict[str, Any] = field(default_factory=dict)
    types: str | None = None
    around: tuple[int, int] | None = None


def pixel_values(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows)}


def several_images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows, 1)}


def sized_images(rows: int) -> dict[str, Tensor]:
    size = 2 * SIZE
    return {"pixel_values": pixels(rows, size=size), "image_sizes": torch.full((rows, 2), size)}


def base_and_tile(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows, 2), "image_sizes": torch.full((rows, 2), SIZE)}


def patches(rows: int) -> dict[str, Tensor]:
    """16 patches of two frames per row, the layout of Qwen."""
    values = torch.randn(
        rows * 16, 2 * 3 * PATCH * PATCH, generator=torch.Generator().manual_seed(5)
    )
    return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 4, 4]] * rows)}


def tiles(rows: int) -> dict[str, Tensor]:
    return {
        "pixel_values": pixels(rows, 1, 1),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(rows, 1, 1, dtype=torch.long),
    }


def sound(rows: int) -> dict[str, Tensor]:
    features = torch.randn(rows, 128, 16, generator=torch.Generator().manual_seed(5))
    return {"input_features": features}


def masked_sound(rows: int) -> dict[str, Tensor]:
    return {**sound(rows), "feature_attention_mask": torch.ones(rows, 16, dtype=torch.long)}


_IMAGE = {"image_size": SIZE, "patch_size": PATCH}
_SQUARE = {"image_size": [SIZE, SIZE], "patch_size": [PATCH, PATCH]}
_TOKEN = {"image_token_index": MEDIA, "image_token_id": MEDIA}
_QWEN = {
    "image_token_id": MEDIA,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
}
_EYE = {"patch_size": PATCH, "depth": 2, "out_hidden_size": zoo.HIDDEN}


def _llava(
    pieces: int, media: Callable[[int], dict[str, Tensor]], vision: dict, **config: Any
) -> Kind:
    return Kind(pieces, media, {**_TOKEN, "vision_config": vision, **config})


def _qwen(vision: dict[str, Any], **config: Any) -> Kind:
    config |= {**_QWEN, "vision_config": {**_EYE, **vision}}
    return Kind(4, patches, config, types="mm_token_type_ids", around=(92, 93))


KINDS: dict[str, Kind] = {
    "llava": _llava(4, pixel_values, _IMAGE),
    "llava_next": _llava(10, base_and_tile, _IMAGE, image_grid_pinpoints=[[SIZE, SIZE]]),
    "qwen2_vl": _qwen({"embed_dim": zoo.HIDDEN}, text_config=_MROPE),
    "qwen2_5_vl": _qwen({"window_size": 8, "fullatt_block_indexes": [1]}, text_config=_MROPE),
    "qwen3_vl": _qwen({"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        text_config=_MROPE),
    "qwen3_5": _qwen({"num_position_embeddings": 16}),
    "gemma3": Kind(4, pixel_values, {**_TOKEN, "mm_tokens_per_image": 4, "vision_config": _IMAGE},
        types="token_type_ids"),
    "paligemma": Kind(4, pixel_values, {**_TOKEN, "projection_dim": zoo.HIDDEN,
        "vision_config": {**_IMAGE, "projection_dim": zoo.HIDDEN},
        "text_config": {"num_key_value_heads": zoo.KV_HEADS, "num_attention_heads": zoo.HEADS}},
        types="token_type_ids"),
    "idefics3": _llava(1, several_images, _IMAGE),
    "smolvlm": _llava(1, several_images, _IMAGE),
    "mllama": _llava(1, tiles, {**_IMAGE, "max_num_tiles": 1, "num_global_layers": 1,
        "intermediate_layers_indices": [0, 1], "supported_aspect_ratios": [[1, 1]],
        "vision_output_dim": 3 * zoo.HIDDEN}, text_config={"cross_attention_layers": [1]}),
    "internvl": _llava(1, pixel_values, _SQUARE),
    "mistral3": _llava(4, sized_images,
        {"image_size": 2 * SIZE, "patch_size": PATCH, "head_dim": zoo.HEAD_DIM}),
    "aya_vision": _llava(1, pixel_values, _IMAGE),
    "blip-2": _llava(4, pixel_values, _IMAGE, num_query_tokens=4,
        qformer_config={"encoder_hidden_size": zoo.HIDDEN}),
    "qwen2_audio": Kind(4, masked_sound,
        {"audio_token_index": MEDIA, "audio_token_id": MEDIA, "audio_config": {"max_source_positions": 8}}),
    "voxtral": Kind(4, sound, {"audio_token_id": MEDIA, "audio_config": {"max_source_positions": 8}}),
}  # fmt: skip


@functools.cache
def build(name: str) -> PreTrainedModel:
    """Build the model in float32, always with the same weights."""
    default = AutoConfig.for_model(name)
    config = AutoConfig.for_model(name, **zoo.shrunk(default, KINDS[name].config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, name)))
        model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config)
        zoo.spread(model)
        for name_, parameter in model.named_parameters():
            if not parameter.any() and "gate" in name_:  # a closed gate would hide the image
                parameter.data.fill_(1.0)
            elif not parameter.any() and parameter.ndim == 2:
                zoo.spread_projection(parameter.data.T)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def text_prompt(rows: int) -> dict[str, Tensor]:
    """Rows of text, padded on the left."""
    return prompt([], rows)


def media_prompt(name: str, rows: int) -> dict[str, Tensor]:
    """Rows with an image each, padded on the left."""
    kind = KINDS[name]
    pieces = [MEDIA] * kind.pieces
    if kind.around:
        pieces = [kind.around[0], *pieces, kind.around[1]]
    inputs = {**prompt(pieces, rows), **kind.media(rows)}
    ids = inputs["input_ids"]
    if kind.types:
        inputs[kind.types] = (ids == MEDIA).long()
    if name == "mllama":
        inputs["cross_attention_mask"] = torch.ones(rows, ids.shape[1], 1, 1, dtype=torch.long)
    return inputs


def prompt(pieces: list[int], rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    texts = []
    for after in AFTER[:rows]:
        words = torch.randint(3, 80, (BEFORE + after,), generator=generator).tolist()
        texts.append([*words[:BEFORE], *pieces, *words[BEFORE:]])
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}
