"""``train``: the training loop of draft weights, for every objective.

accelerate handles devices and processes: ``accelerate launch -m specdec_ext.cli train ...`` runs several
processes. Each reads its own part of a batch, and losses are divided by the number of elements of all
processes, so the loss curve is the same as with one process and the same batches.

A run can be stopped and resumed at any time: the examples of a step depend only on its number, so the curve
continues without a jump. A run is kept in one folder:

    state.pt         weights, optimisers, step; replaced as a whole
    start.json       the evaluations before the first step
    history.jsonl    one Progress per line and step
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, optim

from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import tracked
from specdec_ext.preflight.extras import require
from specdec_ext.preflight.outputs import free_bytes
from specdec_ext.training.data.batches import Example, Features
from specdec_ext.training.data.fingerprint import fingerprint
from specdec_ext.training.evaluation import Evaluation, HeldOut, evaluate
from specdec_ext.training.objectives.objective import Objective
from specdec_ext.training.objectives.teacher import Teacher
from specdec_ext.training.optimizers import (
    Float32Products,
    has_fast_bfloat16,
    make_optimizers,
    scale,
)
from specdec_ext.training.order import epoch_batches

_log = logging.getLogger(__name__)

# The name of a tracker, or a GeneralTracker of accelerate, which is an optional dependency.
Tracker = Any

_STATE, _START, _HISTORY = "state.pt", "start.json", "history.jsonl"
# Losses and speeds that are shown are means over this many steps.
SMOOTHED_OVER = 20


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of the training.

    Attributes:
        updates: number of optimiser steps, over as many epochs as needed.
        batch_size: examples per step and process.
        learning_rate: peak learning rate.
        optimizer: "muon" (for the matrices of the layers, with AdamW for the rest) or "adamw".
        warmup: number of steps in which the learning rate rises to its peak.
        decay: share of the steps, at the end, in which the learning rate falls.
        clip: maximum norm of the gradients.
        mixed_precision: compute matrix products in bfloat16, if the device does so at least as fast as in
            float32; weights and optimisers stay in float32.
        seed: seed of the order of the examples.
        save_every: number of steps between saved states; the last step is always saved.
        evaluate_every: number of steps between evaluations; the last step is always evaluated.
        depth: number of tokens of the chains that an evaluation simulates.
    """

    updates: int
    batch_size: int = 8
    learning_rate: float = 5e-3
    optimizer: Literal["muon", "adamw"] = "muon"
    warmup: int = 20
    decay: float = 0.3
    clip: float = 1.0
    mixed_precision: bool = True
    seed: int = 0
    save_every: int = 100
    evaluate_every: int = 200
    depth: int = 5

    def __post_init__(self) -> None:
        positive = (
            "updates",
            "batch_size",
            "learning_rate",
            "clip",
            "save_every",
            "evaluate_every",
        )
        for name in (*positive, "depth"):
            if not 0 < getattr(self, name) < math.inf:  # False for NaN, too
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer={self.optimizer!r}; expected 'muon' or 'adamw'")


@dataclass(frozen=True)
class Progress(Summarised):
    """The result of one training step.

    Attributes:
        step: number of steps done so far.
        losses: one loss for each step of the objective, over all processes.
        gradient_norm: norm of the gradients before clipping.
        learning_rate: learning rate of this step.
        tokens: number of tokens read in this step by all processes, without padding.
        seconds: duration of the step.
        evaluation: evaluation on held-out texts after this step, None if there was none.
        old_evaluation: evaluation on texts of the domain that the head was trained for before, likewise.
    """

    step: int
    losses: tuple[float, ...]
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    evaluation: Evaluation | None = None
    old_evaluation: Evaluation | None = None

    def summary(self) -> str:
        held_out = "" if self.evaluation is None else f"; held out: {self.evaluation}"
        return f"step {self.step}: {trend([self])}{held_out}"

    def tables(self) -> Iterable[Table]:
        yield Table(
            (
                *((f"loss, {1 + i} ahead", f"{loss:.4f}") for i, loss in enumerate(self.losses)),
                ("gradient norm", f"{self.gradient_norm:.3g}"),
                ("learning rate", f"{self.learning_rate:.3g}"),
                ("seconds", f"{self.seconds:.3f}"),
            )
        )
        if self.evaluation is not None:
            yield from self.evaluation.tables()


