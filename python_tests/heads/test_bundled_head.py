"""The bundled head fits the bundled target, is found for it, drafts well and changes no text."""

from __future__ import annotations

import re

import pytest
import torch

import specdec_ext
from specdec_ext import assets
from specdec_ext.heads.checkpoints import check_pair, tokenizer_fingerprint, weights_fingerprint

CARD = (assets.FOLDER / "tiny-python-head" / "README.md").read_text()


def test_head_fits_the_bundled_target():
    head = assets.load_head()
    assert check_pair(head, assets.load_target()) == []
    assert head.config.fc_norm and head.config.norm_output
    files = [path for path in assets.FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20e6


def test_checkpoint_records_its_target_and_tokenizer():
    """No field is ambiguous."""
    record, target = assets.load_head().record, assets.load_target()
    assert record.ambiguous == ()
    assert record.target_name == "tiny-python-target"
    assert record.target_fingerprint == weights_fingerprint(target)
    assert f"`{record.target_fingerprint}`" in CARD
    assert record.tokenizer_fingerprint == tokenizer_fingerprint(assets.load_tokenizer())


def test_generate_warns_once_of_other_weights():
    """A fine-tuned copy of the target has the same name."""
    target = assets.load_target()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(1.01)
    ids = torch.arange(5)[None]
    with pytest.warns(UserWarning, match="trained for other weights of tiny-python-target") as told:
        for _ in range(3):
            specdec_ext.generate(target, ids, max_new_tokens=4)
    assert len(told) == 1


def test_drafts_are_accepted_and_the_text_is_unchanged():
    """The model card gives tokens per step on all prompts; four prompts must come near."""
    target, tokenizer = assets.load_target(), assets.load_tokenizer()
    drafter = specdec_ext.HeadDrafter(assets.load_head(), specdec_ext.TreeConfig(depth=5))
    emitted = steps = 0
    for prompt in assets.held_out_prompts()[:4]:
        ids = tokenizer(prompt["prompt"], return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": 48, "do_sample": False}
        plain = specdec_ext.generate(target, ids, drafter=None, **options)
        options |= {"speculation": "fixed", "return_dict_in_generate": True}
        output = specdec_ext.generate(target, ids, drafter=drafter, **options)
        assert torch.equal(output.sequences, plain)
        emitted += output.speculation_stats.accepted_tokens
        steps += output.speculation_stats.drafts
    assert 1 + emitted / steps > 2.5


def test_model_card_states_the_tokens_per_step():
    (length,) = re.findall(r"held-out Python .*\*\*(\d\.\d\d)\*\*", CARD)
    assert float(length) >= 3
    assert "specdec train --recipe tools/bundled/head.yaml" in CARD and "prose" in CARD
