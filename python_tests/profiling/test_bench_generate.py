"""``python profiling generate``: the choice of contestants, and a complete run on a tiny random target."""

import json

import pytest
import torch
from baselines import random_targets
from bench import generate
from bench.generate import HF, HF_LOOKUP, PLAIN, chosen, random_contestants, tree_config
from helpers.models.tiny_shapes import TINY

from specdec_ext.evaluate import benchmark
from specdec_ext.evaluate.benchmark import HF_ASSISTED, HF_STATIC


@pytest.mark.parametrize("names, expected", [([], [HF, HF_LOOKUP, PLAIN]), ([PLAIN], [HF, PLAIN])])
def test_contestants_can_be_chosen(names, expected):
    makers = dict.fromkeys([HF, HF_LOOKUP, PLAIN])
    assert chosen(makers, names, 1) == (expected, {})


def test_batches_leave_out_what_takes_single_rows():
    names, left_out = chosen(dict.fromkeys([HF, HF_LOOKUP, HF_ASSISTED, PLAIN]), [], 4)
    assert names == [HF, PLAIN] and set(left_out) == {HF_LOOKUP, HF_ASSISTED}


def test_an_unknown_contestant_is_refused():
    with pytest.raises(SystemExit, match=r"no contestant \['gpt'\]; there are"):
        chosen({HF: None}, ["gpt"], 1)


def test_shapes_and_temperatures_of_the_bundled_head(tmp_path):
    """Each temperature is a record; every shape takes part, even if contestants are named."""
    sizes = ["--count", "1", "--max-new-tokens", "8", "--repeats", "1"]
    asked = ["--contestant", PLAIN, "--shape", "2", "--shape", "2x2x4"]
    hot = ["--temperature", "0", "--temperature", "0.7"]
    generate.main([*sizes, *asked, *hot, "--out", str(tmp_path / "run")])
    greedy, sampled = json.loads((tmp_path / "run.json").read_text())
    names = [HF, PLAIN, "specdec head, chain 2", "specdec head, tree 2x2x4"]
    for record in (greedy, sampled):
        assert [row["name"] for row in record["rows"]] == names
        positions = [len(row["acceptance_per_position"]) for row in record["rows"]]
        assert positions == [0, 0, 2, 2]
    assert [greedy["settings"]["do_sample"], sampled["settings"]["temperature"]] == [False, 0.7]


@pytest.mark.parametrize("shape", ["5x4", "wide", "5x4x-1", ""])
def test_an_unknown_shape_is_refused(shape):
    with pytest.raises(SystemExit, match="expected DEPTH or DEPTHxTOP_KxNODES"):
        tree_config(shape)


def test_shapes_are_for_the_bundled_head(monkeypatch):
    monkeypatch.setitem(random_targets.SHAPES, "135m", ("llama", TINY, 48))
    with pytest.raises(SystemExit, match="pass --depth for a random target"):
        generate.main(["--target", "135m", "--shape", "5"])


def test_on_a_gpu_recorded_passes_can_be_compared(monkeypatch):
    """Also with the static cache of transformers; every way gives the same text."""
    monkeypatch.setitem(random_targets.SHAPES, "8b", ("llama", TINY, 48))
    target = random_targets.random_target("8b", torch.float32)
    prompts = random_targets.random_prompts(target.config.vocab_size, 1, 5, 1)
    shared = benchmark.generation_kwargs(8)
    makers = random_contestants("8b", target, shared, [2.0], 3, recorded=True)
    asked = "specdec, synthetic acceptance 2 at chain 3"
    assert [*makers][1:] == [
        PLAIN,
        HF_STATIC,
        f"{PLAIN}, no graphs",
        asked,
        f"{asked}, no graphs",
        f"{asked}, auto",
        "specdec adversary",
    ]
    outputs = [make(prompts)(prompts[0]) for make in makers.values()]
    texts = [getattr(output, "sequences", output).tolist() for output in outputs]
    assert texts == [texts[0]] * len(makers)


def test_a_random_target_with_synthetic_acceptance(monkeypatch, tmp_path):
    """Two batch sizes and two contexts give four records with the prescribed acceptance and equal texts."""
    monkeypatch.setitem(random_targets.SHAPES, "135m", ("llama", TINY, 48))
    shapes = [
        "--target",
        "135m",
        *("--batch", "1", "--batch", "2", "--context", "5", "--context", "9"),
    ]
    sizes = ["--count", "2", "--max-new-tokens", "8", "--repeats", "1"]
    drafts = ["--acceptance", "2.0", "--depth", "3"]
    generate.main([*shapes, *sizes, *drafts, "--out", str(tmp_path / "run")])
    records = json.loads((tmp_path / "run.json").read_text())
    shapes = [(each["settings"]["batch"], each["settings"]["context"]) for each in records]
    assert shapes == [(1, "5"), (1, "9"), (2, "5"), (2, "9")]
    asked = "specdec, synthetic acceptance 2 at chain 3"
    names = [HF, PLAIN, asked, f"{asked}, auto", "specdec adversary"]
    for record in records:
        assert [row["name"] for row in record["rows"]] == names
        texts = 2 * record["settings"]["batch"]
        equal = f"{texts}/{texts}"
        assert [row["same_text"] for row in record["rows"]] == ["", *[equal] * 4]
        assert record["rows"][4]["mean_acceptance_length"] in (1, None)
        assert record["settings"]["head's vocabulary"] == "48"
    assert (tmp_path / "run.png").exists()
