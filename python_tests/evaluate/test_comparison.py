"""``compare_runs`` distinguishes equal texts, near-ties and bugs."""

import pytest
import torch
from helpers.models.tiny import prompts, tiny_model

from specdec_ext import compare_runs


@pytest.fixture
def text():
    model = tiny_model("llama")
    ids, _ = prompts((6,))
    return model, model.generate(ids, max_new_tokens=10, do_sample=False)[0]


def test_equal_texts_are_equal(text):
    model, first = text
    assert compare_runs(model, first, first.clone(), 6).verdict == "equal"


def test_wrong_token_is_a_bug(text):
    model, first = text
    second = first.clone()
    second[9] = (second[9] + 1) % 97
    verdict = compare_runs(model, first, second, 6)
    assert (verdict.equal, verdict.position, verdict.verdict) == (False, 9, "bug")
    assert verdict.gap > verdict.bound


def test_text_that_ends_early_is_a_bug(text):
    model, first = text
    assert compare_runs(model, first, first[:-2], 6).verdict == "bug"


def test_two_tokens_with_the_same_logits_are_a_near_tie(text):
    """Make the runner-up's output row a copy of the winner's: their logits are equal everywhere."""
    _, first = text
    model = tiny_model.__wrapped__("llama")  # a fresh one: its weights are changed here
    winner, twin = int(first[8]), (int(first[8]) + 1) % 97
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[winner]
    second = first.clone()
    second[8] = twin
    verdict = compare_runs(model, first, second, 6)
    assert (verdict.verdict, verdict.position) == ("near-tie", 8)


def bfloat16_model_and_two_texts():
    """A fresh model, and two texts that differ in one new token, 3 and 5."""
    model = tiny_model.__wrapped__("llama").bfloat16()
    ids, _ = prompts((6,))
    return model, *(torch.cat([ids[0], torch.tensor([token])]) for token in (3, 5))


@pytest.mark.parametrize(("rise", "verdict"), [(0, "bug"), (8, "near-tie")])
def test_what_the_last_bits_of_the_embeddings_change_is_rounding(rise, verdict):
    """All passes give the same logits here. They depend on an element of the last embedding, which is 1."""
    model, first, second = bfloat16_model_and_two_texts()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
    elements = []

    def everywhere(module, args, output):
        output.logits = torch.zeros_like(output.logits)
        output.logits[..., 3] = 8.0
        output.logits[..., 5] = 8.0 + 2 * 2**-4 + rise * (elements[-1] - 1)

    model.register_forward_hook(everywhere)
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args: elements.append(args[0][0, -1, 0])
    )
    found = compare_runs(model, first, second, 6)
    assert (found.verdict, found.gap) == (verdict, 2 * 2**-4)


@pytest.mark.parametrize(("steps", "verdict"), [(1, "near-tie"), (2, "bug")])
def test_two_logits_that_are_neighbours_in_their_dtype_are_a_near_tie(steps, verdict):
    """All passes give the same logits here, so only the rounding of each logit to bfloat16 is left."""
    model, first, second = bfloat16_model_and_two_texts()
    logits = torch.zeros(97, dtype=torch.bfloat16)
    logits[3], logits[5] = 8.0, 8.0 + steps * 2**-4

    def everywhere(module, args, output):
        output.logits = logits.expand_as(output.logits)

    model.register_forward_hook(everywhere)
    found = compare_runs(model, first, second, 6)
    assert (found.verdict, found.gap, found.bound) == (verdict, steps * 2**-4, 2**-4)


def test_invalid_arguments_are_refused(text):
    model, first = text
    with pytest.raises(ValueError, match="unbatched"):
        compare_runs(model, first[None], first, 6)
    second = first.clone()
    second[2] += 1
    with pytest.raises(ValueError, match="within the prompt"):
        compare_runs(model, first, second, 6)
