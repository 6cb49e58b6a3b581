"""``ModulePass``: passes make no call that waits for the device, and leave the model as it was."""

from helpers.models.tiny import prompts, tiny_model
from transformers import PreTrainedModel

import specdec_ext


def test_passes_do_not_look_for_padding_in_their_tokens(monkeypatch):
    """GPT-2 would compare the tokens of every pass without a mask with its padding token, on the host."""
    model, asked = tiny_model("gpt2"), []
    monkeypatch.setattr(
        PreTrainedModel,
        "warn_if_padding_and_no_attention_mask",
        lambda self, input_ids, attention_mask: asked.append(attention_mask is None),
    )
    ids, _ = prompts((7,))
    specdec_ext.generate(model, ids, max_new_tokens=8, do_sample=False, drafter="ngram")
    assert not any(asked)
    model(ids)
    assert any(asked)
