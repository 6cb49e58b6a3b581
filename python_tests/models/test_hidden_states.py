"""The hidden states for drafters are those of transformers, for prompts and trees."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.models.tiny import ARCHITECTURES, prompts, tiny_model

import specdec_ext
from specdec_ext.models import make_target
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder
from specdec_ext.tree.draft_tree import DraftTree

LAYERS = (0, 1, 2, -1)
# Our linears sum in another order than torch's; another layer's states differ by about 1.
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_of_a_prompt_are_those_of_transformers(name):
    model = tiny_model(name)
    ids, mask = prompts((5, 9))
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        given = dict(attention_mask=mask, position_ids=positions, output_hidden_states=True)
        expected = model(ids, **given).hidden_states
    target = make_target(model, 64)
    target.record_hidden_states(LAYERS)
    features = target.prefill(ids, mask).features
    valid = mask.bool()
    expected = torch.cat([expected[layer] for layer in LAYERS], dim=-1)
    torch.testing.assert_close(features[valid], expected[valid], **CLOSE)


def test_states_of_a_tree_are_those_of_transformers():
    model = tiny_model("llama")
    ids, _ = prompts((6,))
    target = make_target(model, 64)
    target.record_hidden_states((1, -1))
    target.prefill(ids, None)
    tree = DraftTree.from_paths(torch.tensor([3]), [[[4, 5], [7]]])
    features = target.forward(tree).features
    for node, path in enumerate(([3], [3, 4], [3, 4, 5], [3, 7])):
        text = torch.cat([ids, torch.tensor([path])], dim=1)
        with torch.no_grad():
            states = model(text, output_hidden_states=True).hidden_states
        expected = torch.cat([states[1][0, -1], states[-1][0, -1]])
        torch.testing.assert_close(features[0, node], expected, **CLOSE)


def test_other_threads_are_not_recorded():
    """Hooks are on modules, which several threads may use."""
    model = tiny_model("llama")
    recorder = HiddenStateRecorder(model, model.config, LAYERS)
    mine, others = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5], [6, 7]])
    with torch.no_grad():
        with recorder.recording() as alone:
            model(mine)
        with recorder.recording() as states:
            model(mine)
            other = threading.Thread(target=model, args=(others,))
            other.start()
            other.join()
    assert len(states) == len(LAYERS)
    assert all(torch.equal(a, b) for a, b in zip(states, alone, strict=True))


class Watching(specdec_ext.Drafter):
    """Proposes the right text and keeps the features."""

    def __init__(self, answer):
        self.answer, self.features = answer, []

    def feature_layers(self, model):
        return (2,)

    def start(self, context, model, output):
        self.features.append(output.features[0])

    def propose(self, context):
        done = len(context.generated[0])
        return DraftTree.from_paths(context.roots, [[[1], self.answer[done : done + 3]]])

    def commit(self, context, accepted, output):
        path = accepted.path[0]
        self.features.append(output.features[0, path[path >= 0]])


def test_drafter_gets_the_states_of_all_committed_tokens():
    model = tiny_model("llama")
    ids, _ = prompts((7,))
    expected = specdec_ext.generate(model, ids, drafter=None, max_new_tokens=14)
    drafter = Watching(expected[0, 7:].tolist())
    text = specdec_ext.generate(model, ids, drafter=drafter, max_new_tokens=14)
    assert torch.equal(text, expected)
    features = torch.cat(drafter.features)
    with torch.no_grad():
        states = model(expected, output_hidden_states=True).hidden_states[2][0]
    assert len(features) == expected.shape[1] - 1
    torch.testing.assert_close(features, states[:-1], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma2-window", "gpt2"])
def test_last_layers_output_is_the_input_of_the_final_norm(name):
    """Published heads for gpt-oss read it, the 36th of 36 layers."""
    model = tiny_model(name)
    ids, _ = prompts((7,))
    target = make_target(model, 64)
    target.runner.direct = None  # its norm rounds in another order
    target.record_hidden_states((3, -1))
    before, after = target.prefill(ids, None).features.chunk(2, dim=-1)
    norm = model.get_decoder().ln_f if name == "gpt2" else model.get_decoder().norm
    torch.testing.assert_close(norm(before.clone()), after.clone(), rtol=0, atol=0)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("layer", [4, 99, -2])
def test_unknown_layer_is_refused(layer):
    with pytest.raises(ValueError, match=f"feature_layers has {layer}.*layers 0 to 2"):
        make_target(tiny_model("llama"), 64).record_hidden_states((layer,))
