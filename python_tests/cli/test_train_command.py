"""``specdec train`` and ``train_head``: complete runs; bad input is refused before training."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
import torch
from helpers import command_line
from helpers.command_line import words
from helpers.drafters.checkpoint_cases import assert_same_head
from helpers.models.tiny import VOCAB, tiny_model
from helpers.texts.training_cases import greedy_examples, random_examples

import specdec_ext
from specdec_ext import assets
from specdec_ext.heads.checkpoints import load_draft, save_draft, weights_fingerprint
from specdec_ext.training import trainer
from specdec_ext.training.recipe import HeadRecipe, make_objective, train_head
from specdec_ext.training.start import new_head
from specdec_ext.training.trainer import TrainConfig

QUICK = TrainConfig(updates=3, batch_size=2, warmup=1, depth=2, mixed_precision=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a target, its tokenizer and texts."""
    folder = tmp_path_factory.mktemp("files")
    prompts = [each["prompt"] for each in assets.held_out_prompts()]
    lines = [json.dumps({"text": text[:400]}) for text in prompts for _ in range(2)]
    (folder / "text.jsonl").write_text("\n".join(lines[:6]))
    (folder / "more.jsonl").write_text("\n".join(lines[6:10]))
    (folder / "empty.jsonl").write_text("")
    (folder / "foreign.jsonl").write_text('{"tokens": [5, 4095]}\n{"tokens": [4096, 7]}\n')
    (folder / "other.jsonl").write_text('{"body": "nothing that is read"}\n')
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "b"}]}
        for n in range(3)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


def run(*arguments):
    return command_line.run("train", *arguments)


FEW = ("--updates", 2, "--batch-size", 1, "--max-length", 24, "--steps", 2)


@pytest.mark.slow
def test_a_head_is_trained_from_files_and_adapted(files, tmp_path):
    out = tmp_path / "head"
    command = (
        "bundled", "--data", files / "text.jsonl", "--data", files / "more.jsonl", "--out", out,
        "--held-out", files / "more.jsonl", "--draft-vocab", 300, "--layers", "1,3,6",
        "--intermediate-size", 96, *FEW,
    )  # fmt: skip
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "step 2: loss" in words(result.output)
    start, end = words(result.output).split("step 2: loss")
    for part in (start.split("step 0; ")[1], end):
        assert re.search(r"mean acceptance length \d\.\d\d greedy, \d\.\d\d sampled at temp", part)
    head = load_draft(out)
    assert head.config.draft_vocab_size == 300 and head.config.feature_layers == (1, 3, 6)
    assert head.config.fc_norm and head.config.norm_output and head.config.intermediate_size == 96
    assert head.record.ambiguous == () and head.record.target_name == "tiny-python-target"
    assert head.record.target_fingerprint == assets.load_head().record.target_fingerprint
    assert head.tensors["norm.weight"].dtype == torch.bfloat16
    work = tmp_path / "head.training"
    assert json.loads((work / "evaluation.json").read_text())["drafts"] > 0
    page = (work / "report.html").read_text()
    for part in ("<svg", "Draft head for tiny-python-target", "draft_vocab_size", "steps, "):
        assert part in page
    assert not re.search(r'(?:src|href)="(?!#)', page)  # no other file
    again = run(*command)
    assert again.exit_code == 0 and "step 2" not in again.output  # the run was complete
    assert_same_head(load_draft(out), head)
    adapted = run(
        "bundled", "--data", files / "more.jsonl", "--out", tmp_path / "adapted",
        "--init-from", out, "--learning-rate", 1e-9, "--old-held-out", files / "text.jsonl", *FEW,
    )  # fmt: skip
    assert adapted.exit_code == 0, adapted.output
    for when in ("step 0; held out", "step 2: loss"):
        assert re.search(rf"{when}.*?; old texts: \d\.\d\d greedy", words(adapted.output))
    changed = load_draft(tmp_path / "adapted")
    assert "previous domain" in (tmp_path / "adapted.training" / "report.html").read_text()
    assert changed.config == head.config
    for name, tensor in head.tensors.items():
        torch.testing.assert_close(changed.tensors[name], tensor)


@pytest.mark.slow
def test_old_texts_are_mixed_in_and_a_recipe_repeats_the_run(files, tmp_path):
    """A part of the old texts is held out. The saved recipe has the same result; a command wins over it."""
    save_draft(assets.load_head(), tmp_path / "old", target=assets.load_target())
    first = tmp_path / "first"
    result = run(
        "bundled", "--data", files / "text.jsonl", "--out", first, "--init-from", tmp_path / "old",
        "--old-data", files / "more.jsonl", "--old-share", 0.5, *FEW,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"step 2: loss.*?; old texts: \d\.\d\d greedy", words(result.output))
    saved = tmp_path / "first.training" / "recipe.yaml"
    assert "old_share: 0.5" in saved.read_text()
    again, other = tmp_path / "again", tmp_path / "other"
    assert run("--recipe", saved, "--out", again).exit_code == 0
    assert_same_head(load_draft(again), load_draft(first))
    assert run("--recipe", saved, "--out", other, "--old-share", 0).exit_code == 0
    heads = [load_draft(folder).tensors["fc.weight"] for folder in (first, other)]
    assert not torch.equal(*heads)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("- data", "holds no mapping of options"),
        ("data: [x\n", "can't be read"),
        ("learning-rat: 3", "has 'learning-rat', which is no option; options are batch_size"),
        ("steps: many", "Invalid value for '--steps'"),
        ("kind: eagle2", "Invalid value for '--kind'"),
    ],
)
def test_bad_recipe_files_are_refused(recipe, message, files, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe)
    arguments = ("bundled", "--data", files / "text.jsonl", "--out", tmp_path / "head")
    result = run(*arguments, "--recipe", tmp_path / "recipe.yaml")
    assert result.exit_code == 2 and message in words(result.output), result.output


