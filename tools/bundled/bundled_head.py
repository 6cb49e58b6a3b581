"""Copy a trained head into ``specdec_ext/assets`` and write its model card with measured acceptance.

``make head`` trains a head from scratch; its last command is ``python tools/bundled/bundled_head.py export``.

Acceptance is measured by generation with greedy chains of five tokens in float32: 128 new tokens for each of
the bundled prompts, and, as prose, for the beginnings of topics of Python's language reference. These come
from ``pydoc_data.topics``, which is part of every Python and too large a file for the training text.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import torch
import typer

import specdec_ext
from specdec_ext import assets
from specdec_ext.evaluate.benchmark import machine_line
from specdec_ext.evaluate.benchmark.series import unique_ngram_fraction
from specdec_ext.heads.checkpoints import load_draft
from specdec_ext.training.trainer import read_history

NAME = "tiny-python-head"
DEPTH = 5
NEW_TOKENS = 128
PROSE_TOKENS = 200
PROSE_TOPICS = 14
CARD = """---
license: apache-2.0
---
# tiny-python-head

An EAGLE 3.1 draft head for `tiny-python-target`, in the layout that SGLang, SafeAILab's code and vLLM read.
Made for demonstrations, tests and benchmarks of `specdec_ext`.

| | |
|---|---|
| architecture | one decoder layer, hidden {hidden}, {heads} heads over {kv_heads} KV heads, `fc_norm` and `norm_output` |
| parameters | {parameters:,}, bf16 |
| draft vocabulary | {vocab} of {target_vocab} tokens |
| hidden states it reads | {layers} (inputs of these layers; {last} is the output of the last one) |
| made for | `{target}`, weights `{fingerprint}` (`specdec_ext.heads.checkpoints.weights_fingerprint`) |
| trained on | {texts:,} steps, {tokens:,} tokens, with repetitions: beginnings of Python files, continued by the target |
| training took | {minutes:.0f} minutes on {processor} |

The table shows the mean acceptance length (bonus token included) and the conditional acceptance of each position
(accepted if the position before was accepted), for greedy chains of {depth} and {new_tokens} new tokens per prompt in float32.
A model of this size repeats itself, and repetitions are easy to draft: see the share of unique 4-grams as well.

| text | acceptance length | unique 4-grams | {positions} |
|---|---|---|{rules}|
| held-out Python ({python_prompts} prompts, `specdec_ext/assets/prompts.json`) | **{python_length:.2f}** | {python_unique:.0%} | {python} |
| prose: {prose_prompts} topics of the language reference, Python {version}; out of domain | {prose_length:.2f} | {prose_unique:.0%} | {prose} |

```
python tools/bundled/bundled_models.py texts
python tools/bundled/bundled_models.py completions
python tools/bundled/bundled_models.py completions held_out --files 100
specdec train --recipe tools/bundled/head.yaml
python tools/bundled/bundled_head.py export
```

