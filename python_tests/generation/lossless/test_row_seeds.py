"""With a list of seeds a row's text depends only on its prompt and its seed.

It is the same in every row of every batch, alone, padded on the left or right, with every drafter and under
every rule of verification.
"""

import pytest
import torch
from helpers.drafters.every_drafter import DRAFTERS
from helpers.models.tiny import prompts, tiny_model

import specdec_ext
from specdec_ext import DraftModelDrafter

NEW = 24
SEED = 7
# (seed, number of tokens) of each row; rows with seed 7 and 9 tokens have the same prompt.
ROWS = [(1, 12), (SEED, 9), (SEED, 3), (SEED, 9), (2, 9)]
SAME = [1, 3]
RULES = ["match", "rejection", "block", "recursive"]


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompts(tuple(length for _, length in ROWS), side=side)
    places = mask[1].bool()
    for row in (3, 4):  # the prompt of row 1 again, with its seed and with another
        ids[row, places] = ids[1, places]
    return ids, mask


def texts(drafter, ids, mask, seed, model="llama", **kwargs) -> list[list[int]]:
    """The tokens that each row generates."""
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, **kwargs}
    kwargs |= dict(attention_mask=mask, drafter=drafter, speculation="fixed", seed=seed)
    output = specdec_ext.generate(tiny_model(model), ids, **kwargs)
    return output[:, ids.shape[1] :].tolist()


def check_rows(make, **kwargs) -> None:
    ids, mask = batch("left")
    prompt = ids[1, mask[1].bool()][None]
    (alone,) = texts(make(), prompt, torch.ones_like(prompt), [SEED], **kwargs)
    assert [alone] == texts(make(), prompt, torch.ones_like(prompt), SEED, **kwargs)
    for side in ("left", "right"):
        rows = texts(make(), *batch(side), [seed for seed, _ in ROWS], **kwargs)
        assert [rows[row] for row in SAME] == [alone, alone]
        assert rows[4] != alone


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_does_not_depend_on_the_batch_with_any_drafter(name):
    check_rows(DRAFTERS[name])


@pytest.mark.parametrize("min_confidence", [0.0, 0.05])
@pytest.mark.parametrize("rule", RULES)
def test_text_does_not_depend_on_the_batch_under_any_rule(rule, min_confidence):
    options = dict(sampled=True, min_confidence=min_confidence)
    check_rows(lambda: DraftModelDrafter(tiny_model("qwen3"), **options), verification=rule)


@pytest.mark.parametrize("name", ["gpt2", "mistral-window", "phi"])
def test_text_does_not_depend_on_the_batch_with_other_models(name):
    check_rows(DRAFTERS["ngram"], model=name)


@pytest.mark.parametrize(
    "kwargs", [dict(repetition_penalty=1.2, top_p=0.9), dict(eos_token_id=[5, 11])], ids=str
)
def test_text_does_not_depend_on_the_batch_with_processors_and_ends(kwargs):
    check_rows(DRAFTERS["ngram"], **kwargs)


def test_text_after_embeddings_does_not_depend_on_the_batch():
    ids, mask = batch("left")
    embed = tiny_model("llama").get_input_embeddings()

    def run(ids, mask, seed):
        kwargs = dict(attention_mask=mask, seed=seed, max_new_tokens=NEW, do_sample=True)
        kwargs |= dict(inputs_embeds=embed(ids), drafter="ngram")
        return specdec_ext.generate(tiny_model("llama"), **kwargs)

    rows = run(ids, mask, [seed for seed, _ in ROWS])
    alone = run(ids[1:2, mask[1].bool()], None, [SEED])
    assert torch.equal(rows[SAME], alone.expand(2, -1)) and not torch.equal(rows[4:], alone)


def test_returned_sequences_have_the_seeds_of_the_list():
    ids, mask = prompts((9,))
    (alone,) = texts(None, ids, mask, [SEED])
    copies = texts("ngram", ids, mask, [4, SEED, SEED], num_return_sequences=3)
    assert copies[0] != alone and copies[1:] == [alone, alone]
