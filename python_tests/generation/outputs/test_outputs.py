"""Scores, logits, hidden states and attentions are those of HF ``generate``; the counters add up.

Claim: with ``return_dict_in_generate=True`` every recorded tensor has HF's place in the same tuples, HF's
shape and, up to the end of its row, HF's values (float32; absolute tolerance 2e-4, because a block of tokens
is scored at once), with every draft, for full and sliding attention, alone and in a ragged batch. Values
behind the end of a row are not specified and not compared.
"""

import functools

import pytest
import torch
from helpers.models.tiny import (
    BATCHES,
    DRAFTERS,
    ScriptedDrafter,
    every_batch,
    every_drafter,
    generated,
    greedy_text,
    make_drafter,
    prompts,
    tiny_model,
)

import specdec_ext
from specdec_ext import SpeculationStats, SpeculativeOutput

NEW_TOKENS = 14
RECORDED = ("scores", "logits", "hidden_states", "attentions")
ALL_OUTPUTS = {f"output_{name}": True for name in RECORDED} | {"return_dict_in_generate": True}
MODELS = ["llama", "mistral-window", "gpt2", "gemma2-window", "gemma3-window"]


def endless(name: str, batch: str) -> list[list[int]]:
    """The texts of transformers, which end only at the maximum length."""
    ids, _, sequences = greedy_text(name, BATCHES[batch], NEW_TOKENS, "eager")
    return generated(sequences, ids.shape[1])


def ends(sequences: torch.LongTensor, columns: int, eos: list[int]) -> list[int]:
    """The number of tokens of each row up to its end."""
    rows = generated(sequences, columns)
    return [next((i + 1 for i, t in enumerate(row) if t in eos), len(row)) for row in rows]


def assert_rows_close(
    mine: torch.Tensor, theirs: torch.Tensor, step: int, lengths: list[int]
) -> None:
    """Check shapes, and values in the rows that have not ended at ``step``."""
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
    alive = torch.tensor([step < length for length in lengths])
    torch.testing.assert_close(mine[alive], theirs[alive], atol=2e-4, rtol=1e-4)


def assert_same_outputs(mine, theirs, lengths: list[int]) -> None:
    assert torch.equal(mine.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        ours, plain = getattr(mine, name), getattr(theirs, name)
        assert isinstance(ours, tuple) and len(ours) == len(plain)
        for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert_rows_close(a, b, step, lengths)
    for name in ("hidden_states", "attentions"):
        ours, plain = getattr(mine, name), getattr(theirs, name)
        assert isinstance(ours, tuple) and len(ours) == len(plain)
        for step, (layers, plain_layers) in enumerate(zip(ours, plain, strict=True)):
            assert isinstance(layers, tuple)
            for a, b in zip(layers, plain_layers, strict=True):
                assert_rows_close(a, b, step, lengths)


@pytest.mark.parametrize(
    "drafter", ["none", "ngram", "self", "noisy_chain", "oracle_tree", "random_tree"]
)
@every_batch
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_hf(name, batch, drafter):
    answers = endless(name, batch)
    eos = sorted({answers[0][8], answers[-1][5]})
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model(name, attn_implementation="eager")
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **ALL_OUTPUTS)
    kwargs |= dict(eos_token_id=eos, repetition_penalty=1.05)
    theirs = model.generate(ids, **kwargs)
    answers = generated(theirs.sequences, ids.shape[1])
    kwargs |= {"drafter": make_drafter(drafter, model, answers), "speculation": "fixed"}
    mine = specdec_ext.generate(model, ids, **kwargs)
    assert isinstance(mine, SpeculativeOutput)
    assert_same_outputs(mine, theirs, ends(theirs.sequences, ids.shape[1], eos))
    assert mine.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()


@pytest.mark.parametrize("drafter", ["none", "oracle_chain", "random_tree"])
def test_rows_that_run_ahead_record_as_many_entries_as_hf(drafter):
    """A criterion ends the rows, without an end-of-sequence id."""
    ids, mask = prompts(BATCHES["five-ragged"])
    model = tiny_model("llama", attn_implementation="eager")
    answers = endless("llama", "five-ragged")

    class RowByRow(torch.nn.Module):
        def forward(self, input_ids, scores, **kwargs):
            wanted = torch.tensor([row[4 + r] for r, row in enumerate(answers)])
            return input_ids[:, -1] == wanted

    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **ALL_OUTPUTS)
    kwargs["stopping_criteria"] = [RowByRow()]
    theirs = model.generate(ids, **kwargs)
    mine = specdec_ext.generate(model, ids, drafter=make_drafter(drafter, model, answers), **kwargs)
    assert_same_outputs(mine, theirs, [theirs.sequences.shape[1] - ids.shape[1]] * 5)


