"""Verdicts on architectures: generation with drafts compared with that of transformers."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.models import zoo
from helpers.models.tiny import SHAPES, ScriptedDrafter, oracle_chain, oracle_tree, prompts, wrong
from torch import Tensor
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext import SpeculativeOutput, Support

BATCHES = {"one": (11,), "three": (11, 4, 8)}
LARGEST_DRIFT = 2e-3  # difference of logits, whose standard deviation is about 2

EXACT = ("exact-tree", "exact-chain", "exact-plain")
FAILURES = ("wrong", "vacuous", "crash")


@dataclass(frozen=True)
class Verdict:
    """The verdict on a model.

    Attributes:
        name: name of the model in the zoo.
        outcome: ``exact-tree``, ``exact-chain`` or ``exact-plain``, as ``supports`` claims, if all text is
            that of ``model.generate`` and right drafts were accepted; ``refused`` with a reason; ``wrong``;
            ``vacuous`` if right drafts were not accepted; ``crash``; ``not built`` or ``not generated`` if
            transformers itself fails.
        batch: whether batches of several rows are decoded with drafts.
        rollback: as ``Support.rollback``.
        drift: largest difference between the logits and those of ``model.generate``.
        detail: reasons, or a description of the failure.
    """

    name: str
    outcome: str
    batch: bool = False
    rollback: str = ""
    drift: float = 0.0
    detail: str = ""

    def row(self) -> dict[str, str]:
        """The verdict as a row of the table."""
        return {
            **{name: str(value) for name, value in vars(self).items()},
            "drift": f"{self.drift:.0e}",
        }


class Failure(Exception):
    """Raised if a call violates a claim; the arguments are the outcome and a description."""


def judge(
    name: str, shapes: Sequence[Callable[..., list]] = SHAPES, new_tokens: int = 24
) -> Verdict:
    """Build the model, generate with transformers and with scripted drafters, and compare.

    Args:
        name: name of an architecture or a variant in the zoo.
        shapes: draft shapes (``tiny.SHAPES``).
        new_tokens: enough tokens for rows to diverge and for the text to exceed windows.
    """
    calls = {batch: inputs(batch, new_tokens) for batch in BATCHES}
    try:
        model = zoo.build(name)
    except Exception as error:
        return Verdict(name, "not built", detail=told(error))
    try:
        expected = {batch: model.generate(**call) for batch, call in calls.items()}
        if not reads_its_prompt(model, calls["one"], expected["one"]):
            return Verdict(name, "vacuous", detail="another early token changes no logit")
    except Exception as error:
        return Verdict(name, "not generated", detail=told(error))
    try:
        support = specdec_ext.supports(model)
        facts = {"batch": support.batch, "rollback": support.rollback}
        outcome = (
            "exact-tree" if support.tree else "exact-chain" if support.chain else "exact-plain"
        )
        drift = max(
            checked(model, calls[batch], expected[batch], support, shapes) for batch in BATCHES
        )
    except Failure as failure:
        outcome, detail = failure.args
        return Verdict(name, outcome, detail=detail)
    except Exception as error:
        return Verdict(name, "crash", detail=told(error))
    return Verdict(name, outcome, **facts, drift=drift, detail="; ".join(support.reasons))


def inputs(batch: str, new_tokens: int) -> dict[str, Any]:
    ids, mask = prompts(BATCHES[batch])
    return dict(
        inputs=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )


def reads_its_prompt(model: PreTrainedModel, call: dict[str, Any], expected: Any) -> bool:
    """Whether the first logits depend on the second token of the prompt."""
    ids = call["inputs"].clone()
    ids[0, 1] = wrong(int(ids[0, 1]))
    changed = model.generate(**{**call, "inputs": ids, "max_new_tokens": 1})
    return float((changed.logits[0] - expected.logits[0]).abs().max()) > 10 * LARGEST_DRIFT


def checked(
    model: PreTrainedModel,
    call: dict[str, Any],
    expected: Any,
    support: Support,
    shapes: Sequence[Callable[..., list]],
) -> float:
    """Compare the text without drafts and with every shape; returns the largest difference of logits."""
    rows, columns = call["inputs"].shape
    answers = expected.sequences[:, columns:].tolist()
    drift = 0.0
    for shape in (None, *shapes):
        where = f"{shape.__name__ if shape else 'plain'}, batch of {rows}"
        drafter = ScriptedDrafter(answers, shape) if shape else None
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                output = specdec_ext.generate(model, drafter=drafter, **call)
        except Exception as error:
            reasons = [reason in str(error) for reason in support.reasons]
            if drafter and not support.chain and refused(error) and all(reasons):
                continue
            outcome = "refused" if refused(error) else "crash"
            raise Failure(outcome, f"{where}: {told(error)}") from error
        if not torch.equal(output.sequences, expected.sequences):
            raise Failure("wrong", f"{where}: {difference(output.sequences, expected.sequences)}")
        drift = max(drift, largest_difference(output, expected))
        if drift > LARGEST_DRIFT:
            raise Failure("wrong", f"{where}: logits differ by {drift:.2g}")
        claimed = {oracle_chain: support.chain, oracle_tree: support.tree}.get(shape, False)
        plain = any("decoded without speculation" in str(warning.message) for warning in warned)
        if claimed and not plain and not output.speculation_stats.accepted_tokens:
            raise Failure("vacuous", f"{where}: no right draft was accepted")
    return drift


def refused(error: Exception) -> bool:
    """Whether the package itself refused the model, and not an error inside transformers."""
    package = Path(specdec_ext.__file__).parent
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, ValueError) and raised_in.is_relative_to(package)


def told(error: Exception) -> str:
    """The error in one line, with the place where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"


def difference(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    row, column = (ours != theirs).nonzero()[0].tolist()
    return f"row {row} differs from column {column} on"


def largest_difference(ours: SpeculativeOutput, theirs: Any) -> float:
    pairs = zip(ours.logits, theirs.logits, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)
