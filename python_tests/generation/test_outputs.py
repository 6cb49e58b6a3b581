"""Scores, logits, hidden states and attentions are those of HF ``generate``; the counters add up.

Claim: with ``return_dict_in_generate=True`` every recorded tensor has HF's place in the same tuples, HF's
shape and, up to the end of its row, HF's values (float32; absolute tolerance 2e-4, since a block of tokens
is scored at once), whatever is drafted, for full and sliding attention, alone and in a ragged batch. What
follows a row's end is unspecified and not compared.
"""

import functools

import pytest
import torch
from tiny import (
    DRAFTERS,
    ScriptedDrafter,
    generated,
    make_drafter,
    prompts,
    tiny_model,
)

import specdec_ext
from specdec_ext import SpeculationStats, SpeculativeOutput

BATCHES = {"one": (7,), "five-ragged": (12, 3, 9, 5, 12)}
NEW_TOKENS = 14
ALL_OUTPUTS = dict(
    output_scores=True, output_logits=True, output_hidden_states=True, output_attentions=True
)
MODELS = ["llama", "mistral-window", "gpt2", "gemma2-window", "gemma3-window"]

every_batch = pytest.mark.parametrize("batch", BATCHES)


@functools.cache
def endless(name: str, batch: str) -> list[list[int]]:
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model(name, attn_implementation="eager")
    return generated(
        model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False),
        ids.shape[1],
    )


def ends(sequences: torch.LongTensor, columns: int, eos: list[int]) -> list[int]:
    """Tokens of each row until its end."""
    rows = generated(sequences, columns)
    return [next((i + 1 for i, t in enumerate(row) if t in eos), len(row)) for row in rows]


def assert_rows_close(
    mine: torch.Tensor, theirs: torch.Tensor, step: int, lengths: list[int]
) -> None:
    """Equal shapes, and equal values in the rows that were not over at ``step``."""
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
def test_all_outputs_equal_those_of_hf(name, batch, drafter):
    answers = endless(name, batch)
    eos = sorted({answers[0][8], answers[-1][5]})
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model(name, attn_implementation="eager")
    kwargs = dict(
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=eos,
        repetition_penalty=1.05,
        return_dict_in_generate=True,
        **ALL_OUTPUTS,
    )
    theirs = model.generate(ids, **kwargs)
    answers = generated(theirs.sequences, ids.shape[1])
    kwargs |= {"drafter": make_drafter(drafter, model, answers), "speculation": "fixed"}
    mine = specdec_ext.generate(model, ids, **kwargs)
    assert isinstance(mine, SpeculativeOutput)
    assert_same_outputs(mine, theirs, ends(theirs.sequences, ids.shape[1], eos))
    assert mine.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()


@pytest.mark.parametrize("drafter", ["none", "oracle_chain", "random_tree"])
def test_rows_that_run_on_record_as_many_entries_as_hf(drafter):
    """No end-of-sequence id and a criterion: a row that ran ahead must not lengthen the tuples."""
    ids, mask = prompts(BATCHES["five-ragged"])
    model = tiny_model("llama", attn_implementation="eager")
    answers = endless("llama", "five-ragged")

    class EachOnItsOwn(torch.nn.Module):
        def forward(self, input_ids, scores, **kwargs):
            wanted = torch.tensor([row[4 + r] for r, row in enumerate(answers)])
            return input_ids[:, -1] == wanted

    kwargs = dict(
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        stopping_criteria=[EachOnItsOwn()],
        return_dict_in_generate=True,
        **ALL_OUTPUTS,
    )
    theirs = model.generate(ids, **kwargs)
    mine = specdec_ext.generate(model, ids, drafter=make_drafter(drafter, model, answers), **kwargs)
    assert_same_outputs(mine, theirs, [theirs.sequences.shape[1] - ids.shape[1]] * 5)


