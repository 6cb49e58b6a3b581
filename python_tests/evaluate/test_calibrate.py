"""``calibrate`` finds the layers and the feedback for which a head was made.

Heads are built, not trained: the ``fc`` of one is fitted to features of certain layers, and another one
counts only if its normed output is fed back. Claims: from every neighbouring option the right one is found; a
head with the right options is returned unchanged.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from helpers.drafters.checkpoint_cases import VOCAB, random_head
from helpers.models.tiny import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import specdec_ext
from specdec_ext import assets
from specdec_ext.evaluate.calibrate import calibrate, own_text
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder

WIDTH = 128


def silent(head):
    """The head with layers that add nothing, so its output is that of ``fc``."""
    for name, tensor in head.tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.zero_()
    return head


@functools.cache
def text() -> torch.Tensor:
    """The target's greedy text."""
    start = torch.tensor([[3, 1, 4, 1, 5]])
    return tiny_model("llama").generate(start, max_new_tokens=50, do_sample=False)


def fitted_head(layers: tuple[int, int]):
    """A head that drafts the text from the hidden states of these layers."""
    head = silent(
        random_head(
            num_features=2,
            feature_layers=layers,
            hidden_size=WIDTH,
            target_hidden_size=32,
            own_embedding=True,
        )
    )
    target = tiny_model("llama")
    recorder = HiddenStateRecorder(target, target.config, layers)
    with torch.no_grad(), recorder.recording() as states:
        target(text())
    features = torch.cat([state[0] for state in states], dim=-1)[:-2]
    answers = torch.nn.functional.one_hot(text()[0, 2:], WIDTH).float()
    weights = torch.linalg.lstsq(features.double(), answers.double()).solution
    head.tensors["fc.weight"].copy_(weights.T)
    head.tensors["lm_head.weight"].copy_(torch.eye(VOCAB, WIDTH))
    return head


@pytest.mark.parametrize("written", [(0, 1), (1, 2), (2, 3)])
def test_right_layers_are_found(written):
    right = fitted_head((1, 2))
    head = replace(right, config=replace(right.config, feature_layers=written))
    found = calibrate(head, tiny_model("llama"), text())
    assert found.head.config.feature_layers == (1, 2)
    assert found.head.tensors is head.tensors
    assert found.trials[0].feature_layers == written
    best = max(found.trials, key=lambda trial: trial.score)
    assert best.first > 0.9
    assert all(trial.first < 0.5 for trial in found.trials if trial is not best)
    assert {trial.drafts for trial in found.trials} == {53}
    if written == (1, 2):
        assert found.head is head, "a head that is right stays as it is"
    else:
        assert found.head.record.layers_from == "calibration on a text of 55 tokens"


def test_layers_that_the_target_lacks_are_corrected():
    """Layer ids of the checkpoint are one too large, so the last one is beyond the target."""
    right = fitted_head((2, 3))
    head = replace(right, config=replace(right.config, feature_layers=(3, 4)))
    found = calibrate(head, tiny_model("llama"), text())
    assert found.head.config.feature_layers == (2, 3)
    assert [trial.feature_layers for trial in found.trials] == [(2, 3)]


def lookup_target(step: int):
    """A target whose next token is (token + step) % VOCAB: its layers add nothing to the embedding."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=6,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(VOCAB, WIDTH))
        model.get_output_embeddings().weight.copy_(shift(step))
    return model


def shift(step: int, width: int = WIDTH) -> torch.Tensor:
    """``[VOCAB, width]``: maps the one-hot of a token to the one-hot of (token + step) % VOCAB."""
    return torch.eye(VOCAB, width).roll(step, dims=0)


def counting_head(step: int, norm_output: bool):
    """Its first token is 2 ``step`` larger; the next one is larger again with normed feedback, else the same.

    ``fc`` gives 1000 times a one-hot vector, which dominates the 60 times another one-hot vector of the MLP.
    After the norm its length is about 11, and the MLP dominates.
    """
    options = {"num_features": 3, "feature_layers": (2, 3, 4), "norm_output": norm_output}
    sizes = {"hidden_size": WIDTH, "target_hidden_size": WIDTH, "intermediate_size": WIDTH}
    head = silent(random_head(**options, **sizes))
    head.tensors["fc.weight"][:VOCAB, :WIDTH] = 1000 * shift(2 * step)
    head.tensors["layers.0.mlp.gate_proj.weight"].copy_(10 * torch.eye(WIDTH))
    head.tensors["layers.0.mlp.up_proj.weight"].copy_(torch.eye(WIDTH))
    head.tensors["layers.0.mlp.down_proj.weight"][:VOCAB] = 0.05 * shift(1)
    head.tensors["lm_head.weight"].copy_(torch.eye(VOCAB, WIDTH))
    return head


@pytest.mark.parametrize("step, right", [(1, True), (0, False)], ids=["post-norm", "pre-norm"])
def test_right_feedback_is_found(step, right):
    """A text that counts is drafted with the normed output, a constant text without."""
    target = lookup_target(step)
    ids = (torch.arange(20) * step + 5) % VOCAB
    found = calibrate(counting_head(step, norm_output=True), target, ids)
    assert found.head.config.norm_output is right
    by_reading = {(t.feature_layers, t.norm_output): t for t in found.trials}
    assert by_reading[(2, 3, 4), right].first == by_reading[(2, 3, 4), right].second == 1.0
    assert by_reading[(2, 3, 4), not right].first == 1.0
    assert by_reading[(2, 3, 4), not right].second == 0.0


def test_eagle1_head_reads_the_last_token():
    """The ``fc`` of this EAGLE-1 head reads only the target's embedding."""
    head = silent(random_head("eagle1", hidden_size=WIDTH, target_hidden_size=WIDTH))
    head.tensors["fc.weight"][:, :WIDTH] = torch.eye(WIDTH)
    (trial,) = calibrate(head, lookup_target(1), torch.arange(20) + 5).trials
    assert trial.first == trial.second == 1.0


