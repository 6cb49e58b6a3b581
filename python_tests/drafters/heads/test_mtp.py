"""``MtpDrafter``: transformers' own drafts at batch 1, and texts of batches with trees."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.drafters.mtp_cases import (
    CONFIGS,
    draft_head_of,
    mtp_model,
    mtp_model_of,
    mtp_target,
    needs_mtp,
)
from helpers.drafters.texts import (
    KEYWORDS,
    generate,
    mean_sampled_length,
    texts_of_the_target,
)
from helpers.models import zoo
from helpers.models.tiny import prompts, random_model, tiny_model
from helpers.texts.training_cases import greedy_examples
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, cache_utils

import specdec_ext
from specdec_ext import HeadDrafter, MtpDrafter, MtpHeads, TreeConfig, assets
from specdec_ext.drafters.heads import mtp as module
from specdec_ext.drafters.heads import unread
from specdec_ext.drafters.resolve import resolve_drafter
from specdec_ext.heads.checkpoints import load_draft
from specdec_ext.models.compat import MtpModel
from specdec_ext.training.data.regenerate import regenerate
from specdec_ext.training.recipe import HeadRecipe, train_head
from specdec_ext.training.trainer import TrainConfig

pytestmark = needs_mtp

MtpCache = getattr(cache_utils, "MtpCache", None)
TREES = {
    "chain of 1": TreeConfig(depth=1),
    "chain of 5": TreeConfig(depth=5),
    "first level": TreeConfig(choices=((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0))),
    "dynamic": TreeConfig(depth=4, top_k=3, num_nodes=9),
}
# Prompts of one token: a layer begins when all rows have two elements.
BATCHES = {"one": (9,), "ragged": (12, 7, 1), "short": (1,)}
# All pairs of a model, a batch and a tree.
PAIRS = [
    (("glm4_moe-1", "glm4_moe-3", "mellum-1")[(i + j) % 3], batch, tree)
    for i, tree in enumerate(TREES)
    for j, batch in enumerate(BATCHES)
]


def heads_of(name: str) -> MtpHeads:
    model = mtp_target(name)
    return MtpHeads(model, mtp_model(model))


class _Notes:
    """Notes the draft of each row by its length; drafts in every ``period``-th step only."""

    def __init__(self, *arguments, period=1, **options):
        super().__init__(*arguments, **options)
        self.drafts, self.period, self._steps = {}, period, 0

    def propose(self, context):
        self._steps += 1
        tree = specdec_ext.DraftTree.root(context.roots)
        if self._steps % self.period == 0:
            tree = super().propose(context)
        if tree.num_nodes > 1:
            for row, tokens in zip(context.rows, tree.tokens[:, 1:].tolist(), strict=True):
                self.drafts[row, context.columns(row)] = tokens
        return tree


class Noting(_Notes, MtpDrafter):
    pass


class NotingHead(_Notes, HeadDrafter):
    pass


def transformers_drafts(model, mtp, ids, monkeypatch, **kwargs):
    """The text with ``use_mtp=True``, and the draft of each step by the length of the text."""
    drafts, forward = {}, MtpModel.forward

    def noted(self, *args, full_input_ids, **kwargs):
        output = forward(self, *args, full_input_ids=full_input_ids, **kwargs)
        drafts[0, full_input_ids.shape[1]] = output[0][0].tolist()
        return output

    monkeypatch.setattr(MtpModel, "forward", noted)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: mtp)
    return model.generate(ids, **kwargs, use_mtp=True), drafts


def assert_equal_drafts_of_one_row(ours, theirs, text, depth):
    """Also that drafts are accepted whole, in part and not at all. Drafts near the end are cut here."""
    end = text.shape[1] - depth
    assert {place: theirs[place] for place in theirs if place[1] < end} == {
        place: ours[place] for place in ours if place[1] < end
    }
    tokens = text[0].tolist()
    kept = [
        sum(draft[:n] == tokens[length : length + n] for n in range(1, depth + 1))
        for (_, length), draft in ours.items()
    ]
    assert set(kept) == set(range(depth + 1))


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_those_of_transformers(name, monkeypatch):
    """The text, and each draft, so the acceptance, too."""
    model, mtp = mtp_target(name), mtp_model(mtp_target(name))
    ids, _ = prompts((9,))
    kwargs = dict(max_new_tokens=120, do_sample=False)
    plain = model.generate(ids, **kwargs)
    with_mtp, theirs = transformers_drafts(model, mtp, ids, monkeypatch, **kwargs)
    depth = len(mtp.layers)
    drafter = Noting(MtpHeads(model, mtp), TreeConfig(depth=depth))
    ours = generate(model, ids, drafter=drafter, speculation="fixed", **kwargs).sequences
    assert torch.equal(ours, plain) and torch.equal(ours, with_mtp)
    assert_equal_drafts_of_one_row(drafter.drafts, theirs, ours, depth)


@pytest.mark.parametrize("of", ["tiny", pytest.param("bundled", marks=pytest.mark.slow)])
def test_a_trained_head_drafts_what_transformers_drafts_with_it(of, tmp_path, monkeypatch):
    """``train_head`` with kind "mtp", saved and read again; transformers runs its layer as a module."""
    settings = dict(updates=60, learning_rate=3e-2, optimizer="adamw")
    if of == "tiny":
        model, texts = tiny_model("llama"), greedy_examples(4, prompt=6, length=40)
        beginnings = [texts[0].tokens[:6]]
    else:
        model, tokenizer, settings = assets.load_target(), assets.load_tokenizer(), {"updates": 40}
        held_out = [each["prompt"] for each in assets.held_out_prompts()]
        beginnings = [torch.tensor(tokenizer(text)["input_ids"]) for text in held_out]
        texts = regenerate(
            model, beginnings[3:], tmp_path / "texts", max_new_tokens=64, max_length=512
        )
        beginnings = beginnings[:3]
    config = TrainConfig(batch_size=4, mixed_precision=False, **settings)
    train_head(model, texts, [], tmp_path / "head", HeadRecipe(kind="mtp", steps=2), config)
    head = load_draft(tmp_path / "head", dtype=torch.float32)
    monkeypatch.setattr(model.config, "num_mtp_layers", 1, raising=False)
    kwargs, mtp = dict(max_new_tokens=60, do_sample=False), mtp_model_of(model, head)
    for ids in (each[None] for each in beginnings):
        with_mtp, theirs = transformers_drafts(model, mtp, ids, monkeypatch, **kwargs)
        drafter = NotingHead(head, TreeConfig(depth=1), weights="same")
        ours = generate(model, ids, drafter=drafter, speculation="fixed", **kwargs).sequences
        assert torch.equal(ours, with_mtp)
        assert_equal_drafts_of_one_row(drafter.drafts, theirs, ours, 1)


def chain(mtp, text, states, depth):
    """The definition of a draft: every level is computed anew, from the whole text.

    Args:
        text: ``[1, n]``.
        states: ``[1, n - 1, hidden]``, the target's last hidden states.
    """
    tokens, drafts, output = text[:, 1:], [], states
    for level in range(depth):
        if 0 < level < len(mtp.layers):
            tokens, states = torch.cat([tokens[:, 1:], drafts[-1]], dim=1), output
        elif level:
            tokens = torch.cat([tokens, drafts[-1]], dim=1)
            states = torch.cat([states, output[:, -1:]], dim=1)
        layer, positions = min(level, len(mtp.layers) - 1), torch.arange(tokens.shape[1])[None]
        cache = MtpCache(config=mtp.config)
        output = mtp.forward_layer(layer, states, positions, cache, input_ids=tokens)
        drafts.append(mtp._project_to_logits(output[:, -1:]).argmax(dim=-1))
    return torch.cat(drafts, dim=1)[0].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_last_layer_drafts_further_levels(name):
    model, mtp = mtp_target(name), mtp_model(mtp_target(name))
    ids, mask = prompts((9, 5))
    drafter = Noting(MtpHeads(model, mtp), TreeConfig(depth=5))
    texts = generate(model, ids, mask, drafter=drafter, speculation="fixed").sequences
    with torch.no_grad():
        for (row, length), draft in drafter.drafts.items():
            text = texts[row, mask.argmax(dim=1)[row] : length][None]
            states = model.get_decoder()(text[:, :-1]).last_hidden_state
            assert draft == chain(mtp, text, states, 5)[: len(draft)]


@pytest.mark.parametrize(("name", "batch", "tree"), PAIRS)
def test_texts_are_those_of_the_target(name, batch, tree):
    model = mtp_target(name)
    ids, mask = prompts(BATCHES[batch])
    drafter = MtpDrafter(heads_of(name), TREES[tree])
    assert len(list(texts_of_the_target(model, ids, mask, drafter))) == len(KEYWORDS)


@pytest.mark.parametrize("name", ["glm4_moe-1", "glm4_moe-3", "deepseek_v3-2", "mellum-1"])
@pytest.mark.parametrize("batch", ["one", "ragged"])
def test_drafts_do_not_depend_on_when_the_text_is_read(name, batch, monkeypatch):
    """Seldom, in blocks, by a drafter whose unread text is full; beside rows that have ended."""
    model, (ids, mask) = mtp_target(name), prompts(BATCHES[batch])
    tree = TreeConfig(depth=4, top_k=2, num_nodes=7)

    def drafts(period, **limits):
        for limit, value in limits.items():
            monkeypatch.setattr(module if limit == "BLOCK" else unread, limit, value)
        drafter = Noting(heads_of(name), tree, period=period)
        ends = dict(eos_token_id=0) if len(ids) > 1 else dict(max_new_tokens=60)
        generate(model, ids, mask, drafter=drafter, speculation="fixed", **ends)
        return drafter.drafts

    always = drafts(1)
    for drafted in (drafts(4, BLOCK=2), drafts(5, MERGED_NODES=2, MAX_PENDING=3)):
        common = [place for place in drafted if place in always]
        assert len(common) >= 3
        assert [drafted[place] for place in common] == [always[place] for place in common]


@pytest.mark.parametrize("speculation", ["fixed", "auto"])
def test_rows_may_end_before_the_first_draft_and_after_it(speculation):
    model, (ids, mask) = mtp_target("deepseek_v3-2"), prompts((9, 7, 8, 6, 5))
    free = generate(model, ids, mask, drafter=None).sequences[:, ids.shape[1] :]
    end = int(free[0, 0])
    first = [row.tolist().index(end) for row in free if end in row.tolist()]
    assert 0 in first and len(set(first)) > 2
    plain, drafted = (
        generate(model, ids, mask, drafter=drafter, speculation=speculation, eos_token_id=end)
        for drafter in (None, heads_of("deepseek_v3-2"))
    )
    assert torch.equal(plain.sequences, drafted.sequences)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_drafts_of_the_op_are_those_of_the_module(kind, tree):
    """The same layer in ``draft_head``, with tokens that are accepted and rejected."""
    model = random_model(kind, 1)
    model.lm_head.weight.data[5:] *= 0.01  # not 0: equal logits have no order
    mtp, (ids, mask) = mtp_model(model, 1), prompts((12, 7, 4))
    drafters = (
        Noting(MtpHeads(model, mtp), TREES[tree]),
        NotingHead(draft_head_of(model, mtp), TREES[tree], weights="same"),
    )
    for drafter in drafters:
        stats = generate(model, ids, mask, drafter=drafter, speculation="fixed").speculation_stats
        assert 0 < sum(stats.accepted_per_position) < sum(stats.proposed_per_position)
    assert drafters[0].drafts == drafters[1].drafts


def test_coupled_drafts_are_accepted_more_often():
    model, (ids, _) = mtp_target("glm4_moe-1"), prompts((9,))

    def mean_length(temperature):
        drafter = MtpDrafter(heads_of("glm4_moe-1"), TreeConfig(depth=3), temperature)
        return mean_sampled_length(model, ids, drafter, 2.0)

    assert mean_length(1.0) > mean_length(0.0) + 1


def test_calls_in_several_threads_share_the_heads():
    model, heads = mtp_target("glm4_moe-1"), heads_of("glm4_moe-1")
    batches = [prompts((length,), seed=length)[0] for length in range(3, 11)]

    def text(ids):
        drafter = MtpDrafter(heads, TreeConfig(depth=3))
        return generate(model, ids, drafter=drafter, speculation="fixed").sequences

    expected = [text(ids) for ids in batches]
    with ThreadPoolExecutor(4) as threads:
        for mine, alone in zip(threads.map(text, batches), expected, strict=True):
            assert torch.equal(mine, alone)


def test_half_precision():
    model = tiny_model("llama", dtype=torch.bfloat16)
    heads = MtpHeads(model, mtp_model(model, 1))
    ids, mask = prompts((9, 4))
    plain = generate(model, ids, mask, drafter=None).sequences
    assert torch.equal(generate(model, ids, mask, drafter=heads).sequences, plain)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a Mellum checkpoint with its MTP layer."""
    folder, model = tmp_path_factory.mktemp("mellum"), mtp_target("mellum-1")
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    layers = {
        f"mtp.{name}": tensor
        for name, tensor in mtp_model(model).state_dict().items()
        if name.startswith("layers.")
    }
    save_file({**load_file(path), **layers}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("drafter", ["mtp", "auto", "use_mtp"])
def test_heads_of_a_checkpoint_draft(checkpoint, drafter):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids, mask = prompts((9, 4))
    kwargs = dict(use_mtp=True) if drafter == "use_mtp" else dict(drafter=drafter)
    out = generate(model, ids, mask, speculation="fixed", **kwargs)
    assert out.speculation_stats.drafter == (
        "CombinedDrafter" if drafter == "auto" else "MtpDrafter"
    )
    assert torch.equal(out.sequences, generate(model, ids, mask, drafter=None).sequences)
    again = resolve_drafter("mtp", model)
    assert again.heads is resolve_drafter("mtp", model).heads


def test_auto_is_lookup_if_the_checkpoint_lacks_the_layers(tmp_path, monkeypatch, caplog):
    mtp_target("mellum-1").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    reads, read = [], MtpModel.from_pretrained.__func__
    monkeypatch.setattr(
        MtpModel,
        "from_pretrained",
        classmethod(lambda *given, **k: reads.append(1) or read(*given, **k)),
    )
    with caplog.at_level(logging.INFO, "specdec_ext"):
        assert isinstance(resolve_drafter("auto", model), specdec_ext.NgramDrafter)
        resolve_drafter("auto", model)
    assert len(reads) == 1 and "MtpModel weights are missing" in caplog.text
    with pytest.raises(RuntimeError, match="weights are missing"):
        resolve_drafter("mtp", model)


def test_targets_without_mtp_layers_are_refused():
    with pytest.raises(
        ValueError, match=r"the config of this LlamaForCausalLM names no MTP layers"
    ):
        resolve_drafter("mtp", tiny_model("llama"))
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        resolve_drafter("mtp", mtp_target("glm4_moe-1"))


def test_layers_with_recurrent_states_are_refused():
    model = zoo.build("inkling_text")
    model.config.num_mtp_layers = 1
    with pytest.raises(ValueError, match=r"InklingForCausalLM can't draft, .* recurrent states"):
        MtpHeads(model, MtpModel(model, 1))


def test_heads_of_another_target_are_refused():
    drafter = MtpDrafter(heads_of("glm4_moe-1"))
    with pytest.raises(ValueError, match="of another target than this LlamaForCausalLM"):
        generate(tiny_model("llama"), prompts((4,))[0], drafter=drafter)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="heads is a int; expected MtpHeads"):
        MtpDrafter(3)
    with pytest.raises(ValueError, match="temperature is relative"):
        MtpDrafter(temperature=-1)


@pytest.mark.parametrize("kwargs", [dict(drafter="ngram"), dict(prompt_lookup_num_tokens=3)])
def test_two_requests_for_drafts_are_refused(kwargs):
    with pytest.raises(
        ValueError, match=r"use_mtp=True requests drafts by .* and .* requests others"
    ):
        generate(mtp_target("mellum-1"), prompts((4,))[0], use_mtp=True, **kwargs)
