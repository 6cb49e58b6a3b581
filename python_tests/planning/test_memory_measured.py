"""``plan`` against the measured peak of a call on the CPU, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers.places import ROOT

from specdec_ext import TreeConfig
from specdec_ext.evaluate.benchmark.memory import peak_bytes
from specdec_ext.planning.memory import plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        peak_bytes(torch.device("cpu")) is None, reason="/proc does not tell the peak of a process"
    ),
]

TARGET = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=768,
    num_hidden_layers=8,
    num_attention_heads=12,
    num_key_value_heads=4,
    intermediate_size=2048,
    vocab_size=32_768,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
DRAFTS = {
    "head": dict(
        TARGET,
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        head_dim=64,
        draft_vocab_size=8192,
    ),
    "model": dict(
        TARGET,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        intermediate_size=512,
    ),
}
MIXTRAL = dict(
    TARGET,
    architectures=["MixtralForCausalLM"],
    model_type="mixtral",
    num_hidden_layers=4,
    intermediate_size=1024,
    num_local_experts=4,
    num_experts_per_tok=2,
)
NEW_TOKENS = 16
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # By default, glibc keeps freed memory for later, more of it the more was freed before. With a fixed
    # limit, it returns large blocks at once, so that the peak is that of the tensors that are alive.
    "MALLOC_MMAP_THRESHOLD_": "131072",
    # By default, oneDNN and torch's interface to it keep the kernels that they compile for a shape: code,
    # which the plan does not count. On processors with arithmetic in bfloat16, torch multiplies with them,
    # and each number of tokens that an expert gets is another shape.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
    "LRU_CACHE_CAPACITY": "1",
}


def measured(case: dict) -> str:
    """The output of ``measure_peak.py`` for this case."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "profiling")))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    script = ROOT / "python_tests" / "helpers" / "measure_peak.py"
    command = [sys.executable, script, json.dumps(case)]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True
    ).stdout.decode()


@pytest.mark.parametrize(
    ("target", "kind", "dtype", "rows", "context", "depth"),
    [
        (TARGET, None, "float32", 4, 800, 0),
        (TARGET, "head", "float32", 4, 1000, 3),
        (TARGET, "head", "bfloat16", 1, 1500, 5),
        (TARGET, "model", "float32", 2, 1000, 4),
        (MIXTRAL, None, "bfloat16", 2, 1000, 0),
    ],
    ids=["plain", "head", "head-bfloat16", "model", "experts-bfloat16"],
)
def test_the_peak_is_within_5_percent(tmp_path, target, kind, dtype, rows, context, depth):
    folders = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    for name, config in (("target", target), ("draft", DRAFTS.get(kind))):
        if config is not None:
            folders[name].mkdir()
            (folders[name] / "config.json").write_text(json.dumps(config))
    case = dict(
        **{name: str(folder) for name, folder in folders.items()},
        kind=kind,
        dtype=dtype,
        rows=rows,
        context=context,
        depth=depth,
        new_tokens=NEW_TOKENS,
    )
    planned = plan(
        folders["target"],
        None if kind is None else folders["draft"],
        context=context,
        rows=rows,
        new_tokens=NEW_TOKENS,
        tree=TreeConfig(depth=depth) if depth else None,
        dtype=getattr(torch, dtype),
        device="cpu",
    )
    if kind == "head":
        measured({**case, "write_head": True})
    peak = json.loads(measured(case).splitlines()[-1])["bytes"]
    assert planned.num_bytes == pytest.approx(peak, rel=0.05), planned.explain()