def test_second_tokens_count_only_after_right_first_tokens():
    """After a wrong first token the target continues another text."""
    head = silent(random_head("eagle1", fc_bias=True, hidden_size=WIDTH, target_hidden_size=WIDTH))
    head.tensors["fc.bias"][8] = 1.0  # so it drafts 9, whatever it reads
    (trial,) = calibrate(head, lookup_target(1), torch.full((20,), 8)).trials
    assert trial.first == 1.0, "the target, too, says 9 after 8"
    assert trial.second == 0.0, "but 8 is what the text goes on with"


def test_stated_norm_output_is_kept():
    found = calibrate(counting_head(1, norm_output=False), lookup_target(1), torch.arange(9))
    assert {trial.norm_output for trial in found.trials} == {False}
    assert [trial.feature_layers for trial in found.trials] == [(2, 3, 4), (3, 4, 5), (1, 2, 3)]


@pytest.mark.parametrize(
    "kind, options",
    [
        ("eagle1", {}),
        ("eagle3", {"has_fc": False, "num_features": 1, "feature_layers": (-1,)}),
    ],
)
def test_heads_of_the_last_hidden_state_have_one_reading(kind, options):
    found = calibrate(random_head(kind, **options), tiny_model("llama"), text(), num_drafts=5)
    assert len(found.trials) == 1
    assert found.trials[0].drafts == 5


def test_p_eagle_heads_in_bfloat16_are_calibrated():
    head = random_head(mask_token_id=7, feature_layers=(0, 1, 2), draft_vocab_size=40)
    found = calibrate(head, tiny_model("llama", dtype=torch.bfloat16), text(), num_drafts=3)
    assert len(found.trials) == 2, "of three layers, those one down do not exist"


@pytest.mark.parametrize("ids", [torch.ones(7).long(), torch.ones(2, 9).long()])
def test_invalid_texts_are_refused(ids):
    with pytest.raises(ValueError, match=r"expected one text of at least 8 tokens"):
        calibrate(random_head(feature_layers=(0, 1, 2)), tiny_model("llama"), ids)


def test_pair_that_cannot_work_is_refused():
    with pytest.raises(ValueError, match="can't draft for"):
        calibrate(
            random_head(vocab_size=50, draft_vocab_size=50, own_embedding=True),
            tiny_model("llama"),
            text(),
        )


def ambiguous(head, layers, *names):
    """The head as a checkpoint would give it that has these layers and is ambiguous about some fields."""
    config, record = replace(head.config, feature_layers=layers), head.record
    return replace(
        head, config=config, record=replace(record, ambiguous=names or ("feature_layers",))
    )


def test_an_ambiguous_head_is_calibrated_by_its_first_use():
    model, right = assets.load_target(), assets.load_head()
    drafter = specdec_ext.HeadDrafter(ambiguous(right, (0, 2, 5)))
    ids = torch.arange(5, 15)[None]
    plain = specdec_ext.generate(model, ids, drafter=None, max_new_tokens=20, do_sample=False)
    message = (
        r"ambiguous about feature_layers.* is used: feature_layers=\(1, 3, 6\), norm_output=True"
    )
    with pytest.warns(UserWarning, match=message) as told:
        drafted = specdec_ext.generate(
            model, ids, drafter=drafter, max_new_tokens=20, do_sample=False
        )
    assert len(told) == 1 and torch.equal(plain, drafted)
    assert drafter.head.config == right.config and drafter.head.record.ambiguous == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specdec_ext.generate(model, ids, drafter=drafter, max_new_tokens=4)
        assert drafter.feature_layers(model) == (1, 3, 6)


def test_an_ambiguous_head_of_another_target_stays_as_it_is():
    silenced = silent(
        random_head(hidden_size=WIDTH, target_hidden_size=32, own_embedding=True)
    )  # drafts token 0 everywhere
    head = ambiguous(silenced, (0, 1, 2))
    with pytest.warns(
        UserWarning, match=r"feature_layers is read as \(0, 1, 2\), but its config is amb"
    ):
        assert specdec_ext.HeadDrafter(head).feature_layers(tiny_model("llama")) == (0, 1, 2)


def test_own_text_is_sampled_from_the_target():
    model = assets.load_target()
    found = own_text(model, 40, seed=3)
    assert found.shape == (1, 40) and found[0, 0] == model.config.bos_token_id
    assert torch.equal(found, own_text(model, 40, seed=3))
    assert not torch.equal(found, own_text(model, 40, seed=4))
    with torch.no_grad():
        loss = model(found, labels=found).loss
    assert 0.5 < loss < 5  # about the entropy of its own text; random tokens have 12
