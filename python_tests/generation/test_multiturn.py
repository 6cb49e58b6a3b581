"""A conversation goes on from the returned cache and says what a fresh run on the whole text says.

Claim (greedy, float32, exact token equality with HF ``model.generate`` without a cache): ``past_key_values``
may be new, filled by HF or left by an earlier call of ours; it comes back as the same object, holding
``sequences[:, :-1]``; our cache goes on under HF's ``generate``, and HF's under ours; and what cannot be
continued is refused with the reason.
"""

import copy
import itertools

import pytest
import torch
from tiny import DRAFTERS, VOCAB, generated, make_drafter, prompts, tiny_model
from transformers import DynamicCache, QuantizedCache, StaticCache

import specdec_ext

NEW_TOKENS = 14
MODELS = ["llama", "gpt2", "mistral-window", "gemma3-window"]
FEW_DRAFTERS = ["none", "self", "noisy_chain", "random_tree"]

every_model = pytest.mark.parametrize("name", MODELS)
few_drafters = pytest.mark.parametrize("drafter", FEW_DRAFTERS)


def question(seed: int, rows: int = 1, length: int = 5) -> torch.LongTensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def plain(model, ids, mask=None, **kwargs):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids, attention_mask=mask, do_sample=False, **{"max_new_tokens": NEW_TOKENS, **kwargs}
    )


def ours(model, ids, drafter, expected, mask=None, **kwargs):
    """Our text where ``expected`` is the right one."""
    made = make_drafter(drafter, model, generated(expected, ids.shape[1]))
    mask = torch.ones_like(ids) if mask is None else mask
    return specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        do_sample=False,
        drafter=made,
        **{"max_new_tokens": NEW_TOKENS, **kwargs},
    )


CACHES = {
    "without-config": lambda model: DynamicCache(),
    "with-config": lambda model: DynamicCache(config=model.config),
}


@every_model
@few_drafters
@pytest.mark.parametrize("kind", CACHES)
def test_three_turns(kind, drafter, name):
    """Each turn adds a question to all text so far; the cache object stays the caller's."""
    model = tiny_model(name)
    cache = CACHES[kind](model)
    ids = question(1, length=7)
    for turn in range(3):
        expected = plain(model, ids)
        actual = ours(model, ids, drafter, expected, past_key_values=cache)
        assert torch.equal(actual, expected), turn
        assert cache.get_seq_length() == expected.shape[1] - 1
        ids = torch.cat([expected, question(turn + 2)], dim=1)


@every_model
@few_drafters
def test_the_cache_is_returned_and_belongs_to_the_caller(drafter, name):
    model = tiny_model(name)
    ids = question(1, length=7)
    expected = plain(model, ids)
    cache = DynamicCache(config=model.config)
    kwargs = dict(return_dict_in_generate=True)
    out = ours(model, ids, drafter, expected, past_key_values=cache, **kwargs)
    assert out.past_key_values is cache
    assert type(cache) is DynamicCache
    out = ours(model, ids, drafter, expected, **kwargs)
    assert out.past_key_values.get_seq_length() == expected.shape[1] - 1
    assert out.past_key_values.layers[0].keys.shape[2] == expected.shape[1] - 1


@every_model
@few_drafters
def test_a_cache_filled_by_hf(drafter, name):
    model = tiny_model(name)
    first = plain(model, question(1, length=7), return_dict_in_generate=True)
    ids = torch.cat([first.sequences, question(2)], dim=1)
    expected = plain(model, ids)
    actual = ours(model, ids, drafter, expected, past_key_values=first.past_key_values)
    assert torch.equal(actual, expected)


@every_model
@few_drafters
@pytest.mark.parametrize("rows", [1, 3])
def test_hf_goes_on_with_our_cache(rows, drafter, name):
    model = tiny_model(name)
    ids = question(1, rows, 7)
    expected = plain(model, ids)
    cache = DynamicCache(config=model.config)
    ours(model, ids, drafter, expected, past_key_values=cache)
    ids = torch.cat([expected, question(2, rows)], dim=1)
    expected = plain(model, ids)
    assert torch.equal(plain(model, ids, past_key_values=cache), expected)
    # and back again: the slots that HF wrote are rolled back like our own
    ids = torch.cat([expected, question(3, rows)], dim=1)
    expected = plain(model, ids)
    assert torch.equal(ours(model, ids, drafter, expected, past_key_values=cache), expected)


