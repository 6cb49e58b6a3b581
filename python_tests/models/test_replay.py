"""Models with recurrent states: a rejected token can't be removed from a state, so states are restored.

Claim: chains and trees on recurrent and hybrid models, alone and in ragged batches whose rows end at
different times, have the text of ``model.generate``; the number of unread tokens is bounded; the returned
cache has read the text except its last token, as transformers' own, and can be written to.
"""

import copy
import functools

import pytest
import torch
from helpers.models.recurrent_models import KINDS, recurrent_models
from helpers.models.tiny import (
    SHAPES,
    ScriptedDrafter,
    adversary_chain,
    generated,
    oracle_chain,
    oracle_tree,
    prompts,
    wrong,
)
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext.models import make_target, supports
from specdec_ext.models.base import MAX_UNREAD
from specdec_ext.models.compat import CACHE, cache_of
from specdec_ext.tree.draft_tree import DraftTree

BATCHES = {"one": (7,), "three-ragged": (12, 3, 9)}
NEW_TOKENS = 20


@pytest.fixture
def models() -> dict[str, PreTrainedModel]:
    return recurrent_models()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_transformers(models, kind, batch):
    model = models[kind]
    assert supports(model).rollback == "replay" and supports(model).tree
    ids, mask = prompts(BATCHES[batch])
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **kwargs)
    assert len(set(expected[0, -NEW_TOKENS:].tolist())) > 2, "the text repeats one token"
    accepted = {}
    for shape in SHAPES:
        drafter = ScriptedDrafter(generated(expected, ids.shape[1]), shape)
        options = dict(kwargs, return_dict_in_generate=True)
        out = specdec_ext.generate(model, ids, drafter=drafter, **options)
        assert torch.equal(out.sequences, expected), shape.__name__
        accepted[shape] = out.speculation_stats.accepted_tokens
    assert min(accepted[oracle_chain], accepted[oracle_tree]) > len(ids) * NEW_TOKENS // 2


def test_row_with_unread_tokens_beside_a_row_with_drafts(models):
    """Row 0 has a wrong draft; then only row 1 has drafts, as many as row 0 has tokens to read again."""
    model = models["mamba2"]
    ids, _ = prompts((6, 6))
    kwargs = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **kwargs)
    right = generated(expected, 6)

    class Uneven(specdec_ext.Drafter):
        def propose(self, context):
            paths = []
            for row in context.rows:
                done = len(context.generated[row])
                drafts = [wrong(right[row][done])] if row == 0 else right[row][done : done + 1]
                paths.append([drafts] if (done % 2 == 1) == (row == 0) else [[]])
            return DraftTree.from_paths(context.roots, paths)

    assert torch.equal(specdec_ext.generate(model, ids, drafter=Uneven(), **kwargs), expected)


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_rows_may_end_at_different_times(models, kind):
    model = models[kind]
    ids, mask = prompts((12, 3, 9, 5))
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    free = model.generate(ids, **kwargs)
    kwargs["eos_token_id"] = [int(free[0, 17]), int(free[2, 24])]
    expected = model.generate(ids, **kwargs)
    ends = (expected != 0).long().sum(1)
    assert len(set(ends.tolist())) > 1, "all rows end together"
    for shape in SHAPES:
        drafter = ScriptedDrafter(generated(free, ids.shape[1]), shape)
        assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("kind", ["lfm2", "mamba2", "falcon_h1"])
