"""Ends inside blocks, many of them: 200 random prompts for each kind of end, no difference from HF.

Claim: stop strings, ends of sequence and criteria of the user's own end a text exactly where transformers
ends it, when the drafts go on beyond the end: each prompt alone (20 of them in ``make test``) and all in one
batch.
"""

import functools

import pytest
import torch
from stopping_cases import letters_tokenizer, text_of
from tiny import (
    VOCAB,
    ScriptedDrafter,
    generated,
    noisy_chain,
    oracle_chain,
    oracle_tree,
    prompts,
    tiny_model,
)
from transformers.generation.stopping_criteria import StoppingCriteria

import specdec_ext

PROMPTS, NEW = 200, 24
SHAPES = [oracle_chain, noisy_chain, oracle_tree]
UNUSED = 0  # an end of sequence that finished rows are padded with, as transformers asks for it


class LastTwo(StoppingCriteria):
    """Ends a row whose two newest tokens add up to a multiple of 11."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] + input_ids[:, -2]) % 11 == 0


@functools.cache
def texts() -> tuple[torch.LongTensor, torch.LongTensor, list[list[int]]]:
    """Prompts, mask and texts without an end."""
    lengths = torch.randint(2, 12, (PROMPTS,), generator=torch.Generator().manual_seed(1))
    ids, mask = prompts(tuple(lengths.tolist()), seed=2)
    free = tiny_model("llama").generate(
        ids, attention_mask=mask, max_new_tokens=NEW + 6, do_sample=False
    )
    return ids, mask, generated(free, ids.shape[1])


@functools.cache
def stop_strings() -> list[str]:
    """Parts of some of the texts, from inside one token to inside another."""
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


def differences(kind: str, rows: range) -> list[int]:
    """The prompts whose text is not what transformers makes of it."""
    ids, mask, answers = texts()
    expected, wrong = generated(plain(kind), ids.shape[1]), []
    for row in rows:
        alone = ids[row : row + 1, -int(mask[row].sum()) :]
        text = specdec_ext.generate(
            tiny_model("llama"),
            alone,
            drafter=ScriptedDrafter([answers[row]], SHAPES[row % 3], seed=row),
            speculation="fixed",
            max_new_tokens=NEW,
            do_sample=False,
            **ends(kind),
        )
        (tokens,) = generated(text, alone.shape[1])
        ended = tokens + [UNUSED] * (len(expected[row]) - len(tokens))
        wrong += [row] * (ended != expected[row])
    return wrong


KINDS = ["stop-strings", "eos", "criteria"]


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_prompts(kind):
    assert differences(kind, range(20)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_prompts(kind):
    assert differences(kind, range(PROMPTS)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_batch(kind):
    ids, mask, answers = texts()
    text = specdec_ext.generate(
        tiny_model("llama"),
        ids,
        attention_mask=mask,
        drafter=ScriptedDrafter(answers, noisy_chain),
        speculation="fixed",
        max_new_tokens=NEW,
        do_sample=False,
        **ends(kind),
    )
    assert torch.equal(text, plain(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_most_texts_end_early(kind):
    """And rarely where a block of four ends: otherwise nothing is shown."""
    padding = UNUSED if kind != "eos" else int(tiny_model("llama").generation_config.pad_token_id)
    lengths = [
        text.index(padding) if padding in text else NEW
        for text in generated(plain(kind), texts()[0].shape[1])
    ]
    early = [length for length in lengths if length < NEW]
    assert len(early) > PROMPTS / 2 and len({length % 4 for length in early}) == 4
