"""``train_head``: from a target and texts to a saved draft head, in one call."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_ext.heads.checkpoints import check_pair, load_draft, save_draft, save_medusa
from specdec_ext.heads.checkpoints.layouts import Layout, config_json
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.preflight.extras import missing
from specdec_ext.preflight.outputs import writable_folder
from specdec_ext.training.batches import Example, Features, OnlineFeatures
from specdec_ext.training.dump import DumpedFeatures, DumpSize, dump_features, dump_size
from specdec_ext.training.eagle import EagleObjective
from specdec_ext.training.evaluation import Evaluation, HeldOut, sampled_texts
from specdec_ext.training.fingerprint import fingerprint
from specdec_ext.training.medusa_heads import MedusaObjective
from specdec_ext.training.objective import Objective
from specdec_ext.training.plot import plot_history
from specdec_ext.training.start import default_layers, new_head, new_medusa_heads
from specdec_ext.training.teacher import Teacher
from specdec_ext.training.trainer import (
    Progress,
    TrainConfig,
    has_state,
    make_accelerator,
    read_history,
    train,
)
from specdec_ext.training.vocabulary import draft_vocabulary

Kind = Literal["eagle3", "p-eagle", "medusa"]


@dataclass(frozen=True)
class HeadRecipe:
    """The head to make.

    Attributes:
        kind: "eagle3" (EAGLE 3.1: ``fc_norm`` and ``norm_output`` on), "p-eagle" or "medusa".
        init_from: folder or hub id of a head to go on from, which then decides everything but ``steps``.
        layers: tapped hidden states; None for :func:`~specdec_ext.training.start.default_layers`.
        draft_vocab_size: most frequent tokens of the texts that are drafted; None for all.
        num_layers: decoder layers; None for 1, or 4 of "p-eagle".
        steps: tokens ahead that are trained; of "medusa" the number of heads.
        decay: weight of a token's loss to that of the one before.
        mask_token_id: of "p-eagle": a token that texts hardly use; None for the target's padding token.
        learn_everything: all tokens of the texts count, prompts included, not those of the loss mask only.
    """

    kind: Kind = "eagle3"
    init_from: str | None = None
    layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    num_layers: int | None = None
    steps: int = 4
    decay: float = 0.8
    mask_token_id: int | None = None
    learn_everything: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("eagle3", "p-eagle", "medusa"):
            raise ValueError(f"kind={self.kind!r}; expected 'eagle3', 'p-eagle' or 'medusa'")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected at least 1")
        fixed = ("layers", "draft_vocab_size", "num_layers", "mask_token_id")
        given = [name for name in fixed if getattr(self, name) is not None]
        if self.init_from is not None and (given or self.kind != "eagle3"):
            names = ", ".join([*given, *(["kind"] if self.kind != "eagle3" else [])])
            raise ValueError(f"init_from={self.init_from!r} decides {names}; leave them out")


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
    on_start: Callable[[Evaluation, Evaluation | None], None] = lambda new, old: None,
    on_step: Callable[[Progress], None] = lambda progress: None,
    on_dump: Callable[[DumpSize], None] = lambda size: None,
) -> DraftHead | MedusaHeads:
    """Train a head for ``model`` and save it in bfloat16.

    Args:
        model: the target, on the device to train on.
        examples: texts to learn from.
        held_out: texts for the early estimate of the acceptance length; may be empty.
        out: folder of the head; a checkpoint there is replaced by that of its own run alone.
        recipe: what to make.
        config: how to train it.
        work: folder of the state of the run, by which it is resumed, of ``history.jsonl``,
            ``history.png``, ``evaluation.json`` and ``sampled.jsonl``, texts that the target drew to be
            estimated on; ``out`` with ".training" added by default.
        dump: folder for the target's hidden states, which are computed once; None computes them in each step.
        layout: of the files: "eagle" (SafeAILab, SGLang, vLLM) or "speculators" (vLLM); by default the former
            where it can express the head. Medusa heads have one for vLLM where their vocabulary is a part.
        target_name: written into the checkpoint, with the target's revision and the fingerprint of its
            weights, in place of the name that it has.
        tokenizer: likewise its fingerprint.
        old_held_out: texts of the domain that ``recipe.init_from`` was made for, to tell what it forgets.
        on_start: told the estimates before the first step, on ``held_out`` and on ``old_held_out``.
        on_step: told of every step.
        on_dump: told what a dump takes before it is written.

    Returns:
        The head, in float32.

    Raises:
        ValueError: for what can't be trained or saved, before any training.
        OSError: likewise for folders that can't be written.
    """
    out, work = check_outputs(out, work, dump)
    if (no_plot := missing("matplotlib", "history.png")) is not None:
        warnings.warn(f"the run will have no plot: {no_plot}", stacklevel=2)
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
    judges = HeldOut(held_out, (), old_held_out, online)
    with main_process_first(model.device) as is_main:
        if dump is not None and is_main:
            texts = [*examples, *held_out, *old_held_out]
            on_dump(dump_size(model, layers, texts, dump))
            features = dump_features(model, layers, texts, dump)
        elif dump is not None:
            features = DumpedFeatures(model, layers, dump)
        if held_out and is_main:  # which judges
            sampled = sampled_texts(model, held_out, work / "sampled.jsonl", config.seed)
            judges = replace(judges, sampled=sampled)
    target = fingerprint(model)
    train(objective, features, teacher, examples, judges, work, config, on_step, target, on_start)
    trained: DraftHead | MedusaHeads = objective.trained()
    with main_process_first(model.device) as is_main:
        if is_main:
            save(out, trained.to("cpu", torch.bfloat16))
            history = read_history(work)
            if history[-1].evaluation is not None:
                text = json.dumps(asdict(history[-1].evaluation), indent=2)
                (work / "evaluation.json").write_text(text + "\n")
            if no_plot is None:
                _draw(history, work / "history.png")
    return trained.to("cpu", torch.float32)


def check_outputs(
    out: str | Path, work: str | Path | None = None, dump: str | Path | None = None
) -> tuple[Path, Path]:
    """The folders of the head and of its run, if :func:`train_head` can write there.

    Args:
        out, work, dump: as there.

    Raises:
        OSError: for a folder that can't be written.
        ValueError: for a checkpoint that would be replaced by something else than the end of its own run.
    """
    out = Path(out)
    work = Path(work) if work is not None else out.with_name(f"{out.name}.training")
    named = {"out": out, "work": work, "dump": None if dump is None else Path(dump)}
    for name, folder in named.items():
        if folder is not None:
            writable_folder(folder, name)
    if (out / "config.json").exists() and not has_state(work):
        raise ValueError(
            f"{out} holds a checkpoint, which would be replaced, and {work} has no state of a run to go on "
            "with; name another folder"
        )
    return out, work


def _draw(history: Sequence[Progress], path: Path) -> None:
    """Whatever is wrong with a plot, the head is saved."""
    try:
        plot_history(history, path)
    except Exception as error:
        warnings.warn(f"the head is saved, and {path} can't be drawn: {error}", stacklevel=3)


def make_objective(
    model: PreTrainedModel, examples: Sequence[Example], recipe: HeadRecipe
) -> tuple[Objective, tuple[int, ...]]:
    """``(objective, tapped layers)`` of a recipe.

    Raises:
        ValueError: for a head that does not fit the target.
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
            ids = draft_vocabulary(examples, recipe.draft_vocab_size, vocab_size).ids
        if recipe.kind == "medusa":
            draft = new_medusa_heads(model, recipe.steps, ids)
        else:
            parallel = recipe.kind == "p-eagle"
            draft = new_head(
                model,
                recipe.layers or default_layers(depth),
                ids,
                num_layers=recipe.num_layers or (4 if parallel else 1),
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
            "the target has no padding token; give mask_token_id, a token that texts hardly use"
        )
    return int(token)


def _saver(
    draft: Any,
    layout: Layout | None,
    recorded: dict[str, Any],
) -> Callable[[Path, Any], object]:
    """What saves the trained weights; a layout that can't express them is refused now."""
    if isinstance(draft, MedusaHeads):
        if layout is not None:
            raise ValueError(
                f"layout={layout!r} is one of EAGLE heads; leave it out for Medusa heads"
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
    """Of several processes the main one goes first, and the others when it is done; whether this is it."""
    accelerator = make_accelerator(device)
    with accelerator.main_process_first():
        yield accelerator.is_main_process
