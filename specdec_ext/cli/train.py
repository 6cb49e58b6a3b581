"""``specdec train``: make a draft head for a target from texts or chats."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specdec_ext.cli._common import (
    DeviceOption,
    Dtype,
    DtypeOption,
    Model,
    find_device,
    load_target,
    user_errors,
)
from specdec_ext.cli._console import PlainConsole
from specdec_ext.preflight.inputs import regular_file
from specdec_ext.preflight.outputs import writable_folder

if TYPE_CHECKING:
    from specdec_ext.training.batches import Example
    from specdec_ext.training.evaluation import Evaluation
    from specdec_ext.training.records import Record
    from specdec_ext.training.trainer import Progress as Trained

BUNDLED = "bundled"
_SMOOTHED_OVER = 20


class HeadKind(str, Enum):
    """What is trained."""

    eagle3 = "eagle3"
    p_eagle = "p-eagle"
    medusa = "medusa"


class HeadLayout(str, Enum):
    """Of the files that are written."""

    eagle = "eagle"
    speculators = "speculators"


class Optimizer(str, Enum):
    """What trains it."""

    muon = "muon"
    adamw = "adamw"


def train(
    model: Annotated[
        str, typer.Argument(help="Folder or hub id of the target; 'bundled' for the bundled one.")
    ],
    data: Annotated[
        list[Path],
        typer.Option("--data", help="Texts or chats: .txt, .json, .jsonl; may be repeated."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the head.")],
    kind: Annotated[HeadKind, typer.Option(help="eagle3 makes EAGLE 3.1 heads.")] = HeadKind.eagle3,
    init_from: Annotated[
        str | None, typer.Option(help="Adapt this head: a folder or hub id.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Texts to estimate on; by default one in fifty of the data is kept for that."
        ),
    ] = None,
    old_held_out: Annotated[
        Path | None,
        typer.Option(
            help="With --init-from: texts of what the head was made for; estimates on them tell what it "
            "forgets."
        ),
    ] = None,
    regenerate: Annotated[
        Path | None,
        typer.Option(help="Let the target write the answers anew, and keep them in this file."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Of an answer, with --regenerate.")
    ] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Of answers, with --regenerate.")] = 0.0,
    text_column: Annotated[
        str | None, typer.Option(help="Where texts are, if not in 'text'.")
    ] = None,
    messages_column: Annotated[
        str | None, typer.Option(help="Where chats are, if not in 'messages' or 'conversations'.")
    ] = None,
    learn_everything: Annotated[
        bool, typer.Option("--learn-everything", help="Learn from prompts as well as answers.")
    ] = False,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a text.")] = 512,
    layers: Annotated[
        str | None,
        typer.Option(help="Tapped hidden states, such as 2,16,29; i is the input of layer i."),
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="Draft only the most frequent tokens; all by default.")
    ] = None,
    decoder_layers: Annotated[
        int | None, typer.Option(min=1, help="Of the head; by default 1, of p-eagle 4.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Tokens ahead to train; heads of medusa.")] = 4,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Steps of the optimiser; by default one epoch.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per step and process.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 1e-2,
    optimizer: Annotated[
        Optimizer, typer.Option(help="Muon has AdamW beside it.")
    ] = Optimizer.muon,
    decay: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the steps in which the rate falls.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the new weights and the order of the texts.")] = 0,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between two estimates.")] = 200,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two saved states.")] = 100,
    work: Annotated[
        Path | None, typer.Option(help="State, history and plot; OUT.training by default.")
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(help="Compute the target's hidden states once, and keep them in this folder."),
    ] = None,
    layout: Annotated[
        HeadLayout | None, typer.Option(help="By default eagle, if it can express the head.")
    ] = None,
    dtype: DtypeOption = Dtype.bfloat16,
    device: DeviceOption = "auto",
) -> None:
    """Train a draft head; call it again to go on where it was stopped.

    Several processes: accelerate launch --module specdec_ext.cli train ...
    """
    console = PlainConsole()
    with user_errors("--device"):
        found = find_device(device)
    with user_errors():
        accelerator, place = _accelerator(str(found))
        from specdec_ext.training import recipe as recipes
        from specdec_ext.training.trainer import TrainConfig

        recipe = recipes.HeadRecipe(
            kind=kind.value,
            init_from=init_from,
            layers=_numbers(layers),
            draft_vocab_size=draft_vocab,
            num_layers=decoder_layers,
            steps=steps,
            learn_everything=learn_everything,
        )
        config = TrainConfig(
            updates=updates or 1,  # until the texts are counted
            batch_size=batch_size,
            learning_rate=learning_rate,
            optimizer=optimizer.value,
            decay=decay,
            seed=seed,
            evaluate_every=evaluate_every,
            save_every=save_every,
        )
        _check_files([*data, held_out, old_held_out], regenerate)
        recipes.check_outputs(out, work, dump)
        target, tokenizer = load_target(None if model == BUNDLED else model, dtype, place)
        answers = None
        if regenerate is not None:
            answers = _Answers(regenerate, target, max_new_tokens, temperature, seed, console)
        vocab_size = target.get_input_embeddings().num_embeddings
        texts = _Texts(tokenizer, max_length, text_column, messages_column, vocab_size, answers)
        with accelerator.main_process_first():  # which writes what the others then find in files
            examples, kept, old = texts.read(data, held_out, old_held_out)
        if updates is None:
            epoch = max(1, len(examples) // (batch_size * accelerator.num_processes))
            config = replace(config, updates=epoch)
        if accelerator.is_main_process:
            _print_texts(console, examples, kept)
        with _Shown(console, config.updates) as shown:
            recipes.train_head(
                target,
                examples,
                kept,
                out,
                recipe,
                config,
                work=work,
                dump=dump,
                layout=None if layout is None else layout.value,
                tokenizer=tokenizer,
                old_held_out=old,
                on_start=shown.start,
                on_step=shown,
                on_dump=lambda size: console.print(f"hidden states: {size}", soft_wrap=True),
            )
    if accelerator.is_main_process:
        console.print(f"saved to {out}", soft_wrap=True)


def _accelerator(device: str) -> tuple[Any, str]:
    """accelerate, and the device of this process: of several on "cuda" each has its own."""
    import torch

    from specdec_ext.training.trainer import make_accelerator

    accelerator = make_accelerator(torch.device(device))
    return accelerator, str(accelerator.device) if device == "cuda" else device


def _check_files(texts: list[Path | None], answers: Path | None) -> None:
    """Before a target is read, and answers for hours, what they would be wasted on."""
    for path in texts:
        if path is not None:
            regular_file(path, "a file of texts")
    if answers is not None:
        writable_folder(answers.parent, "--regenerate")
        if answers.exists():
            regular_file(answers, "a file that --regenerate wrote")


def _numbers(given: str | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError as error:
        raise ValueError(f"--layers {given!r}; expected numbers such as 2,16,29") from error


@dataclass
class _Answers:
    """How the target answers the prompts of the texts."""

    file: Path
    target: Model
    max_new_tokens: int
    temperature: float
    seed: int
    console: PlainConsole

    def __call__(self, records: list[Record], tokenizer: Any, max_length: int) -> list[Example]:
        from specdec_ext.training.data import prompts
        from specdec_ext.training.regenerate import regenerate

        longest = max(1, max_length - self.max_new_tokens)
        lengths = min(16, longest), min(256, longest)
        with self.console.status("the target answers") as status:
            return regenerate(
                self.target,
                prompts(records, tokenizer, lengths=lengths, seed=self.seed),
                self.file,
                max_new_tokens=self.max_new_tokens,
                max_length=max_length,
                tokenizer=tokenizer,
                temperature=self.temperature,
                seed=self.seed,
                progress=lambda done: status.update(
                    f"the target answers: {done.prompts} of {done.total}, {done.tokens:,} tokens"
                ),
            )


@dataclass
class _Texts:
    """How the files of a command line are read."""

    tokenizer: Any
    max_length: int
    text_column: str | None
    messages_column: str | None
    vocab_size: int  # of the target
    answers: _Answers | None

    def read(
        self, data: list[Path], held_out: Path | None, old_held_out: Path | None
    ) -> tuple[list[Example], list[Example], list[Example]]:
        """Examples to learn from, to estimate on, and to tell on what is forgotten."""
        from specdec_ext.training.records import split_records

        records = [record for path in data for record in self._records(path)]
        if held_out is None:
            records, kept = split_records(records)
        else:
            kept = self._records(held_out)
        old = [] if old_held_out is None else self._examples(self._records(old_held_out))
        return self._examples(records), self._examples(kept), old

    def _records(self, path: Path) -> list[Record]:
        from specdec_ext.training.records import read_records

        columns = {"text_column": self.text_column, "messages_column": self.messages_column}
        return read_records(path, **columns, vocab_size=self.vocab_size)

    def _examples(self, records: list[Record]) -> list[Example]:
        from specdec_ext.training.data import encode

        if self.answers is not None:
            return self.answers(records, self.tokenizer, self.max_length)
        return encode(records, self.tokenizer, max_length=self.max_length)


def _print_texts(console: PlainConsole, examples: list[Example], kept: list[Example]) -> None:
    tokens = sum(len(each.tokens) for each in examples)
    learnt = sum(int(each.loss_mask.sum()) for each in examples)
    console.print(
        f"{len(examples):,} texts, {tokens:,} tokens, of which {learnt:,} are in the loss mask; "
        f"{len(kept):,} texts to estimate on",
        soft_wrap=True,
    )


class _Shown:
    """A bar, or where there is no terminal a line per estimate."""

    def __init__(self, console: PlainConsole, updates: int):
        self._console = console
        self._recent: deque[Trained] = deque(maxlen=_SMOOTHED_OVER)
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=updates)

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, progress: Trained) -> None:
        self._recent.append(progress)
        curves = zip(*(p.losses for p in self._recent), strict=True)
        losses = [sum(values) / len(self._recent) for values in curves]
        rate = sum(p.tokens for p in self._recent) / sum(p.seconds for p in self._recent)
        state = f"loss {losses[0]:.3f} .. {losses[-1]:.3f}, {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=progress.step, description=state)
        if progress.evaluation is not None:
            self._print(
                f"step {progress.step}: {state}", progress.evaluation, progress.old_evaluation
            )

    def start(self, found: Evaluation, old: Evaluation | None) -> None:
        """What the weights are worth before the first step."""
        self._print("step 0", found, old)

    def _print(self, when: str, found: Evaluation, old: Evaluation | None) -> None:
        by_position = " ".join(f"{share:.2f}" for share in found.conditional)
        sampled = ""
        if found.sampled:
            sampled = f", {found.sampled_acceptance_length:.2f} sampled at temperature 1"
        forgotten = "" if old is None else f"; old texts: {old.acceptance_length:.2f} greedy"
        self._console.print(
            f"{when}; held out: mean acceptance length {found.acceptance_length:.2f} greedy{sampled}; "
            f"by position {by_position}{forgotten}",
            soft_wrap=True,
        )
