"""Arguments that can't be honoured are refused by name, with a way out; errors inside a call are located.

Claim: every refusal of ``generate``, ``custom_generate``, the target, the drafters and ``DraftTree`` raises
the exception and the message below; a broken drafter or model is named; the next call works.
"""

import numpy as np
import pytest
import torch
from helpers.models.tiny import VOCAB, ScriptedDrafter, generated, prompts, random_model, tiny_model
from transformers import LogitsProcessor

import specdec_ext
from specdec_ext import Drafter, DraftModelDrafter, DraftTree, NgramDrafter
from specdec_ext.models.compat import CACHE


def call(rows: int = 1, model=None, **kwargs):
    ids, _ = prompts((6,) * rows)
    model = tiny_model("llama") if model is None else model
    return specdec_ext.generate(model, ids, **{"max_new_tokens": 5, "do_sample": False, **kwargs})


# --- arguments


ARGUMENTS = {
    "two-drafters": (dict(assistant_model="m", drafter="ngram"), "name two drafters; pass only one"),
    "assistant-tokenizer": (dict(assistant_tokenizer="t"),
        "assistant_tokenizer needs assistant_model, which is missing"),
    "lookup-and-drafter": (dict(prompt_lookup_num_tokens=3, drafter="ngram"),
        "prompt_lookup_num_tokens=3 requests n-gram drafts, and drafter=... requests others; pass"),
    "lookup-and-assistant": (dict(max_matching_ngram_size=3, assistant_model="m"),
        "max_matching_ngram_size=3 requests n-gram drafts, and drafter=... requests others"),
    "shape-of-no-assistant": (dict(num_assistant_tokens=3),
        r"num_assistant_tokens=3 configures .*=DraftModelDrafter\(model, num_draft_tokens="),
    "stop-strings-without-tokenizer": (dict(stop_strings="ab"), "stop_strings needs tokenizer="),
    "unknown": (dict(temprature=0.3), r"not used by the model: \['temprature'\]"),
    "negative-length": (dict(max_new_tokens=0), "`max_new_tokens` must be greater than 0"),
    "greedy-copies": (dict(num_return_sequences=2), "do not support `num_return_sequences`"),
    "attentions-under-sdpa": (dict(output_attentions=True, return_dict_in_generate=True),
        "output_attentions=True needs attn_implementation='eager'"),
    "mask-too-long": (dict(attention_mask=torch.ones(1, 7)),
        r"attention_mask has shape \(1, 7\) and input_ids \(1, 6\); pass the whole text"),
    "mask-of-another-shape": (dict(attention_mask=torch.tensor([[0, 1, 1, 1]])),
        r"attention_mask has shape \(1, 4\) and input_ids \(1, 6\); pass the whole text"),
    "positions-from-one": (dict(position_ids=torch.arange(1, 7)[None]),
        "position_ids do not count the unpadded tokens"),
    "too-few-positions": (dict(position_ids=torch.arange(5)[None]),
        "position_ids do not count the unpadded tokens"),
    "drafter-name": (dict(drafter="eagle9"), r"drafter='eagle9' is not known; expected one of \['auto'"),
    "too-many-seeds": (dict(do_sample=True, seed=[1, 2]),
        "seed has 2 entries; expected one int, or one per row of the batch of 1"),
    "seed-and-generator": (dict(do_sample=True, seed=1, generator=torch.Generator()),
        "seed and generator both determine the noise"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_refused(case):
    kwargs, message = ARGUMENTS[case]
    if "assistant_model" in kwargs:
        kwargs = {**kwargs, "assistant_model": tiny_model("llama")}
    with pytest.raises(ValueError, match=message):
        call(**kwargs)


@pytest.mark.parametrize(
    "seed",
    [1.5, "abc", True, 2**63, -(2**63) - 1, [1.5], [None], np.int64(3), torch.tensor(3)],
    ids=repr,
)
def test_other_seeds_than_64_bit_ints_are_refused(seed):
    with pytest.raises(ValueError, match="seed must be a 64-bit int or a list of such ints, got"):
        call(do_sample=True, seed=seed)


@pytest.mark.parametrize("name", ["inputs", "input_ids"])
@pytest.mark.parametrize(
    "given, error, message",
    [
        (torch.arange(5), ValueError, r"has shape \[5\]; expected ids .*\[None\] is a batch of one row"),
        (torch.zeros(1, 2, 3, dtype=torch.long), ValueError, r"has shape \[1, 2, 3\]; expected ids \["),
        (torch.zeros(1, 5), ValueError, "is of torch.float32; expected integers, .*inputs_embeds"),
        (torch.ones(1, 5, dtype=torch.bool), ValueError, "is of torch.bool; expected integers"),
        ("text", TypeError, r"is a str; expected a tensor of ids \[batch, length\], such as tokenizer"),
        ([[1, 2]], TypeError, "is a list; expected a tensor of ids"),
        (np.ones((1, 2), dtype=int), TypeError, "is a ndarray; expected a tensor of ids"),
        ({"input_ids": None}, TypeError, r"is a dict; pass its entries: generate\(model, \*\*inputs"),
    ],
    ids=["1-d", "3-d", "float", "bool", "text", "list", "array", "mapping"],
)  # fmt: skip
def test_inputs_that_are_no_batch_of_ids_are_refused(name, given, error, message):
    with pytest.raises(error, match=f"^{name} {message}"):
        specdec_ext.generate(tiny_model("llama"), **{name: given}, max_new_tokens=2)


@pytest.mark.parametrize("drafter", [3, NgramDrafter, len], ids=repr)
def test_objects_that_are_no_drafter_are_refused(drafter):
    message = "expected one of .* a Hugging Face model or a specdec_ext.Drafter"
    with pytest.raises(TypeError, match=message):
        call(drafter=drafter)


@pytest.mark.parametrize("shape", [(0, 4), (1, 0)], ids=str)
def test_empty_inputs_are_refused(shape):
    ids = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"expected at least one row and one token"):
        specdec_ext.generate(tiny_model("llama"), ids, max_new_tokens=3)


def test_row_of_paddings_alone_is_refused():
    mask = torch.tensor([[1] * 6, [0] * 6])
    with pytest.raises(ValueError, match="has no token in row 1"):
        call(2, attention_mask=mask)


# --- models


def test_models_that_are_only_decoded_plainly():
    model = random_model("xlm", emb_dim=32, n_layers=2, n_heads=4)
    # XLM has an argument `cache` that generate does not pass. Since 5.24 other models have it, too.
    reason = "prepares one token" if CACHE == "cache" else "a token that it appends"
    ids, _ = prompts((6,))
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(call(model=model, drafter=None), expected)
    with pytest.warns(UserWarning, match=f"is decoded without speculation: .*{reason}"):
        assert torch.equal(call(model=model), expected)
    with pytest.raises(ValueError, match=f"can't be speculated on: .*{reason}.* Pass drafter=None"):
        call(model=model, drafter="ngram")


def test_batches_that_are_only_decoded_plainly():
    model = random_model("openai-gpt", n_embd=32, n_layer=2, n_head=4)
    ids, _ = prompts((6, 6))
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    message = "without speculation in a batch of 2: its forward does not take a cache"
    with pytest.warns(UserWarning, match=message):
        assert torch.equal(call(2, model=model, drafter="ngram"), expected)


def test_hidden_states_of_a_model_without_a_cache_are_refused():
    model = random_model("openai-gpt", n_embd=32, n_layer=2, n_head=4)
    message = r"output_hidden_states can't be recorded: OpenAIGPTLMHeadModel runs the whole text"
    with pytest.raises(ValueError, match=message):
        call(model=model, return_dict_in_generate=True, output_hidden_states=True)


def test_draft_models_without_rollback_are_refused():
    model = random_model("mamba2", num_heads=4, head_dim=16, state_size=8, n_groups=2)
    message = "Mamba2ForCausalLM can't be a draft model, because its cache"
    with pytest.raises(ValueError, match=message):
        call(drafter=model)


# --- drafters


class Fixed(Drafter):
    """Proposes ``make(context)`` from its second call on."""

    def __init__(self, make):
        self.make, self.calls = make, 0

    def propose(self, context):
        self.calls += 1
        return DraftTree.root(context.roots) if self.calls == 1 else self.make(context)


def tree(context, tokens, parents):
    """Rows of (root, *tokens) with these parents."""
    rows = [[root, *tokens] for root in context.roots.tolist()]
    return DraftTree(torch.tensor(rows), torch.tensor([parents] * len(rows)))


BROKEN_TREES = {
    "wrong-roots": (lambda c: DraftTree.root((c.roots + 1) % VOCAB),
        r"Fixed returned a DraftTree whose roots are .* must be the last committed token"),
    "a-row-too-few": (lambda c: DraftTree.root(c.roots[1:]),
        r"tokens are torch.int64 \(1, 1\); expected torch.int64 of shape \(2, nodes\)"),
    "a-later-parent": (lambda c: tree(c, [5, 6], [-1, 2, 0]), r"parents\[0, 1\] = 2"),
    "token-beyond-the-vocabulary": (lambda c: tree(c, [5, VOCAB], [-1, 0, 0]),
        r"Fixed drafted token 97 \(row 0, node 2\); the target's vocabulary is \[0, 97\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_TREES)
def test_broken_trees_are_refused(case):
    make, message = BROKEN_TREES[case]
    with pytest.raises(ValueError, match=message):
        call(2, drafter=Fixed(make), speculation="fixed")


@pytest.mark.parametrize("what", [None, torch.zeros(2), [1, 2]], ids=["none", "tensor", "list"])
def test_proposal_that_is_no_tree_is_refused(what):
    message = f"Fixed.propose returned a {type(what).__name__}; expected a DraftTree"
    with pytest.raises(TypeError, match=message):
        call(2, drafter=Fixed(lambda context: what), speculation="fixed")


def test_inactive_nodes_may_hold_any_token_and_have_children():
    """A node below an inactive one is inactive, and its token is not read."""

    def make(context):
        return tree(context, [5000, -7, 8], [-1, -2, -2, 0])

    expected = call(2, drafter=None)
    assert torch.equal(call(2, drafter=Fixed(make), speculation="fixed"), expected)
    below = Fixed(lambda context: tree(context, [9, 10], [-1, -2, 1]))
    assert torch.equal(call(2, drafter=below, speculation="fixed"), expected)


def test_drafter_must_define_propose():
    class Idle(Drafter):
        pass

    with pytest.raises(NotImplementedError, match="Idle must define propose"):
        call(drafter=Idle(), speculation="fixed")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: NgramDrafter(num_draft_tokens=0), "num_draft_tokens must be at least 1, got 0"),
        (lambda: NgramDrafter(num_branches=0), "num_branches must be at least 1, got 0"),
        (lambda: DraftModelDrafter(None, 0), "num_draft_tokens must be at least 1, got 0"),
    ],
)
def test_arguments_of_drafters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- numbers


