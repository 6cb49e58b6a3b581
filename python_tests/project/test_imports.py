"""Imports: public names are imported at their first use, and the ops need only torch."""

import subprocess
import sys

import pytest

import specdec_ext

OPS_ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        others = "transformers tokenizers safetensors huggingface_hub typer rich nvtx"
        if name.partition(".")[0] in others.split():
            raise ImportError(f"{name} is out of reach")

sys.meta_path.insert(0, Refuse())
import torch
from specdec_ext import ops, reference
from specdec_ext.evaluate import machine
from specdec_ext.reference import tree_mask
mask = ops.tree_mask(torch.tensor([[-1, 0]]), torch.tensor([4]))
assert mask.positions.tolist() == [[4, 5]]
print(machine.machine_line(torch.device("cpu")))
"""


def test_ops_need_only_torch():
    done = subprocess.run([sys.executable, "-c", OPS_ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"torch {__import__('torch').__version__} | commit" in done.stdout


def test_every_public_name_is_found_and_listed():
    for name in specdec_ext.__all__:
        assert getattr(specdec_ext, name).__name__ == name
        assert name in dir(specdec_ext)


FIRST = """
import os
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
import specdec_ext

first = {module: names[0] for module, names in specdec_ext._MODULES.items()}
for name in first.values():
    child = os.fork()
    if not child:
        getattr(specdec_ext, name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_every_public_name_may_be_the_first_to_be_used():
    """No module needs another one to be imported before."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'specdec_ext' has no attribute 'generates'"):
        _ = specdec_ext.generates


def test_old_names_work_and_warn():
    with pytest.warns(DeprecationWarning, match=r"use specdec_ext\.SpeculationConfig"):
        old = specdec_ext.Speculation
    assert old is specdec_ext.SpeculationConfig
    output = specdec_ext.SpeculativeOutput(sequences=None)
    output.speculation_stats = specdec_ext.SpeculationStats()
    with pytest.warns(DeprecationWarning, match="read `speculation_stats`"):
        assert output.speculation is output.speculation_stats


@pytest.mark.parametrize(
    ("old", "new"), [("kinds", "lookups"), ("dead_draft_advice", "low_acceptance_hint")]
)
def test_a_drafter_with_an_old_name_is_told_the_new_one(old, new):
    with pytest.warns(DeprecationWarning, match=f"Mine.{old} is not read any more; define {new}"):
        type("Mine", (specdec_ext.Drafter,), {old: ""})
