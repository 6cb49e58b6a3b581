"""``write_gguf``: a Llama with a byte-level BPE tokenizer as a GGUF file, which llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file
from torch import Tensor

# Names of a layer's weights in the checkpoint and in GGUF.
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, out: Path, half: bool = False) -> None:
    """Write the weights of a folder, with its tokenizer.

    Args:
        folder: ``config.json``, ``model.safetensors`` and ``tokenizer.json`` of a Llama.
        out: the file.
        half: matrices in bfloat16 instead of float32.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["hidden_size"] // heads
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kind = gguf.LlamaFileType.MOSTLY_BF16 if half else gguf.LlamaFileType.ALL_F32
    writer.add_file_type(kind)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for layer in range(config["num_hidden_layers"]):
        for theirs, its in _LAYER.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{its}.weight"
    for name, weight in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if "q_proj" in name:
            weight = _interleaved(weight, heads)
        if "k_proj" in name:
            weight = _interleaved(weight, kv_heads)
        values = np.ascontiguousarray(weight.float().numpy())
        if half and weight.ndim == 2:
            dtype = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(names[name], gguf.quants.quantize(values, dtype), raw_dtype=dtype)
        else:
            writer.add_tensor(names[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Order the rows of each head as llama.cpp rotates them: in pairs of neighbours, not of halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, config: dict) -> None:
    ids = {**tokenizer["model"]["vocab"]}
    special = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    tokens = {number: token for token, number in (ids | special).items()}
    size = config["vocab_size"]
    kinds = [
        gguf.TokenType.CONTROL if number in special.values() else gguf.TokenType.NORMAL
        for number in range(size)
    ]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(number, f"<unused {number}>") for number in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
