"""A draft model with another tokenizer: which tokens are the same, read and drafted.

Claims: tokens are matched one to one by role, by special string or by their bytes; a translated draft model
is as good as the original; tokens without a counterpart are never drafted and are read as their text;
vocabularies of equal size may differ; the text is the target's.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from helpers.checks.engine_texts import check_texts, random_calls
from helpers.models.tiny import VOCAB, generated, prompts, tiny_model
from helpers.ops.op_cases import generator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import specdec_ext
from specdec_ext import DraftModelDrafter
from specdec_ext.drafters.vocabulary import (
    MAX_EXPANSION,
    SharedVocabulary,
    Vocabulary,
    match_vocabularies,
    token_keys,
)

CPU = torch.device("cpu")
LENGTHS = (12, 3, 9, 5)


def tokenizer(tokens: list[str], **special: str) -> PreTrainedTokenizerFast:
    """Words between spaces; token i is ``tokens[i]``."""
    unknown = special.get("unk_token")
    words = models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=unknown)
    backend = Tokenizer(words)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse() if unknown is None else None
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def letters(tokens: list[str]) -> PreTrainedTokenizerFast:
    """One token per character."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_text_that_the_draft_tokenizer_refuses_becomes_a_filler():
    """WordLevel without an unknown token raises an error for an unknown word."""
    target, draft = tokenizer(["a", "b", "c"]), tokenizer(["b", "a"])
    vocabulary = match_vocabularies(3, 2, target, draft, CPU)
    ids = vocabulary.read([0, 2, 1])
    assert (ids[0], ids[-1]) == (1, 0) and len(ids) == 3


def test_tokens_of_the_same_bytes_are_matched():
    byte_level = token_keys(tokenizer(["Ġthe", "the", "Ã©", "Ġ", "Ċ", "Ġx"]), 6)
    metaspace = token_keys(tokenizer(["▁the", "the", "é", "▁", "<0x0A>", "▁y"]), 6)
    plain = token_keys(tokenizer(["the", "é"]), 2)
    shared = byte_level.keys() & metaspace.keys()
    assert {byte_level[key]: metaspace[key] for key in shared} == {i: i for i in range(5)}
    assert {byte_level[key]: plain[key] for key in byte_level.keys() & plain.keys()} == {1: 0, 2: 1}


def test_special_tokens_are_matched_by_role_and_then_by_string():
    roles = dict(bos_token="<s>", eos_token="</s>", pad_token="</s>")
    roles["additional_special_tokens"] = ["<tool>", "<think>"]
    first = token_keys(tokenizer(["<s>", "</s>", "<tool>", "a", "<think>"], **roles), 5)
    roles = dict(bos_token="<begin>", eos_token="<end>", additional_special_tokens=["<tool>"])
    tokens = ["a", "<tool>", "<end>", "<begin>", "<s>", "<think>"]
    second = token_keys(tokenizer(tokens, **roles), 6)
    matched = {first[key]: second[key] for key in first.keys() & second.keys()}
    assert matched == {0: 3, 1: 2, 2: 1, 3: 0}  # in the second, "<s>" and "<think>" are text


def test_ids_beyond_the_embeddings_are_ignored():
    assert set(token_keys(tokenizer(["a", "b", "c"]), 2).values()) == {0, 1}


def shared(target: list[str], draft: list[str], **special: str) -> SharedVocabulary:
    tokenizers = tokenizer(target), tokenizer(draft, **special)
    return SharedVocabulary(len(target), len(draft), *tokenizers, CPU)


def test_logits_are_moved_to_the_targets_ids():
    vocabulary = shared(["a", "b", "c", "d"], ["x", "d", "b"])
    assert vocabulary.num_shared == 2
    logits = vocabulary.for_target(torch.tensor([[1.0, 2.0, 3.0]]))
    assert logits.tolist() == [[-torch.inf, 3.0, -torch.inf, 2.0]]


def test_tokens_without_counterpart_are_read_as_their_text():
    """The target has a, xy, b and z; the draft model has a, b and the letters x and y."""
    target = tokenizer(["a", "xy", "b", "z"])
    draft = letters(["b", "y", "x", "a", " "])
    vocabulary = SharedVocabulary(4, 5, target, draft, CPU)
    assert vocabulary.read([2, 0, 0]) == [0, 3, 3]
    assert vocabulary.read([0, 1, 2]) == [3, 2, 1, 0]
    assert vocabulary.read([3]) == [0]  # "z" is unknown, so it becomes a filler
    assert vocabulary.read([]) == []


