"""``specdec inspect``: its output for a head and for a pair, and its exit codes."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from helpers import command_line
from helpers.drafters.checkpoint_cases import random_head, read_folder, write_folder
from helpers.drafters.medusa_cases import random_heads
from helpers.places import GOLDEN

from specdec_ext import assets, save_draft
from specdec_ext.display.console import PlainConsole
from specdec_ext.evaluate.calibrate import Calibration, Trial
from specdec_ext.heads.checkpoints import save_medusa, weights_fingerprint

TARGET = str(assets.FOLDER / "tiny-python-target")
# The sizes of the bundled target.
SIZES = {
    "hidden_size": 256,
    "target_hidden_size": 256,
    "vocab_size": 4096,
    "draft_vocab_size": 100,
    "feature_layers": (2, 3, 4),
}


def run(*arguments) -> tuple[int, str]:
    """Exit code, and the output without colours, boxes and line breaks."""
    result = command_line.run("inspect", *arguments, columns=200)
    return result.exit_code, command_line.words(result.output)


def test_a_head_without_a_target():
    code, short = run(GOLDEN / "speculators_qwen3_two_layers" / "draft")
    assert code == 0, short
    assert "format speculators eagle3" in short and "norm_before_residual" not in short
    code, text = run(GOLDEN / "speculators_qwen3_two_layers" / "draft", "--all")
    assert code == 0, text
    for expected in (
        "format speculators eagle3",
        "parameters 173,056",
        "weights 676.0 KiB (float32)",
        "keys and values 1.0 KiB per token",  # 2 layers, 2 heads of 32, keys and values, 4 bytes
        "hidden states read 2, 4, 5 (eagle_aux_hidden_state_layer_ids [2, 4, 5], read as inputs of",
        "made for not recorded",
        "unused tensors t2d",
        "norm_before_residual True",
        "rope_parameters rope_theta=10000.0, rope_type=default",
    ):
        assert expected in text


def test_medusa_heads_fit_and_have_nothing_to_calibrate(tmp_path):
    save_medusa(random_heads(hidden_size=256, vocab_size=4096, draft_vocab_size=4096), tmp_path)
    code, text = run(tmp_path, "--target", TARGET, "--all")
    assert code == 0, text
    assert "format Medusa" in text and "num_heads 3" in text and "fits" in text
    code, text = run(tmp_path, "--target", TARGET, "--calibrate", __file__)
    assert code == 2 and "nothing to calibrate" in text


def test_a_pair_that_fits(tmp_path):
    save_draft(random_head(**SIZES), tmp_path, tokenizer=assets.load_tokenizer())
    code, text = run(tmp_path, "--target", TARGET)
    assert code == 0
    assert text.startswith("fits") and "looks wrong" not in text


def test_a_pair_that_looks_wrong(tmp_path):
    save_draft(random_head(**SIZES), tmp_path, target_name="org/other")
    code, text = run(tmp_path, "--target", TARGET)
    assert code == 0
    assert "looks wrong:" in text and "was trained for org/other" in text


def test_a_target_with_other_weights_looks_wrong(tmp_path):
    """A fine-tuned copy may have the name of the original."""
    target = assets.load_target()
    save_draft(random_head(**SIZES), tmp_path / "head", target=target)
    code, text = run(tmp_path / "head", "--target", TARGET)
    assert code == 0 and f"fits {TARGET}" in text
    assert f"made for tiny-python-target, weights {weights_fingerprint(target)}" in text
    target.lm_head.weight.data.mul_(1.1)
    target.save_pretrained(tmp_path / "tiny-python-target")
    code, text = run(tmp_path / "head", "--target", tmp_path / "tiny-python-target")
    assert code == 0 and "looks wrong:" in text
    assert "was trained for other weights of tiny-python-target (fingerprint" in text


def test_a_pair_that_can_not_work():
    code, text = run(GOLDEN / "eagle1_gqa" / "draft", "--target", TARGET)
    assert code == 1
    assert text.startswith("can't work:")
    assert "hidden states of width 64, but the target's have 256" in text


def test_long_notes_break_at_words_in_a_terminal(tmp_path):
    shown = PlainConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    note = "looks wrong: " + "a note of many words that goes on and on " * 6
    shown.sentence(note)
    lines = shown.file.getvalue().splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines) == note.strip()


def test_calibration_lists_every_reading(tmp_path):
    folder = save_draft(random_head(**SIZES, norm_output=True), tmp_path / "head")
    config, tensors = read_folder(folder)
    del config["specdec_ext"]  # a head of SpecForge
    write_folder(folder, config, tensors)
    (tmp_path / "text.py").write_text("def area(width, height):\n    return width * height\n")
    code, text = run(tmp_path / "head", "--target", TARGET, "--calibrate", tmp_path / "text.py")
    assert code == 0, text
    for layers in ("2, 3, 4", "3, 4, 5", "1, 2, 3"):
        for norm_output in ("True", "False"):
            assert re.search(rf"{layers}\W+{norm_output}\W+\d+\.\d%", text)
    assert "no reading agrees with the target" in text
    assert "ambiguous norm_output" in text


@pytest.mark.parametrize(
    "trials, advice",
    [
        ([((1, 2), True, 0.5), ((2, 3), True, 0.4)], "the checkpoint is read correctly"),
        (
            [((2, 3), True, 0.5), ((1, 2), True, 0.4)],
            "pass feature_layers=(2, 3), norm_output=True to",
        ),
    ],
)
def test_calibration_recommends_the_best_reading(trials, advice):
    head = random_head(feature_layers=(1, 2), num_features=2, norm_output=True)
    best = replace(head, config=replace(head.config, feature_layers=trials[0][0]))
    changed = trials[0][0] != (1, 2)
    found = Calibration(
        best if changed else head,
        tuple(Trial(layers, norm_output, 9, first, 0.0) for layers, norm_output, first in trials),
        changed,
    )
    assert str(found).startswith(advice)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no/such"], "'no/such' is neither a file nor a folder"),
        ([GOLDEN, "--target", TARGET], "has no weight file"),
        ([GOLDEN, "--calibrate", __file__], "--calibrate needs --target"),
    ],
)
def test_user_errors_exit_with_code_2(arguments, message):
    code, text = run(*arguments)
    assert code == 2
    assert message in text
