"""Recorded passes: the text and the bits of other passes, at addresses that stay the same.

On the CPU nothing is recorded, but the passes have the shapes and the buffers of a recording.
"""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch
from baselines.random_targets import TINY, random_prompts, tiny_target
from generation.cuda_like import DEVICE, CudaLike, FakeGraph, cuda_like, reporting, to_device
from generation.trace import FROM_HOST, LAUNCH, TO_HOST, Trace, differences
from helpers.checks.lossless import generate, plain_text
from helpers.drafters.every_drafter import DRAFTERS
from helpers.models import zoo
from helpers.models.tiny import prompts, tiny_model

import specdec_ext
from specdec_ext.models.factory import make_target
from specdec_ext.models.graphs import runner
from specdec_ext.models.graphs.arena import lender_of
from specdec_ext.models.graphs.graph import NotRecordableError
from specdec_ext.models.graphs.recorded import RecordedPass
from specdec_ext.models.slots import target as target_module
from specdec_ext.tree.draft_tree import DraftTree

pytestmark = pytest.mark.usefixtures("fresh_arena")


def arena():
    return lender_of(tiny_model("llama")).arena


def ngram(batch="five-ragged", graphs=True, **kwargs):
    kwargs = {"speculation": "fixed", "graphs": graphs, **kwargs}
    return generate(DRAFTERS["ngram"](), batch, "greedy", **kwargs)


@pytest.mark.usefixtures("by_modules")
@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", ["one", "five-ragged"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_and_bits_are_those_of_other_passes(name, batch, decoding):
    kwargs = dict(output_logits=True, speculation="fixed")
    expected, ours = (
        generate(DRAFTERS[name](), batch, decoding, graphs=graphs, **kwargs)
        for graphs in (False, True)
    )
    assert arena().passes
    assert torch.equal(ours.sequences, expected.sequences)
    for mine, other in zip(ours.logits, expected.logits, strict=True):
        assert torch.equal(mine, other)
    layers = zip(ours.past_key_values.layers, expected.past_key_values.layers, strict=True)
    for mine, other in layers:
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


def test_shape_is_recorded_when_it_is_needed_for_the_third_time(monkeypatch):
    expected, calls = plain_text("one", "greedy"), []
    original = RecordedPass.__call__
    monkeypatch.setattr(RecordedPass, "__call__", lambda *args: calls.append(1) or original(*args))
    monkeypatch.setattr(target_module, "RECORDING_DEVICES", ("cpu",))
    output = ngram("one", "auto")
    assert torch.equal(output.sequences, expected)
    uses, passes = arena().uses, arena().passes
    shapes = [key for key in uses if len(key) == len(next(iter(passes)))]
    missed = sum(min(uses[key], runner.RECORDED_AT - 1) for key in shapes)
    rounds = output.speculation_stats.steps - missed
    assert sum(uses[key] >= runner.RECORDED_AT for key in shapes) == len(passes)
    assert len(passes) <= len(calls) <= rounds  # the others are parts of whole recordings


def test_calls_of_a_model_share_buffers_and_recordings():
    ngram()
    first, buffers = arena(), [key.data_ptr() for key in arena().keys]
    passes = dict(first.passes)
    ngram()
    ngram("one")  # fewer rows
    assert arena() is first and [key.data_ptr() for key in first.keys] == buffers
    assert all(first.passes[key] is each for key, each in passes.items())


def test_longer_or_wider_call_gets_a_larger_arena():
    ngram("one")
    small = arena()
    ngram("five-ragged")
    assert arena() is not small
    wide = arena()
    ids, _ = prompts((40,))
    model = tiny_model("llama")
    text = dict(max_new_tokens=8, do_sample=False)
    expected = model.generate(ids.repeat(1, 30), **text)
    given = specdec_ext.generate(model, ids.repeat(1, 30), drafter="ngram", graphs=True, **text)
    assert torch.equal(given, expected)
    assert arena() is not wide and arena().slots >= 1200


