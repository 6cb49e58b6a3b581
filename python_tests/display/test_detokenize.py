"""Pieces of text add up to the decoded tokens and never contain a half of a character, for any tokens."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdec_ext import assets
from specdec_ext.display.detokenize import IncrementalDecoder


@functools.cache
def byte_level():
    return assets.load_tokenizer()


@functools.cache
def byte_fallback():
    """A tokenizer as Llama 2 has it: "▁" marks a space, and bytes are tokens."""
    vocab = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for piece in ("▁", "▁Hello", "▁world", "a", "€"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def pieces(tokenizer, tokens, **kwargs):
    decoder = IncrementalDecoder(tokenizer, **kwargs)
    return [*(decoder.feed(token) for token in tokens), decoder.flush()]


def as_bytes(text: str) -> list[int]:
    return [2 + byte for byte in text.encode()]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXT)
@settings(deadline=None)
def test_pieces_of_a_text_are_whole_characters(text):
    tokenizer = byte_level()
    tokens = tokenizer(text)["input_ids"]
    got = pieces(tokenizer, tokens)
    assert "".join(got) == text
    assert sum(piece.count("\ufffd") for piece in got) == text.count("\ufffd")


@given(TEXT)
@settings(deadline=None)
def test_bytes_of_a_text_are_whole_characters(text):
    # Without the marker of spaces, which this tokenizer takes for a space.
    text = text.replace("▁", "")
    tokens = [1, 2 + 256, *as_bytes(text)]  # "▁" at the start is stripped
    assert "".join(pieces(byte_fallback(), tokens)) == text


@given(st.lists(st.integers(0, 4095), max_size=80), st.booleans())
@settings(deadline=None)
def test_pieces_of_any_tokens_are_their_text(tokens, skip):
    tokenizer = byte_level()
    expected = tokenizer.decode(tokens, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, tokens, skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("token", [0, "first byte", "continuation"])
def test_the_window_stays_short(token):
    """Thousands of special tokens, or of bytes that are no character, take no longer than other tokens."""
    tokenizer = byte_level()
    if token == "first byte":
        token = tokenizer.convert_tokens_to_ids("Ã")  # byte C3
    elif token == "continuation":
        token = tokenizer.convert_tokens_to_ids("Ģ")  # byte 80
    decoder = IncrementalDecoder(tokenizer)
    got = [decoder.feed(token) for _ in range(200)]
    assert len(decoder._tokens) < 40
    end = tokenizer("x €")["input_ids"]
    got += [decoder.feed(each) for each in end] + [decoder.flush()]
    assert "".join(got) == tokenizer.decode([token] * 200 + end, skip_special_tokens=True)


def test_spaces_between_words_stay():
    tokenizer = byte_fallback()
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    assert pieces(tokenizer, [1, hello, world, world]) == ["", "Hello", " world", " world", ""]
