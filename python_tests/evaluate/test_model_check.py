"""``check_model``: true claims pass in every dtype, and the check of a false claim fails."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.command_line import run, words
from helpers.models.tiny import prompts, tiny_model
from torch import nn
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext import ModelCheck, Support, check_model
from specdec_ext.evaluate import check as model_check
from specdec_ext.evaluate.check import PROMPT_TOKENS
from specdec_ext.evaluate.scripted import DEPTH, Script


def verdicts(found: ModelCheck) -> dict[str, str]:
    return {check.name: check.verdict for check in found.checks}


ALL = ["single step", "chain", "rollback", "tree", "batch"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-window"])
def test_true_claims_pass(name, dtype):
    found = check_model(tiny_model(name, dtype=dtype))
    assert found.holds
    assert [check.name for check in found.checks] == ALL
    assert found.support == specdec_ext.supports(tiny_model(name))
    for check in found.checks:
        assert check.delta <= check.bound
        assert (check.accepted > 0) == (check.name != "single step")
    if dtype == torch.float32:
        assert set(verdicts(found).values()) == {"exact"}
        assert [check.tokens for check in found.checks] == [16, 16, 16, 16, 48]


def test_bound_is_far_from_rounding_and_from_errors():
    """The bound is far below the error of a wrong pass (0.1 and more in the tests below)."""
    assert all(check.bound < 0.01 for check in check_model(tiny_model("llama")).checks)


# --- models that are broken on purpose


def broken(forward) -> PreTrainedModel:
    """A Llama whose second MLP computes ``forward(mlp, hidden_states)``."""
    model = copy.deepcopy(tiny_model("llama"))
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden_states: forward(plain, hidden_states)
    return model


def is_block(hidden_states: torch.Tensor) -> bool:
    return 1 < hidden_states.shape[1] <= 3 * DEPTH


def test_passes_of_several_tokens_that_differ_fail():
    """As with a layer that ignores its state in passes over several tokens."""
    model = broken(lambda mlp, x: mlp(x) * (1.1 if is_block(x) else 1.0))
    found = verdicts(check_model(model))
    assert found["single step"] == "exact"
    assert {found[name] for name in ("chain", "rollback", "tree", "batch")} == {"wrong"}


def test_state_outside_of_the_cache_fails():
    """Each token reads the previous token's hidden state, which the module keeps outside of the cache."""
    kept: list[torch.Tensor] = []

    def forward(mlp, x):
        before = torch.zeros_like(x[:, :1])
        if x.shape[1] < PROMPT_TOKENS and kept and len(kept[0]) == len(x):
            before = kept[0]
        kept[:] = [x[:, -1:].clone()]
        return mlp(x + 0.3 * torch.cat([before, x[:, :-1]], dim=1))

    found = verdicts(check_model(broken(forward)))
    assert (found["single step"], found["chain"]) == ("exact", "exact")
    assert (found["rollback"], found["tree"]) == ("wrong", "wrong")


def test_mask_that_ignores_the_tree_fails():
    """One layer builds its own causal mask, in which siblings see each other."""
    model = copy.deepcopy(tiny_model("llama"))
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def forward(hidden_states, *args, attention_mask=None, **kwargs):
        queries = hidden_states.shape[1]
        if attention_mask is not None and len(hidden_states) == 1:
            causal = torch.ones(queries, attention_mask.shape[-1], dtype=torch.bool)
            attention_mask = causal.tril(causal.shape[1] - queries)[None, None]
        return plain(hidden_states, *args, attention_mask=attention_mask, **kwargs)

    attention.forward = forward
    found = verdicts(check_model(model))
    assert found == dict.fromkeys(ALL, "exact") | {"tree": "wrong"}


def test_rows_that_read_each_other_fail():
    model = broken(lambda mlp, x: mlp(x + 0.3 * (x.roll(1, dims=0) - x) if is_block(x) else x))
    assert verdicts(check_model(model)) == dict.fromkeys(ALL, "exact") | {"batch": "wrong"}


def test_text_without_drafts_proves_nothing(monkeypatch):
    monkeypatch.setattr(Script, "propose", lambda self, context: root(context))
    found = check_model(tiny_model("llama"))
    assert verdicts(found) == dict.fromkeys(ALL, "idle") | {"single step": "exact"}
    assert not found.holds


def root(context):
    return specdec_ext.DraftTree.root(context.roots)


class Nudged(nn.Module):
    """An output layer that adds ``by`` to the logit of one token in passes over several tokens."""

    def __init__(self, head: nn.Module, token: int, by: float):
        super().__init__()
        self.head, self.token, self.by = head, token, by

    def forward(self, hidden_states):
        logits = self.head(hidden_states)
        if is_block(hidden_states):
            logits[..., self.token] += self.by
        return logits


@pytest.mark.parametrize("by, verdict", [(1e-4, "near-tie"), (0.1, "wrong")])
def test_near_ties_pass(by, verdict):
    """A copy of a token has the same logit, except for less, or for more, than rounding explains."""
    model = copy.deepcopy(tiny_model("llama"))
    ids, _ = prompts((6,))
    text = model.generate(ids, max_new_tokens=16, do_sample=False)[0, 6:].tolist()
    seldom = next(token for token in range(1, 97) if token not in text)
    with torch.no_grad():
        model.lm_head.weight[seldom] = model.lm_head.weight[text[5]]
    # Equal logits: the smaller id wins, unless the other one is nudged.
    winner, twin = sorted((seldom, text[5]))
    model.lm_head = Nudged(model.lm_head, twin, by)
    found = {check.name: check for check in check_model(model, ids).checks}
    assert found["single step"].verdict == "exact"
    assert found["chain"].verdict == verdict
    assert found["chain"].gap == 0.0
    assert found["chain"].delta == pytest.approx(by, rel=0.5)
    assert winner < twin


def test_only_claims_are_checked(monkeypatch):
    modest = Support(chain=True, tree=False, batch=False, rollback="compact")
    monkeypatch.setattr(model_check, "supports", lambda model: modest)
    assert list(verdicts(check_model(tiny_model("llama")))) == ALL[:3]
    monkeypatch.setattr(model_check, "supports", lambda model: Support(False, False, False, "none"))
    assert list(verdicts(check_model(tiny_model("llama")))) == ALL[:1]


@pytest.mark.parametrize("shape", [(2, 6), (1, 1), (6,)], ids=str)
def test_prompts_may_have_another_shape(shape):
    with pytest.raises(
        ValueError, match=r"input_ids has shape \(.*expected one prompt \[1, length\]"
    ):
        check_model(tiny_model("llama"), torch.ones(shape, dtype=torch.long))


# --- the command


def test_command_fails_on_a_false_claim(monkeypatch):
    check = specdec_ext.Check("tree", "wrong", 0.7, 1e-4, 16, 3)
    found = ModelCheck(Support(True, True, False, "compact", ("one reason",)), (check,))
    monkeypatch.setattr(specdec_ext, "check_model", lambda model, ids: found)
    result = run("check", "--prompt", "def f(x, y):\n    return", "--max-new-tokens", "4")
    assert result.exit_code == 1
    assert "WRONG" in result.output
    assert "one reason" in result.output and "please report it" in words(result.output)


def test_command_takes_one_source_of_prompts(tmp_path):
    (tmp_path / "p.txt").write_text("x")
    result = run("check", "--prompt", "x", "--prompts", str(tmp_path / "p.txt"))
    assert result.exit_code == 2
    assert "--prompts and --prompt both name the texts" in words(result.output)
