"""``ops.adjust_logits`` computes what transformers' processors compute along the path to each node.

Claim: the scores of ``Processors.on_tree`` have the bits of transformers' own calls, one per node, for random
sequences of processors in random orders, random texts, paddings and trees. ``generate`` gives the text of
transformers' loop and of the walk on the host, and says which processors were called on the host.
"""

import pytest
import torch
from helpers.models.tiny import (
    BATCHES,
    VOCAB,
    every_batch,
    generated,
    make_drafter,
    prompts,
    tiny_model,
)
from helpers.ops.op_cases import generator, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

import specdec_ext
from specdec_ext.context import Context
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify import processors as module
from specdec_ext.verify.adjustments import RANGES, AdjustLogits, fuse_adjustments
from specdec_ext.verify.processors import Processors

WORDS = 11  # tokens of the random vocabulary
INF = torch.inf
CPU = torch.device("cpu")

token = st.integers(0, WORDS - 1)
few_tokens = st.lists(token, min_size=1, max_size=4)
length = st.integers(0, 14)
number = st.floats(-4, 4, width=32)


def penalties(batch):
    """With and without ignored columns: none, a number, or one number for each row."""
    ignored = st.one_of(
        st.none(), length, st.lists(length, min_size=batch, max_size=batch).map(torch.tensor)
    )
    return st.builds(hf.RepetitionPenaltyLogitsProcessor, st.floats(0.1, 3), ignored)


def some_processors(batch):
    biases = st.dictionaries(st.tuples(token), st.one_of(number, st.just(-INF)), min_size=1)
    each = st.one_of(
        penalties(batch),
        st.builds(hf.NoRepeatNGramLogitsProcessor, st.integers(1, 4)),
        st.builds(hf.SequenceBiasLogitsProcessor, biases),
        st.builds(
            hf.NoBadWordsLogitsProcessor,
            st.lists(st.tuples(token).map(list), min_size=1, max_size=3),
            st.one_of(st.none(), few_tokens),
        ),
        st.builds(hf.SuppressTokensLogitsProcessor, few_tokens),
        st.builds(hf.SuppressTokensAtBeginLogitsProcessor, few_tokens, length),
        st.builds(hf.MinLengthLogitsProcessor, length, few_tokens),
        st.builds(hf.MinNewTokensLengthLogitsProcessor, length, st.integers(0, 6), few_tokens),
        st.builds(hf.ForcedBOSTokenLogitsProcessor, token),
        st.builds(hf.ForcedEOSTokenLogitsProcessor, st.integers(1, 16), few_tokens),
        st.builds(hf.InfNanRemoveLogitsProcessor),
        st.builds(hf.TemperatureLogitsWarper, st.floats(0.5, 2)),
    )
    return st.lists(each, min_size=1, max_size=6).map(LogitsProcessorList)


@st.composite
def cases(draw):
    """Processors, a context with rows of several lengths of which some are active, a tree and logits."""
    batch = draw(st.integers(1, 3))
    list_ = draw(some_processors(batch))
    seed = draw(st.integers(0, 2**16))
    rng = generator(seed)
    prompt, new = draw(st.integers(0, 8)), draw(st.lists(st.integers(0, 6), min_size=batch))
    few = draw(st.integers(1, WORDS))  # few different tokens, so that n-grams repeat
    context = Context(torch.randint(few, (batch, prompt), generator=rng), None, 0, 40, None, None)
    for row in range(batch):
        tokens = torch.randint(
            few + 2, (new[row],), generator=rng
        ).tolist()  # beyond the vocabulary
        context.extend(row, tokens)
    context.rows = draw(st.permutations(range(batch)))[: draw(st.integers(1, batch))]
    rows, nodes = len(context.rows), draw(st.integers(1, 8))
    parents = random_parents(rows, nodes, seed)
    parents[:, 1:][torch.rand(rows, nodes - 1, generator=rng) < 0.1] = -2
    tree = DraftTree(torch.randint(few, (rows, nodes), generator=rng), parents)
    logits = torch.randn(rows, nodes, WORDS, generator=rng) * 4
    logits[torch.rand(logits.shape, generator=rng) < 0.05] = draw(
        st.sampled_from([-INF, INF, torch.nan, 0.0, -0.0])
    )
    return list_, context, tree, logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def called_at_every_node(list_, context, tree, logits):
    """The float32 scores of transformers: one call per node, with the node's text in its row of the batch."""
    scores = logits.float()
    for i, row in enumerate(context.rows):
        texts = {0: context.text(row)}
        for node, depth in enumerate(tree.depths[i]):
            if depth > 0:
                texts[node] = [*texts[int(tree.parents[i, node])], int(tree.tokens[i, node])]
            if depth >= 0:
                ids = torch.zeros(len(context.generated), len(texts[node]), dtype=torch.long)
                ids[row] = torch.tensor(texts[node], dtype=torch.long)
                batch = torch.zeros(len(ids), WORDS)
                batch[row] = scores[i, node]
                scores[i, node] = list_(ids, batch)[row]
    return scores