@pytest.mark.slow
def test_texts_are_read_from_parquet_and_from_the_hub(files, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow needs Python 3.11")
    rows = [json.loads(line) for line in (files / "text.jsonl").read_text().splitlines()]
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "text.parquet")
    asked = []

    def download(repo, file, **given):
        asked.append((repo, file, given))
        return str(tmp_path / "text.parquet")

    monkeypatch.setattr("specdec_ext.training.data.hub.hf_hub_download", download)
    heads = []
    for name in (files / "text.jsonl", "hf://datasets/org/chats@v1/data/train-00000.parquet"):
        out = tmp_path / f"head{len(heads)}"
        result = run("bundled", "--data", name, "--out", out, *FEW)
        assert result.exit_code == 0, result.output
        heads.append(load_draft(out))
    assert_same_head(*heads)
    given = {"repo_type": "dataset", "revision": "v1"}
    assert asked == [("org/chats", "data/train-00000.parquet", given)]
    (tmp_path / "text.parquet").write_bytes(b"PAR1 not at all")
    result = run("bundled", "--data", tmp_path / "text.parquet", "--out", tmp_path / "none")
    assert result.exit_code == 2 and "is not a valid parquet file" in words(result.output)


def test_regenerated_answers_and_dumped_hidden_states_are_written(files, tmp_path):
    answers, dump = tmp_path / "answers.jsonl", tmp_path / "dump"
    result = run(
        "bundled", "--data", files / "text.jsonl", "--out", tmp_path / "head",
        "--regenerate", answers, "--max-new-tokens", 6, "--dump", dump, *FEW,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "are free" in words(result.output)
    assert answers.exists() and list(dump.glob("*.safetensors"))


@pytest.mark.slow
def test_a_dump_serves_runs_with_other_seeds(files, tmp_path):
    """A dump does not contain the texts that are sampled for the evaluation."""
    for seed in (0, 1):
        result = run(
            "bundled", "--data", files / "text.jsonl", "--out", tmp_path / f"head{seed}",
            "--seed", seed, "--dump", tmp_path / "dump", *FEW,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "sampled at temperature 1" in words(result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "empty.jsonl"), "holds no text"),
        (("--data", "other.jsonl"), "body"),
        (("--data", "foreign.jsonl"), "line 2 has token 4096, but the target's vocabulary has 4096"),
        (("--data", "chat.jsonl"), "chat template"),
        (("--data", "nothing.jsonl"), "nothing.jsonl"),
        (("--data", "text.jsonl", "--layers", "low,high"), "expected numbers such as 2,16,29"),
        (("--data", "text.jsonl", "--layers", "1,2,9"), "layers 0 to 5"),
        (("--data", "text.jsonl", "--draft-vocab", "9999"), "9999"),
        (("--data", "text.jsonl", "--batch-size", "99"), "expected at least 99, one batch"),
        (("--data", "text.jsonl", "--init-from", "x", "--layers", "1"), "already determines layers"),
        (("--data", "text.jsonl", "--kind", "p-eagle", "--layout", "eagle"), "mask_token_id"),
        (("--data", "text.jsonl", "--kind", "medusa", "--layout", "eagle"), "EAGLE heads"),
        (("--data", "text.jsonl", "--kind", "mtp", "--draft-vocab", "300"), "leave out draft_vocab_size"),
        (("--data", "text.jsonl", "--kind", "eagle1", "--layers", "1"), "leave out layers"),
        (("--data", "text.jsonl", "--kind", "mtp", "--decoder-layers", "2"), "leave out num_layers"),
        (("--data", "text.jsonl", "--kind", "medusa", "--intermediate-size", "96"), "out intermediate_size"),
        (("--data", "text.jsonl", "--kind", "medusa", "--layers", "1"), "it leaves draft_vocab_size to"),
        (("--data", "text.jsonl", "--old-data", "more.jsonl"), "are for a head of --init-from; add it"),
        (("--data", "text.jsonl", "--track", "mlflow"), "mlflow is not installed: pip install mlflow"),
        (("--data", "text.jsonl", "--track", "paper"), "accelerate does not know paper"),
        (("--data", "hf://datasets/chats"), "expected hf://datasets/ORG/NAME[@REVISION]/FILE"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_bad_input_is_refused_before_training(arguments, message, files, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer._Run, "record", lambda *_: pytest.fail("a step was trained"))
    named = [files / each if each.endswith(".jsonl") else each for each in arguments]
    if "--batch-size" not in named:
        named += ["--batch-size", 1]
    result = run("bundled", "--out", tmp_path / "head", "--max-length", 64, *named)
    assert result.exit_code == 2, result.output
    assert message in words(result.output)


OUTPUTS = {
    "a file as folder": (("--out", "text.jsonl"), "out .*text.jsonl: .*text.jsonl is not a folder"),
    "a checkpoint": (("--out", "model"), "holds a checkpoint, which would be replaced, and .*model"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_are_checked_before_the_target_is_loaded(case, files, monkeypatch):
    arguments, message = OUTPUTS[case]
    (files / "model").mkdir(exist_ok=True)
    (files / "model" / "config.json").write_text("{}")
    command = sys.modules["specdec_ext.cli.train"]
    monkeypatch.setattr(command, "load_target", lambda *_: pytest.fail("the target was read"))
    named = [each if each.startswith("--") else files / each for each in arguments]
    result = run("bundled", "--data", files / "text.jsonl", *named)
    assert result.exit_code == 2, result.output
    assert re.search(message, words(result.output)), result.output


@pytest.mark.parametrize("what", ["matplotlib is missing", "drawing fails"])
def test_head_is_saved_if_the_report_fails(what, tmp_path, monkeypatch):
    """Regression: after hours of training "a plot needs matplotlib" was raised and no head was saved."""
    if what == "matplotlib is missing":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        message = r"report.html will not be written: report.html needs matplotlib.*pip install '\.\[plot\]'"
    else:
        monkeypatch.setattr("specdec_ext.training.recipe.write_report", lambda *_: 1 / 0)
        message = "the head is saved, but .*report.html can't be written: division by zero"
    with pytest.warns(UserWarning, match=message) as told:
        train_head(
            tiny_model("llama"), random_examples(4, 12), [], tmp_path / "head", HeadRecipe(), QUICK
        )
    assert len(told) == 1
    assert load_draft(tmp_path / "head").config.fc_norm


def test_too_little_disk_space_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "free_bytes", lambda path: 1000)
    with pytest.raises(ValueError, match=r"0\.00 GB free, but the state of the run may need"):
        train_head(
            tiny_model("llama"), random_examples(4, 12), [], tmp_path / "head", HeadRecipe(), QUICK
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["eagle1", "mtp", "p-eagle", "medusa"])
def test_other_kinds_are_saved_in_a_layout_that_can_express_them(kind, tmp_path):
    recipe = HeadRecipe(kind=kind, steps=2, mask_token_id=1 if kind == "p-eagle" else None)
    model = tiny_model("llama")
    examples, held_out = random_examples(6, 12), random_examples(2, 12)
    config = dataclasses.replace(QUICK, depth=3)  # deeper than what is trained
    trained = train_head(model, examples, held_out, tmp_path / "head", recipe, config)
    loaded = load_draft(tmp_path / "head")
    assert loaded.config == trained.config
    assert loaded.record.target_fingerprint == weights_fingerprint(model)
    assert loaded.record.ambiguous == ()
    drafter = specdec_ext.MedusaDrafter if kind == "medusa" else specdec_ext.HeadDrafter
    ids = torch.arange(5)[None]
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    tree = specdec_ext.TreeConfig(depth=2)
    output = specdec_ext.generate(model, ids, drafter=drafter(loaded, tree), max_new_tokens=8)
    assert torch.equal(output, plain)


def test_an_adapted_head_starts_as_the_given_head(tmp_path):
    model = tiny_model("llama")
    head = new_head(model, (1, 2, 3), torch.arange(5, VOCAB), seed=4)
    save_draft(head, tmp_path / "head")
    recipe = HeadRecipe(init_from=str(tmp_path / "head"))
    objective, layers = make_objective(model, random_examples(3, 12), recipe)
    assert layers == (1, 2, 3)
    assert_same_head(objective.trained(), head)
    with pytest.raises(ValueError, match="already determines layers, kind"):
        dataclasses.replace(recipe, layers=(1,), kind="medusa")


def test_learn_everything_includes_the_prompts(tmp_path):
    model = tiny_model("llama")
    masked = [
        dataclasses.replace(each, loss_mask=torch.arange(len(each.tokens)) >= 9)
        for each in greedy_examples(4, prompt=4, length=14)
    ]
    curves = []
    for name, everything in (("answers", False), ("everything", True)):
        recipe = HeadRecipe(steps=2, learn_everything=everything)
        train_head(model, masked, [], tmp_path / name, recipe, QUICK)
        curves.append(trainer.read_history(tmp_path / f"{name}.training"))
    assert curves[0][0].losses != curves[1][0].losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "eagle"}, "kind='eagle'; expected one of eagle3, eagle1, mtp, p-eagle, medusa"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_bad_recipes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HeadRecipe(**options)