@pytest.mark.parametrize("drafter", ["none", "random_tree"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_records_what_it_records_alone(side, drafter):
    """Attention to paddings is zero; without their columns the weights are those of the row alone."""
    lengths = (6, 3, 9)
    ids, mask = prompts(lengths, side=side)
    model = tiny_model("llama", attn_implementation="eager")
    kwargs = dict(
        max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, **ALL_OUTPUTS
    )
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
                continue  # the prompt pass, as the model gave it: paddings included
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
    kwargs = dict(
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=sampling,
        bad_words_ids=[[5], [6]],
        repetition_penalty=1.3,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    if sampling:
        kwargs.update(seed=3, temperature=0.7, top_k=11)
    plain = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    answers = generated(plain.sequences, ids.shape[1])
    for drafter in DRAFTERS:
        out = specdec_ext.generate(
            model, ids, drafter=make_drafter(drafter, model, answers), **kwargs
        )
        assert torch.equal(out.sequences, plain.sequences)
        for step in range(NEW_TOKENS):
            assert (out.scores[step][:, [5, 6]] == -torch.inf).all()
            assert out.logits[step].isfinite().all()
            if sampling:
                assert (out.scores[step].isfinite().sum(dim=1) == 11).all()
            # top-k may cut between two scores that round differently in a block
            torch.testing.assert_close(out.logits[step], plain.logits[step], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(out.scores[step], plain.scores[step], atol=2e-4, rtol=1e-4)


def test_outputs_that_were_not_asked_for_are_none():
    ids, _ = prompts((7,))
    model = tiny_model("llama")
    out = specdec_ext.generate(model, ids, max_new_tokens=4, return_dict_in_generate=True)
    assert out.scores is out.logits is out.hidden_states is out.attentions is None
    assert out.past_key_values is not None
    ids_only = specdec_ext.generate(model, ids, max_new_tokens=4, output_scores=True)
    assert isinstance(ids_only, torch.Tensor)


@pytest.mark.parametrize("drafter", ["none", "noisy_chain", "random_tree"])
def test_what_is_returned_may_be_edited_and_differentiated(drafter):
    """Everything is an ordinary tensor: writable in place, usable under autograd."""
    ids, mask = prompts((7, 4))
    model = tiny_model("llama", attn_implementation="eager")
    answers = generated(model.generate(ids, attention_mask=mask, max_new_tokens=8), 7)
    out = specdec_ext.generate(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=8,
        drafter=make_drafter(drafter, model, answers),
        return_dict_in_generate=True,
        **ALL_OUTPUTS,
    )
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


def stats_of(
    drafter, batch: str, model_name: str = "llama", **kwargs
) -> tuple[SpeculationStats, int]:
    """Counters of a call, and how many tokens it generated (paddings not counted)."""
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model(model_name)
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
    return out.speculation_stats, sum(
        ends(plain, ids.shape[1], eos if isinstance(eos, list) else [eos])
    )


@pytest.mark.parametrize("eos", [False, True], ids=["to-the-limit", "eos"])
@every_batch
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_counters_add_up(drafter, batch, eos):
    kwargs = {"eos_token_id": endless("llama", batch)[0][6]} if eos else {}
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


def test_counters_of_plain_decoding():
    stats, count = stats_of("none", "five-ragged")
    assert stats.drafter == "none"
    assert (stats.steps, stats.emitted_tokens) == (count - 5, count - 5)
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (0, 0, 0)
    assert (stats.mean_acceptance_length, stats.emitted_per_step, stats.acceptance_rate) == (
        1,
        1,
        0,
    )


def test_counters_of_an_oracle():
    """13 tokens after the first: two blocks of 4 + bonus, one of 2 + bonus, as the limit cuts the third."""
    stats, _ = stats_of("oracle_chain", "one")
    assert stats.drafter == "ScriptedDrafter"
    assert (stats.steps, stats.drafts, stats.emitted_tokens) == (3, 3, 13)
    assert stats.draft_tokens == stats.accepted_tokens == 10
    assert stats.proposed_per_position == stats.accepted_per_position == [3, 3, 2, 2]
    assert stats.acceptance_rate == 1.0
    assert stats.conditional_acceptance == [1.0] * 4


def test_counters_of_an_adversary():
    stats, _ = stats_of("adversary_chain", "one")
    assert (stats.steps, stats.emitted_tokens, stats.accepted_tokens) == (13, 13, 0)
    assert stats.drafts == 12  # the last step has no room for a draft
    assert stats.mean_acceptance_length == 1.0 and stats.acceptance_rate == 0.0


def test_a_drafter_that_proposes_nothing_counts_steps_but_no_drafts():
    silent = ScriptedDrafter([[]], lambda right, rng: [])
    stats, count = stats_of(silent, "one")
    assert (stats.steps, stats.drafts, stats.draft_tokens) == (count - 1, 0, 0)


def test_a_tree_counts_every_node_but_only_one_path():
    stats, _ = stats_of("oracle_tree", "one")
    assert stats.draft_tokens > stats.accepted_tokens == sum(stats.accepted_per_position)
    assert stats.emitted_tokens == 13


def test_reusing_one_drafter_begins_new_counters():
    ids, mask = prompts(BATCHES["five-ragged"])
    model = tiny_model("llama")
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    drafter = specdec_ext.NgramDrafter(min_ngram=1)
    runs = [
        specdec_ext.generate(
            model, ids, drafter=drafter, speculation="fixed", **kwargs
        ).speculation_stats
        for _ in range(2)
    ]
    for stats in runs:
        stats.seconds = {}
    assert runs[0] == runs[1]
