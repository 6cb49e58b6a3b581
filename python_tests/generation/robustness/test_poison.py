"""Drafted tokens for which a model computes NaN or infinity do not change the text and raise no error.

A rejected token that is masked still takes part: in attention as zero times NaN, in recurrent layers within
its chunk, and in the cache until its slot is overwritten. ``test_architectures.py`` tests every architecture.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from helpers.checks import poison
from helpers.checks.poison import PoisonDrafter, poisoned, unread_tokens
from helpers.drafters.head_cases import head_of
from helpers.models.tiny import ScriptedDrafter, generated, noisy_chain, prompts, tiny_model
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import specdec_ext
from specdec_ext import DraftModelDrafter, DraftTree, HeadDrafter
from specdec_ext.context import Context
from specdec_ext.models.passes.branches import padded
from specdec_ext.schedule.policy import Policy
from specdec_ext.transfer import Staging
from specdec_ext.verify.sampler import Sampler, SpoiltLogits
from specdec_ext.verify.stopping import StopRule

LENGTHS = (6, 3, 5)
SETTINGS = [
    *(("llama", attention, dtype) for attention in poison.ATTENTIONS for dtype in poison.DTYPES),
    # Biases, sinks and windows, which need eager attention; an indexer; other head sizes; an encoder; chunks
    # of recurrent states with and without attention; a cache of its own class.
    *((name, "eager", torch.float32) for name in ("gemma2", "bloom", "gpt_oss", "mpt", "gptj")),
    *((name, "sdpa", torch.float32) for name in ("deepseek_v3", "deepseek_v32", "bart", "qwen3_next")),
    *((name, "eager", torch.float32) for name in ("falcon_h1", "mamba2", "minimax", "openai-gpt")),
    *((name, "eager", torch.float16) for name in ("bloom", "gemma2", "falcon_h1")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "attention", "dtype"), SETTINGS, ids=lambda each: str(each).removeprefix("torch.")
)
def test_text_is_that_of_plain_decoding(name, attention, dtype):
    model = poison.built(name, attention, dtype)
    assert model is not None
    found, count = poison.faults(model)
    assert count and not found, found


@pytest.fixture
def eager():
    """A model in whose attention each token of a block multiplies the values of all others."""
    return copy.deepcopy(tiny_model("llama", "eager"))


generate = partial(specdec_ext.generate, speculation="fixed")


def call(ids, mask, new_tokens=14, **kwargs):
    return dict(
        inputs=ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, **kwargs
    )


@pytest.mark.parametrize("removing", [False, True], ids=["raises", "removes"])
@pytest.mark.parametrize("attention", poison.ATTENTIONS)
def test_overflow_of_float16_leaves_the_text_unchanged(attention, removing):
    """All weights are finite; the MLP of one token exceeds the range of float16."""
    model = copy.deepcopy(tiny_model("llama", attention, torch.float16))
    ids, mask = prompts((4,))
    bad = 50
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = 0
        embeddings[bad] = 0
        embeddings[bad, 0] = 1
        for layer in model.model.layers:
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight[0] = 0
            for inputs in (layer.mlp.gate_proj, layer.mlp.up_proj):
                inputs.weight[:, 0] = 600
        assert model.model(torch.tensor([[bad]])).last_hidden_state.isnan().all()
    arguments = call(ids, mask, suppress_tokens=[bad], remove_invalid_values=removing)
    expected = generate(model, drafter=None, **arguments)
    drafter = ScriptedDrafter([[0]], lambda right, rng: [[bad]])
    assert torch.equal(generate(model, drafter=drafter, **arguments), expected)


def test_score_as_large_as_the_mask_leaves_the_text_unchanged():
    """The largest float16 is 65504: with a mask of -65504 such a score would become zero."""
    model = copy.deepcopy(tiny_model("gpt2", "eager", torch.float16))
    width, heads = model.config.n_embd, model.config.n_head
    channels = torch.arange(heads) * (width // heads)  # the first channel of every head
    read = []
    model.transformer.wte.register_forward_pre_hook(lambda module, args: read.append(args[0]))

    def spoil(module, args, output):
        output, bad = output.clone(), (read[-1] == token)[..., None]
        output[..., channels] = 8.0  # of all queries
        keys = output[..., width : 2 * width]
        keys.masked_fill_(bad, 0)
        keys[..., channels] = torch.where(bad, 8188.0, -8.0).half()
        return output

    for block in model.transformer.h:
        block.attn.scaling = 1.0
        block.attn.c_attn.register_forward_hook(spoil)
    ids, mask = prompts((6,))
    token = -1
    expected = model.generate(**call(ids, mask))
    (token,) = unread_tokens(1, expected)
    drafter = PoisonDrafter(generated(expected, 6), [token], tree=False)
    assert torch.equal(generate(model, drafter=drafter, **call(ids, mask)), expected)


@pytest.mark.parametrize(
    "processors",
    [{}, dict(repetition_penalty=1.3, no_repeat_ngram_size=2), dict(forced_eos_token_id=7)],
    ids=["none", "by-text", "forced"],
)
def test_pass_is_run_again_once_for_all_rows(processors, eager):
    ids, mask = prompts(LENGTHS)
    expected = eager.generate(**call(ids, mask, **processors))
    tokens = unread_tokens(3, expected)
    passes = []
    eager.model.register_forward_hook(lambda *_: passes.append(1))
    drafter = ScriptedDrafter(generated(expected, 6), lambda right, rng: [[tokens[0], *right[:2]]])
    with poisoned(eager, tokens, "embedding"):
        arguments = call(ids, mask, return_dict_in_generate=True, **processors)
        output = generate(eager, drafter=drafter, **arguments)
    assert torch.equal(output.sequences, expected)
    stats = output.speculation_stats
    # In each of 13 steps but the last, which has no room for a draft.
    assert stats.reruns == 12 and len(passes) == 1 + 13 + 12
    assert stats.drafts == 36 and stats.accepted_tokens == 0


@pytest.mark.parametrize("attention", poison.ATTENTIONS)
@pytest.mark.parametrize("shape", [noisy_chain, lambda right, rng: [[3, 4], right]])
def test_nan_behind_an_accepted_token_is_the_error_of_plain_decoding(attention, shape):
    model = copy.deepcopy(tiny_model("llama", attention))
    ids, mask = prompts(LENGTHS)
    texts = generated(model.generate(**call(ids, mask)), 6)
    with torch.no_grad():
        model.model.embed_tokens.weight[texts[1][6]] = torch.nan
    with pytest.raises(ValueError, match=r"logits of row . at position \d+ contain NaN") as plain:
        generate(model, drafter=None, **call(ids, mask))
    with pytest.raises(ValueError, match="contain NaN") as error:
        generate(model, drafter=ScriptedDrafter(texts, shape), **call(ids, mask))
    assert str(error.value) == str(plain.value)


class Notes(LogitsProcessor):
    """Keeps the ids of its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        assert scores.isfinite().all()
        return scores


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_processors_that_keep_state_are_called_as_in_plain_decoding(eager, tree):
    ids, mask = prompts((6, 6, 6))
    plain, ours = Notes(), Notes()
    expected = eager.generate(**call(ids, mask, logits_processor=[plain]))
    tokens = unread_tokens(3, expected)
    drafter = PoisonDrafter(generated(expected, 6), tokens, tree)
    with poisoned(eager, tokens, "embedding"):
        text = generate(eager, drafter=drafter, **call(ids, mask, logits_processor=[ours]))
    assert torch.equal(text, expected) and ours.calls == plain.calls


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_returned_cache_is_finite(name):
    """Also where the keys of drafts behind the end of a row are NaN."""
    model = poison.built(name, "sdpa", torch.float32)
    ids, mask = prompts(LENGTHS)
    arguments = call(ids, mask, pad_token_id=0, return_dict_in_generate=True)
    texts = generated(model.generate(**arguments).sequences, 6)
    arguments["eos_token_id"] = [texts[0][5], texts[1][7]]
    plain = model.generate(**arguments)
    tokens = unread_tokens(3, plain.sequences)
    drafter = ScriptedDrafter(texts, lambda right, rng: [[*right[:1], *tokens]])
    with poisoned(model, tokens, "embedding"):
        ours = generate(model, drafter=drafter, **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    for layer in ours.past_key_values.layers:
        for stored in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            assert stored is None or stored.isfinite().all()


def test_paddings_of_a_block_are_tokens_of_the_text():
    """Rows of a recurrent model read different numbers of tokens again, and shorter ones are padded."""
    assert padded([[5, 6], [7], []], torch.device("cpu")).tolist() == [[5, 6], [7, 7], [0, 0]]
    model = poison.built("mamba2", "eager", torch.float32)
    ids, mask = prompts((6, 6, 6))
    arguments = call(ids, mask, suppress_tokens=[0])
    expected = model.generate(**arguments)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
    for seed in range(3):
        drafter = ScriptedDrafter(generated(expected, 6), noisy_chain, seed)
        assert torch.equal(generate(model, drafter=drafter, **arguments), expected)


@pytest.mark.parametrize("rule", ["rejection", "block", "recursive"])
def test_sampling_rules_reject_a_tree_with_nan_anywhere(rule):
    """If only trees whose accepted path has NaN were drawn again, these tokens would be emitted too
    rarely."""
    logits = torch.zeros(1, 3, 8)
    logits[0, 0, 1] = -torch.inf
    logits[0, 2, 5] = torch.nan
    tree = DraftTree(
        torch.tensor([[1, 1, 3]]), torch.tensor([[-1, 0, 1]]), torch.full((1, 3, 8), 1 / 8)
    )
    context = Context(torch.tensor([[4, 1]]), None, 0, 20, lambda *_: None, lambda *_: None)
    context.generated = [[1]]
    stop = StopRule([], GenerationConfig(max_length=20))
    sampler = Sampler(LogitsProcessorList(), True, [(0, 0)], Staging(torch.device("cpu")), rule)
    with pytest.raises(SpoiltLogits):
        sampler.verify(tree, logits, context, stop)
    assert context.generated == [[1]]
    sampler.verify(tree, logits.nan_to_num(), context, stop)
    assert len(context.generated[0]) > 1


class HeadAndPoison(HeadDrafter):
    """Adds the tokens ``poison`` to a head's drafts."""

    def __init__(self, head, poison):
        super().__init__(head)
        self.poison = poison

    def propose(self, context):
        tree = super().propose(context)
        others = [[[token] for token in self.poison]] * tree.num_rows
        return DraftTree.merged([DraftTree.from_paths(context.roots, others), tree])


@pytest.mark.parametrize("attention", poison.ATTENTIONS)
def test_head_drafts_beside_poison(attention):
    model = copy.deepcopy(tiny_model("llama", attention))
    ids, mask = prompts(LENGTHS)
    expected = model.generate(**call(ids, mask))
    drafter = HeadAndPoison(head_of("eagle3"), unread_tokens(3, expected))
    with poisoned(model, drafter.poison, "embedding"):
        text = generate(model, drafter=drafter, **call(ids, mask))
    assert torch.equal(text, expected)


@pytest.mark.parametrize("attention", poison.ATTENTIONS)
def test_draft_model_that_computes_nan_does_not_change_the_text(attention):
    model, draft = tiny_model("llama"), copy.deepcopy(tiny_model("llama", attention))
    ids, mask = prompts(LENGTHS)
    expected = model.generate(**call(ids, mask))
    with torch.no_grad():
        draft.model.embed_tokens.weight[generated(expected, 6)[1][5]] = torch.nan
    text = generate(model, drafter=DraftModelDrafter(draft), **call(ids, mask))
    assert torch.equal(text, expected)


def test_policies_learn_the_nodes_of_the_first_pass(eager, monkeypatch):
    """A draft that is run again costs the time of both passes."""
    learnt = []
    monkeypatch.setattr(
        Policy, "learn", lambda self, accepted, context, nodes: learnt.append(nodes)
    )
    ids, mask = prompts(LENGTHS)
    expected = eager.generate(**call(ids, mask))
    tokens = unread_tokens(3, expected)
    with poisoned(eager, tokens, "embedding"):
        drafter = ScriptedDrafter(generated(expected, 6), lambda right, rng: [tokens])
        generate(eager, drafter=drafter, **call(ids, mask))
    assert learnt == [4] * 10 + [3, 2, 1]
