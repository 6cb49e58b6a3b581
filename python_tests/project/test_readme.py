"""Every Python block and command of the README and docs runs, and the example drafter is lossless."""

import json
import re
import shlex
from contextlib import ExitStack

import pytest
import torch
from helpers.models.tiny import prompts, tiny_model
from helpers.places import ROOT
from typer.testing import CliRunner

import specdec_ext
from specdec_ext import assets
from specdec_ext.cli import app
from specdec_ext.rollout.lock import ReferenceAcceptance

README = (ROOT / "README.md").read_text()
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text()
    for path in sorted((ROOT / "docs").rglob("*.md"))
}


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


BLOCKS = python_blocks(README)


def test_drafter_of_the_docs_is_lossless():
    (block,) = python_blocks(PAGES["guide/write-a-drafter.md"])
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
        speculation="fixed",  # "auto" would not ask it again on a text this random
        max_new_tokens=64,
        return_dict_in_generate=True,
    )
    assert out.speculation_stats.accepted_tokens > 0


def names_of_the_preamble():
    names: dict = {}
    exec(BLOCKS[0], names)
    return names


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_python_block_of_the_readme_runs_as_printed(number):
    """Each block runs after the first one, which defines the names that the others use."""
    exec(BLOCKS[number], names_of_the_preamble())


# The blocks of the page on the server need a running one (python_tests/serve/test_page.py), and those of the
# page on many machines need Ray (python_tests/cluster/test_ray.py).
ELSEWHERE = ("guide/serve.md", "guide/many-machines.md")


@pytest.mark.parametrize(
    "page", [name for name in PAGES if python_blocks(PAGES[name]) and name not in ELSEWHERE]
)
def test_python_blocks_of_a_page_run_as_printed(page):
    """They run in order, with the names of the README's first block."""
    names = names_of_the_preamble()
    for block in python_blocks(PAGES[page]):
        exec(block, names)


def test_first_block_is_a_typical_call():
    assert BLOCKS[0].count("from_pretrained(folder") == 2
    for part in ("apply_chat_template(", "TextStreamer(", "return_dict_in_generate=True"):
        assert part in BLOCKS[0]


# --- commands -----------------------------------------------------------------------------------------

SHOWN = "\n".join([README, *PAGES.values()]).replace("\\\n", " ")  # one line per command
COMMANDS = {
    shlex.join(words): words[1:]
    for line in re.findall(r"^ *specdec .*", SHOWN, re.MULTILINE)
    for words in [shlex.split(line, comments=True)]
    if words[1] != "serve"  # it does not end by itself: python_tests/serve/test_page.py
}
# Options that make a command fast.
SHORT = {
    "demo": "--prompts 1 --max-new-tokens 8",
    "generate": "--max-new-tokens 8",
    "batch": "--max-new-tokens 8",
    "chat": "--plain",
    "bench": "--prompts {texts} --max-new-tokens 4 --repeats 1",
    "breakeven": "--max-new-tokens 8",
    "rollout": "--prompts {texts} --max-new-tokens 4 --repeats 1 --gate equal>=1.0",
    "check": "--prompts {texts} --max-new-tokens 4",
    "watch": "--once --window 0.2 --interval 0.1",
    "train": "--updates 1 --batch-size 2 --max-length 48 --steps 2 --max-new-tokens 8 --work {new}",
}
NUMBERS = re.compile(r"\d{4,}")  # sizes that are too large for the bundled model


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_runs(command, tmp_path):
    """As printed, but with real folders and files instead of placeholders, and with less work."""
    lines = [
        json.dumps({"text": f"def area_{i}(width):\n    return width * {i}\n" * 4})
        for i in range(60)
    ]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(lines))
    prompts = tmp_path / "prompts.json"
    shown = ["import os\n\n", "def f(x):\n", "class A:\n", "import re\n"]
    prompts.write_text(json.dumps([{"prompt": text, "category": "code"} for text in shown]))
    lined = tmp_path / "prompts.jsonl"
    lined.write_text("".join(json.dumps(text) + "\n" for text in shown))
    model, head = (str(assets.FOLDER / f"tiny-python-{kind}") for kind in ("target", "head"))
    stand_for = {"MODEL": model, "TARGET": "bundled", "PATH": head, "FILE": str(texts)}
    stand_for |= {"FOLDER": str(tmp_path / "out"), "text.txt": str(prompts)}
    stand_for |= {"IN.jsonl": str(lined), "OUT.jsonl": str(tmp_path / "answers.jsonl")}
    words = []
    for word in command:
        before = words[-1] if words else ""
        if before in ("--data", "--old-data"):
            word = str(texts)
        elif before == "--init-from" or (before == "--drafter" and "/" in word):
            word = head
        elif before in ("--out", "-o", "--regenerate"):
            word = str(tmp_path / word)
        words.append(NUMBERS.sub("512", stand_for.get(word, word)))
    if "--lock" in words:
        reference = ReferenceAcceptance(100, 300, (80, 60), 120, 260)
        pair = specdec_ext.PairLock.of(assets.load_target(), "auto", reference=reference)
        words[words.index("pair.lock")] = str(pair.save(tmp_path / "pair.lock"))
    extra = SHORT.get(command[0], "").format(texts=prompts, new=tmp_path / "work")
    with ExitStack() as stack:
        if any(word.startswith("http://") for word in words):
            from helpers.serving import serving

            url = stack.enter_context(serving()).url
            words = [url if word.startswith("http://") else word for word in words]
        result = CliRunner().invoke(app, [*words, *extra.split()])
    assert result.exit_code == 0, result.output
