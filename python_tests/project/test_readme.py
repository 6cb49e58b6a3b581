"""What the README shows works: every Python block and every command runs, its drafter is lossless."""

import json
import re
import shlex

import pytest
import torch
from places import ROOT
from tiny import prompts, tiny_model
from typer.testing import CliRunner

import specdec_ext
from specdec_ext import assets
from specdec_ext.cli import app

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_drafter_of_the_readme():
    (block,) = [block for block in BLOCKS if "class BigramDrafter" in block]
    model = tiny_model("llama")
    ids, mask = prompts((12, 3, 9))
    inputs = dict(input_ids=ids, attention_mask=mask, do_sample=False)
    names = dict(specdec_ext=specdec_ext, model=model, inputs=inputs)
    exec(block, names)
    assert torch.equal(names["out"], model.generate(**inputs, max_new_tokens=128))
    out = specdec_ext.generate(
        model,
        **inputs,
        drafter=names["BigramDrafter"](),
        max_new_tokens=64,
        return_dict_in_generate=True,
    )
    assert out.speculation.accepted_tokens > 0


def names_of_the_preamble():
    names: dict = {}
    exec(BLOCKS[0], names)
    return names


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_python_block_runs_as_printed(number):
    """Behind the first one, which makes the names that the others use, each by itself."""
    exec(BLOCKS[number], names_of_the_preamble())


def test_the_blocks_show_what_people_do():
    assert BLOCKS[0].count("from_pretrained(folder") == 2
    for part in ("apply_chat_template(", "TextStreamer(", "return_dict_in_generate=True"):
        assert any(part in block for block in BLOCKS)


# --- commands -----------------------------------------------------------------------------------------

COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for line in re.findall(r"^specdec .*", README, re.MULTILINE)
]
# What makes a command short.
SHORT = {
    "demo": "--prompts 1 --max-new-tokens 8",
    "generate": "--max-new-tokens 8",
    "bench": "--prompts {texts} --max-new-tokens 4 --repeats 1",
    "check": "--prompts {texts} --max-new-tokens 4",
    "train": "--updates 1 --batch-size 2 --max-length 48 --steps 2 --max-new-tokens 8 --work {new}",
}
NUMBERS = re.compile(r"\d{4,}")  # sizes that the bundled model has not


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_runs(command, tmp_path):
    """As printed, with folders and files in place of the names that stand for them, and with less to do."""
    lines = [
        json.dumps({"text": f"def area_{i}(width):\n    return width * {i}\n" * 4})
        for i in range(60)
    ]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(lines))
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["import os\n\n", "def f(x):\n"]))
    model, head = (str(assets.FOLDER / f"tiny-python-{kind}") for kind in ("target", "head"))
    stand_for = {"MODEL": model, "TARGET": "bundled", "PATH": head, "FILE": str(texts)}
    stand_for |= {"FOLDER": str(tmp_path / "out"), "text.txt": str(prompts)}
    words = []
    for word in command:
        before = words[-1] if words else ""
        if before == "--data":
            word = str(texts)
        elif before == "--init-from":
            word = head
        elif before in ("--out", "--regenerate"):
            word = str(tmp_path / word)
        words.append(NUMBERS.sub("512", stand_for.get(word, word)))
    extra = SHORT.get(command[0], "").format(texts=prompts, new=tmp_path / "work")
    result = CliRunner().invoke(app, [*words, *extra.split()])
    assert result.exit_code == 0, result.output