@settings(max_examples=400, deadline=None)
@given(cases())
def test_scores_are_those_of_transformers(case):
    list_, context, tree, logits = case
    ours = Processors(list_, CPU)
    assert not ours.on_host
    actual = ours.on_tree(logits, tree, context)
    expected = called_at_every_node(list_, context, tree, logits)
    active = torch.tensor(tree.depths) >= 0
    actual, expected = actual[active].float(), expected[active]
    nan = actual.isnan() & expected.isnan()
    assert torch.equal(
        actual.masked_fill(nan, 0).view(torch.int32), expected.masked_fill(nan, 0).view(torch.int32)
    )


class Custom(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class OwnPenalty(hf.RepetitionPenaltyLogitsProcessor):
    """A subclass may do anything."""


def names(processors):
    return [
        "+".join(type(part).__name__[:8] for part in each._processors)
        if isinstance(each, AdjustLogits)
        else type(each).__name__[:8]
        for each in fuse_adjustments(processors)
    ]


def test_what_is_fused():
    penalty, ngrams = hf.RepetitionPenaltyLogitsProcessor(1.2), hf.NoRepeatNGramLogitsProcessor(2)
    suppress = hf.SuppressTokensLogitsProcessor([3])
    assert names([penalty, ngrams, suppress]) == ["Repetiti+NoRepeat+Suppress"]
    assert names([suppress, penalty, penalty]) == ["Suppress+Repetiti", "Repetiti"]
    assert names([ngrams, suppress, ngrams]) == ["NoRepeat+Suppress", "NoRepeat"]
    assert names([suppress]) == ["Suppress"]  # reads no text: needs no op that does
    assert names([suppress, Custom(), penalty]) == ["Suppress", "Custom", "Repetiti"]
    assert names([OwnPenalty(1.2), penalty]) == ["OwnPenal", "Repetiti"]
    assert names([penalty] + [suppress] * 40) == [
        "+".join(["Repetiti", *["Suppress"] * 31]),
        *["Suppress"] * 9,
    ]
    bias = hf.SequenceBiasLogitsProcessor({(1,): 2.0})
    longer = hf.SequenceBiasLogitsProcessor({(1,): 2.0, (3, 4): 1.0})
    assert names([bias, longer]) == ["Sequence", "Sequence"]
    assert isinstance(fuse_adjustments([bias, longer])[0], AdjustLogits)
    assert fuse_adjustments([bias, longer])[1] is longer


def test_nan_is_kept_unless_tokens_are_forced():
    """NaN of drafts must not be hidden: also the keys and values of the pass are NaN."""
    lists = [
        [hf.RepetitionPenaltyLogitsProcessor(1.2), hf.NoRepeatNGramLogitsProcessor(2)],
        [hf.MinLengthLogitsProcessor(9, [3]), hf.TemperatureLogitsWarper(0.5)],
        [hf.RepetitionPenaltyLogitsProcessor(1.2), hf.ForcedEOSTokenLogitsProcessor(9, 3)],
        [hf.ForcedBOSTokenLogitsProcessor(3)],
        [hf.NoRepeatNGramLogitsProcessor(2), hf.InfNanRemoveLogitsProcessor()],
    ]
    kept = [Processors(LogitsProcessorList(each), CPU).keep_nan for each in lists]
    assert kept == [True, True, False, False, False]


def test_invalid_tokens_and_rows_are_refused():
    """With transformers' messages, where these have one."""
    ids, model = prompts((5, 3))[0], tiny_model("llama")
    kwargs = dict(max_new_tokens=3, drafter=None)
    with pytest.raises(ValueError, match=f"vocabulary size is {VOCAB}, but the following tokens"):
        specdec_ext.generate(model, ids, sequence_bias=[[[VOCAB], 2.0]], **kwargs)
    wrong = hf.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([1, 2, 3]))
    with pytest.raises(
        ValueError, match=r"prompt_ignore_length of .* has 3 entries; .* batch of 2"
    ):
        specdec_ext.generate(model, ids, logits_processor=[wrong], **kwargs)


