"""``history_figure``: the curves of a training run, losses and estimated acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_ext.preflight.extras import require
from specdec_ext.training.evaluation import Evaluation
from specdec_ext.training.trainer import SMOOTHED_OVER, Progress

Evaluations = list[tuple[int, Evaluation]]


def evaluations(
    history: Sequence[Progress], start: tuple[Evaluation | None, Evaluation | None]
) -> tuple[Evaluations, Evaluations]:
    """Return step and evaluation on the new domain, and the same on the previous domain.

    Args:
        history: the steps of a run.
        start: the evaluations before the first step, as of step 0.
    """
    new = [(0, start[0]), *((each.step, each.evaluation) for each in history)]
    old = [(0, start[1]), *((each.step, each.old_evaluation) for each in history)]
    found_new, found_old = (
        [(step, each) for step, each in every if each is not None] for every in (new, old)
    )
    return found_new, found_old


def history_figure(
    history: Sequence[Progress],
    start: tuple[Evaluation | None, Evaluation | None] = (None, None),
) -> Any:
    """Make a matplotlib figure of losses, acceptance by position and mean acceptance lengths.

    Args:
        history: the steps of a run.
        start: the evaluations before the first step.

    Raises:
        ValueError: for an empty history.
        ImportError: if matplotlib is not installed.
    """
    if not history:
        raise ValueError("history is empty; expected the steps of a run")
    figures = require("matplotlib.figure", "a plot")
    figure = figures.Figure(figsize=(13, 4), layout="constrained")
    losses, acceptance, lengths = figure.subplots(1, 3)
    steps = [progress.step for progress in history]
    for index in range(len(history[0].losses)):
        values = [progress.losses[index] for progress in history]
        losses.plot(steps, _smoothed(values), label=f"{1 + index} ahead", linewidth=1)
    losses.set(xlabel="step", ylabel="cross entropy to the target", title="loss")
    losses.legend(frameon=False)
    evaluated, before = evaluations(history, start)
    for position in range(len(evaluated[0][1].conditional) if evaluated else 0):
        shares = [evaluation.conditional[position] for _, evaluation in evaluated]
        label = f"position {1 + position}"
        acceptance.plot([step for step, _ in evaluated], shares, marker=".", label=label)
    acceptance.set(
        xlabel="step", ylim=(0, 1), title="acceptance, given the position before, greedy"
    )
    curves = {
        "greedy": [(step, each.acceptance_length) for step, each in evaluated],
        "sampled": [(step, each.sampled_acceptance_length) for step, each in evaluated],
        "previous domain, greedy": [(step, each.acceptance_length) for step, each in before],
    }
    for label, points in curves.items():
        if points:
            lengths.plot(*zip(*points, strict=True), marker=".", label=label)
    lengths.set(xlabel="step", title="mean acceptance length")
    if evaluated:
        acceptance.legend(frameon=False)
        lengths.legend(frameon=False)
    return figure


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and the ``SMOOTHED_OVER - 1`` values before it."""
    means = []
    for end in range(1, len(values) + 1):
        last = values[max(0, end - SMOOTHED_OVER) : end]
        means.append(sum(last) / len(last))
    return means