class Poisoned(LogitsProcessor):
    """Makes the scores invalid from a column on, in one row."""

    def __init__(self, value: float, row: int, column: int):
        self.value, self.row, self.column = value, row, column

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.column:
            scores[self.row] = self.value
        return scores


@pytest.mark.parametrize("shape", ["none", "oracle", "ngram"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize(
    "value, message",
    [
        (float("nan"), "contain NaN"),
        (-float("inf"), "are all -inf: the logits processors excluded every token"),
    ],
    ids=["nan", "minus-inf"],
)
@pytest.mark.parametrize("column", [6, 9])
def test_error_names_row_and_position_of_invalid_logits(column, value, message, sampling, shape):
    """The position counts tokens, and row 1 has two paddings."""
    ids, mask = prompts((6, 4, 6))
    kwargs = dict(attention_mask=mask, do_sample=sampling, max_new_tokens=8)
    if sampling:
        kwargs["seed"] = 4
    model = tiny_model("llama")
    plain = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    drafter = {
        "none": None,
        "ngram": "ngram",
        "oracle": ScriptedDrafter(generated(plain, 6), lambda right, rng: [right[:5]]),
    }[shape]
    position = column - 2
    poisoned = dict(kwargs, logits_processor=[Poisoned(value, 1, column)])
    with pytest.raises(ValueError, match=rf"logits of row 1 at position {position} {message}"):
        specdec_ext.generate(model, ids, drafter=drafter, **poisoned)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), plain)