EOS = 42  # occurs in some texts of this model
KEYWORDS = {
    "repetition": dict(repetition_penalty=1.3),
    "ngrams": dict(no_repeat_ngram_size=2),
    "one-grams": dict(no_repeat_ngram_size=1),
    "bias": dict(sequence_bias=[[[7], 3.0], [[11], -4.0]]),
    "bad-words": dict(bad_words_ids=[[token] for token in range(40)]),
    "min-length": dict(min_length=23, eos_token_id=EOS),
    "min-new": dict(min_new_tokens=9, eos_token_id=[EOS, 7]),
    "forced": dict(forced_eos_token_id=[EOS, 9], forced_bos_token_id=8),
    "suppressed": dict(suppress_tokens=[1, 2, 7], begin_suppress_tokens=[31]),
    "all": dict(repetition_penalty=1.2, no_repeat_ngram_size=3, bad_words_ids=[[5]], eos_token_id=EOS,
        sequence_bias=[[[7], 3.0]], min_new_tokens=4, min_length=9, suppress_tokens=[3],
        begin_suppress_tokens=[31], forced_eos_token_id=9, remove_invalid_values=True,
        renormalize_logits=True),
}  # fmt: skip
NEW_TOKENS = 16


def text(case, batch, drafter, answers=None, **kwargs):
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model("llama")
    made = make_drafter(drafter, model, answers) if answers is not None else drafter
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, **KEYWORDS[case], **kwargs)
    return specdec_ext.generate(model, ids, drafter=made, return_dict_in_generate=True, **kwargs)


def on_host(monkeypatch):
    monkeypatch.setattr(module, "fuse_adjustments", list)


def hf_text(case, batch):
    ids, mask = prompts(BATCHES[batch])
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **KEYWORDS[case])
    return tiny_model("llama").generate(ids, **kwargs)


@every_batch
@pytest.mark.parametrize("drafter", ["none", "self", "noisy_chain", "random_tree"])
@pytest.mark.parametrize("case", KEYWORDS)
def test_greedy_text_and_scores(case, drafter, batch, monkeypatch):
    """Those of transformers and of the walk; the op is used, and the statistics say so."""
    expected = hf_text(case, batch)
    answers = generated(expected, max(BATCHES[batch]))
    kwargs = dict(output_scores=True, do_sample=False, speculation="fixed")
    ours = text(case, batch, drafter, answers, **kwargs)
    assert torch.equal(ours.sequences, expected)
    assert ours.speculation_stats.host_processors == []
    on_host(monkeypatch)
    walked = text(case, batch, drafter, answers, **kwargs)
    assert walked.speculation_stats.host_processors
    assert torch.equal(walked.sequences, expected)
    for theirs, mine in zip(walked.scores, ours.scores, strict=True):
        assert torch.equal(mine, theirs)


@every_batch
@pytest.mark.parametrize("drafter", ["none", "noisy_chain", "random_tree"])
@pytest.mark.parametrize("case", KEYWORDS)
def test_sampled_text(case, drafter, batch, monkeypatch):
    """One seed gives the text of the walk, with every drafter."""
    kwargs = dict(do_sample=True, top_k=30, temperature=1.3, seed=11)
    with monkeypatch.context() as patched:
        on_host(patched)
        expected = text(case, batch, None, **kwargs).sequences
    answers = generated(expected, max(BATCHES[batch]))
    assert torch.equal(text(case, batch, drafter, answers, **kwargs).sequences, expected)


@pytest.mark.parametrize("case", KEYWORDS)
def test_cases_change_the_text(case):
    ids, mask = prompts(BATCHES["five-ragged"])
    kwargs = {k: v for k, v in KEYWORDS[case].items() if k == "eos_token_id"}
    kwargs |= dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    without = tiny_model("llama").generate(ids, **kwargs)
    assert not torch.equal(hf_text(case, "five-ragged"), without)


def test_processors_on_the_host_are_named():
    ids, model = prompts((5,))[0], tiny_model("llama")
    kwargs = dict(max_new_tokens=3, repetition_penalty=1.2, speculation="fixed")
    kwargs |= dict(return_dict_in_generate=True)
    stats = specdec_ext.generate(
        model, ids, logits_processor=[Custom()], **kwargs
    ).speculation_stats
    assert stats.host_processors == ["Custom"]
    assert "called at every visited node" in stats.explain() and "Custom" in stats.explain()


def test_every_adjustment_is_in_the_table_of_keywords():
    from specdec_ext.keyword_table import PARTS, Verdict

    for processor in RANGES:
        assert PARTS[processor.__name__].verdict is Verdict.EXACT
