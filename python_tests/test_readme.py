"""What the README shows works: its drafter runs and is lossless, its names and commands exist."""

import re
from pathlib import Path

import pytest
import torch
from checkpoint_cases import random_head
from test_medusa import random_heads
from tiny import prompts, tiny_model
from typer.testing import CliRunner

import specdec_ext
from specdec_ext import assets
from specdec_ext.checkpoints import save_medusa
from specdec_ext.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_drafter_of_the_readme():
    (block,) = [block for block in BLOCKS if "class BigramDrafter" in block]
    model = tiny_model("llama")
    ids, mask = prompts((12, 3, 9))
    inputs = dict(input_ids=ids, attention_mask=mask, do_sample=False)
    names = dict(specdec_ext=specdec_ext, model=model, inputs=inputs)
    exec(block, names)
    assert torch.equal(names["out"], model.generate(**inputs, max_new_tokens=256))
    out = specdec_ext.generate(
        model,
        **inputs,
        drafter=names["BigramDrafter"](),
        max_new_tokens=64,
        return_dict_in_generate=True,
    )
    assert out.speculation.accepted_tokens > 0


def test_the_calls_of_the_readme(tmp_path):
    (block,) = [block for block in BLOCKS if "custom_generate" in block]
    head = specdec_ext.save_draft(random_head(feature_layers=(1, 2, 3)), tmp_path)
    ids, _ = prompts((5,))
    names = dict(
        model=tiny_model("llama"), draft_model=tiny_model("qwen3"), inputs={"input_ids": ids}
    )
    block = block.replace("max_new_tokens=256", "max_new_tokens=8")
    exec(re.sub(r'drafter="\w+/[^"]+"', f"drafter={str(head)!r}", block), names)


def test_the_drafters_of_the_readme(tmp_path):
    (block,) = [block for block in BLOCKS if "SuffixHistory(" in block]
    head = specdec_ext.save_draft(random_head(feature_layers=(1, 2, 3)), tmp_path / "head")
    save_medusa(random_heads(), tmp_path / "medusa")
    names = dict(
        specdec_ext=specdec_ext,
        draft_model=tiny_model("qwen3"),
        tokenizer=assets.load_tokenizer(),
        draft_tokenizer=assets.load_tokenizer(),
    )
    for line in block.splitlines():
        folder = tmp_path / "medusa" if "Medusa" in line else head
        made = eval(line.replace("folder or hub id", str(folder)), names)
        assert isinstance(made, specdec_ext.Drafter)


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"^specdec (\w+)", README, re.MULTILINE)))
)
def test_the_commands_of_the_readme(command):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