{machine}
"""  # noqa: E501

app = typer.Typer(help=__doc__, pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Measured:
    """Acceptance over some prompts.

    Attributes:
        prompts: number of prompts.
        length: mean acceptance length, bonus token included.
        unique_4grams: share of unique 4-grams of the completions.
        conditional: conditional acceptance of each position in the draft.
    """

    prompts: int
    length: float
    unique_4grams: float
    conditional: list[float]


def measure(head: Path, prompts: list[torch.Tensor]) -> Measured:
    """Measure acceptance by generating with a head.

    Args:
        head: folder of the head.
        prompts: token ids, ``[1, length]`` each.
    """
    model = assets.load_target()
    drafter = specdec_ext.HeadDrafter(load_draft(head), specdec_ext.TreeConfig(depth=DEPTH))
    proposed, accepted = torch.zeros(DEPTH), torch.zeros(DEPTH)
    completions = []
    for ids in prompts:
        output = specdec_ext.generate(
            model,
            ids,
            drafter=drafter,
            speculation="fixed",
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
        )
        counters = output.speculation_stats
        completions.append(output.sequences[0, ids.shape[1] :].tolist())
        proposed += torch.tensor(counters.proposed_per_position)
        accepted += torch.tensor(counters.accepted_per_position)
    # Drafts in which the position before was accepted.
    before = torch.cat([proposed[:1], accepted[:-1]])
    return Measured(
        len(prompts),
        1 + float(accepted.sum() / proposed[0]),
        unique_ngram_fraction(completions),
        (accepted / before).tolist(),
    )


def python_prompts() -> list[torch.Tensor]:
    tokenizer = assets.load_tokenizer()
    texts = [each["prompt"] for each in assets.held_out_prompts()]
    return [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]


def prose_prompts() -> list[torch.Tensor]:
    """Beginnings of the longest topics."""
    tokenizer = assets.load_tokenizer()
    longest = sorted(topics.values(), key=len, reverse=True)[:PROSE_TOPICS]
    return [
        tokenizer(text[: 16 * PROSE_TOKENS], return_tensors="pt")["input_ids"][:, :PROSE_TOKENS]
        for text in longest
    ]


Head = Annotated[Path, typer.Option(help="Folder of the trained head.")]
TRAINED = Path("build/bundled/head") / NAME


@app.command(name="measure")
def print_measured(head: Head = TRAINED) -> None:
    """Print the acceptance of a head on Python and on prose."""
    for name, prompts in (("python", python_prompts()), ("prose", prose_prompts())):
        found = measure(head, prompts)
        shares = " ".join(f"{share:.2f}" for share in found.conditional)
        print(f"{name}: mean acceptance length {found.length:.3f}; by position {shares}")


@app.command()
def export(
    head: Head = TRAINED,
    processor: Annotated[
        str, typer.Option(help="What the training ran on, for the model card.")
    ] = "two idle cores",
) -> None:
    """Copy a head into the package, measure it and write its model card."""
    folder = assets.FOLDER / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(head / name, folder / name)
        (folder / name).chmod(0o644)
    python, prose = measure(folder, python_prompts()), measure(folder, prose_prompts())
    draft = assets.load_head()
    history = read_history(head.with_name(f"{NAME}.training"))
    config = draft.config
    card = CARD.format(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        parameters=sum(t.numel() for t in draft.tensors.values() if t.is_floating_point()),
        vocab=config.draft_vocab_size,
        target_vocab=config.vocab_size,
        layers=", ".join(map(str, config.feature_layers or ())),
        last=assets.load_target().config.num_hidden_layers,
        target=draft.record.target_name,
        fingerprint=draft.record.target_fingerprint,
        texts=len(history),
        tokens=sum(progress.tokens for progress in history),
        minutes=sum(progress.seconds for progress in history) / 60,
        processor=processor,
        depth=DEPTH,
        new_tokens=NEW_TOKENS,
        positions=" | ".join(map(str, range(1, DEPTH + 1))),
        rules="|".join(["---"] * DEPTH),
        python_prompts=python.prompts,
        python_length=python.length,
        python=" | ".join(f"{share:.2f}" for share in python.conditional),
        python_unique=python.unique_4grams,
        prose_unique=prose.unique_4grams,
        prose_prompts=prose.prompts,
        prose_length=prose.length,
        prose=" | ".join(f"{share:.2f}" for share in prose.conditional),
        version=platform.python_version(),
        machine=machine_line(assets.load_target()),
    )
    (folder / "README.md").write_text(card)
    size = sum(path.stat().st_size for path in folder.iterdir())
    everything = sum(path.stat().st_size for path in assets.FOLDER.rglob("*") if path.is_file())
    print(json.dumps({"python": python.length, "prose": prose.length}))
    print(f"{folder}: {size / 1e6:.2f} MB; all assets {everything / 1e6:.2f} MB")


if __name__ == "__main__":
    sys.exit(app())