@pytest.fixture
def broken_model():
    """The embedding of token 13 is NaN, so all logits behind it are."""
    model = random_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = float("nan")
    return model


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_error_names_nan_weights(broken_model, sampling):
    ids, mask = prompts((6, 3))
    ids[1, -1] = 13
    kwargs = dict(attention_mask=mask, do_sample=sampling, max_new_tokens=3)
    message = "logits of row 1 at position 3 contain NaN. Check the model's weights"
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(broken_model, ids, **kwargs)


def test_error_counts_rows_as_the_caller_does():
    """Inside the call finished rows are moved behind the others."""
    model = tiny_model("llama")
    ids, mask = prompts((6, 6, 6))
    kwargs = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    rows = generated(model.generate(ids, **kwargs), 6)
    assert rows[0][1] not in rows[2][:6]
    kwargs |= dict(eos_token_id=[rows[0][1]], logits_processor=[Poisoned(float("nan"), 2, 11)])
    with pytest.raises(ValueError, match="logits of row 2 at position 11 contain NaN"):
        specdec_ext.generate(model, ids, **kwargs)


def test_remove_invalid_values_works_with_nan_weights(broken_model):
    """The error message recommends it."""
    ids, mask = prompts((6, 3))
    ids[1, -1] = 13
    kwargs = dict(attention_mask=mask, do_sample=False, max_new_tokens=4)
    kwargs["remove_invalid_values"] = True
    expected = broken_model.generate(ids, **kwargs)
    assert torch.equal(specdec_ext.generate(broken_model, ids, **kwargs), expected)
