"""Training runs: they learn, resume with the same curve, and have the same curve with several processes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate.tracking import GeneralTracker
from helpers.drafters.checkpoint_cases import assert_same_head
from helpers.models import zoo
from helpers.models.tiny import VOCAB, tiny_model
from helpers.places import TESTS
from helpers.texts.training_cases import example, greedy_examples, random_examples

import specdec_ext
from specdec_ext import assets
from specdec_ext.heads.checkpoints import check_pair
from specdec_ext.training import trainer
from specdec_ext.training.data.batches import Example, OnlineFeatures
from specdec_ext.training.data.mixture import mixed
from specdec_ext.training.evaluation import HeldOut, _walk, evaluate, sampled_texts
from specdec_ext.training.objectives.eagle import EagleObjective
from specdec_ext.training.objectives.medusa_heads import MedusaObjective
from specdec_ext.training.objectives.objective import Step, rows_of
from specdec_ext.training.objectives.teacher import Teacher
from specdec_ext.training.optimizers import Float32Products, make_optimizers, scale
from specdec_ext.training.order import epoch_batches
from specdec_ext.training.report import write_report
from specdec_ext.training.start import default_layers, new_head, new_medusa_heads
from specdec_ext.training.trainer import TrainConfig, read_history, read_start, train
from specdec_ext.tree.config import TreeConfig

LAYERS = (1, 2, 3)
QUICK = TrainConfig(updates=6, batch_size=2, save_every=2, warmup=2, depth=2)


def objective_of(kind: str):
    model = tiny_model("llama")
    if kind == "medusa":
        return MedusaObjective(new_medusa_heads(model, 3, torch.arange(2, VOCAB)))
    if kind in ("eagle1", "mtp"):
        head = new_head(model, kind=kind)
    else:
        options = {"mask_token_id": 1, "num_layers": 2} if kind == "p-eagle" else {}
        if kind == "eagle3":
            options = {"intermediate_size": 3 * model.config.intermediate_size}
        head = new_head(model, LAYERS, torch.arange(2, VOCAB), **options)
    shared = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return EagleObjective(head, *shared, steps=3)


def layers_of(kind: str) -> tuple[int, ...]:
    return (-1,) if kind in ("medusa", "eagle1", "mtp") else LAYERS


def run(folder: Path, config: TrainConfig, examples, held_out=(), kind="eagle3", on_step=None):
    model, objective = tiny_model("llama"), objective_of(kind)
    on_step = on_step or (lambda progress: None)
    layers = layers_of(kind)
    features = OnlineFeatures(model, layers)
    train(objective, features, Teacher(model), examples, HeldOut(held_out), folder, config, on_step)
    return objective


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mtp", "p-eagle", "medusa"])
def test_trained_head_is_accepted_as_often_as_estimated(kind, tmp_path):
    """The head learns a few greedy texts. The estimated acceptance is that of generation, whose text is
    unchanged."""
    model = tiny_model("llama")
    texts = greedy_examples(4, prompt=6, length=40)
    settings = dict(updates=90, batch_size=4, learning_rate=3e-2, optimizer="adamw", warmup=5)
    config = TrainConfig(**settings, evaluate_every=90, depth=3, mixed_precision=False)
    untrained = objective_of(kind)
    features = OnlineFeatures(model, layers_of(kind))
    masked = [
        dataclasses.replace(each, loss_mask=torch.arange(len(each.tokens)) >= 8) for each in texts
    ]
    before = evaluate(untrained, features, Teacher(model), masked, 3)
    objective = run(tmp_path, config, texts, masked, kind)
    history = read_history(tmp_path)
    assert history[-1].losses[-1] < history[0].losses[-1] - 2
    found = history[-1].evaluation
    assert before.acceptance_length < 1.5 < 2.5 < found.acceptance_length
    draft = objective.trained()
    tree = TreeConfig(depth=3)
    make = specdec_ext.MedusaDrafter if kind == "medusa" else specdec_ext.HeadDrafter
    accepted, drafts = 0, 0
    for text in texts:
        ids = text.tokens[None, :6]
        # The end of the text cuts the last draft, which the estimate excludes.
        output = specdec_ext.generate(
            model, ids, drafter=make(draft, tree), max_new_tokens=34, return_dict_in_generate=True
        )
        assert output.sequences[0].tolist() == text.tokens.tolist()
        accepted += output.speculation_stats.accepted_tokens
        drafts += output.speculation_stats.drafts
    assert 1 + accepted / drafts == pytest.approx(found.acceptance_length, rel=0.15)


@pytest.mark.slow
def test_sampled_drafts_are_accepted_as_often_as_estimated(tmp_path):
    """With the bundled pair at temperature 1; over six seeds, both means are 2.07."""
    model, head = assets.load_target(), assets.load_head().to("cpu", torch.float32)
    texts = [
        Example(ids, torch.ones(len(ids), dtype=torch.bool))
        for ids in (
            torch.tensor(assets.load_tokenizer()(each["prompt"])["input_ids"])
            for each in assets.held_out_prompts()
        )
    ]
    drawn = sampled_texts(model, texts, tmp_path / "sampled.jsonl")
    features = OnlineFeatures(model, head.config.feature_layers)
    embedding, rows = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    objective = EagleObjective(head, embedding, rows, steps=4)
    found = evaluate(objective, features, Teacher(model), texts, depth=4, sampled=drawn)
    drafter = specdec_ext.HeadDrafter(head, TreeConfig(depth=4))
    accepted = drafts = 0
    for seed, text in enumerate(drawn):
        start = int(text.loss_mask.int().argmax())
        kwargs = dict(max_new_tokens=128, do_sample=True, top_k=0, seed=seed)
        kwargs |= dict(speculation="fixed", return_dict_in_generate=True)
        ids = text.tokens[None, :start]
        output = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
        accepted += output.speculation_stats.accepted_tokens
        drafts += output.speculation_stats.drafts
    measured = 1 + accepted / drafts
    assert found.sampled_acceptance_length == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_the_target_itself_would_draft_every_drawn_token(kind, tmp_path, monkeypatch):
    """If the head's logits are the target's, coupled drafts equal the drawn text; best tokens do not."""
    model, objective = tiny_model("llama"), objective_of(kind)
    features, teacher = OnlineFeatures(model, layers_of(kind)), Teacher(model)
    greedy = greedy_examples(4, prompt=6, length=30)
    drawn = sampled_texts(model, greedy, tmp_path / "sampled.jsonl", seed=3)
    assert [each.tokens[:7].tolist() for each in drawn] == [
        each.tokens[:7].tolist() for each in greedy
    ]
    assert all(each.loss_mask.tolist() == [False] * 7 + [True] * 15 for each in drawn)
    batch, lm_head = features(drawn), model.get_output_embeddings().weight

    def unroll(batch, steps, elements):
        for step in range(steps):
            columns = (1 + step + elements).clamp(max=batch.tokens.shape[1] - 1)
            yield Step(rows_of(batch.last_hidden, columns), lm_head)

    monkeypatch.setattr(objective, "unroll", unroll)
    monkeypatch.setattr(objective, "draft_to_target", None)
    found = objective.agreement(batch, teacher, 2, torch.Generator().manual_seed(0))
    assert len(found.accepted) == 4 * 14 and found.accepted.all()
    rows, at = found.places // batch.tokens.shape[1], found.places % batch.tokens.shape[1]
    best = teacher.logits(batch.last_hidden[rows, at + 1]).argmax(dim=-1)
    assert not torch.equal(best, batch.tokens[rows, at + 2])


def test_without_drawn_texts_there_is_no_estimate_of_sampling():
    model, objective = tiny_model("llama"), objective_of("eagle3")
    features, teacher = OnlineFeatures(model, LAYERS), Teacher(model)
    alone = evaluate(objective, features, teacher, greedy_examples(4, prompt=6, length=30), 2)
    assert alone.sampled == () and math.isnan(alone.sampled_acceptance_length)


def test_old_texts_are_evaluated_beside_the_new_ones(tmp_path):
    """Before the first step and during the run."""
    model, objective = tiny_model("llama"), objective_of("eagle3")
    features, teacher = OnlineFeatures(model, LAYERS), Teacher(model)
    held_out = HeldOut(greedy_examples(2, 6, 20), (), greedy_examples(2, 6, 20, seed=1))
    started = []
    config = dataclasses.replace(QUICK, evaluate_every=3, mixed_precision=False)
    train(
        objective,
        features,
        teacher,
        random_examples(10, 12),
        held_out,
        tmp_path,
        config,
        on_start=lambda new, old: started.append((new, old)),
    )
    untrained = objective_of("eagle3")
    assert started == [
        tuple(evaluate(untrained, features, teacher, t, 2) for t in (held_out.texts, held_out.old))
    ]
    history = read_history(tmp_path)
    assert [p.step for p in history if p.old_evaluation is not None] == [3, 6]
    assert history[-1].old_evaluation == evaluate(objective, features, teacher, held_out.old, 2)
    assert history[-1].evaluation == evaluate(objective, features, teacher, held_out.texts, 2)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("is_fast", [True, False])
def test_matrix_products_are_in_bfloat16_only_where_that_is_fast(
    asked, is_fast, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer, "has_fast_bfloat16", lambda device: is_fast)
    found = []
    forward = EagleObjective.forward

    def recorded(self, *arguments):
        found.append(torch.is_autocast_enabled("cpu"))
        return forward(self, *arguments)

    monkeypatch.setattr(EagleObjective, "forward", recorded)
    multiplied = []

    class Recorded(Float32Products):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.addmm.default:
                multiplied.append(args[0].dtype)
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(trainer, "Float32Products", Recorded)
    config = dataclasses.replace(QUICK, updates=2, mixed_precision=asked)
    run(tmp_path, config, random_examples(4, 12))
    assert found == [asked and is_fast] * 2
    # The products of Muon.
    assert set(multiplied) == (set() if is_fast else {torch.bfloat16})


def test_slow_products_of_bfloat16_are_computed_in_float32():
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 40, 40).bfloat16()
    with Float32Products():
        product, sum_of_both = a @ b, torch.addmm(c, a, b.mT, beta=0.5, alpha=2)
        wide = a.float() @ b.float()
    assert torch.equal(product, (a.float() @ b.float()).bfloat16())
    assert torch.equal(sum_of_both, (0.5 * c.float() + 2 * (a.float() @ b.mT.float())).bfloat16())
    assert wide.dtype == torch.float32


def test_muon_has_the_same_steps_with_products_in_float32():
    """Up to the rounding of its products to bfloat16."""
    torch.manual_seed(0)
    start, gradient = torch.randn(24, 40), torch.randn(24, 40)
    found = []
    for products in (nullcontext(), Float32Products()):
        layer = torch.nn.Linear(40, 24)
        layer.weight.data.copy_(start)
        layer.weight.grad = gradient.clone()
        with products:
            for optimizer in make_optimizers(layer, "muon", 0.1):
                optimizer.step()
        found.append(layer.weight.detach() - start)
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=1e-3)


def test_walk_continues_behind_accepted_drafts():
    #        text of six places            another text
    places = [3, 4, 5, 6, 7, 8, 20, 21, 22]
    accepted = [2, 0, 3, 0, 1, 0, 0, 5, 0]
    assert _walk(places, accepted) == [0, 3, 4, 6, 7]


class Stopped(Exception):
    pass


def test_resumed_run_has_the_same_curve_and_bits(tmp_path):
    examples, held_out = random_examples(10, 12), random_examples(2, 12, seed=1)
    through = run(tmp_path / "through", QUICK, examples, held_out)

    def stop(progress):
        if progress.step == 5:  # one step behind the last state
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path / "stopped", QUICK, examples, held_out, on_step=stop)
    with (tmp_path / "stopped" / "history.jsonl").open("a") as file:
        file.write('{"step": 6, "los')  # killed while it wrote
    assert len(read_history(tmp_path / "stopped")) == 5
    resumed = run(tmp_path / "stopped", QUICK, examples, held_out)
    assert_same_head(resumed.trained(), through.trained())
    curves = [read_history(tmp_path / name) for name in ("through", "stopped")]
    for one, other in zip(*curves, strict=True):
        assert dataclasses.replace(one, seconds=0) == dataclasses.replace(other, seconds=0)
    assert [progress.step for progress in curves[0]] == [1, 2, 3, 4, 5, 6]
    assert curves[0][-1].evaluation is not None


def test_run_with_other_settings_is_not_resumed(tmp_path):
    examples = random_examples(10, 12)
    run(tmp_path, dataclasses.replace(QUICK, updates=2), examples)
    with pytest.raises(ValueError, match=r"state.pt is the state of a run with different data"):
        run(tmp_path, dataclasses.replace(QUICK, updates=2), random_examples(10, 12, seed=1))
    with pytest.raises(ValueError, match=r"state.pt is the state of a run with different head"):
        run(tmp_path, dataclasses.replace(QUICK, updates=2), examples, kind="p-eagle")
    with pytest.raises(
        ValueError, match=r"state.pt is the state of a run with different learning_rate"
    ):
        run(tmp_path, dataclasses.replace(QUICK, updates=2, learning_rate=1.0), examples)


def test_infinite_loss_stops_the_run_and_keeps_the_last_state(tmp_path):
    def spoil(progress):
        if progress.step == 3:
            with torch.no_grad():
                next(objective.parameters()).fill_(torch.nan)

    model, objective = tiny_model("llama"), objective_of("eagle3")
    features, teacher = OnlineFeatures(model, LAYERS), Teacher(model)
    examples = random_examples(10, 12)
    with pytest.raises(ArithmeticError, match=r"losses of step 4 are \[nan"):
        train(objective, features, teacher, examples, HeldOut(), tmp_path, QUICK, spoil)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 2
    assert all(bool(each.isfinite().all()) for each in state["weights"].values())


def test_held_out_texts_too_short_for_a_draft_are_skipped(tmp_path):
    model, objective = tiny_model("llama"), objective_of("eagle3")
    features, teacher = OnlineFeatures(model, LAYERS), Teacher(model)
    texts = random_examples(2, 12)
    short = [example([1] * length) for length in (2, 3, 5, 6)]
    found = evaluate(objective, features, teacher, [*short, *texts], depth=5)
    assert found == evaluate(objective, features, teacher, texts, depth=5)
    for hopeless in (short, [], [example([1] * 12, [0] * 12)]):
        with pytest.raises(ValueError, match=r"no 6 consecutive tokens in the loss mask"):
            evaluate(objective, features, teacher, hopeless, depth=5)


def test_too_few_examples_are_refused_before_a_file_is_written(tmp_path):
    folder = tmp_path / "run"
    short = [example([1, 2, 3, 4])] * 5 + random_examples(1, 12)
    with pytest.raises(ValueError, match=r"1 of 6 examples .* expected at least 2, one batch"):
        run(folder, QUICK, short)
    assert not folder.exists()


@pytest.mark.parametrize(
    "field",
    ["updates", "batch_size", "learning_rate", "clip", "save_every", "evaluate_every", "depth"],
)
def test_impossible_settings_are_refused(field):
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"{field} is {value}; expected more than 0"):
            dataclasses.replace(QUICK, **{field: value})
    with pytest.raises(ValueError, match=r"optimizer='sgd'; expected 'muon' or 'adamw'"):
        dataclasses.replace(QUICK, optimizer="sgd")


ON_TWO = """
import multiprocessing, os, sys
from pathlib import Path
sys.path[:0] = {folders!r}
import accelerate, torch
torch.set_num_threads(1)
from test_training import QUICK, dataclasses, random_examples, run

