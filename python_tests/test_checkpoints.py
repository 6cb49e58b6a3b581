"""Checkpoints are read as what they are, in every published layout.

Claims: the checkpoints that other projects have written (golden/) give the options that their READMEs and
configs state, and their tensors bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec_ext.checkpoints import load_draft

GOLDEN = Path(__file__).parent / "golden"

# Options that differ from HeadConfig's defaults, as the checkpoints' authors state them.
GOLDEN_OPTIONS = {
    "eagle1_gqa": {"fc_bias": True, "own_embedding": True, "own_lm_head": False},
    "eagle1_nobias": {"own_embedding": True, "own_lm_head": False},
    "eagle3_full_vocab": {"draft_vocab_size": 512},
    "eagle3_gqa_small_vocab": {"draft_vocab_size": 200},
    "eagle3_target_hidden_differs": {"draft_vocab_size": 200, "target_hidden_size": 96},
    "speculators_eagle31_fcnorm_normout": {
        "draft_vocab_size": 200,
        "own_embedding": True,
        "fc_norm": True,
        "norm_output": True,
    },
    "speculators_eagle3_defaults_beforefc": {
        "draft_vocab_size": 200,
        "own_embedding": True,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
    },
    "speculators_qwen3_two_layers": {
        "draft_vocab_size": 200,
        "own_embedding": True,
        "norm_before_residual": True,
        "qk_norm": True,
        "num_layers": 2,
        "head_dim": 32,
    },
}
FLAGS = [
    "own_embedding",
    "fc_bias",
    "qkv_bias",
    "o_bias",
    "qk_norm",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
]


@pytest.mark.parametrize("case", GOLDEN_OPTIONS)
def test_golden_checkpoints(case):
    head = load_draft(GOLDEN / case / "draft")
    config, options = head.config, GOLDEN_OPTIONS[case]
    assert config.kind == case[:6].replace("specul", "eagle3")
    for name in FLAGS:
        assert getattr(config, name) == options.get(name, False), name
    for name, expected in options.items():
        assert getattr(config, name) == expected, name
    sizes = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads
    assert sizes == (64, 128, 4, 2)
    layers = {"eagle1": (-1,), "eagle3": None, "specul": (2, 4, 5)}[case[:6]]
    assert config.feature_layers == layers
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.sliding_windows == (None,) * config.num_layers


@pytest.mark.parametrize("case", GOLDEN_OPTIONS)
def test_golden_tensors_are_those_of_the_file(case):
    head = load_draft(GOLDEN / case / "draft")
    stored = load_file(GOLDEN / case / "draft" / "model.safetensors")
    for name, tensor in head.tensors.items():
        if name == "draft_to_target":
            expected = stored["d2t"] + torch.arange(len(stored["d2t"]))
            assert torch.equal(stored["t2d"].nonzero().flatten(), tensor)
        else:
            file_name = name if name in stored else name.replace("layers.0.", "midlayer.")
            expected = stored[file_name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    full = head.config.draft_vocab_size == head.config.vocab_size
    unused = {"t2d", "d2t"} if full else {"t2d"}
    assert set(head.record.ignored) == (unused & stored.keys())
    assert len(head.tensors) + len(head.record.ignored) == len(stored)
