"""Texts that end inside blocks: 200 random prompts for each kind of end.

Claim: stop strings, end-of-sequence ids and the user's criteria end a text where transformers ends it,
although drafts continue behind the end: each prompt alone (20 of them in ``make test``) and all in one batch.
"""

import functools

import pytest
import torch
from helpers.models.tiny import (
    VOCAB,
    ScriptedDrafter,
    generated,
    noisy_chain,
    oracle_chain,
    oracle_tree,
    prompts,
    tiny_model,
)
from helpers.texts.stopping_cases import letters_tokenizer, text_of
from transformers.generation.stopping_criteria import StoppingCriteria

import specdec_ext

PROMPTS, NEW = 200, 24
SHAPES = [oracle_chain, noisy_chain, oracle_tree]
UNUSED = 0  # an end-of-sequence id, which transformers needs for padding finished rows


class LastTwo(StoppingCriteria):
    """Ends a row if the sum of its last two tokens is a multiple of 11."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] + input_ids[:, -2]) % 11 == 0


@functools.cache
def texts() -> tuple[torch.LongTensor, torch.LongTensor, list[list[int]]]:
    """Prompts, mask and texts without an end."""
    lengths = torch.randint(2, 12, (PROMPTS,), generator=torch.Generator().manual_seed(1))
    ids, mask = prompts(tuple(lengths.tolist()), seed=2)
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW + 6, do_sample=False)
    free = tiny_model("llama").generate(ids, **kwargs)
    return ids, mask, generated(free, ids.shape[1])


@functools.cache
def stop_strings() -> list[str]:
    """Parts of some of the texts, which begin and end inside tokens."""
    return [text_of(text[4 + i % 12 : 6 + i % 12])[1:] for i, text in enumerate(texts()[2][::5])]


def ends(kind: str) -> dict:
    return {
        "stop-strings": lambda: dict(
            stop_strings=stop_strings(), tokenizer=letters_tokenizer(), eos_token_id=UNUSED
        ),
        "eos": lambda: dict(eos_token_id=list(range(3, VOCAB, 12))),
        "criteria": lambda: dict(stopping_criteria=[LastTwo()], eos_token_id=UNUSED),
    }[kind]()


@functools.cache
def plain(kind: str) -> torch.LongTensor:
    ids, mask, _ = texts()
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return tiny_model("llama").generate(ids, **kwargs, **ends(kind))


def ours(kind: str, ids, drafter, **kwargs) -> torch.LongTensor:
    kwargs |= dict(speculation="fixed", max_new_tokens=NEW, do_sample=False, **ends(kind))
    return specdec_ext.generate(tiny_model("llama"), ids, drafter=drafter, **kwargs)


def differences(kind: str, rows: range) -> list[int]:
    """The prompts whose text is not that of transformers."""
    ids, mask, answers = texts()
    expected, wrong = generated(plain(kind), ids.shape[1]), []
    for row in rows:
        alone = ids[row : row + 1, -int(mask[row].sum()) :]
        text = ours(kind, alone, ScriptedDrafter([answers[row]], SHAPES[row % 3], seed=row))
        (tokens,) = generated(text, alone.shape[1])
        ended = tokens + [UNUSED] * (len(expected[row]) - len(tokens))
        wrong += [row] * (ended != expected[row])
    return wrong


KINDS = ["stop-strings", "eos", "criteria"]


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_prompts_end_as_in_transformers(kind):
    assert differences(kind, range(20)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_prompts_end_as_in_transformers(kind):
    assert differences(kind, range(PROMPTS)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_batch_ends_as_in_transformers(kind):
    ids, mask, answers = texts()
    text = ours(kind, ids, ScriptedDrafter(answers, noisy_chain), attention_mask=mask)
    assert torch.equal(text, plain(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_most_texts_end_early_and_inside_blocks(kind):
    padding = UNUSED if kind != "eos" else int(tiny_model("llama").generation_config.pad_token_id)
    lengths = [
        text.index(padding) if padding in text else NEW
        for text in generated(plain(kind), texts()[0].shape[1])
    ]
    early = [length for length in lengths if length < NEW]
    assert len(early) > PROMPTS / 2 and len({length % 4 for length in early}) == 4