@every_model
@few_drafters
def test_keys_and_values_are_those_of_one_forward_pass(drafter, name):
    """Not only the next text: every slot holds what the model computes for its token."""
    model = tiny_model(name)
    ids = question(1, 2, 7)
    expected = plain(model, ids)
    cache = DynamicCache()
    ours(model, ids, drafter, expected, past_key_values=cache)
    fresh = DynamicCache()
    with torch.no_grad():
        model(input_ids=expected[:, :-1], past_key_values=fresh)
    for mine, theirs in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, atol=2e-5, rtol=1e-4)


# Rows that end at different columns: the mask of the next turn leaves their paddings out.


def conversation(model, lengths, eos, side="left"):
    """First turn of a ragged batch: prompt, mask, HF's text, the mask of the text, and the rows' texts."""
    ids, mask = prompts(lengths, side=side)
    expected = plain(model, ids, mask, eos_token_id=eos)
    columns = ids.shape[1]
    text_mask = torch.cat([mask, torch.ones_like(expected[:, columns:])], dim=1)
    for row, tokens in enumerate(generated(expected, columns)):
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        text_mask[row, columns + end :] = 0
    return ids, mask, expected, text_mask


def eos_for(model, lengths) -> list[int]:
    """Two ids that end the rows at different columns, but not all of them before the limit."""
    ids, mask = prompts(lengths)
    rows = generated(plain(model, ids, mask), ids.shape[1])
    for first, second in itertools.product(rows[0][2:8], rows[1][:12]):
        ends = {min([*row, token].index(token) for token in (first, second)) for row in rows}
        if len(ends) == len(rows) and max(ends) == NEW_TOKENS:
            return [first, second]
    raise AssertionError("no two tokens end these rows at three different columns")


def row_alone(model, ids, mask, row, **kwargs):
    """HF's continuation of one row without its paddings, on an empty cache."""
    text = ids[row : row + 1, mask[row].bool()]
    return generated(plain(model, text, **kwargs), text.shape[1])[0]


@every_model
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_ragged_batch_goes_on(drafter, name):
    """The end-of-sequence token of a row that ended early is text of the next turn.

    Nobody needs the keys of a row's last token during the call, so a row that ended before the others used to
    leave a hole in the cache where HF has the keys of its end-of-sequence token.
    """
    model = tiny_model(name)
    lengths = (9, 4, 7)
    eos = eos_for(model, lengths)
    ids, mask, expected, text_mask = conversation(model, lengths, eos)
    ends = text_mask[:, ids.shape[1] :].sum(dim=1).tolist()
    assert len(set(ends)) > 1 and max(ends) == NEW_TOKENS
    cache = DynamicCache(config=model.config)
    actual = ours(model, ids, drafter, expected, mask, past_key_values=cache, eos_token_id=eos)
    assert torch.equal(actual, expected)
    assert cache.get_seq_length() == expected.shape[1] - 1

    ids = torch.cat([expected, question(5, 3)], dim=1)
    mask = torch.cat([text_mask, torch.ones(3, 5, dtype=torch.long)], dim=1)
    answers = [row_alone(model, ids, mask, row) for row in range(3)]
    right = torch.cat([ids, torch.tensor(answers)], dim=1)
    actual = ours(model, ids, drafter, right, mask, past_key_values=cache)
    assert generated(actual, ids.shape[1]) == answers


@few_drafters
def test_hf_goes_on_with_the_cache_of_a_ragged_batch(drafter):
    """Full attention only: with windows transformers counts paddings inside a row, and we count tokens."""
    model = tiny_model("llama")
    lengths = (9, 4, 7)
    eos = eos_for(model, lengths)
    ids, mask, expected, text_mask = conversation(model, lengths, eos)
    cache = DynamicCache(config=model.config)
    ours(model, ids, drafter, expected, mask, past_key_values=cache, eos_token_id=eos)
    ids = torch.cat([expected, question(5, 3)], dim=1)
    mask = torch.cat([text_mask, torch.ones(3, 5, dtype=torch.long)], dim=1)
    assert torch.equal(plain(model, ids, mask, past_key_values=cache), plain(model, ids, mask))


