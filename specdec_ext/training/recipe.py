"""``train_head``: train a draft head for a target on texts, and save it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_ext.evaluate.machine import machine_line
from specdec_ext.heads.checkpoints import check_pair, load_draft, save_draft, save_medusa
from specdec_ext.heads.checkpoints.config.layouts import Layout, config_json
from specdec_ext.heads.checkpoints.pair import recorded_name
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.preflight.extras import require
from specdec_ext.preflight.outputs import writable_folder
from specdec_ext.training.data.batches import Example, Features, OnlineFeatures
from specdec_ext.training.data.dump import DumpedFeatures, DumpSize, dump_features, dump_size
from specdec_ext.training.data.fingerprint import fingerprint
from specdec_ext.training.data.vocabulary import draft_vocabulary
from specdec_ext.training.evaluation import Evaluation, HeldOut, sampled_texts
from specdec_ext.training.objectives.eagle import EagleObjective
from specdec_ext.training.objectives.medusa_heads import MedusaObjective
from specdec_ext.training.objectives.objective import Objective
from specdec_ext.training.objectives.teacher import Teacher
from specdec_ext.training.report import write_report
from specdec_ext.training.start import default_layers, new_head, new_medusa_heads
from specdec_ext.training.trainer import (
    Progress,
    Tracker,
    TrainConfig,
    check_trackers,
    has_state,
    make_accelerator,
    read_history,
    read_start,
    train,
)

Kind = Literal["eagle3", "eagle1", "mtp", "p-eagle", "medusa"]

# The fields of HeadRecipe that describe the architecture, for each kind that leaves them to choose.
_CHOICES: dict[Kind, tuple[str, ...]] = {
    "eagle3": ("layers", "draft_vocab_size", "num_layers", "intermediate_size"),
    "eagle1": ("num_layers", "intermediate_size"),
    "mtp": ("intermediate_size",),
    "p-eagle": ("layers", "draft_vocab_size", "num_layers", "intermediate_size", "mask_token_id"),
    "medusa": ("draft_vocab_size",),
}
_ARCHITECTURE = _CHOICES["p-eagle"]


@dataclass(frozen=True)
class HeadRecipe:
    """The architecture of a head and its training objective.

    Attributes:
        kind: "eagle3" (EAGLE 3.1: ``fc_norm`` and ``norm_output`` on), "eagle1", "mtp", "p-eagle" or
            "medusa". EAGLE-1 and MTP heads read the last hidden state and draft with the target's output
            head. An MTP head has one layer; Medusa heads have no decoder layer. What a kind determines must
            be left out.
        init_from: folder or hub id of a head to continue training; it then determines the architecture, and
            ``kind``, ``layers``, ``draft_vocab_size``, ``num_layers``, ``intermediate_size`` and
            ``mask_token_id`` must be left out.
        layers: feature layers; None for :func:`~specdec_ext.training.start.default_layers`.
        draft_vocab_size: the head drafts this many tokens, the most frequent ones of the texts; None for the
            whole vocabulary.
        num_layers: number of decoder layers; None for 1, or 4 for "p-eagle".
        intermediate_size: inner width of the MLPs in the decoder layers; None for the target's.
        steps: number of tokens ahead that are trained; for "medusa" the number of heads.
        decay: weight of each token's loss relative to that of the token before.
        mask_token_id: for "p-eagle", a token that texts rarely contain; None for the target's padding token.
        learn_everything: train on all tokens of the texts, including prompts, instead of the loss mask.
    """

    kind: Kind = "eagle3"
    init_from: str | None = None
    layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    num_layers: int | None = None
    intermediate_size: int | None = None
    steps: int = 4
    decay: float = 0.8
    mask_token_id: int | None = None
    learn_everything: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}; expected one of {', '.join(get_args(Kind))}")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected at least 1")
        given = [name for name in _ARCHITECTURE if getattr(self, name) is not None]
        if self.init_from is not None and (given or self.kind != "eagle3"):
            names = ", ".join([*given, *(["kind"] if self.kind != "eagle3" else [])])
            raise ValueError(
                f"init_from={self.init_from!r} already determines {names}; leave them out"
            )
        if fixed := [name for name in given if name not in _CHOICES[self.kind]]:
            choices = ", ".join(_CHOICES[self.kind])
            raise ValueError(
                f"kind={self.kind!r} determines {', '.join(fixed)}: leave out {', '.join(fixed)}; of the "
                f"architecture, it leaves {choices} to choose"
            )


def train_head(
    model: PreTrainedModel,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    out: str | Path,
    recipe: HeadRecipe,
    config: TrainConfig,
    *,
    work: str | Path | None = None,
    dump: str | Path | None = None,
    layout: Layout | None = None,
    target_name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    old_held_out: Sequence[Example] = (),
    trackers: Sequence[Tracker] = (),
    on_start: Callable[[Evaluation, Evaluation | None], None] = lambda new, old: None,
    on_step: Callable[[Progress], None] = lambda progress: None,
    on_dump: Callable[[DumpSize], None] = lambda size: None,
) -> DraftHead | MedusaHeads:
    """Train a head for ``model`` and save it in bfloat16.

    Args:
        model: the target, on the device to train on.
        examples: the training texts.
        held_out: texts for estimates of the acceptance length during training; may be empty.
        out: folder of the head. A checkpoint there is replaced only if it is from the same run.
        recipe: architecture and objective.
        config: how to train.
        work: folder of the run. It holds the state for resuming, ``history.jsonl``, ``report.html``,
            ``evaluation.json`` and ``sampled.jsonl`` (texts that the target sampled for the estimates). By
            default ``out`` with ".training" appended.
        dump: folder for the target's hidden states, which are then computed once; None computes them in every
            step.
        layout: layout of the files: "eagle" (SafeAILab, SGLang, vLLM) or "speculators" (vLLM). By default
            "eagle" if it can express the head. Must be None for Medusa heads, which are written in the
            authors' layout, or in vLLM's if they draft only a part of the vocabulary.
        target_name: name of the target in the checkpoint, instead of the model's own name. The target's
            revision and the fingerprint of its weights are recorded as well.
        tokenizer: the target's tokenizer; its fingerprint is recorded.
        old_held_out: texts of the domain that ``recipe.init_from`` was trained for, to measure what the head
            forgets. To train on such texts as well, mix them into ``examples``
            (:func:`specdec_ext.training.data.mixture.mixed`).
        trackers: names of trackers that accelerate knows ("tensorboard", "wandb", ...), or its
            ``GeneralTracker`` objects; they get losses and estimates of every step.
        on_start: called before the first step with the estimates on ``held_out`` and ``old_held_out``.
        on_step: called after every step.
        on_dump: called with the size of the dump before it is written.

    Returns:
        The head, in float32.

    Raises:
        ValueError: for a head that can't be trained or saved; raised before the training.
        OSError: for folders that can't be written; raised before the training.
    """
    out, work = check_outputs(out, work, dump)
    check_trackers(trackers)
    reported = True
    try:
        require("matplotlib", "report.html")
    except ImportError as error:
        reported = False
        warnings.warn(f"report.html will not be written: {error}", stacklevel=2)
    teacher = Teacher(model)
    objective, layers = make_objective(model, examples, recipe)
    objective.to(model.device)
    recorded = {"target": model, "target_name": target_name, "tokenizer": tokenizer}
    save = _saver(objective.trained(), layout, recorded)
    if recipe.learn_everything:
        everything = [Example(each.tokens, torch.ones_like(each.loss_mask)) for each in examples]
        examples = everything
    online = OnlineFeatures(model, layers)
    features: Features = online
    evaluated = HeldOut(held_out, (), old_held_out, online)
    with main_process_first(model.device) as is_main:
        if dump is not None and is_main:
            texts = [*examples, *held_out, *old_held_out]
            on_dump(dump_size(model, layers, texts, dump))
            features = dump_features(model, layers, texts, dump)
        elif dump is not None:
            features = DumpedFeatures(model, layers, dump)
        if held_out and is_main:  # only the main process evaluates
            sampled = sampled_texts(model, held_out, work / "sampled.jsonl", config.seed)
            evaluated = replace(evaluated, sampled=sampled)
    target = fingerprint(model)
    train(
        objective,
        features,
        teacher,
        examples,
        evaluated,
        work,
        config,
        on_step,
        target,
        on_start,
        trackers,
    )
    trained: DraftHead | MedusaHeads = objective.trained()
    with main_process_first(model.device) as is_main:
        if is_main:
            save(out, trained.to("cpu", torch.bfloat16))
            history = read_history(work)
            if history[-1].evaluation is not None:
                text = json.dumps(asdict(history[-1].evaluation), indent=2)
                (work / "evaluation.json").write_text(text + "\n")
            if reported:
                name = target_name or recorded_name(model) or type(model).__name__
                settings = {**asdict(recipe), **asdict(config)}
                _report(work, f"Draft head for {name}", history, settings, model)
    return trained.to("cpu", torch.float32)


def check_outputs(
    out: str | Path, work: str | Path | None = None, dump: str | Path | None = None
) -> tuple[Path, Path]:
    """Check that :func:`train_head` can write to these folders; return ``out`` and ``work``.

    Args:
        out, work, dump: as in :func:`train_head`.

    Raises:
        OSError: for a folder that can't be written.
        ValueError: if ``out`` holds a checkpoint of another run, which would be replaced.
    """
    out = Path(out)
    work = Path(work) if work is not None else out.with_name(f"{out.name}.training")
    named = {"out": out, "work": work, "dump": None if dump is None else Path(dump)}
    for name, folder in named.items():
        if folder is not None:
            writable_folder(folder, name)
    if (out / "config.json").exists() and not has_state(work):
        raise ValueError(
            f"{out} holds a checkpoint, which would be replaced, and {work} has no state of a run to resume; "
            "pass another folder"
        )
    return out, work


def _report(
    work: Path,
    title: str,
    history: Sequence[Progress],
    settings: dict[str, Any],
    model: PreTrainedModel,
) -> None:
    """Write the report; an error is only a warning, because the head is saved already."""
    path = work / "report.html"
    try:
        start, machine = read_start(work), machine_line(model.device)
        write_report(path, title, history, start, settings, machine)
    except Exception as error:
        warnings.warn(f"the head is saved, but {path} can't be written: {error}", stacklevel=3)


def make_objective(
    model: PreTrainedModel, examples: Sequence[Example], recipe: HeadRecipe
) -> tuple[Objective, tuple[int, ...]]:
    """Make the objective of a recipe; return it with the feature layers.

    Raises:
        ValueError: for a head that does not match the target.
    """
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    config: Any = model.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    if recipe.init_from is not None:
        draft = load_draft(recipe.init_from).to("cpu", torch.float32)
        check_pair(draft, model)
    else:
        ids = None
        vocab_size = len(output.weight)
        if recipe.draft_vocab_size not in (None, vocab_size):
            ids = draft_vocabulary(examples, recipe.draft_vocab_size, vocab_size)
        if recipe.kind == "medusa":
            draft = new_medusa_heads(model, recipe.steps, ids)
        elif recipe.kind == "eagle1" or recipe.kind == "mtp":
            draft = new_head(
                model,
                kind=recipe.kind,
                num_layers=recipe.num_layers or 1,
                intermediate_size=recipe.intermediate_size,
            )
        else:
            parallel = recipe.kind == "p-eagle"
            draft = new_head(
                model,
                recipe.layers or default_layers(depth),
                ids,
                num_layers=recipe.num_layers or (4 if parallel else 1),
                intermediate_size=recipe.intermediate_size,
                mask_token_id=_mask_token(recipe, config) if parallel else None,
            )
    if isinstance(draft, MedusaHeads):
        return MedusaObjective(draft, recipe.decay), ()
    shared, rows = (each.weight.detach().float() for each in (embedding, output))
    objective = EagleObjective(draft, shared, rows, recipe.steps, recipe.decay)
    return objective, draft.config.resolved_feature_layers(depth)


def _mask_token(recipe: HeadRecipe, config: Any) -> int:
    token = recipe.mask_token_id if recipe.mask_token_id is not None else config.pad_token_id
    if token is None:
        raise ValueError(
            "the target has no padding token; pass mask_token_id, a token that texts rarely contain"
        )
    return int(token)


def _saver(
    draft: Any,
    layout: Layout | None,
    recorded: dict[str, Any],
) -> Callable[[Path, Any], object]:
    """Return the function that saves the trained weights; refuse a layout that can't express them now."""
    if isinstance(draft, MedusaHeads):
        if layout is not None:
            raise ValueError(
                f"layout={layout!r} is a layout of EAGLE heads; leave it out for Medusa heads"
            )
        whole = draft.config.draft_vocab_size == draft.config.vocab_size
        return lambda folder, heads: save_medusa(
            heads, folder, layout="medusa" if whole else "vllm", **recorded
        )
    if layout is None:
        try:
            config_json(draft.config, draft.record, "eagle")
            layout = "eagle"
        except ValueError:
            layout = "speculators"
    config_json(draft.config, draft.record, layout)
    chosen: Layout = layout
    return lambda folder, head: save_draft(head, folder, layout=chosen, **recorded)


@contextmanager
def main_process_first(device: torch.device) -> Iterator[bool]:
    """Run the context in the main process first, then in the others; yield whether this is the main one."""
    accelerator = make_accelerator(device)
    with accelerator.main_process_first():
        yield accelerator.is_main_process
