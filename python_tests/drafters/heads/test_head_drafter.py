"""``HeadDrafter`` has the text of plain decoding, and its head reads the right inputs.

The emitted text does not show wrong inputs of a head, so every proposed tree is compared with the draft of a
new head that reads the whole text and transformers' own hidden states.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import pytest
import torch
from helpers.drafters.checkpoint_cases import random_head
from helpers.drafters.head_cases import KINDS, TREES, Run, head_of, trained_head
from helpers.models.tiny import ARCHITECTURES, noisy_chain, prompts, tiny_model, wrong
from transformers import DynamicCache

import specdec_ext
from specdec_ext import DraftTree, HeadDrafter, TreeConfig
from specdec_ext.drafters.heads.head import default_tree
from specdec_ext.ops import DraftNoise
from specdec_ext.verify.sampler import DRAFT_TEMPERATURES

LENGTHS = (5, 9, 3, 7, 8)
NEW = 14
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5}


@functools.cache
def plain(lengths: tuple[int, ...] = LENGTHS, side: str = "left", new: int = NEW, **options):
    """``(input_ids, attention_mask, sequences)`` of plain decoding."""
    ids, mask = prompts(lengths, side=side)
    return ids, mask, text_of(ids, mask, None, max_new_tokens=new, **options)


def text_of(ids, mask, drafter, name: str = "llama", **kwargs):
    kwargs = dict(max_new_tokens=NEW, attention_mask=mask, drafter=drafter) | kwargs
    return specdec_ext.generate(tiny_model(name), ids, **kwargs)


def answers(sequences, columns):
    return sequences[:, columns:].tolist()


def as_is(head, tree, **options) -> HeadDrafter:
    """A drafter whose weights are not rounded, to compare with the specification."""
    return HeadDrafter(head, tree, weights="same", **options)


class Watched(specdec_ext.Drafter):
    """Proposes partly right trees, and keeps the head's trees.

    So rows emit several tokens in a step, along different nodes and at different paces, although the head is
    random.
    """

    def __init__(self, drafter: HeadDrafter, right: list[list[int]], every: int = 1):
        self.drafter, self.right, self.every = drafter, right, every
        self.trees: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        self.random, self.steps = random.Random(3), 0

    def feature_layers(self, model):
        return self.drafter.feature_layers(model)

    def start(self, context, model, output):
        self.drafter.start(context, model, output)

    def commit(self, context, accepted, output):
        self.drafter.commit(context, accepted, output)

    def propose(self, context):
        if self.steps % self.every == 0:
            tree = self.drafter.propose(context)
            for i, row in enumerate(context.rows):
                drafted = tree.tokens[i].tolist(), tree.parents[i].tolist()
                self.trees[row, len(context.generated[row])] = drafted
        self.steps += 1
        paths = []
        for row in context.rows:
            done = len(context.generated[row])
            [right] = noisy_chain(self.right[row][done : done + 6], self.random)
            detours = [[wrong(token) for token in right[:2]], [*right[:1], wrong(0)]]
            paths.append([*detours, right])
        return DraftTree.from_paths(context.roots, paths)


def expected_tree(head, tree, model, text, held=0, noise=None):
    """The draft of a new head after ``text``, whose first ``held`` tokens have no features."""
    ids = torch.tensor([text])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    layers = head.config.feature_layers
    features = torch.cat([states[layer] for layer in layers], dim=-1)[:, held:-1]
    embedding = model.get_input_embeddings().weight.detach()
    lm_head = model.get_output_embeddings().weight.detach()
    run = Run.start(head, 1, embedding=embedding, lm_head=lm_head, first_position=held)
    run.noise = noise
    tokens, parents, _ = run.draft(tree, ids[:, held + 1 :], features)
    return tokens[0].tolist(), parents[0].tolist()


def assert_as_specified(
    watched, model, prompt_texts, sequences, columns, held=None, noise_of=lambda row: None
):
    """Check that every proposed tree is the expected one, with the noise ``noise_of(row)``."""
    drafter = watched.drafter
    for (row, done), (tokens, parents) in watched.trees.items():
        if len(tokens) == 1:
            continue
        text = prompt_texts[row] + sequences[row, columns : columns + done].tolist()
        first = 0 if held is None else held[row]
        expected = expected_tree(drafter.head, drafter.tree, model, text, first, noise_of(row))
        assert (tokens, parents) == expected, f"row {row} after {done} tokens"
    assert sum(len(tokens) > 1 for tokens, _ in watched.trees.values()) > 2 * len(prompt_texts)


def texts_of(ids, mask):
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_text_of_plain_decoding(kind, tree):
    drafter = HeadDrafter(head_of(kind), TREES[tree])
    for options in ({}, SAMPLED):
        ids, mask, expected = plain(new=8, **options)
        assert torch.equal(text_of(ids, mask, drafter, max_new_tokens=8, **options), expected)


@pytest.mark.parametrize("draft_vocab", [40, 90])
def test_target_may_have_more_tokens_than_the_head(draft_vocab):
    """Embeddings may be padded. All 97 tokens of the target are read; some of the head's 90 are drafted."""
    head = random_head(vocab_size=90, draft_vocab_size=draft_vocab, feature_layers=(0, 1, 2))
    model, (ids, mask, sequences) = tiny_model("llama"), plain((5, 9, 3))
    watched = Watched(as_is(head, TREES["dynamic"]), answers(sequences, ids.shape[1]))
    message = "trained for a vocabulary of 90 tokens, but the target has 97"
    with pytest.warns(UserWarning, match=message):
        given = text_of(ids, mask, watched)
    assert torch.equal(given, sequences) and int(given.max()) >= 90
    assert_as_specified(watched, model, texts_of(ids, mask), sequences, ids.shape[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("org/name",), r"head is a str; expected a DraftHead, as load_draft\(path\) returns"),
        ((head_of("eagle3"), 5), "tree is a int; expected a TreeConfig"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        HeadDrafter(*arguments)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_target_has_the_text_of_plain_decoding(name):
    """Windows, scaled embeddings, soft caps, partial rotation, another list of layers."""
    ids, mask = prompts(LENGTHS)
    drafter = HeadDrafter(head_of("eagle3"), TREES["static"])
    texts = [text_of(ids, mask, each, name, max_new_tokens=10) for each in (None, drafter)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_of_a_new_head(kind, side):
    model = tiny_model("llama")
    tree = TREES[["chain", "static", "dynamic"][len(kind) % 3]]
    ids, mask, sequences = plain((5, 9, 3), side)
    watched = Watched(as_is(head_of(kind), tree), answers(sequences, ids.shape[1]))
    assert torch.equal(text_of(ids, mask, watched), sequences)
    assert_as_specified(watched, model, texts_of(ids, mask), sequences, ids.shape[1])


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["eagle1", "qk-norm-window", "p-eagle"])
def test_sampled_proposals_have_the_noise_of_their_rows(kind, tree):
    """Of their seed and stream, and of the positions after their roots; also when rows have ended."""
    model, temperature = tiny_model("llama"), 0.6
    sampled = SAMPLED | {"eos_token_id": 11, "pad_token_id": 0}
    ids, mask, sequences = plain((5, 9, 3), new=30, **sampled)
    drafter = as_is(head_of(kind), TREES[tree], temperature=temperature)
    watched = Watched(drafter, answers(sequences, ids.shape[1]))
    given = text_of(ids, mask, watched, max_new_tokens=30, speculation="fixed", **sampled)
    assert torch.equal(given, sequences)

    def noise_of(row):
        own = SAMPLED["temperature"] * DRAFT_TEMPERATURES[True] * temperature
        return DraftNoise(torch.tensor([own]), torch.tensor([5]), torch.tensor([row]))

    columns = ids.shape[1]
    assert_as_specified(watched, model, texts_of(ids, mask), sequences, columns, noise_of=noise_of)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_proposals_are_those_of_a_new_head(seed):
    choose = random.Random(seed)
    model, kind = tiny_model(choose.choice(["llama", "qwen3"])), choose.choice(list(KINDS))
    lengths = [choose.randint(1, 40) for _ in range(choose.randint(1, 6))]
    ids, mask = prompts(tuple(lengths), seed, choose.choice(["left", "right"]))
    options = {"max_new_tokens": choose.randint(2, 60), "pad_token_id": 0}
    sequences = specdec_ext.generate(model, ids, attention_mask=mask, drafter=None, **options)
    if choose.random() < 0.5:
        options["eos_token_id"] = choose.choice(sequences[0, ids.shape[1] :].tolist())
    expected = specdec_ext.generate(model, ids, attention_mask=mask, drafter=None, **options)
    tree = TREES[choose.choice(list(TREES))]
    right = answers(sequences, ids.shape[1])
    watched = Watched(as_is(head_of(kind, seed), tree), right, every=choose.randint(1, 3))
    given = specdec_ext.generate(model, ids, attention_mask=mask, drafter=watched, **options)
    assert torch.equal(given, expected)
    for (row, done), drafted in watched.trees.items():
        if len(drafted[0]) > 1:
            text = texts_of(ids, mask)[row] + right[row][:done]
            assert drafted == expected_tree(watched.drafter.head, tree, model, text), (row, done)


def test_head_that_drafts_in_some_steps_catches_up():
    model = tiny_model("llama")
    ids, mask, sequences = plain((5, 9, 3), new=30)
    drafter = as_is(head_of("eagle3.1"), TREES["dynamic"])
    watched = Watched(drafter, answers(sequences, ids.shape[1]), every=2)
    text_of(ids, mask, watched, max_new_tokens=30)
    assert_as_specified(watched, model, texts_of(ids, mask), sequences, ids.shape[1])


def test_proposals_after_a_row_has_ended_are_those_of_a_new_head():
    """The row ends inside a draft."""
    model = tiny_model("llama")
    ids, mask, sequences = plain((5, 9, 3))
    columns = ids.shape[1]
    stop = int(sequences[0, columns + 3])
    options = {"eos_token_id": stop, "pad_token_id": 0}
    expected = text_of(ids, mask, None, **options)
    assert not torch.equal(expected, sequences[:, : expected.shape[1]])
    right = answers(sequences, columns)
    watched = Watched(as_is(head_of("qk-norm-window"), TREES["static"]), right)
    assert torch.equal(text_of(ids, mask, watched, speculation="fixed", **options), expected)
    assert_as_specified(watched, model, texts_of(ids, mask), sequences, columns)
    ended = min(row.index(stop) + 1 if stop in row else NEW for row in right)
    assert max(done for row, done in watched.trees if row == 0) <= ended


@pytest.mark.parametrize("side", ["left", "right"])
def test_head_begins_behind_a_filled_cache(side):
    """The text in the cache has no features; the head's positions count it."""
    model = tiny_model("llama")
    ids, mask, _ = plain((5, 9, 3), side)
    cache = DynamicCache(config=model.config)
    turn = text_of(ids, mask, None, past_key_values=cache, max_new_tokens=5)
    question, _ = prompts((4, 4, 4), seed=9)
    ids = torch.cat([turn, question], dim=1)
    mask = torch.cat([mask, torch.ones(3, ids.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
    expected = text_of(ids, mask, None)
    held = mask[:, : cache.get_seq_length()].sum(dim=1).tolist()
    # With this rope type absolute positions matter.
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    head = head_of("qk-norm-window", max_positions=8, rope_parameters=rope)
    watched = Watched(as_is(head, TREES["dynamic"]), answers(expected, ids.shape[1]))
    assert torch.equal(text_of(ids, mask, watched, past_key_values=cache), expected)
    assert_as_specified(watched, model, texts_of(ids, mask), expected, ids.shape[1], held)


@pytest.mark.parametrize("side", ["left", "right"])
def test_head_begins_again_after_a_rest(side):
    """The head drafts from the tokens after the rest, at their own positions."""
    model, (ids, mask, sequences) = tiny_model("llama"), plain((5, 9, 3), side, new=30)
    held = {}

    class Resting(Watched):
        def propose(self, context):
            if self.steps in (0, 2):
                self.drafter.rest(self.steps == 0)
                for row, position in zip(context.rows, context.root_positions, strict=True):
                    held[row] = position
            return super().propose(context)

    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    head = head_of("qk-norm-window", max_positions=8, rope_parameters=rope)
    watched = Resting(as_is(head, TREES["dynamic"]), answers(sequences, ids.shape[1]))
    given = text_of(ids, mask, watched, max_new_tokens=30, speculation="fixed")
    assert torch.equal(given, sequences)
    first = {row: min(done for each, done in watched.trees if each == row) for row in held}
    assert all(len(watched.trees[each][0]) == 1 for each in first.items())  # during the rest
    assert_as_specified(watched, model, texts_of(ids, mask), sequences, ids.shape[1], held)


def added(values):
    """The sum of numbers, or of lists of numbers by position."""
    if isinstance(values[0], list):
        return [sum(column) for column in itertools.zip_longest(*values, fillvalue=0)]
    return sum(values)


def test_drafts_are_accepted_as_often_in_a_batch_as_alone():
    model = tiny_model("llama")
    ids, mask, sequences = plain(new=30)
    texts = [
        text + sequences[row, ids.shape[1] :].tolist()
        for row, text in enumerate(texts_of(ids, mask))
    ]
    shortest = min(map(len, texts))
    head = trained_head(model, tuple(tuple(text[:shortest]) for text in texts))
    for tree in TREES.values():
        drafter = HeadDrafter(head, tree)
        kwargs = dict(speculation="fixed", max_new_tokens=30, return_dict_in_generate=True)
        batch = text_of(ids, mask, drafter, **kwargs)
        assert torch.equal(batch.sequences, sequences)
        alone = [
            text_of(torch.tensor([text[:length]]), None, drafter, **kwargs).speculation_stats
            for text, length in zip(texts, LENGTHS, strict=True)
        ]
        stats = batch.speculation_stats
        for name in ("steps", "accepted_tokens", "draft_tokens", "accepted_per_position"):
            assert getattr(stats, name) == added([getattr(each, name) for each in alone]), name
        assert stats.accepted_tokens / stats.steps > 1
        # Also at the last level, which depends on keys and values of several drafted levels.
        assert min(stats.accepted_per_position[:3]) > 10


@pytest.mark.parametrize("tree", TREES)
def test_cache_and_rope_tables_grow(tree, monkeypatch):
    monkeypatch.setattr("specdec_ext.drafters.heads.head_cache.STEP", 1)
    model = tiny_model("llama")
    ids, mask, sequences = plain((5, 9, 3))
    head = head_of("qk-norm-window", max_positions=8)
    watched = Watched(as_is(head, TREES[tree]), answers(sequences, ids.shape[1]))
    text_of(ids, mask, watched)
    assert_as_specified(watched, model, texts_of(ids, mask), sequences, ids.shape[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_target_may_have_16_bits(dtype):
    """With float16 the CPU computes the head in float32."""
    model = tiny_model("llama", dtype=dtype)
    ids, mask = prompts((5, 9))
    drafter = HeadDrafter(head_of("eagle1"), TREES["dynamic"])
    given = specdec_ext.generate(model, ids, attention_mask=mask, drafter=drafter, max_new_tokens=8)
    assert given.shape == (2, 17)


def test_drafter_may_be_used_with_several_targets():
    """A head that shares the target's embedding uses that of the present target."""
    drafter = HeadDrafter(head_of("eagle1"), TREES["chain"])
    ids, _ = prompts((6,))
    for name in ("llama", "qwen3", "llama"):
        texts = [text_of(ids, None, each, name, max_new_tokens=10) for each in (None, drafter)]
        assert torch.equal(*texts)
        weight = tiny_model(name).get_input_embeddings().weight
        assert drafter._bound.embedding.data_ptr() == weight.data_ptr()


def test_head_of_another_target_is_refused():
    model = tiny_model("llama")
    ids, _ = prompts((4,))
    wide = random_head("eagle3", target_hidden_size=48, feature_layers=(0, 1, 2))
    with pytest.raises(ValueError, match="hidden states of width 48, but the target's have 32"):
        specdec_ext.generate(model, ids, drafter=HeadDrafter(wide), max_new_tokens=4)
    with pytest.raises(ValueError, match="layers"):
        beyond = dataclasses.replace(head_of("eagle1").config, feature_layers=(5,))
        head = dataclasses.replace(head_of("eagle1"), config=beyond)
        specdec_ext.generate(model, ids, drafter=HeadDrafter(head), max_new_tokens=4)


def test_quantised_shared_weight_is_refused():
    class Packed(torch.nn.Parameter):
        """As the tensor subclasses of quantisation libraries."""

    model = tiny_model("gpt2")
    embedding = model.get_input_embeddings()
    plain_weight = embedding.weight
    try:
        embedding.weight = torch.nn.Parameter(plain_weight.detach(), requires_grad=False)
        embedding.weight.__class__ = Packed
        message = "no embedding of its own, and the target's is a Packed"
        with pytest.raises(ValueError, match=message):
            HeadDrafter(head_of("eagle1")).feature_layers(model)
    finally:
        embedding.weight = plain_weight


def test_default_tree_depends_on_device_and_rows():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [default_tree(cpu, rows).depth for rows in (1, 2)] == [5, 3]
    assert default_tree(cuda, 1) == TreeConfig(depth=6, top_k=10, num_nodes=60)
    assert default_tree(cuda, 1, parallel=True) == TreeConfig(depth=7)
    assert default_tree(cuda, 8) == TreeConfig(depth=3)
