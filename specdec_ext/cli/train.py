"""``specdec train``: train a draft head for a target on texts or chats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specdec_ext.cli.shared.common import (
    DeviceOption,
    DtypeOption,
    Model,
    find_device,
    load_target,
    user_errors,
)
from specdec_ext.cli.shared.recipe import RecipeOption, recipe_of
from specdec_ext.display import disable_progress
from specdec_ext.display.console import PlainConsole
from specdec_ext.display.progress import paused
from specdec_ext.preflight.inputs import regular_file
from specdec_ext.preflight.outputs import writable_folder

if TYPE_CHECKING:
    from specdec_ext.training.data.batches import Example
    from specdec_ext.training.data.records import Record
    from specdec_ext.training.evaluation import Evaluation
    from specdec_ext.training.trainer import Progress as Trained


def train(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Folder or hub id of the target; 'bundled' for the bundled model.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            help="File of training texts or chats: .txt, .json, .jsonl, .parquet; may be repeated. "
            "hf://datasets/ORG/NAME/FILE is a file on the hub.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write the head to.")],
    recipe: RecipeOption = None,
    kind: Annotated[
        Literal["eagle3", "eagle1", "mtp", "p-eagle", "medusa"],
        typer.Option(help="Kind of head; eagle3 makes EAGLE 3.1 heads."),
    ] = "eagle3",
    init_from: Annotated[
        str | None,
        typer.Option(
            help="Start from this trained head (folder or hub id), not from random weights."
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            help="Texts to evaluate on; default: one text in fifty of the data is held out."
        ),
    ] = None,
    old_data: Annotated[
        list[str],
        typer.Option(
            "--old-data",
            help="Texts of the domain that the head of --init-from was trained for; a share of them is mixed "
            "in, so that it forgets less. May be repeated.",
        ),
    ] = [],  # noqa: B006 -- typer copies it
    old_share: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of --old-data among the training texts.")
    ] = 0.25,
    old_held_out: Annotated[
        str | None,
        typer.Option(
            help="Texts of that domain to evaluate on, which shows what the head forgets; default: one text "
            "in fifty of --old-data is held out."
        ),
    ] = None,
    regenerate: Annotated[
        Path | None,
        typer.Option(help="Replace the answers by the target's own and save them in this file."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of an answer, for --regenerate.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of answers, for --regenerate.")
    ] = 0.0,
    text_column: Annotated[
        str | None, typer.Option(help="Column of the texts; default: 'text'.")
    ] = None,
    messages_column: Annotated[
        str | None,
        typer.Option(help="Column of the chats; default: 'messages' or 'conversations'."),
    ] = None,
    learn_everything: Annotated[
        bool, typer.Option("--learn-everything", help="Train on prompts as well as on answers.")
    ] = False,
    max_length: Annotated[int, typer.Option(min=2, help="Maximum tokens of a text.")] = 512,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Target layers whose hidden states the head reads, such as 2,16,29; i is the input of "
            "layer i."
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(min=1, help="Draft only this many most frequent tokens; default: all tokens."),
    ] = None,
    decoder_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Decoder layers of the head; default: 1, for p-eagle 4."),
    ] = None,
    intermediate_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Inner width of the MLPs in the head's layers; default: the target's."
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Draft tokens per position to train on; for medusa, number of heads."
        ),
    ] = 4,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Number of optimizer steps; default: one epoch.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per step and process.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-2,
    optimizer: Annotated[
        Literal["muon", "adamw"],
        typer.Option(
            help="muon: Muon for the matrices of the layers, AdamW for all other weights."
        ),
    ] = "muon",
    decay: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the steps, at the end, in which the learning rate decays."
        ),
    ] = 0.5,
    seed: Annotated[
        int, typer.Option(help="Seed of the initial weights and of the order of the texts.")
    ] = 0,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 200,
    save_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints of the training state.")
    ] = 100,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of the training state, history and plot; default: OUT.training."),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(
            help="Compute the target's hidden states once and store them in this folder; default: compute "
            "them in every step."
        ),
    ] = None,
    track: Annotated[
        list[str],
        typer.Option(
            "--track",
            help="Tracker of losses and estimates: tensorboard, wandb, ...; may be repeated.",
        ),
    ] = [],  # noqa: B006
    layout: Annotated[
        Literal["eagle", "speculators"] | None,
        typer.Option(help="Format of the head's files; default: eagle if it can express the head."),
    ] = None,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
) -> None:
    """Train a draft head; the same command resumes a run that was stopped.

    For several processes: accelerate launch --module specdec_ext.cli train ...
    The options of a run are saved in recipe.yaml, in the folder of its history.
    """
    console = PlainConsole()
    with user_errors("--device"):
        found = find_device(device)
    with user_errors():
        accelerator, place = _accelerator(str(found))
        if not accelerator.is_main_process:
            disable_progress()
        from specdec_ext.training import recipe as recipes
        from specdec_ext.training.data.hub import local_file
        from specdec_ext.training.data.mixture import mixed
        from specdec_ext.training.trainer import TrainConfig, check_trackers

        architecture = recipes.HeadRecipe(
            kind=kind,
            init_from=init_from,
            layers=_numbers(layers),
            draft_vocab_size=draft_vocab,
            num_layers=decoder_layers,
            intermediate_size=intermediate_size,
            steps=steps,
            learn_everything=learn_everything,
        )
        config = TrainConfig(
            updates=updates or 1,  # replaced by one epoch once the texts are counted
            batch_size=batch_size,
            learning_rate=learning_rate,
            optimizer=optimizer,
            decay=decay,
            seed=seed,
            evaluate_every=evaluate_every,
            save_every=save_every,
        )
        if init_from is None and (old_data or old_held_out):
            raise ValueError("--old-data and --old-held-out are for a head of --init-from; add it")
        check_trackers(track)
        paths, old_paths = ([local_file(each) for each in given] for given in (data, old_data))
        kept_path, old_kept_path = (
            None if each is None else local_file(each) for each in (held_out, old_held_out)
        )
        _check_answers(regenerate)
        _, folder = recipes.check_outputs(out, work, dump)
        target, tokenizer = load_target(model, dtype, place)
        answers = None
        if regenerate is not None:
            answers = _Answers(regenerate, target, max_new_tokens, temperature, seed)
        vocab_size = target.get_input_embeddings().num_embeddings
        texts = _Texts(tokenizer, max_length, text_column, messages_column, vocab_size, answers)
        # The main process writes the answers to a file, which the others then read.
        with accelerator.main_process_first():
            examples, kept = texts.read(paths, kept_path)
            old, old_kept = texts.read(old_paths, old_kept_path)
        if old:
            examples = mixed(examples, old, old_share)
        if updates is None:
            epoch = max(1, len(examples) // (batch_size * accelerator.num_processes))
            config = replace(config, updates=epoch)
        if accelerator.is_main_process:
            _print_texts(console, examples, kept)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "recipe.yaml").write_text(recipe_of(context))
        history = _History(console)
        recipes.train_head(
            target,
            examples,
            kept,
            out,
            architecture,
            config,
            work=work,
            dump=dump,
            layout=layout,
            tokenizer=tokenizer,
            old_held_out=old_kept,
            trackers=track,
            on_start=history.start,
            on_step=history,
            on_dump=lambda size: console.print(f"hidden states: {size}", soft_wrap=True),
        )
    if accelerator.is_main_process:
        console.print(f"saved to {out}", soft_wrap=True)


def _accelerator(device: str) -> tuple[Any, str]:
    """Return accelerate's Accelerator and this process's device; on "cuda" every process has its own."""
    import torch

    from specdec_ext.training.trainer import make_accelerator

    accelerator = make_accelerator(torch.device(device))
    return accelerator, str(accelerator.device) if device == "cuda" else device


def _check_answers(path: Path | None) -> None:
    """Check the file of answers before the target is loaded and generates them, which may take hours."""
    if path is not None:
        writable_folder(path.parent, "--regenerate")
        if path.exists():
            regular_file(path, "a file that --regenerate wrote")


def _numbers(given: str | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError as error:
        raise ValueError(f"--layers {given!r}; expected numbers such as 2,16,29") from error


@dataclass
class _Answers:
    """Lets the target answer the prompts of the texts, for ``--regenerate``."""

    file: Path
    target: Model
    max_new_tokens: int
    temperature: float
    seed: int

    def __call__(self, records: list[Record], tokenizer: Any, max_length: int) -> list[Example]:
        from specdec_ext.training.data.examples import prompts
        from specdec_ext.training.data.regenerate import regenerate

        longest = max(1, max_length - self.max_new_tokens)
        lengths = min(16, longest), min(256, longest)
        return regenerate(
            self.target,
            prompts(records, tokenizer, lengths=lengths, seed=self.seed),
            self.file,
            max_new_tokens=self.max_new_tokens,
            max_length=max_length,
            tokenizer=tokenizer,
            temperature=self.temperature,
            seed=self.seed,
        )


@dataclass
class _Texts:
    """Reads the files of the command line into training examples."""

    tokenizer: Any
    max_length: int
    text_column: str | None
    messages_column: str | None
    vocab_size: int  # of the target
    answers: _Answers | None

    def read(self, data: list[Path], held_out: Path | None) -> tuple[list[Example], list[Example]]:
        """Return the examples to train on and to evaluate on; without ``held_out`` a part of the data."""
        from specdec_ext.training.data.records import split_records

        records = [record for path in data for record in self._records(path)]
        kept = [] if held_out is None else self._records(held_out)
        if records and held_out is None:
            records, kept = split_records(records)
        return self._examples(records), self._examples(kept)

    def _records(self, path: Path) -> list[Record]:
        from specdec_ext.training.data.records import read_records

        columns = {"text_column": self.text_column, "messages_column": self.messages_column}
        return read_records(path, **columns, vocab_size=self.vocab_size)

    def _examples(self, records: list[Record]) -> list[Example]:
        from specdec_ext.training.data.examples import encode

        if not records:
            return []
        if self.answers is not None:
            return self.answers(records, self.tokenizer, self.max_length)
        return encode(records, self.tokenizer, max_length=self.max_length)


def _print_texts(console: PlainConsole, examples: list[Example], kept: list[Example]) -> None:
    tokens = sum(len(each.tokens) for each in examples)
    learnt = sum(int(each.loss_mask.sum()) for each in examples)
    console.print(
        f"{len(examples):,} texts, {tokens:,} tokens, of which {learnt:,} are in the loss mask; "
        f"{len(kept):,} texts to evaluate on",
        soft_wrap=True,
    )


class _History:
    """Prints one line per evaluation."""

    def __init__(self, console: PlainConsole):
        self._console = console
        self._recent: list[Trained] = []

    def start(self, found: Evaluation, old: Evaluation | None) -> None:
        """Print the evaluation of the initial weights."""
        self._print("step 0", found, old)

    def __call__(self, progress: Trained) -> None:
        from specdec_ext.training.trainer import SMOOTHED_OVER, trend

        self._recent = [*self._recent, progress][-SMOOTHED_OVER:]
        if progress.evaluation is not None:
            when = f"step {progress.step}: {trend(self._recent)}"
            self._print(when, progress.evaluation, progress.old_evaluation)

    def _print(self, when: str, found: Evaluation, old: Evaluation | None) -> None:
        forgotten = "" if old is None else f"; old texts: {old.acceptance_length:.2f} greedy"
        with paused():
            self._console.print(f"{when}; held out: {found}{forgotten}", soft_wrap=True)
