"""Texts without an end, and a tokenizer whose strings span token borders."""

from __future__ import annotations

import functools

import torch
from helpers.models.tiny import BATCHES, VOCAB, generated, greedy_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NEW_TOKENS = 24


def endless(batch: str) -> tuple[torch.LongTensor, torch.LongTensor, list[list[int]]]:
    """Prompts, mask and the texts of transformers, which end only at the maximum length."""
    ids, mask, sequences = greedy_text("llama", BATCHES[batch], NEW_TOKENS + 8)
    return ids, mask, generated(sequences, ids.shape[1])


@functools.cache
def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token ``i`` is two letters, ``ab`` for 1; texts have no spaces."""
    vocab = {chr(97 + i // 10) + chr(97 + i % 10): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="aa"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="aa", pad_token="aa")


def text_of(tokens: list[int]) -> str:
    return "".join(chr(97 + token // 10) + chr(97 + token % 10) for token in tokens)