def trend(recent: Sequence[Progress]) -> str:
    """Mean loss of the first and of the last token ahead, and tokens per second, over some steps."""
    curves = zip(*(each.losses for each in recent), strict=True)
    losses = [sum(values) / len(recent) for values in curves]
    rate = sum(each.tokens for each in recent) / sum(each.seconds for each in recent)
    return f"loss {losses[0]:.3f} .. {losses[-1]:.3f}, {rate:,.0f} tokens/s"


def train(
    objective: Objective,
    features: Features,
    teacher: Teacher,
    examples: Sequence[Example],
    held_out: HeldOut,
    folder: Path,
    config: TrainConfig,
    on_step: Callable[[Progress], None] = lambda progress: None,
    target: str = "",
    on_start: Callable[[Evaluation, Evaluation | None], None] = lambda new, old: None,
    trackers: Sequence[Tracker] = (),
) -> None:
    """Train an objective; resume the run if ``folder`` holds the state of an earlier call.

    Args:
        objective: trained in place; on the same device as features and teacher.
        features: computes or reads the target's hidden states of the examples.
        teacher: of the target.
        examples: the training texts.
        held_out: texts for evaluations, of which the first is before the first step; may be empty.
        folder: folder of the state and the history; created if it does not exist.
        config: hyperparameters.
        on_step: called after every step in the main process.
        target: :func:`~specdec_ext.training.data.fingerprint.fingerprint` of the target. A run can only be
            resumed with the same target, texts, initial weights and number of processes.
        on_start: called before the first step with the evaluations on ``held_out.texts`` and
            ``held_out.old``.
        trackers: names of trackers that accelerate knows, or its ``GeneralTracker`` objects.

    Raises:
        ValueError: for too few examples, too little space on the disk, or a folder with the state of another
            run.
        ArithmeticError: for a loss that is not finite; the saved state of an earlier step stays.
        ImportError: if accelerate is not installed.
    """
    check_trackers(trackers)
    device = next(objective.parameters()).device
    accelerator = make_accelerator(device, trackers, folder)
    size = config.batch_size * accelerator.num_processes
    # An example is usable if an element of the last step has a token to predict.
    usable = [each for each in examples if bool(each.loss_mask[objective.steps + 1 :].any())]
    if len(usable) < size:
        raise ValueError(
            f"{len(usable)} of {len(examples)} examples have tokens of the loss mask after their first "
            f"{objective.steps + 1} tokens; expected at least {size}, one batch. Pass more text, or a "
            "smaller batch_size"
        )
    optimizers = make_optimizers(objective, config.optimizer, config.learning_rate)
    highest = [[group["lr"] for group in each.param_groups] for each in optimizers]
    check_room(folder, objective)
    identity = {
        "target": target,
        "data": _digest(usable),
        "head": f"{fingerprint(objective)}, {objective.steps} steps, decay {objective.decay}",
        "num_processes": accelerator.num_processes,
    }
    run = _Run(folder, config, identity, objective, optimizers)
    first = run.resume(accelerator.is_main_process)
    if trackers:
        accelerator.init_trackers("specdec_ext", {**asdict(config), **identity})
    prepared = accelerator.prepare_model(objective)
    batches = _Batches(usable, size, config.seed)

    def total(tensor: Tensor) -> Tensor:
        summed: Tensor = accelerator.reduce(tensor, reduction="sum")
        return summed

    fast_bfloat16 = has_fast_bfloat16(device)
    mixed = config.mixed_precision and fast_bfloat16
    if mixed != config.mixed_precision:
        _log.info("matrix products are computed in float32: %s is slow in bfloat16", device)

    def precision() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=mixed)

    def evaluate_now() -> tuple[Evaluation | None, Evaluation | None]:
        """Evaluate the current weights on ``held_out.texts`` and ``held_out.old``."""
        found: list[Evaluation | None] = [None, None]
        with precision():
            if held_out.texts:
                found[0] = evaluate(
                    objective,
                    features,
                    teacher,
                    held_out.texts,
                    config.depth,
                    sampled=held_out.sampled,
                    sampled_features=held_out.features,
                )
            if held_out.old:
                found[1] = evaluate(objective, features, teacher, held_out.old, config.depth)
        return found[0], found[1]

    if first:
        _log.info("%s: the run is resumed at step %d of %d", folder, first, config.updates)
    if first == 0 and accelerator.is_main_process:
        new, old = evaluate_now()
        run.record_start(new, old)
        if new is not None:
            on_start(new, old)
    recent: deque[Progress] = deque(maxlen=SMOOTHED_OVER)
    shown = accelerator.is_main_process
    with tracked("training", config.updates, done=first, shown=shown) as work:
        for step in range(first, config.updates):
            began = time.perf_counter()
            factor = scale(step, config.updates, config.warmup, config.decay)
            for optimizer, rates in zip(optimizers, highest, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
            mine = batches[step][accelerator.process_index :: accelerator.num_processes]
            batch = features([usable[index] for index in mine])
            with precision():
                loss, losses = prepared(batch, teacher, total)
            # accelerate averages the gradients of the processes, but the losses are parts of a sum.
            accelerator.backward(loss * accelerator.num_processes)
            norm = float(torch.nn.utils.clip_grad_norm_(objective.parameters(), config.clip))
            with nullcontext() if fast_bfloat16 else Float32Products():
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            counted = total(torch.cat([losses, losses.new_tensor([float(batch.lengths.sum())])]))
            *summed, tokens = counted.tolist()
            if not all(map(math.isfinite, summed)):
                raise ArithmeticError(
                    f"the losses of step {step + 1} are {summed}; pass a smaller learning_rate, and check "
                    "that the target's hidden states are finite in its dtype"
                )
            seconds = time.perf_counter() - began
            done, last = step + 1, step + 1 == config.updates
            if accelerator.is_main_process:
                asked = last or done % config.evaluate_every == 0
                evaluations = evaluate_now() if asked else (None, None)
                rate = config.learning_rate * factor
                progress = Progress(
                    done, tuple(summed), norm, rate, int(tokens), seconds, *evaluations
                )
                run.record(progress)
                if last or done % config.save_every == 0:
                    run.save(done)
                on_step(progress)
                accelerator.log(tracked_values(progress), step=done)
                recent.append(progress)
                work.update(done, f"epoch {batches.epoch_of(step)}, {trend(recent)}")
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        tracker.finish()


def tracked_values(progress: Progress) -> dict[str, float]:
    """Return the numbers of a step that trackers show, by name."""
    values = {f"loss/{1 + i} ahead": loss for i, loss in enumerate(progress.losses)}
    values["gradient norm"] = progress.gradient_norm
    values["learning rate"] = progress.learning_rate
    values["tokens per second"] = progress.tokens / progress.seconds
    if progress.evaluation is not None:
        values["acceptance length/greedy"] = progress.evaluation.acceptance_length
        if progress.evaluation.sampled:
            values["acceptance length/sampled"] = progress.evaluation.sampled_acceptance_length
    if progress.old_evaluation is not None:
        values["acceptance length/previous domain"] = progress.old_evaluation.acceptance_length
    return values


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """Refuse names of trackers that are unknown or not installed.

    Raises:
        ValueError: the message names those that can be used.
        ImportError: if accelerate is not installed.
    """
    if not trackers:
        return
    tracking = require("accelerate.tracking", "trackers")
    known = {str(each.value) for each in tracking.LoggerType}
    available = {str(each) for each in tracking.get_available_trackers()}
    for name in trackers:
        if isinstance(name, str) and name not in available:
            what = (
                f"{name} is not installed: pip install {name}"
                if name in known
                else f"accelerate does not know {name}"
            )
            raise ValueError(
                f"tracker {name!r}: {what}; installed are {', '.join(sorted(available)) or 'none'}"
            )


def check_room(folder: Path, objective: Objective) -> None:
    """Refuse a disk without space for two states of a run: the previous one and the next one.

    Raises:
        ValueError: the message names the needed and the free space.
    """
    # Weights, and at most two moments per weight.
    needed = 2 * 3 * sum(each.numel() * each.element_size() for each in objective.parameters())
    free = free_bytes(folder)
    if needed > free:
        raise ValueError(
            f"the disk of {folder} has {free / 1e9:.2f} GB free, but the state of the run may need "
            f"{needed / 1e9:.2f} GB; pass a folder on another disk"
        )


def has_state(folder: Path) -> bool:
    """Whether the folder holds the state of a run that can be resumed."""
    return (folder / _STATE).exists()


def read_history(folder: Path) -> list[Progress]:
    """Read the steps of a run so far; an incomplete last line of an interrupted run is skipped."""
    path = folder / _HISTORY
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [_progress(json.loads(line)) for line in lines if line.endswith("\n")]


def read_start(folder: Path) -> tuple[Evaluation | None, Evaluation | None]:
    """Read the evaluations before the first step, on ``HeldOut.texts`` and on ``HeldOut.old``."""
    path = folder / _START
    fields = json.loads(path.read_text()) if path.exists() else [None, None]
    new, old = (_evaluation(each) for each in fields)
    return new, old


def _digest(examples: Sequence[Example]) -> str:
    """Return a hash of texts and masks in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.tokens.cpu().numpy().tobytes())
        digest.update(example.loss_mask.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _progress(fields: dict[str, Any]) -> Progress:
    new, old = (_evaluation(fields.pop(name, None)) for name in ("evaluation", "old_evaluation"))
    losses = tuple(fields.pop("losses"))
    return Progress(losses=losses, evaluation=new, old_evaluation=old, **fields)


def _evaluation(fields: dict[str, Any] | None) -> Evaluation | None:
    if fields is None:
        return None
    drafts = fields.pop("drafts")
    return Evaluation(drafts, **{name: tuple(value) for name, value in fields.items()})


class _Run:
    """The state and history of a run in its folder."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        identity: dict[str, Any],
        objective: Objective,
        optimizers: Sequence[optim.Optimizer],
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._objective, self._optimizers = folder, objective, optimizers
        # How often states are saved and evaluated does not change the weights.
        ignored = ("save_every", "evaluate_every")
        kept = {k: v for k, v in asdict(config).items() if k not in ignored}
        self._config = kept | identity

    def resume(self, is_main: bool) -> int:
        """Load the state, if there is one, and return the number of steps done.

        Args:
            is_main: whether this process writes the files.
        """
        path = self._folder / _STATE
        if not path.exists():
            if is_main:
                (self._folder / _HISTORY).unlink(missing_ok=True)
            return 0
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["config"] != self._config:
            differing = sorted(
                name for name, value in self._config.items() if state["config"].get(name) != value
            )
            raise ValueError(
                f"{path} is the state of a run with different {', '.join(differing)}; pass the values that "
                "the run was started with, or another folder"
            )
        self._objective.load_state_dict(state["weights"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        done: int = state["step"]
        if is_main:  # steps after the saved state are repeated
            kept = read_history(self._folder)[:done]
            lines = [json.dumps(asdict(progress)) + "\n" for progress in kept]
            (self._folder / _HISTORY).write_text("".join(lines))
        return done

    def save(self, step: int) -> None:
        unfinished = self._folder / f"{_STATE}.unfinished"
        torch.save(
            {
                "config": self._config,
                "step": step,
                "weights": self._objective.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            },
            unfinished,
        )
        os.replace(unfinished, self._folder / _STATE)

    def record_start(self, new: Evaluation | None, old: Evaluation | None) -> None:
        fields = [None if each is None else asdict(each) for each in (new, old)]
        (self._folder / _START).write_text(json.dumps(fields))

    def record(self, progress: Progress) -> None:
        with (self._folder / _HISTORY).open("a") as file:
            file.write(json.dumps(asdict(progress)) + "\n")


class _Batches:
    """The batch of each step, over all processes, as indices of examples."""

    def __init__(self, examples: Sequence[Example], size: int, seed: int):
        self._lengths = [len(each.tokens) for each in examples]
        self._size, self._seed = size, seed
        self._epoch, self._batches = -1, list[list[int]]()
        self._per_epoch = len(epoch_batches(self._lengths, size, seed, 0))

    def epoch_of(self, step: int) -> int:
        """Number of the epoch of a step, from 1."""
        return 1 + step // self._per_epoch

    def __getitem__(self, step: int) -> list[int]:
        epoch, index = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._batches = epoch_batches(self._lengths, self._size, self._seed, epoch)
        return self._batches[index]


def make_accelerator(
    device: torch.device, trackers: Sequence[Tracker] = (), folder: Path | None = None
) -> Any:
    """Make the accelerator, which coordinates the processes.

    Args:
        device: "cpu", or another device for its default device.
        trackers: as in :func:`train`.
        folder: folder for the files of the trackers.

    Raises:
        ImportError: if accelerate is not installed.
    """
    accelerate = require("accelerate", "training")
    # accelerate's own mixed precision would be a setting of the whole process. Buffers need no broadcast:
    # they are the target's, and equal in all processes.
    parallel = accelerate.DistributedDataParallelKwargs(broadcast_buffers=False)
    return accelerate.Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",
        kwargs_handlers=[parallel],
        log_with=list(trackers) or None,
        project_dir=folder,
    )
