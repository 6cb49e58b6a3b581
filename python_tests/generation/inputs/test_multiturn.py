"""A conversation continues from the returned cache with the text of a new run on the whole text.

Claim (greedy, float32, exact token equality with HF ``model.generate`` without a cache): ``past_key_values``
may be new, filled by HF or by an earlier call of ours; the same object is returned and holds
``sequences[:, :-1]``; HF's ``generate`` continues with our cache, and ours with HF's; a cache that can't be
continued is refused with the reason.
"""

import copy
import itertools

import pytest
import torch
from helpers.models.tiny import VOCAB, generated, make_drafter, prompts, tiny_model
from helpers.texts.padding_cases import row_alone
from transformers import DynamicCache, QuantizedCache, StaticCache

import specdec_ext
from specdec_ext.models.compat import CACHE

NEW_TOKENS = 14
MODELS = ["llama", "gpt2", "mistral-window", "gemma3-window"]

every_model = pytest.mark.parametrize("name", MODELS)
few_drafters = pytest.mark.parametrize("drafter", ["none", "self", "random_tree"])


def question(seed: int, rows: int = 1, length: int = 5) -> torch.LongTensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def plain(model, ids, mask=None, **kwargs):
    mask = torch.ones_like(ids) if mask is None else mask
    kwargs = dict(attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS) | kwargs
    return model.generate(ids, **kwargs)


def ours(model, ids, drafter, expected, mask=None, **kwargs):
    """Our text; scripted drafters propose parts of ``expected``."""
    made = make_drafter(drafter, model, generated(expected, ids.shape[1]))
    mask = torch.ones_like(ids) if mask is None else mask
    kwargs = dict(attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS) | kwargs
    return specdec_ext.generate(model, ids, drafter=made, **kwargs)


CACHES = {
    "without-config": lambda model: DynamicCache(),
    "with-config": lambda model: DynamicCache(config=model.config),
}


@every_model
@few_drafters
@pytest.mark.parametrize("kind", CACHES)
def test_three_turns_have_the_text_of_new_runs(kind, drafter, name):
    """Each turn adds a question to the text so far and uses the same cache object."""
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
def test_callers_cache_is_returned(drafter, name):
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
def test_cache_filled_by_hf_is_continued(drafter, name):
    model = tiny_model(name)
    first = plain(model, question(1, length=7), return_dict_in_generate=True)
    ids = torch.cat([first.sequences, question(2)], dim=1)
    expected = plain(model, ids)
    actual = ours(model, ids, drafter, expected, past_key_values=first.past_key_values)
    assert torch.equal(actual, expected)


@every_model
@few_drafters
@pytest.mark.parametrize("rows", [1, 3])
def test_hf_continues_with_our_cache(rows, drafter, name):
    model = tiny_model(name)
    ids = question(1, rows, 7)
    expected = plain(model, ids)
    cache = DynamicCache(config=model.config)
    ours(model, ids, drafter, expected, past_key_values=cache)
    ids = torch.cat([expected, question(2, rows)], dim=1)
    expected = plain(model, ids)
    assert torch.equal(plain(model, ids, past_key_values=cache), expected)
    # Ours continues again: slots that HF wrote are rolled back as our own.
    ids = torch.cat([expected, question(3, rows)], dim=1)
    expected = plain(model, ids)
    assert torch.equal(ours(model, ids, drafter, expected, past_key_values=cache), expected)


@every_model
@few_drafters
def test_keys_and_values_are_those_of_one_forward_pass(drafter, name):
    """In every slot."""
    model = tiny_model(name)
    ids = question(1, 2, 7)
    expected = plain(model, ids)
    cache = DynamicCache()
    ours(model, ids, drafter, expected, past_key_values=cache)
    fresh = DynamicCache()
    with torch.no_grad():
        model(input_ids=expected[:, :-1], **{CACHE: fresh})
    for mine, theirs in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, atol=2e-5, rtol=1e-4)


# Rows that end at different columns: the mask of the next turn excludes their paddings.


def conversation(model, lengths, eos, side="left"):
    """The first turn of a ragged batch: prompt, mask, HF's text and the mask of the text."""
    ids, mask = prompts(lengths, side=side)
    expected = plain(model, ids, mask, eos_token_id=eos)
    columns = ids.shape[1]
    text_mask = torch.cat([mask, torch.ones_like(expected[:, columns:])], dim=1)
    for row, tokens in enumerate(generated(expected, columns)):
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        text_mask[row, columns + end :] = 0
    return ids, mask, expected, text_mask