def ragged_batch_filled_by_hf(model):
    """(cache that HF's generate left, whole text with a new question, its mask); rows differ in length."""
    lengths = (9, 4, 7)
    eos = eos_for(model, lengths)
    ids, mask = prompts(lengths)
    first = plain(model, ids, mask, eos_token_id=eos, return_dict_in_generate=True)
    *_, text_mask = conversation(model, lengths, eos)
    ids = torch.cat([first.sequences, question(5, 3)], dim=1)
    mask = torch.cat([text_mask, torch.ones(3, 5, dtype=torch.long)], dim=1)
    return first.past_key_values, ids, mask


@few_drafters
def test_a_ragged_batch_filled_by_hf(drafter):
    model = tiny_model("llama")
    cache, ids, mask = ragged_batch_filled_by_hf(model)
    expected = plain(model, ids, mask)
    actual = ours(model, ids, drafter, expected, mask, past_key_values=cache)
    assert torch.equal(actual, expected)


@every_model
@few_drafters
def test_right_padded_questions(drafter, name):
    """Questions of different lengths, padded on the right, in both turns."""
    model = tiny_model(name)
    ids, mask = prompts((4, 7, 5), side="right")
    cache = DynamicCache(config=model.config)
    for seed in (5, 6):
        answers = [row_alone(model, ids, mask, row) for row in range(3)]
        right = torch.cat([ids, torch.tensor(answers)], dim=1)
        actual = ours(model, ids, drafter, right, mask, past_key_values=cache)
        assert generated(actual, ids.shape[1]) == answers
        more, more_mask = prompts((2, 5, 3), seed=seed, side="right")
        ids = torch.cat([actual, more], dim=1)
        mask = torch.cat([mask, torch.ones_like(actual[:, mask.shape[1] :]), more_mask], dim=1)


@few_drafters
def test_outputs_of_a_second_turn(drafter):
    """The prompt pass covers the new tokens only, as in HF."""
    model = tiny_model("llama", attn_implementation="eager")
    ids = question(1, length=7)
    expected = plain(model, ids)
    caches = [DynamicCache(), DynamicCache()]
    ours(model, ids, drafter, expected, past_key_values=caches[0])
    plain(model, ids, past_key_values=caches[1])
    ids = torch.cat([expected, question(2)], dim=1)
    kwargs = dict(
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
        output_logits=True,
    )
    theirs = plain(model, ids, past_key_values=caches[1], **kwargs)
    mine = ours(model, ids, drafter, theirs.sequences, past_key_values=caches[0], **kwargs)
    assert torch.equal(mine.sequences, theirs.sequences)
    for name in ("hidden_states", "attentions"):
        for step, plain_step in zip(getattr(mine, name), getattr(theirs, name), strict=True):
            for a, b in zip(step, plain_step, strict=True):
                torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


def test_a_call_that_ends_with_its_first_token_leaves_the_prompt():
    model = tiny_model("llama")
    ids = question(1, length=7)
    expected = plain(model, ids)
    cache = DynamicCache()
    actual = ours(model, ids, "oracle_chain", expected, past_key_values=cache, max_new_tokens=1)
    assert torch.equal(actual, expected[:, :8])
    assert cache.get_seq_length() == 7


def test_operations_of_the_hf_cache_work_on_ours():
    """Copy, select rows, repeat rows, crop and reset, each followed by a continuation."""
    model = tiny_model("llama")
    ids = question(1, 3, 7)
    expected = plain(model, ids)
    cache = DynamicCache()
    ours(model, ids, "random_tree", expected, past_key_values=cache)
    longer = torch.cat([expected, question(2, 3)], dim=1)

    def goes_on(used, text):
        right = plain(model, text)
        assert torch.equal(ours(model, text, "noisy_chain", right, past_key_values=used), right)

    goes_on(copy.deepcopy(cache), longer)
    selected = copy.deepcopy(cache)
    selected.batch_select_indices(torch.tensor([2, 0]))
    cropped = copy.deepcopy(selected)
    goes_on(selected, longer[[2, 0]])
    cropped.crop(-3)
    goes_on(cropped, torch.cat([expected[[2, 0], :-4], question(4, 2, 8)], dim=1))
    repeated = copy.deepcopy(cache)
    repeated.crop(-6)
    repeated.batch_repeat_interleave(2)
    goes_on(repeated, expected[:, :-6].repeat_interleave(2, dim=0))
    goes_on(cache, longer)
    cache.reset()
    assert cache.get_seq_length() == 0
    goes_on(cache, question(7, 4, 6))  # another batch size: nothing of the old conversation is left


