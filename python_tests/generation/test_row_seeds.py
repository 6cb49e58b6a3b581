"""With a list of seeds a row's text belongs to its prompt and its seed, whatever else is in the batch.

The same prompt and seed give the same text in any row of any batch, alone, padded left or right, with every
drafter, and under every rule of verification.
"""

import pytest
import torch
from every_drafter import DRAFTERS
from tiny import prompts, tiny_model

import specdec_ext
from specdec_ext import DraftModelDrafter

NEW = 24
SEED = 7
# (seed, tokens) of each row; rows with seed 7 and 9 tokens have the prompt that is looked at.
ROWS = [(1, 12), (SEED, 9), (SEED, 3), (SEED, 9), (2, 9)]
LOOKED_AT = [1, 3]
RULES = ["match", "rejection", "block", "recursive"]


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompts(tuple(length for _, length in ROWS), side=side)
    places = mask[1].bool()
    for row in (3, 4):  # the prompt of row 1 again, with its seed and with another
        ids[row, places] = ids[1, places]
    return ids, mask


def texts(drafter, ids, mask, seed, model="llama", **kwargs) -> list[list[int]]:
    """What each row generates."""
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, **kwargs}
    model = tiny_model(model)
    output = specdec_ext.generate(
        model, ids, attention_mask=mask, drafter=drafter, speculation="fixed", seed=seed, **kwargs
    )
    return output[:, ids.shape[1] :].tolist()


def check(make, **kwargs) -> None:
    ids, mask = batch("left")
    prompt = ids[1, mask[1].bool()][None]
    (alone,) = texts(make(), prompt, torch.ones_like(prompt), [SEED], **kwargs)
    assert [alone] == texts(make(), prompt, torch.ones_like(prompt), SEED, **kwargs)
    for side in ("left", "right"):
        rows = texts(make(), *batch(side), [seed for seed, _ in ROWS], **kwargs)
        assert [rows[row] for row in LOOKED_AT] == [alone, alone]
        assert rows[4] != alone


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter(name):
    check(DRAFTERS[name])


@pytest.mark.parametrize("min_confidence", [0.0, 0.05])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule, min_confidence):
    model = tiny_model("qwen3")
    check(
        lambda: DraftModelDrafter(model, sampled=True, min_confidence=min_confidence),
        verification=rule,
    )


@pytest.mark.parametrize("name", ["gpt2", "mistral-window", "phi"])
def test_other_models(name):
    check(DRAFTERS["ngram"], model=name)


def test_processors_that_read_the_text():
    check(DRAFTERS["ngram"], repetition_penalty=1.2, top_p=0.9)


def test_rows_that_end_early():
    check(DRAFTERS["ngram"], eos_token_id=[5, 11])


def test_embeddings():
    """Their paddings shift no position either."""
    ids, mask = batch("left")
    embed = tiny_model("llama").get_input_embeddings()
    kwargs = dict(max_new_tokens=NEW, do_sample=True, drafter="ngram")
    rows = specdec_ext.generate(
        tiny_model("llama"),
        inputs_embeds=embed(ids),
        attention_mask=mask,
        seed=[seed for seed, _ in ROWS],
        **kwargs,
    )
    alone = specdec_ext.generate(
        tiny_model("llama"), inputs_embeds=embed(ids[1:2, mask[1].bool()]), seed=[SEED], **kwargs
    )
    assert torch.equal(rows[LOOKED_AT], alone.expand(2, -1)) and not torch.equal(rows[4:], alone)


def test_copies_of_a_row():
    """Each of ``num_return_sequences`` has a seed of the list."""
    ids, mask = prompts((9,))
    (alone,) = texts(None, ids, mask, [SEED])
    copies = texts("ngram", ids, mask, [4, SEED, SEED], num_return_sequences=3)
    assert copies[0] != alone and copies[1:] == [alone, alone]