def test_call_may_outgrow_its_arena(monkeypatch):
    monkeypatch.setattr("specdec_ext.models.graphs.arena.SLOTS", 8)
    monkeypatch.setattr(runner, "SPARE_SLOTS", 0)
    assert torch.equal(ngram().sequences, plain_text("five-ragged", "greedy"))
    assert arena().slots <= 64


def test_returned_cache_is_not_changed_by_later_calls():
    cache = ngram().past_key_values
    before = [layer.keys.clone() for layer in cache.layers]
    ngram("one")
    for layer, kept in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, kept)
        layer.keys[:] = torch.nan
    assert torch.equal(ngram().sequences, plain_text("five-ragged", "greedy"))


def test_old_contents_of_the_arena_are_not_read():
    ngram()
    for buffer in (*arena().keys, *arena().values):
        buffer.fill_(torch.nan)
    assert torch.equal(ngram().sequences, plain_text("five-ragged", "greedy"))


def test_second_turn_continues_the_returned_cache():
    model, (ids, mask) = tiny_model("llama"), prompts((9, 5))
    kwargs = dict(do_sample=False, drafter="ngram", graphs=True, return_dict_in_generate=True)
    first = specdec_ext.generate(model, ids, attention_mask=mask, max_new_tokens=9, **kwargs)
    longer = torch.nn.functional.pad(mask, (0, 9), value=1)
    second = specdec_ext.generate(
        model,
        first.sequences,
        attention_mask=longer,
        past_key_values=first.past_key_values,
        max_new_tokens=9,
        **kwargs,
    )
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=18, do_sample=False)
    assert torch.equal(second.sequences, expected)


class Nested:
    """A streamer that generates with the same model at every token."""

    def __init__(self):
        self.texts = []

    def put(self, value):
        self.texts.append(ngram().sequences)

    def end(self):
        pass


def test_call_inside_of_a_call_uses_buffers_of_its_own():
    streamer = Nested()
    outer = ngram("one", streamer=streamer)
    assert torch.equal(outer.sequences, plain_text("one", "greedy"))
    for text in streamer.texts:
        assert torch.equal(text, plain_text("five-ragged", "greedy"))


def test_arena_is_free_after_an_error():
    class Broken(specdec_ext.NgramDrafter):
        def propose(self, context):
            if len(context.generated[0]) > 4:
                raise KeyboardInterrupt
            return super().propose(context)

    with pytest.raises(KeyboardInterrupt):
        generate(Broken(min_ngram=1), "one", "greedy", graphs=True, speculation="fixed")
    used = arena()
    assert torch.equal(ngram("one").sequences, plain_text("one", "greedy"))
    assert arena() is used


def test_changed_model_is_recorded_anew():
    model = tiny_model("llama")
    ngram()
    before = arena()
    weight = model.model.layers[0].mlp.up_proj.weight
    kept = weight.data
    weight.data = kept.clone()
    try:
        ngram()
        assert arena() is not before
    finally:
        weight.data = kept


def test_recording_with_other_logits_is_not_used(monkeypatch):
    """The first pass of each shape is compared with the same pass without a recording."""
    original = RecordedPass.__call__

    def wrong(self, *args):
        output = original(self, *args)
        output.logits.mul_(1.01)
        return output

    monkeypatch.setattr(RecordedPass, "__call__", wrong)
    monkeypatch.setattr(target_module, "RECORDING_DEVICES", ("cpu",))
    output = ngram(graphs="auto")
    assert torch.equal(output.sequences, plain_text("five-ragged", "greedy"))
    assert not arena().passes
    with pytest.raises(ValueError, match=r"its logits differ by 0\.01 \(relative\)"):
        ngram()