@pytest.mark.parametrize("drafter", ["none", "random_tree"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_row_has_the_outputs_of_the_row_alone(side, drafter):
    """Attention to paddings is zero."""
    lengths = (6, 3, 9)
    ids, mask = prompts(lengths, side=side)
    model = tiny_model("llama", attn_implementation="eager")
    kwargs = dict(max_new_tokens=NEW_TOKENS, do_sample=False, **ALL_OUTPUTS)
    alone = [model.generate(ids[r : r + 1, mask[r].bool()], **kwargs) for r in range(3)]
    answers = [generated(out.sequences, n)[0] for out, n in zip(alone, lengths, strict=True)]
    made = make_drafter(drafter, model, answers)
    mine = specdec_ext.generate(model, ids, attention_mask=mask, drafter=made, **kwargs)
    for r, out in enumerate(alone):
        for step in range(NEW_TOKENS):
            close = functools.partial(torch.testing.assert_close, atol=2e-4, rtol=1e-4)
            close(mine.scores[step][r], out.scores[step][0])
            close(mine.logits[step][r], out.logits[step][0])
            if step == 0:
                continue  # the outputs of the prompt pass include paddings
            columns = torch.cat([mask[r].bool(), torch.ones(step, dtype=torch.bool)])
            for a, b in zip(mine.hidden_states[step], out.hidden_states[step], strict=True):
                close(a[r], b[0])
            for a, b in zip(mine.attentions[step], out.attentions[step], strict=True):
                assert a.shape[-1] == len(columns)
                assert not a[r][..., ~columns].any()
                close(a[r][..., columns], b[0])


@every_batch
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_scores_are_processed_and_logits_are_not(batch, sampling):
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model("llama")
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=sampling)
    kwargs |= dict(bad_words_ids=[[5], [6]], repetition_penalty=1.3)
    kwargs |= dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    if sampling:
        kwargs.update(seed=3, temperature=0.7, top_k=11)
    plain = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    answers = generated(plain.sequences, ids.shape[1])
    for drafter in DRAFTERS:
        made = make_drafter(drafter, model, answers)
        out = specdec_ext.generate(model, ids, drafter=made, **kwargs)
        assert torch.equal(out.sequences, plain.sequences)
        for step in range(NEW_TOKENS):
            assert (out.scores[step][:, [5, 6]] == -torch.inf).all()
            assert out.logits[step].isfinite().all()
            if sampling:
                assert (out.scores[step].isfinite().sum(dim=1) == 11).all()
            torch.testing.assert_close(out.logits[step], plain.logits[step], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(out.scores[step], plain.scores[step], atol=2e-4, rtol=1e-4)


def test_outputs_that_were_not_requested_are_none():
    ids, _ = prompts((7,))
    model = tiny_model("llama")
    out = specdec_ext.generate(model, ids, max_new_tokens=4, return_dict_in_generate=True)
    assert out.scores is out.logits is out.hidden_states is out.attentions is None
    assert out.past_key_values is not None
    ids_only = specdec_ext.generate(model, ids, max_new_tokens=4, output_scores=True)
    assert isinstance(ids_only, torch.Tensor)


@pytest.mark.parametrize("drafter", ["none", "noisy_chain", "random_tree"])
def test_returned_tensors_may_be_edited_and_differentiated(drafter):
    ids, mask = prompts((7, 4))
    model = tiny_model("llama", attn_implementation="eager")
    answers = generated(model.generate(ids, attention_mask=mask, max_new_tokens=8), 7)
    made = make_drafter(drafter, model, answers)
    kwargs = dict(attention_mask=mask, max_new_tokens=8, **ALL_OUTPUTS)
    out = specdec_ext.generate(model, ids, drafter=made, **kwargs)
    tensors = [out.sequences, *out.scores, *out.logits]
    tensors += [each for step in (*out.hidden_states, *out.attentions) for each in step]
    for layer in out.past_key_values.layers:
        tensors += [layer.keys, layer.values]
    for tensor in tensors:
        assert not tensor.is_inference()
        tensor[0].zero_()
    weight = torch.ones(97, requires_grad=True)
    (out.logits[3] * weight).sum().backward()
    assert weight.grad is not None
    assert out.sequences.data_ptr() != ids.data_ptr()


# --- counters


def stats_of(drafter, batch: str, **kwargs) -> tuple[SpeculationStats, int]:
    """The counters of a call, and the number of tokens that it generated, without paddings."""
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model("llama")
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": mask, **kwargs}
    plain = model.generate(ids, **kwargs)
    eos = kwargs.get("eos_token_id", [])
    made = drafter
    if isinstance(drafter, str):
        long = {**kwargs, "eos_token_id": None, "max_new_tokens": NEW_TOKENS + 8}
        answers = generated(model.generate(ids, **long), ids.shape[1])
        made = make_drafter(drafter, model, answers)
    kwargs["speculation"] = "fixed"
    out = specdec_ext.generate(model, ids, drafter=made, return_dict_in_generate=True, **kwargs)
    assert torch.equal(out.sequences, plain)
    return out.speculation_stats, sum(ends(plain, ids.shape[1], eos))


@pytest.mark.parametrize("eos", [False, True], ids=["to-the-limit", "eos"])
@every_batch
@every_drafter
def test_counters_add_up(drafter, batch, eos):
    kwargs = {"eos_token_id": [endless("llama", batch)[0][6]]} if eos else {}
    stats, count = stats_of(drafter, batch, **kwargs)
    rows = len(BATCHES[batch])
    assert stats.emitted_tokens == count - rows
    assert stats.drafts <= stats.steps <= stats.emitted_tokens
    assert stats.accepted_tokens <= stats.draft_tokens
    # A step emits its accepted tokens and one more, unless the row ends on an accepted one.
    surplus = stats.steps + stats.accepted_tokens - stats.emitted_tokens
    assert 0 <= surplus <= rows * eos
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert sum(stats.proposed_per_position) <= stats.draft_tokens
    for counts in (stats.proposed_per_position, stats.accepted_per_position):
        assert counts == sorted(counts, reverse=True)
    assert all(0 <= rate <= 1 for rate in stats.conditional_acceptance)
    assert all(0 <= rate <= 1 for rate in stats.acceptance_per_position)
    assert set(stats.seconds) == {"prefill", "draft", "verify", "commit"}
    assert all(value >= 0 for value in stats.seconds.values()) and stats.seconds["prefill"] > 0


def test_counters_of_plain_decoding_count_no_drafts():
    stats, count = stats_of("none", "five-ragged")
    assert stats.drafter == "none"
    assert (stats.steps, stats.emitted_tokens) == (count - 5, count - 5)
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (0, 0, 0)
    rates = stats.mean_acceptance_length, stats.emitted_per_step, stats.acceptance_rate
    assert rates == (1, 1, 0)


def test_counters_of_right_drafts():
    """13 tokens after the first: two blocks of 4 drafts and a bonus; the limit cuts the third to 2 and
    one."""
    stats, _ = stats_of("oracle_chain", "one")
    assert stats.drafter == "ScriptedDrafter"
    assert (stats.steps, stats.drafts, stats.emitted_tokens) == (3, 3, 13)
    assert stats.draft_tokens == stats.accepted_tokens == 10
    assert stats.proposed_per_position == stats.accepted_per_position == [3, 3, 2, 2]
    assert stats.acceptance_rate == 1.0
    assert stats.conditional_acceptance == [1.0] * 4


def test_counters_of_wrong_drafts():
    stats, _ = stats_of("adversary_chain", "one")
    assert (stats.steps, stats.emitted_tokens, stats.accepted_tokens) == (13, 13, 0)
    assert stats.drafts == 12  # the last step has no room for a draft
    assert stats.mean_acceptance_length == 1.0 and stats.acceptance_rate == 0.0


def test_empty_proposals_are_no_drafts():
    silent = ScriptedDrafter([[]], lambda right, rng: [])
    stats, count = stats_of(silent, "one")
    assert (stats.steps, stats.drafts, stats.draft_tokens) == (count - 1, 0, 0)


def test_draft_tokens_count_all_nodes_of_a_tree():
    stats, _ = stats_of("oracle_tree", "one")
    assert stats.draft_tokens > stats.accepted_tokens == sum(stats.accepted_per_position)
    assert stats.emitted_tokens == 13


def test_each_call_has_new_counters():
    ids, mask = prompts(BATCHES["five-ragged"])
    model = tiny_model("llama")
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    kwargs |= dict(drafter=specdec_ext.NgramDrafter(min_ngram=1), speculation="fixed")
    runs = [specdec_ext.generate(model, ids, **kwargs).speculation_stats for _ in range(2)]
    for stats in runs:
        stats.seconds = {}
    assert runs[0] == runs[1]
