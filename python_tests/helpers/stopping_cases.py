"""Texts that nothing stops, and a tokenizer in which strings span the borders of tokens."""

from __future__ import annotations

import functools

import torch
from tiny import VOCAB, generated, prompts, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BATCHES = {"one": (7,), "five-ragged": (12, 3, 9, 5, 12)}
NEW_TOKENS = 24


@functools.cache
def endless(batch: str) -> tuple[torch.LongTensor, torch.LongTensor, list[list[int]]]:
    """Prompt, mask and HF's text where nothing but the length stops it."""
    ids, mask = prompts(BATCHES[batch])
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS + 8, do_sample=False)
    return ids, mask, generated(tiny_model("llama").generate(ids, **kwargs), ids.shape[1])


@functools.cache
def letters_tokenizer() -> PreTrainedTokenizerFast:
    """Token ``i`` is two letters, ``ab`` for 1: texts without spaces in which strings span token borders."""
    vocab = {chr(97 + i // 10) + chr(97 + i % 10): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="aa"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="aa", pad_token="aa")


def text_of(tokens: list[int]) -> str:
    return "".join(chr(97 + token // 10) + chr(97 + token % 10) for token in tokens)
