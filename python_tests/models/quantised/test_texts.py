"""Texts of quantised models: those of ``model.generate``, with every drafter, alone and in batches."""

import copy
import functools

import pytest
import torch
from helpers.models.tiny import BATCHES, make_drafter, prompts, tiny_model
from typer.testing import CliRunner

import specdec_ext
from specdec_ext import assets, quantize
from specdec_ext.cli import app

NEW_TOKENS = 24


@functools.cache
def quantised(name, weights, symmetric=True):
    return quantize(copy.deepcopy(tiny_model(name)), weights, symmetric=symmetric)


@functools.cache
def text(name, weights, symmetric, batch):
    ids, mask = prompts(BATCHES[batch])
    model = quantised(name, weights, symmetric)
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    return ids, mask, model.generate(ids, **kwargs)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("drafter", ["none", "noisy_chain", "oracle_tree"])
@pytest.mark.parametrize(
    ("name", "weights", "symmetric"),
    [
        ("llama", "int8", True),
        ("llama", "int4", True),
        ("llama", "int4", False),
        ("qwen3", "int4", True),
        ("gpt2", "int4", True),
        ("gemma2-window", "int8", True),
    ],
)
def test_greedy_texts(name, weights, symmetric, drafter, batch):
    ids, mask, expected = text(name, weights, symmetric, batch)
    model = quantised(name, weights, symmetric)
    answers = expected[:, ids.shape[1] :].tolist()
    actual = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        drafter=make_drafter(drafter, model, answers),
        speculation="fixed",
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    assert torch.equal(actual, expected)


def test_quantising_changes_texts():
    """The other tests compare texts that could not be those of the plain model by accident."""
    ids, _, expected = text("llama", "int4", True, "one")
    plain = tiny_model("llama").generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert not torch.equal(plain, expected)


@pytest.mark.filterwarnings("error:.* was trained for other weights")  # the target is the same
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bundled_model_with_its_head(dtype):
    """One seed is one text, in half precision, too: drafts do not change a bit of the logits."""
    model = quantize(assets.load_target(dtype), "int4")
    head = specdec_ext.load_draft(assets.FOLDER / "tiny-python-head")
    ids = assets.load_tokenizer()("def area(width, height):\n", return_tensors="pt").input_ids
    kwargs = dict(max_new_tokens=48, seed=1, do_sample=True, return_dict_in_generate=True)
    plain = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    out = specdec_ext.generate(
        model, ids, drafter=specdec_ext.HeadDrafter(head), speculation="fixed", **kwargs
    )
    assert torch.equal(plain.sequences, out.sequences)
    assert out.speculation_stats.accepted_tokens > 0


def test_commands_load_quantised_models(tmp_path):
    quantize(assets.load_target(torch.float32)).save_pretrained(tmp_path)
    assets.load_tokenizer().save_pretrained(tmp_path)
    arguments = ["generate", str(tmp_path), "--prompt", "def f(x):\n", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