def test_long_token_is_read_in_part():
    target, draft = tokenizer(["xy" * 20, "x"]), letters(["x", "y"])
    vocabulary = SharedVocabulary(2, 2, target, draft, CPU)
    assert vocabulary.read([0]) == [0, 1] * (MAX_EXPANSION // 2)


def test_equal_vocabularies_need_no_translation():
    words = ["a", "b", "c"]
    padded = match_vocabularies(8, 4, tokenizer(words), tokenizer(words), CPU)
    assert type(padded) is Vocabulary
    assert padded.for_target(torch.zeros(1, 4)).tolist() == [[0.0] * 4 + [-torch.inf] * 4]
    assert padded.read([1, 7]) == [1, 3]
    assert type(match_vocabularies(3, 3, None, None, CPU)) is Vocabulary
    swapped = match_vocabularies(3, 3, tokenizer(words), tokenizer(["b", "a", "c"]), CPU)
    assert swapped.read([0, 1, 2]) == [1, 0, 2]  # equal sizes, other ids


def test_vocabularies_without_common_tokens_are_refused():
    with pytest.raises(ValueError, match="have no common token; use another draft model"):
        shared(["a", "b"], ["c", "d"])


def test_one_tokenizer_alone_is_refused():
    with pytest.raises(ValueError, match="tokenizer and target_tokenizer must be passed together"):
        DraftModelDrafter(tiny_model("llama"), tokenizer=tokenizer(["a"]))


# --- through the loop

ORDER = torch.randperm(VOCAB, generator=generator(0)).tolist()  # draft id -> target id
MISSING = set(ORDER[:9])  # target tokens that the smaller draft tokenizer does not know


@functools.cache
def words(order: tuple[int, ...], missing: frozenset[int] = frozenset()):
    unknown = {"unk_token": f"none{min(missing)}"} if missing else {}
    return tokenizer([f"none{i}" if i in missing else f"w{i}" for i in order], **unknown)


@functools.cache
def permuted_model() -> PreTrainedModel:
    """The target with its tokens in another order."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight.copy_(layer.weight[ORDER].clone())
    return model


def run(drafter, **kwargs):
    ids, mask = prompts(LENGTHS)
    kwargs = dict(max_new_tokens=24, do_sample=False, attention_mask=mask) | kwargs
    kwargs |= dict(drafter=drafter, return_dict_in_generate=True)
    return specdec_ext.generate(tiny_model("llama"), ids, **kwargs)


def drafter(missing=frozenset(), cls=DraftModelDrafter, **kwargs):
    return cls(
        permuted_model(),
        tokenizer=words(tuple(ORDER), frozenset(missing)),
        target_tokenizer=words(tuple(range(VOCAB))),
        **kwargs,
    )


SAMPLED = dict(do_sample=True, seed=3, temperature=0.9)


@pytest.mark.parametrize("kwargs", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_translated_draft_model_is_as_good_as_the_original(kwargs):
    expected = run(None, **kwargs).sequences
    out = run(drafter(), **kwargs)
    assert torch.equal(out.sequences, expected) and out.speculation_stats.acceptance_rate == 1.0
    out = run(DraftModelDrafter(permuted_model()), **kwargs)  # without translation
    assert torch.equal(out.sequences, expected) and out.speculation_stats.acceptance_rate < 0.1


@pytest.mark.parametrize(
    "missing", [frozenset(), frozenset(MISSING)], ids=["same words", "fewer words"]
)
def test_requests_of_an_engine_share_a_translated_draft_model(missing):
    calls = [
        (ids, dict(max_new_tokens=20, do_sample=True, seed=number, temperature=0.9))
        for number, (ids, _) in enumerate(random_calls(10, 20))
    ]
    make = lambda: drafter(missing)  # noqa: E731
    stats = check_texts(tiny_model("llama"), make, calls, max_rows=3, speculation="fixed").stats()
    rate = stats.acceptance_rate
    assert 0.05 < rate < 1 if missing else rate == 1


class Checked(DraftModelDrafter):
    """Checks that each draft is the draft model's continuation of the text as it reads it."""

    def propose(self, context):
        tree = super().propose(context)
        for row, drafts in zip(context.rows, tree.tokens[:, 1:].tolist(), strict=True):
            read = self._vocabulary.read(context.prompt(row))
            for step in self.steps[row]:
                read += self._vocabulary.read(step)
            new = context.generated[row][sum(map(len, self.steps[row])) :]
            read += self._vocabulary.read(new)
            self.steps[row].append(new)
            for token in drafts:
                logits = self._vocabulary.for_target(self.model(torch.tensor([read])).logits[:, -1])
                assert token == int(logits.argmax()) and token not in MISSING
                read.append(ORDER.index(token))
        return tree

    def start(self, context, model, output):
        self.steps = [[] for _ in context.rows]
        super().start(context, model, output)


def test_tokens_without_counterpart_are_read_and_never_drafted():
    expected = run(None).sequences
    answers = generated(expected, max(LENGTHS))
    assert sum(token in MISSING for row in answers for token in row) > 3
    out = run(drafter(MISSING, Checked))
    assert torch.equal(out.sequences, expected)
    assert 0.05 < out.speculation_stats.acceptance_rate < 1


@pytest.mark.parametrize("rule", ["match", "block"])
def test_sampled_drafts_are_translated(rule):
    made = drafter(MISSING, sampled=rule != "match")
    out = run(made, verification=rule, **SAMPLED)
    assert 0.05 < out.speculation_stats.acceptance_rate < 1
    if rule == "match":
        assert torch.equal(out.sequences, run(None, **SAMPLED).sequences)
    assert torch.equal(out.sequences, run(made, verification=rule, **SAMPLED).sequences)