def eos_for(model, lengths) -> list[int]:
    """Two ids that end the rows at different columns, one of them only at the maximum length."""
    ids, mask = prompts(lengths)
    rows = generated(plain(model, ids, mask), ids.shape[1])
    for first, second in itertools.product(rows[0][2:8], rows[1][:12]):
        ends = {min([*row, token].index(token) for token in (first, second)) for row in rows}
        if len(ends) == len(rows) and max(ends) == NEW_TOKENS:
            return [first, second]
    raise AssertionError("no two tokens end these rows at three different columns")


@every_model
@few_drafters
def test_ragged_batch_is_continued(drafter, name):
    """The cache holds the keys of the end-of-sequence token of a row that ended early.

    During the call these keys are not needed, but the token belongs to the text of the next turn.
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
    answers = [row_alone(model, ids, mask, row, NEW_TOKENS) for row in range(3)]
    right = torch.cat([ids, torch.tensor(answers)], dim=1)
    actual = ours(model, ids, drafter, right, mask, past_key_values=cache)
    assert generated(actual, ids.shape[1]) == answers


@few_drafters
def test_hf_continues_with_the_cache_of_a_ragged_batch(drafter):
    """With full attention: in windows transformers counts paddings, and the package counts tokens."""
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
    """(HF's cache, whole text with a new question, its mask); rows differ in length."""
    lengths = (9, 4, 7)
    eos = eos_for(model, lengths)
    ids, mask = prompts(lengths)
    first = plain(model, ids, mask, eos_token_id=eos, return_dict_in_generate=True)
    *_, text_mask = conversation(model, lengths, eos)
    ids = torch.cat([first.sequences, question(5, 3)], dim=1)
    mask = torch.cat([text_mask, torch.ones(3, 5, dtype=torch.long)], dim=1)
    return first.past_key_values, ids, mask


@few_drafters
def test_ragged_batch_filled_by_hf_is_continued(drafter):
    model = tiny_model("llama")
    cache, ids, mask = ragged_batch_filled_by_hf(model)
    expected = plain(model, ids, mask)
    actual = ours(model, ids, drafter, expected, mask, past_key_values=cache)
    assert torch.equal(actual, expected)


@every_model
@few_drafters
def test_questions_may_be_padded_on_the_right(drafter, name):
    """In both turns."""
    model = tiny_model(name)
    ids, mask = prompts((4, 7, 5), side="right")
    cache = DynamicCache(config=model.config)
    for seed in (5, 6):
        answers = [row_alone(model, ids, mask, row, NEW_TOKENS) for row in range(3)]
        right = torch.cat([ids, torch.tensor(answers)], dim=1)
        actual = ours(model, ids, drafter, right, mask, past_key_values=cache)
        assert generated(actual, ids.shape[1]) == answers
        more, more_mask = prompts((2, 5, 3), seed=seed, side="right")
        ids = torch.cat([actual, more], dim=1)
        mask = torch.cat([mask, torch.ones_like(actual[:, mask.shape[1] :]), more_mask], dim=1)


@few_drafters
def test_outputs_of_a_second_turn_are_those_of_hf(drafter):
    """The first pass reads only the new tokens."""
    model = tiny_model("llama", attn_implementation="eager")
    ids = question(1, length=7)
    expected = plain(model, ids)
    caches = [DynamicCache(), DynamicCache()]
    ours(model, ids, drafter, expected, past_key_values=caches[0])
    plain(model, ids, past_key_values=caches[1])
    ids = torch.cat([expected, question(2)], dim=1)
    recorded = ("output_hidden_states", "output_attentions", "output_logits")
    kwargs = dict.fromkeys(("return_dict_in_generate", *recorded), True)
    theirs = plain(model, ids, past_key_values=caches[1], **kwargs)
    mine = ours(model, ids, drafter, theirs.sequences, past_key_values=caches[0], **kwargs)
    assert torch.equal(mine.sequences, theirs.sequences)
    for name in ("hidden_states", "attentions"):
        for step, plain_step in zip(getattr(mine, name), getattr(theirs, name), strict=True):
            for a, b in zip(step, plain_step, strict=True):
                torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


def test_call_of_one_token_leaves_the_prompt_in_the_cache():
    model = tiny_model("llama")
    ids = question(1, length=7)
    expected = plain(model, ids)
    cache = DynamicCache()
    actual = ours(model, ids, "oracle_chain", expected, past_key_values=cache, max_new_tokens=1)
    assert torch.equal(actual, expected[:, :8])
    assert cache.get_seq_length() == 7


def test_methods_of_hf_caches_work_on_ours():
    """A turn follows each of them: copy, select, reorder and repeat rows, crop and reset."""
    model = tiny_model("llama")
    ids = question(1, 3, 7)
    expected = plain(model, ids)
    cache = DynamicCache()
    ours(model, ids, "random_tree", expected, past_key_values=cache)
    longer = torch.cat([expected, question(2, 3)], dim=1)

    def check_continued(used, text):
        right = plain(model, text)
        assert torch.equal(ours(model, text, "noisy_chain", right, past_key_values=used), right)

    check_continued(copy.deepcopy(cache), longer)
    selected = copy.deepcopy(cache)
    selected.batch_select_indices(torch.tensor([0, 2]))
    selected.reorder_cache(torch.tensor([1, 0]))
    assert selected.get_seq_length() == cache.get_seq_length()
    cropped = copy.deepcopy(selected)
    check_continued(selected, longer[[2, 0]])
    cropped.crop(-3)
    check_continued(cropped, torch.cat([expected[[2, 0], :-4], question(4, 2, 8)], dim=1))
    repeated = copy.deepcopy(cache)
    repeated.crop(-6)
    repeated.batch_repeat_interleave(2)
    check_continued(repeated, expected[:, :-6].repeat_interleave(2, dim=0))
    check_continued(cache, longer)
    cache.reset()
    assert cache.get_seq_length() == 0
    check_continued(cache, question(7, 4, 6))  # another batch size


def test_cache_may_be_read_under_autograd():
    model = tiny_model("llama")
    ids = question(1, length=7)
    expected = plain(model, ids)
    cache = DynamicCache()
    ours(model, ids, "noisy_chain", expected, past_key_values=cache)
    logits = model(input_ids=question(3), **{CACHE: cache}).logits
    logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    model.zero_grad(set_to_none=True)


# --- wrong uses


def filled(model, rows=1):
    cache = DynamicCache(config=model.config)
    expected = plain(model, question(1, rows, 7), past_key_values=cache)
    return cache, expected


@few_drafters
def test_new_tokens_alone_are_refused(drafter):
    """transformers accepts them with a mask of the whole text, but drafters and processors need the text."""
    model = tiny_model("llama")
    for length in (5, 30):
        cache, expected = filled(model)
        new = question(2, length=length)
        mask = torch.ones(1, expected.shape[1] - 1 + length, dtype=torch.long)
        made = make_drafter(drafter, model, [[]])
        with pytest.raises(ValueError, match="the whole text"):
            kwargs = dict(attention_mask=mask, past_key_values=cache, max_new_tokens=4)
            specdec_ext.generate(model, new, drafter=made, **kwargs)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_cache_of_another_batch_is_refused(rows):
    model = tiny_model("llama")
    cache, _ = filled(model, rows=3)
    with pytest.raises(ValueError, match=f"{CACHE} holds 3 rows and input_ids {rows}"):
        specdec_ext.generate(model, question(1, rows, 30), past_key_values=cache, max_new_tokens=4)


def test_row_without_a_new_token_is_refused():
    """The logits of its last token, which the cache holds, are not kept."""
    model = tiny_model("llama")
    cache, expected = filled(model, rows=2)
    ids = torch.cat([expected, question(2, 2, 3)], dim=1)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    kwargs = dict(attention_mask=mask, past_key_values=cache, max_new_tokens=4)
    with pytest.raises(ValueError, match=f"row 1 has no token after the 20 that {CACHE} hold"):
        specdec_ext.generate(model, ids, **kwargs)


def test_window_that_dropped_tokens_of_a_padded_row_is_refused():
    """HF's sliding layers keep as many slots as the window, paddings included."""
    model = tiny_model("mistral-window")
    cache, ids, mask = ragged_batch_filled_by_hf(model)
    with pytest.raises(ValueError, match="sliding-window cache that has dropped"):
        ours(model, ids, "none", ids, mask, past_key_values=cache)


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda model: StaticCache(config=model.config, max_cache_len=64), "StaticCache"),
        (lambda model: QuantizedCache.__new__(QuantizedCache), "QuantizedCache"),
        (lambda model: DynamicCache(config=model.config, offloading=True), "an offloading cache"),
    ],
    ids=["static", "quantized", "offloading"],
)
def test_other_cache_classes_are_refused(make, name):
    model = tiny_model("llama")
    cache = make(model)
    if name == "QuantizedCache":
        cache.layers, cache.layer_class_to_replicate, cache.offloading = [], None, False
    message = f"{CACHE} is {name}; expected a transformers.DynamicCache"
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(model, question(1), past_key_values=cache, max_new_tokens=4)