def work(rank):
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    config = dataclasses.replace(QUICK, batch_size=2, updates=4, mixed_precision=False)
    run(Path({folder!r}), config, random_examples(12, 14))

forked = multiprocessing.get_context("fork")  # the children need not import torch again
processes = [forked.Process(target=work, args=(rank,)) for rank in "01"]
for each in processes:
    each.start()
for each in processes:
    each.join()
sys.exit(any(each.exitcode for each in processes))
"""


def test_two_processes_have_the_curve_of_one_with_double_batches(tmp_path):
    """Texts have different lengths and masks, so the two gloo processes have different shares of the loss."""
    folders = [str(TESTS), str(Path(__file__).parent)]
    script = ON_TWO.format(folders=folders, folder=str(tmp_path / "two"))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # As set by a launcher.
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env={**os.environ, **shared}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    config = dataclasses.replace(QUICK, batch_size=4, updates=4, mixed_precision=False)
    run(tmp_path / "one", config, random_examples(12, 14))
    one, two = (read_history(tmp_path / name) for name in ("one", "two"))
    assert [progress.tokens for progress in one] == [progress.tokens for progress in two]
    for alone, together in zip(one, two, strict=True):
        assert together.losses == pytest.approx(alone.losses, rel=1e-4)
        assert together.gradient_norm == pytest.approx(alone.gradient_norm, rel=1e-3)


def test_epoch_has_every_example_once_in_batches_of_similar_length():
    lengths = [5 + index * 7 % 23 for index in range(40)]
    batches = epoch_batches(lengths, 4, seed=0, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(40))
    assert batches != epoch_batches(lengths, 4, seed=0, epoch=1)
    assert batches == epoch_batches(lengths, 4, seed=0, epoch=0)
    assert max(max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches) <= 6
    assert len(epoch_batches(lengths[:39], 4, seed=0, epoch=0)) == 9


def test_learning_rate_rises_stays_and_falls():
    factors = [scale(step, total=100, warmup=10, decay=0.5) for step in range(100)]
    assert factors[0] == 0.1 and factors[9] == factors[49] == 1
    assert factors[75] == 0.5 and factors[99] == 0.02
    assert factors[50:] == sorted(factors[50:], reverse=True)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "mpt", "falcon", "gemma3_text"])
def test_new_head_fits_targets_with_other_config_names(name):
    model = tiny_model(name) if name == "gpt2" else zoo.build(name)
    head = new_head(model, (1, 2))
    assert check_pair(head, model) == []


def test_default_layers_of_shallow_targets_are_spread():
    assert default_layers(32) == (2, 16, 29)
    assert default_layers(6) == (1, 3, 6)
    assert default_layers(1) == (1,)


def test_report_has_curves_and_escapes_names(tmp_path):
    run(tmp_path, QUICK, random_examples(10, 12), random_examples(2, 12, seed=1))
    history, page = read_history(tmp_path), tmp_path / "report.html"
    start = read_start(tmp_path)
    write_report(page, "<b>", history, start, {"steps": 3, "layers": None}, "a machine")
    text = page.read_text()
    assert "<b>" not in text and "&lt;b&gt;" in text and "a machine" in text
    assert "layers" not in text and text.count("<svg") == 1
    for evaluation in (start[0], history[-1].evaluation):
        assert f"{evaluation.acceptance_length:.2f}" in text
    assert start[1] is None and text.count(">0</td>") == 1
    bare = [dataclasses.replace(history[0], evaluation=None)]
    write_report(page, "bare", bare, (None, None), {}, "")
    assert "Estimates" not in page.read_text()
    with pytest.raises(ValueError, match="history is empty"):
        write_report(page, "empty", [], (None, None), {}, "")


def test_trackers_get_every_step(tmp_path):
    class Noting(GeneralTracker):
        name, requires_logging_directory = "noting", False

        def __init__(self):
            super().__init__()
            self.config, self.logged, self.finished = {}, [], False

        @property
        def tracker(self):
            return self

        def store_init_configuration(self, values):
            self.config = values

        def log(self, values, step=None, **_):
            self.logged.append((step, values))

        def finish(self):
            self.finished = True

    noting, model, objective = Noting(), tiny_model("llama"), objective_of("eagle3")
    held_out = HeldOut(random_examples(2, 12, seed=1))
    arguments = (
        OnlineFeatures(model, LAYERS),
        Teacher(model),
        random_examples(10, 12),
        held_out,
        tmp_path,
    )
    train(objective, *arguments, QUICK, trackers=[noting])
    assert noting.finished and noting.config["updates"] == 6
    history = read_history(tmp_path)
    assert [step for step, _ in noting.logged] == [1, 2, 3, 4, 5, 6]
    for progress, (_, values) in zip(history, noting.logged, strict=True):
        assert values["loss/1 ahead"] == progress.losses[0]
    assert values["acceptance length/greedy"] == history[-1].evaluation.acceptance_length
    with pytest.raises(ValueError, match="accelerate does not know paper; installed are"):
        train(objective, *arguments, QUICK, trackers=["paper"])


def test_mixtures_have_the_share():
    new, old = random_examples(9, 5), random_examples(3, 5, seed=1)
    for share, count in ((0, 0), (0.1, 1), (0.25, 3), (0.5, 9), (0.7, 21)):
        found = mixed(new, old, share)
        assert found[:9] == new and len(found) == 9 + count
        counts = [sum(each is one for each in found[9:]) for one in old]
        assert max(counts) - min(counts) <= 1
    with pytest.raises(ValueError, match="share of old texts is 1; expected"):
        mixed(new, old, 1)
    with pytest.raises(ValueError, match="no old texts to mix in"):
        mixed(new, [], 0.5)


def test_history_has_a_line_per_step(tmp_path):
    run(tmp_path, QUICK, random_examples(10, 12))
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] == 1
