"""``AssistantDrafter``: drafts by their definition and those of transformers, and texts of the target."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.drafters.assistant_cases import ASSISTANTS, AVAILABLE, WINDOW, assistant, target
from helpers.drafters.texts import generate, mean_sampled_length, texts_of_the_target
from helpers.models.tiny import prompts, tiny_model

from specdec_ext import AssistantDrafter, DraftModelDrafter, HeadDrafter, TreeConfig
from specdec_ext.drafters.resolve import resolve_drafter
from specdec_ext.training.start import new_head

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="transformers has no Gemma-4 assistants")

DEPTH = 4
# An assistant that scores the tokens of some clusters only; here a cluster is one token.
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 97}
TREES = {
    "chain of 1": TreeConfig(depth=1),
    "chain of 5": TreeConfig(depth=5),
    "static": TreeConfig(choices=((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0))),
    "dynamic": TreeConfig(depth=4, top_k=3, num_nodes=9),
}
# Shorter and longer than the window.
BATCHES = {"one": (9,), "ragged": (2 * WINDOW + 3, 7, 1)}


class Noting(AssistantDrafter):
    """Notes the tree of each row by the length of its text."""

    def __init__(self, *args):
        super().__init__(*args)
        self.trees = {}

    def propose(self, context):
        tree = super().propose(context)
        if tree.num_nodes > 1:
            for i, row in enumerate(context.rows):
                drafted = tree.tokens[i].tolist(), tree.parents[i].tolist()
                self.trees[row, context.columns(row)] = drafted
        return tree


def chain(model, helper, text, depth):
    """The definition of a chain: all of the text anew, and transformers' own forward of the assistant."""
    output = model(text[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    token, state, drafted = text[:, -1:], output.hidden_states[-1][:, -1:], []
    for _ in range(depth):
        out = helper(
            inputs_embeds=torch.cat([model.get_input_embeddings()(token), state], dim=-1),
            position_ids=torch.tensor([[text.shape[1] - 1]]),
            attention_mask=torch.ones(1, text.shape[1] - 1).long(),
            shared_kv_states=output.shared_kv_states,
        )
        token, state = out.logits.argmax(dim=-1), out.last_hidden_state
        drafted.append(int(token))
    return drafted


@pytest.mark.parametrize(
    "fields", [{}, {**ORDERED, "centroid_intermediate_top_k": 60}], ids=["plain", "ordered"]
)
@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_drafts_are_those_of_the_definition(name, batch, fields):
    model, helper = target(name), assistant(name, **fields)
    ids, mask = prompts(BATCHES[batch])
    drafter = Noting(helper, TreeConfig(depth=DEPTH))
    out = generate(model, ids, mask, drafter=drafter, speculation="fixed")
    texts, starts = out.sequences, mask.argmax(dim=1)
    for (row, length), (drafted, _) in drafter.trees.items():
        text = texts[row, starts[row] : length][None]
        assert drafted[1:] == chain(model, helper, text, DEPTH)[: len(drafted) - 1]
    counts = out.speculation_stats.accepted_per_position
    assert 0 < sum(counts) < sum(out.speculation_stats.proposed_per_position)
    assert len(drafter.trees) > 10 * len(ids)


@torch.no_grad()
def test_children_are_the_best_continuations_of_their_nodes():
    """A static tree: each child is the guess of its rank after the path to its parent."""
    model, helper = target(), assistant()
    ids, _ = prompts((2 * WINDOW + 3,))
    drafter = Noting(helper, TREES["static"])
    text = generate(model, ids, drafter=drafter, speculation="fixed").sequences
    embed = model.get_input_embeddings()
    for (_, length), (tokens, parents) in drafter.trees.items():
        output = model(
            text[:, : length - 1], output_hidden_states=True, return_shared_kv_states=True
        )
        states, children = {-1: output.hidden_states[-1][:, -1:]}, {}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent != -1:
                children.setdefault(parent, []).append(token)
            out = helper(
                inputs_embeds=torch.cat([embed(torch.tensor([[token]])), states[parent]], dim=-1),
                position_ids=torch.tensor([[length - 1]]),
                shared_kv_states=output.shared_kv_states,
            )
            states[node] = out.last_hidden_state
            best = out.logits[0, 0].topk(3).indices.tolist()
            children[node, "best"] = best
        for node in range(len(tokens)):
            guessed = children.get(node, [])
            assert guessed == children[node, "best"][: len(guessed)]


@pytest.mark.parametrize("length", [3, WINDOW + 1, WINDOW + 2, 3 * WINDOW])
def test_first_draft_is_that_of_transformers(length, monkeypatch):
    """Later, transformers leaves the assistant the keys of a rejected token."""
    model, helper = target(), copy.copy(assistant())
    ids, _ = prompts((length,))
    guesses, forward = [], type(helper).forward

    def noted(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        guesses.append(int(output.logits.argmax()))
        return output

    monkeypatch.setattr(type(helper), "forward", noted)
    helper.generation_config = copy.copy(helper.generation_config)
    helper.generation_config.num_assistant_tokens = DEPTH
    kwargs = dict(max_new_tokens=12, do_sample=False)
    theirs = model.generate(ids, assistant_model=helper, **kwargs)
    drafter = Noting(helper, TreeConfig(depth=DEPTH))
    ours = generate(model, ids, drafter=drafter, speculation="fixed", **kwargs)
    tokens, _ = drafter.trees[0, length + 1]
    assert tokens[1:] == guesses[:DEPTH]
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shared", [0, 2])
def test_texts_are_those_of_the_target(shared, batch, tree):
    """Also of a target whose layers all have keys of their own, as the largest Gemma 4 has."""
    model, helper = target(shared=shared), assistant()
    ids, mask = prompts(BATCHES[batch])
    for out in texts_of_the_target(model, ids, mask, AssistantDrafter(helper, TREES[tree])):
        assert sum(out.speculation_stats.accepted_per_position) > 0


def test_coupled_drafts_are_accepted_more_often():
    model, (ids, _) = target(), prompts((9,))

    def mean_length(temperature):
        drafter = AssistantDrafter(assistant(), TreeConfig(depth=3), temperature)
        return mean_sampled_length(model, ids, drafter, 3.0)

    assert mean_length(1.0) > mean_length(0.0) + 0.3


def test_tokens_without_a_score_are_not_drafted():
    """An assistant with ordered embeddings scores few tokens; noise does not lift the others."""
    helper = copy.deepcopy(assistant(**ORDERED, centroid_intermediate_top_k=2))
    helper.masked_embedding.centroids.weight.data.zero_()  # so that the same clusters are always scored
    clusters = torch.zeros(ORDERED["num_centroids"]).topk(2).indices
    scored = set(helper.masked_embedding.token_ordering[clusters].tolist())
    drafter = Noting(helper, TreeConfig(depth=2))
    torch.manual_seed(6)
    model, (ids, _) = target(), prompts((9,))
    generate(model, ids, drafter=drafter, speculation="fixed", do_sample=True, temperature=5.0)
    drafted = {token for tokens, _ in drafter.trees.values() for token in tokens[1:]}
    assert len(drafter.trees) > 5 and drafted <= scored


def test_next_turn_drafts_from_the_cache_of_the_last():
    """A window of the caller's cache has dropped its first tokens."""
    model, helper = target(), assistant()
    ids, _ = prompts((3 * WINDOW,))
    first = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    mask = torch.ones_like(first.sequences)
    expected = generate(model, first.sequences, mask, drafter=None).sequences
    drafter = AssistantDrafter(helper, TreeConfig(depth=3))
    out = generate(
        model,
        first.sequences,
        mask,
        drafter=drafter,
        speculation="fixed",
        past_key_values=first.past_key_values,
    )
    assert torch.equal(out.sequences, expected)
    assert sum(out.speculation_stats.accepted_per_position) > 0


@pytest.mark.parametrize("way", ["drafter", "assistant_model", "folder", "auto"])
def test_every_way_to_pass_an_assistant(way, tmp_path):
    model, helper, (ids, mask) = target(), assistant(), prompts((9, 4))
    expected = generate(model, ids, mask, drafter=None).sequences
    kwargs = {"drafter": helper}
    if way == "assistant_model":
        kwargs = {"assistant_model": helper, "num_assistant_tokens": 3}
    elif way == "folder":
        helper.save_pretrained(tmp_path)
        kwargs = {"drafter": str(tmp_path)}
    elif way == "auto":
        kwargs["speculation"] = "auto"
    out = generate(model, ids, mask, **kwargs)
    assert out.speculation_stats.drafter == "AssistantDrafter"
    assert torch.equal(out.sequences, expected)
    if way == "assistant_model":
        assert len(out.speculation_stats.proposed_per_position) <= 3


def test_half_precision():
    model, helper = (copy.deepcopy(each).to(torch.bfloat16) for each in (target(), assistant()))
    ids, mask = prompts((9, 4))
    plain = generate(model, ids, mask, drafter=None).sequences
    assert torch.equal(generate(model, ids, mask, drafter=helper).sequences, plain)


def test_heads_read_the_states_of_all_prompt_tokens():
    """Without hooks, transformers runs the last layers for one token of the prompt only."""
    model, (ids, _) = target(), prompts((9,))
    plain = generate(model, ids, drafter=None).sequences
    out = generate(model, ids, drafter=HeadDrafter(new_head(model)), speculation="fixed")
    assert torch.equal(out.sequences, plain)


def refused(helper, match, model=None, **kwargs):
    model = target() if model is None else model
    with pytest.raises(ValueError, match=match):
        generate(model, prompts((4,))[0], drafter=AssistantDrafter(helper), **kwargs)


def test_assistants_of_other_targets_are_refused():
    helper = assistant()
    refused(helper, "width 64, and those of this LlamaForCausalLM are 32", tiny_model("llama"))
    refused(
        copy.deepcopy(helper).to(torch.bfloat16),
        "is torch.bfloat16 on cpu, the target torch.float32",
    )
    other = copy.deepcopy(helper)
    other.model.layers[1].self_attn.head_dim = 16
    refused(other, "2 heads of 16 dimensions in layers of type 'full_attention', .* 2 heads of 32")
    other = copy.deepcopy(helper)
    other.config.text_config.layer_types = ["chunked_attention", "full_attention"]
    refused(other, "a layer of type 'chunked_attention', and this Gemma4ForCausalLM has none")
    other = copy.deepcopy(assistant(**ORDERED, centroid_intermediate_top_k=60))
    other.masked_embedding.token_ordering[3] = -5
    refused(other, "token_ordering of the assistant holds ids from -5 to 9.; expected 0 to 9.")
    other = copy.deepcopy(helper)
    other.config._attn_implementation = "flash_attention_2"
    refused(other, "attn_implementation='flash_attention_2'; load it with one of sdpa, eager")


def test_wrong_arguments_are_named():
    with pytest.raises(
        TypeError, match="model is a LlamaForCausalLM; expected a Gemma-4 assistant"
    ):
        AssistantDrafter(tiny_model("llama"))
    with pytest.raises(ValueError, match="temperature is relative"):
        AssistantDrafter(assistant(), temperature=-1)
    ids, model = prompts((4,))[0], target()
    with pytest.raises(ValueError, match="leave assistant_tokenizer out"):
        generate(model, ids, assistant_model=assistant(), assistant_tokenizer=1, tokenizer=2)
    with pytest.raises(ValueError, match=r"assistant_confidence_threshold=0\.7 has no effect"):
        generate(model, ids, assistant_model=assistant(), assistant_confidence_threshold=0.7)
    assert isinstance(resolve_drafter(tiny_model("llama"), tiny_model("llama")), DraftModelDrafter)
