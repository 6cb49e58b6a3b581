"""``install`` lets ``model.generate`` speculate with its usual arguments; ``uninstall`` restores it."""

from __future__ import annotations

import copy
import functools
import pickle
import weakref

import pytest
import torch
from helpers.models.tiny import ScriptedDrafter, generated, greedy_text, oracle_tree, tiny_model
from transformers import GenerationConfig, LogitsProcessorList

import specdec_ext
from specdec_ext.evaluate import benchmark

KWARGS = dict(max_new_tokens=8, do_sample=False)


@pytest.fixture
def model():
    """A model without the hooks that transformers leaves behind when hidden states are requested."""
    shared = tiny_model("llama")
    fresh = type(shared)(copy.deepcopy(shared.config)).eval()
    fresh.load_state_dict(shared.state_dict())
    fresh.generation_config = copy.deepcopy(shared.generation_config)
    return fresh


def expected():
    """``(ids, text)`` of transformers' own generate."""
    ids, _, text = greedy_text("llama", (6,), KWARGS["max_new_tokens"])
    return ids, text


def right() -> ScriptedDrafter:
    ids, text = expected()
    return ScriptedDrafter(generated(text, ids.shape[1]), oracle_tree)


def test_generate_speculates(model):
    ids, text = expected()
    specdec_ext.install(model, right())
    out = model.generate(ids, return_dict_in_generate=True, **KWARGS)
    assert torch.equal(out.sequences, text)
    assert out.speculation_stats.accepted_tokens > 0


def test_positional_arguments_are_those_of_transformers(model):
    """Positional arguments have the order of ``model.generate``: the config, then logits processors."""
    ids, text = expected()
    specdec_ext.install(model, right())
    config = GenerationConfig(pad_token_id=0, **KWARGS)
    assert torch.equal(model.generate(ids, config, LogitsProcessorList()), text)


class Pieces:
    """A streamer that records what it receives."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamer_and_assistant_as_in_transformers(model):
    ids, text = expected()
    specdec_ext.install(model, right())
    pieces = Pieces()
    assert torch.equal(model.generate(ids, streamer=pieces, **KWARGS), text)
    assert pieces.tokens == text[0].tolist() and pieces.ended
    kwargs = dict(KWARGS, assistant_model=tiny_model("llama"), return_dict_in_generate=True)
    out = model.generate(ids, **kwargs)
    assert out.speculation_stats.drafter == "DraftModelDrafter"
    assert torch.equal(out.sequences, text)


def test_arguments_of_a_call_replace_the_defaults(model):
    ids, _ = expected()
    specdec_ext.install(model, None, seed=3, do_sample=True, max_new_tokens=8)
    plain = specdec_ext.generate(model, ids, drafter=None, seed=3, do_sample=True, max_new_tokens=8)
    assert torch.equal(model.generate(ids), plain)
    other = model.generate(ids, seed=4, return_dict_in_generate=True, drafter="ngram")
    assert other.speculation_stats.drafter == "NgramDrafter"
    assert not torch.equal(other.sequences, plain)


def test_callers_own_hook_is_used(model):
    ids, text = expected()
    specdec_ext.install(model, right())
    hook = specdec_ext.custom_generate(None)
    out = model.generate(ids, custom_generate=hook, return_dict_in_generate=True, **KWARGS)
    assert torch.equal(out.sequences, text) and out.speculation_stats.drafter == "none"


def test_model_can_be_uninstalled_and_installed_again(model):
    before = dict(vars(model))
    specdec_ext.uninstall(model)  # nothing to do
    specdec_ext.install(model)
    second = specdec_ext.install(model, "ngram")
    assert model.generate is second
    specdec_ext.uninstall(model)
    assert vars(model) == before
    with specdec_ext.install(model) as same:
        assert same is model and "generate" in vars(model)
    assert vars(model) == before
    with specdec_ext.install(model):
        newer = specdec_ext.install(model)
    assert model.generate is newer  # not the one whose context has ended


def test_generate_of_another_library_is_called_and_restored(model):
    """A ``generate`` that another library has installed on the model is restored."""
    calls, (ids, text) = [], expected()

    def theirs(*args, **kwargs):
        calls.append(kwargs)
        return type(model).generate(model, *args, **kwargs)

    model.generate = theirs
    specdec_ext.install(model)
    specdec_ext.install(model, right())
    assert torch.equal(model.generate(ids, **KWARGS), text) and len(calls) == 1
    specdec_ext.uninstall(model)
    assert model.generate is theirs


def test_generate_may_be_assigned_to_the_model(model):
    """It must not call itself."""
    ids, text = expected()
    model.generate = functools.partial(specdec_ext.generate, model, drafter=right())
    out = model.generate(ids, return_dict_in_generate=True, **KWARGS)
    assert torch.equal(out.sequences, text) and out.speculation_stats.accepted_tokens > 0
    assert torch.equal(specdec_ext.generate(model, ids, **KWARGS), text)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_are_plain_models(again, model):
    ids, text = expected()
    specdec_ext.install(model, right())
    other = again(model)
    out = other.generate(ids, return_dict_in_generate=True, **KWARGS)
    assert torch.equal(out.sequences, text) and not hasattr(out, "speculation_stats")
    assert other.generate.__self__ is other
    specdec_ext.install(other, right())
    assert model.generate.model is model and other.generate.model is other


def test_installed_model_can_be_saved(model, tmp_path):
    specdec_ext.install(model, right())
    model.save_pretrained(tmp_path)
    ids, text = expected()
    assert torch.equal(type(model).from_pretrained(tmp_path).generate(ids, **KWARGS), text)


def test_deleted_model_is_freed_at_once():
    """A deleted model is freed, installed or not, because its memory on a GPU is needed."""
    model = copy.deepcopy(tiny_model("llama"))
    installed, alive = specdec_ext.install(model), weakref.ref(model)
    del model
    assert alive() is None
    with pytest.raises(ReferenceError, match="does not exist any more"):
        installed(torch.tensor([[1]]))


def test_compiled_models_can_be_installed(model):
    ids, text = expected()
    compiled = torch.compile(model, backend="eager")
    specdec_ext.install(compiled, right())
    out = compiled.generate(ids, return_dict_in_generate=True, **KWARGS)
    assert torch.equal(out.sequences, text) and out.speculation_stats.accepted_tokens > 0
    specdec_ext.uninstall(compiled)
    assert "generate" not in vars(model)


def test_baselines_are_those_of_transformers(model):
    """The baseline of comparisons must be the model's own generate, not the installed one."""
    ids, _ = expected()
    specdec_ext.install(model, right())
    run = benchmark.hugging_face(model, {"do_sample": False}, return_dict_in_generate=True)
    assert not hasattr(run({"input_ids": ids}), "speculation_stats")


def test_invalid_settings_are_refused(model):
    ids, _ = expected()
    with pytest.raises(ValueError, match="verification='other' is not known"):
        specdec_ext.install(model, verification="other")
    with pytest.raises(TypeError, match="Linear, which has no method generate"):
        specdec_ext.install(torch.nn.Linear(2, 2))
    assert "generate" not in vars(model)
    specdec_ext.install(model)
    with pytest.raises(ValueError, match=r"num_beams.*specdec_ext.uninstall\(model\) restores"):
        model.generate(ids, num_beams=2, **KWARGS)
    with pytest.raises(ValueError, match="heal it before the call") as raised:
        model.generate(ids, token_healing=True, **KWARGS)
    assert "uninstall" not in str(raised.value)  # another way out is named