def test_training_goes_on_after_a_call():
    """A cache of ours may be read under autograd."""
    model = tiny_model("llama")
    ids = question(1, length=7)
    expected = plain(model, ids)
    cache = DynamicCache()
    ours(model, ids, "noisy_chain", expected, past_key_values=cache)
    logits = model(input_ids=question(3), past_key_values=cache).logits
    logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    model.zero_grad(set_to_none=True)


# --- wrong uses


def filled(model, rows=1):
    cache = DynamicCache(config=model.config)
    expected = plain(model, question(1, rows, 7), past_key_values=cache)
    return cache, expected


@few_drafters
def test_only_the_new_tokens(drafter):
    """transformers also takes the new tokens alone, with a mask of the whole text. Drafters and processors
    need the text, so that is refused; it used to be decoded as if the new tokens were the whole text."""
    model = tiny_model("llama")
    for length in (5, 30):
        cache, expected = filled(model)
        new = question(2, length=length)
        mask = torch.ones(1, expected.shape[1] - 1 + length, dtype=torch.long)
        made = make_drafter(drafter, model, [[]])
        with pytest.raises(ValueError, match="the whole text"):
            specdec_ext.generate(
                model,
                new,
                attention_mask=mask,
                past_key_values=cache,
                drafter=made,
                max_new_tokens=4,
            )


def test_a_text_that_the_cache_already_holds():
    model = tiny_model("llama")
    cache, expected = filled(model)
    with pytest.raises(
        ValueError, match=r"past_key_values holds 20 tokens and the prompt 20; .* new token"
    ):
        specdec_ext.generate(model, expected[:, :20], past_key_values=cache, max_new_tokens=4)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_cache_of_another_batch(rows):
    model = tiny_model("llama")
    cache, _ = filled(model, rows=3)
    with pytest.raises(ValueError, match=f"past_key_values holds 3 rows and input_ids {rows}"):
        specdec_ext.generate(model, question(1, rows, 30), past_key_values=cache, max_new_tokens=4)


def test_a_row_without_a_new_token():
    """Its next token would follow a token that is in the cache already, whose logits are gone."""
    model = tiny_model("llama")
    cache, expected = filled(model, rows=2)
    ids = torch.cat([expected, question(2, 2, 3)], dim=1)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    with pytest.raises(
        ValueError, match="row 1 has no token after the 20 that past_key_values holds"
    ):
        specdec_ext.generate(
            model, ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4
        )


def test_a_window_that_dropped_what_a_padded_row_still_sees():
    """HF's sliding layers keep as many slots as the window is long, paddings included; ours count tokens."""
    model = tiny_model("mistral-window")
    cache, ids, mask = ragged_batch_filled_by_hf(model)
    with pytest.raises(ValueError, match="sliding-window cache that has dropped"):
        ours(model, ids, "none", ids, mask, past_key_values=cache)


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda model: StaticCache(config=model.config, max_cache_len=64), "StaticCache"),
        (lambda model: QuantizedCache.__new__(QuantizedCache), "QuantizedCache"),
    ],
    ids=["static", "quantized"],
)
def test_other_cache_classes(make, name):
    model = tiny_model("llama")
    cache = make(model)
    if name == "QuantizedCache":
        cache.layers, cache.layer_class_to_replicate, cache.offloading = [], None, False
    with pytest.raises(
        ValueError, match=rf"past_key_values is {name}; expected a transformers.DynamicCache"
    ):
        specdec_ext.generate(model, question(1), past_key_values=cache, max_new_tokens=4)