def test_returned_cache_is_that_of_transformers(models, kind, shape):
    """The model is in float64, but some scans compute in float32, which sets the tolerance."""
    close = functools.partial(torch.testing.assert_close, rtol=1.3e-6, atol=1e-5)
    model = copy.deepcopy(models[kind]).double()
    ids, mask = prompts(BATCHES["three-ragged"])
    kwargs = dict(attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    kwargs["return_dict_in_generate"] = True
    plain = model.generate(ids, **kwargs)
    drafter = ScriptedDrafter(generated(plain.sequences, ids.shape[1]), shape)
    ours = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
    for mine, their in zip(cache_of(ours).layers, cache_of(plain).layers, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(their, name, {}).items():
                if state is not None:
                    close(getattr(mine, name)[index], state)
                    getattr(mine, name)[index].add_(1)  # no inference tensor
        if getattr(their, "keys", None) is not None:
            valid = torch.cat([mask, torch.ones(3, 8)], dim=1).bool()[:, None, :, None]
            close(torch.where(valid, mine.keys, 0), torch.where(valid, their.keys, 0))


@pytest.mark.parametrize("accepted", [[0, 1, 2], [0, 3], [0, 1], [0]], ids=str)
@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_row_continues_from_a_branch_accepted_as_a_whole(models, kind, accepted):
    model = models[kind]
    target, (ids, _) = make_target(model, 60), prompts((6, 6))
    target.prefill(ids, None)
    tokens = torch.tensor([[5, 11, 12, 13], [6, 21, 22, 23]])
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 1, 0]] * 2))
    target.forward(tree)
    path = torch.tensor([[*accepted, *[-1] * (4 - len(accepted))]] * 2)
    target.commit(path, torch.tensor([len(accepted) - 1] * 2))
    text = tokens[:, accepted]
    assert target._replay.unread == ([[], []] if len(accepted) == 3 else text.tolist())
    logits = target.forward(DraftTree.root(torch.tensor([3, 4]))).logits
    text = torch.cat([ids, text, torch.tensor([[3], [4]])], dim=1)
    with torch.no_grad():
        expected = model(text).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_single_branch_may_follow_an_inactive_node(models):
    target, (ids, _) = make_target(models["mamba2"], 60), prompts((6,))
    target.prefill(ids, None)
    tree = DraftTree(torch.tensor([[5, 0, 11]]), torch.tensor([[-1, -2, 0]]))
    logits = target.forward(tree).logits
    with torch.no_grad():
        expected = models["mamba2"](torch.cat([ids, torch.tensor([[5, 11]])], dim=1)).logits
    torch.testing.assert_close(logits[:, [0, 2]], expected[:, -2:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("branches", [1, 2])
def test_unread_tokens_are_bounded(models, branches):
    """Each wrong draft leaves one more token unread, until a step has no drafts."""
    target = make_target(models["mamba2"], 200)
    ids, _ = prompts((6, 6))
    target.prefill(ids, None)
    widths, rests = [], 0
    for _ in range(60):
        room = min(target.draft_room)
        rests += room == 0
        drafts = [[[5 + branch] * min(room, 4) for branch in range(branches)]] * 2
        tree = DraftTree.from_paths(torch.tensor([1, 2]), drafts)
        target.forward(tree)
        widths.append(target._replay.width)
        target.commit(torch.zeros_like(tree.tokens), torch.tensor([0, 0]))
    assert max(widths) == MAX_UNREAD + 4 and rests == 60 // (MAX_UNREAD + 1)


def test_plain_decoding_copies_no_state(models, monkeypatch):
    from specdec_ext.models.cache.states import States

    monkeypatch.setattr(States, "branch", lambda self, origins: pytest.fail("copied"))
    ids, mask = prompts(BATCHES["three-ragged"])
    kwargs = dict(attention_mask=mask, max_new_tokens=3, do_sample=False)
    specdec_ext.generate(models["mamba2"], ids, drafter=None, **kwargs)


def test_paddings_after_tokens_are_refused(models):
    ids, mask = prompts((5, 3), side="right")
    with pytest.raises(ValueError, match=r"padding after or between tokens.*pad on the left"):
        specdec_ext.generate(models["mamba2"], ids, attention_mask=mask, max_new_tokens=3)


def test_attentions_are_those_of_transformers(models):
    model = models["falcon_h1"]
    model.set_attn_implementation("eager")
    try:
        ids, mask = prompts(BATCHES["three-ragged"])
        kwargs = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
        kwargs |= dict(return_dict_in_generate=True, output_attentions=True)
        plain = model.generate(ids, **kwargs)
        drafter = ScriptedDrafter(generated(plain.sequences, 12), adversary_chain)
        ours = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
        for mine, their in zip(ours.attentions[1:], plain.attentions[1:], strict=True):
            for layer, expected in zip(mine, their, strict=True):
                torch.testing.assert_close(layer, expected)
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("gated", [True, False])
def test_scan_continues_from_a_state(gated):
    """A scan from the state of another scan gives the end of one long scan."""
    from transformers.models.mamba import modeling_mamba

    from specdec_ext.models.families import scans

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

    x, dt, z = normal(2, 6, 9), normal(2, 6, 9), normal(2, 6, 9)
    A, B, C = -normal(6, 4).exp(), normal(2, 4, 9), normal(2, 4, 9)
    fixed = dict(delta_bias=normal(6), delta_softplus=True, return_last_state=True)
    scan = scans._with_initial_state(modeling_mamba.mamba_selective_scan)

    def run(part: slice, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        token = scans._initial.set(None if state is None else iter([state]))
        gate = z[..., part] if gated else None
        try:
            x_, dt_, B_, C_ = (each[..., part] for each in (x, dt, B, C))
            return scan(x_, dt_, A, B_, C_, D=A[:, 0], z=gate, **fixed)
        finally:
            scans._initial.reset(token)

    whole, end = run(slice(0, 9))
    first, middle = run(slice(0, 5))
    second, last = run(slice(5, 9), middle)
    torch.testing.assert_close(torch.cat([first, second], dim=-1), whole)
    torch.testing.assert_close(last, end)


def test_filled_cache_of_states_alone_is_refused(models):
    """It does not tell how many tokens it has read. An empty one is filled."""
    from transformers import DynamicCache

    model, (ids, _) = models["mamba2"], prompts((6,))
    cache = DynamicCache(config=model.config)
    kwargs = dict(max_new_tokens=5, do_sample=False, cache_params=cache)
    out = specdec_ext.generate(model, ids, drafter="ngram", return_dict_in_generate=True, **kwargs)
    assert out.past_key_values is cache and cache.has_previous_state()
    message = f"Mamba2ForCausalLM holds recurrent states only.*without {CACHE}"
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(model, out.sequences, drafter="ngram", **kwargs)