def test_pass_that_can_not_be_recorded_runs_without_a_recording(monkeypatch, caplog):
    def refuse(self, *args):
        raise NotRecordableError("it waits")

    monkeypatch.setattr(RecordedPass, "__call__", refuse)
    monkeypatch.setattr(target_module, "RECORDING_DEVICES", ("cpu",))
    with caplog.at_level("INFO", logger="specdec_ext"):
        output = ngram(graphs="auto")
    assert torch.equal(output.sequences, plain_text("five-ragged", "greedy"))
    assert caplog.messages == ["passes of LlamaForCausalLM are not recorded: it waits"]
    with pytest.raises(ValueError, match=r"can't be recorded: it waits\. Use graphs='auto'"):
        ngram()


@pytest.mark.parametrize(
    ("make", "kwargs", "message"),
    [
        ("qwen3_next", {}, "the model has recurrent states"),
        ("gemma2", {}, "its attention implementation is 'eager'"),
        ("llama", {"output_attentions": True}, "the call asks for output_attentions"),
        (
            "llama",
            {"graphs": "always"},
            "graphs='always' is not known; expected 'auto', True or False",
        ),
    ],
)
def test_required_recordings_that_are_impossible_are_refused(make, kwargs, message):
    model, (ids, _) = zoo.build(make), prompts((6,))
    kwargs = {"graphs": True, "return_dict_in_generate": True, **kwargs}
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(model, ids, drafter="ngram", max_new_tokens=4, **kwargs)


def test_hook_on_a_module_is_not_skipped():
    model, (ids, _) = tiny_model("llama"), prompts((6,))
    seen = []
    hook = model.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    try:
        with pytest.raises(
            ValueError, match="a module is in training mode, compiled, or has a hook"
        ):
            specdec_ext.generate(model, ids, graphs=True, max_new_tokens=4)
    finally:
        hook.remove()


# Parents of scored trees: plain decoding, and a tree with siblings and two levels.
TREES = ((-1,), (-1, 0, 0, 1, 1, 2))


def traces_of_rounds(model, rows: int, parents: tuple[int, ...], graphs: bool) -> list[Trace]:
    """The calls of the passes of two rounds, between which tokens are accepted; inside ``cuda_like``.

    With ``graphs`` these are the calls that a recording repeats.
    """
    (prompt,) = random_prompts(model.config.vocab_size, rows, 24, count=1)
    mask = torch.ones_like(prompt["input_ids"])
    for row, padding in enumerate((0, 3, 10)[:rows]):
        mask[row, :padding] = 0
    target = make_target(model, 128, graphs=graphs)
    target.record_hidden_states((0, 1, 2))
    target.prefill(CudaLike(prompt["input_ids"]), CudaLike(mask) if rows > 1 else None)
    traces = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(
            1, model.config.vocab_size, (rows, len(parents)), generator=generator
        )
        tree = DraftTree(tokens, torch.tensor(parents).expand(rows, -1).contiguous())
        on_device = tree.on(target.staging)
        trace = Trace()
        traces.append(trace)
        with (
            reporting(lambda call: None) if graphs else reporting(trace.add),
            mock.patch.object(FakeGraph, "inside", staticmethod(trace.add)),
        ):
            target.forward(on_device)
        branch = max(tree.branches[0], key=len)
        counts = [min(row, len(branch) - 1) for row in range(rows)]
        path = [branch + [-1] * (len(parents) - len(branch))] * rows
        accepted = (torch.tensor(each, device=DEVICE) for each in (path, counts))
        target.commit(*accepted, (path, counts))
    if graphs:
        target.runner.graphs.finish()
    return traces[1:]  # the first one records the pass


@pytest.mark.parametrize("name", TINY)
def test_rounds_make_the_same_calls_without_a_copy(name):
    """No number, address or shape of a recorded pass changes, so what a CUDA graph repeats is right. Other
    passes do not wait for the host, either."""
    with cuda_like():
        model = to_device(tiny_target(name))
        for rows, parents, graphs in product((1, 3), TREES, (True, False)):
            traces = traces_of_rounds(model, rows, parents, graphs)
            assert traces[0].count(LAUNCH) > 10
            assert traces[0].count(TO_HOST) == traces[0].count(FROM_HOST) == 0
            if graphs:
                assert not [str(each) for each in differences(*traces)]
