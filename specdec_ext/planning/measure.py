"""Measure what a break-even is computed from: the time of steps, and the acceptance of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.drafters import Drafter
from specdec_ext.evaluate.breakdown import DRAFT, DRAFT_OP, Breakdown, breakdown
from specdec_ext.generation import generate
from specdec_ext.planning.costs import SECONDS, StepCosts, Time
from specdec_ext.schedule.settings import SpeculationConfig
from specdec_ext.stats import SpeculationStats
from specdec_ext.tree.config import TreeConfig


def measured_costs(
    model: PreTrainedModel,
    prompts: Mapping[int, Sequence[Tensor]],
    drafter: str | PreTrainedModel | Drafter,
    lengths: Sequence[int],
    max_new_tokens: int = 64,
) -> StepCosts:
    """Measure plain steps, and steps with chains of each length, on this machine.

    Args:
        model: the target.
        prompts: number of rows -> prompts ``[rows, columns]``; one call each.
        drafter: a drafter whose shapes can be chosen, as for :func:`specdec_ext.generate`.
        lengths: draft lengths.
        max_new_tokens: new tokens per call.

    Raises:
        ValueError: for a drafter that drafts no chains of a chosen length.
    """
    verify: list[Time] = []
    drafts: list[Time] = []
    for rows, each in prompts.items():
        whole = breakdown(model, each, None, max_new_tokens)
        verify.append((rows, 1, 1e-6 * whole.microseconds))
        for length in lengths:
            shape = _chains(length)
            whole = breakdown(model, each, drafter, max_new_tokens, speculation=shape)
            draft = _draft_seconds(whole)
            verify.append((rows, 1 + length, 1e-6 * whole.microseconds - draft))
            drafts.append((rows, length, draft))
    return StepCosts.of(verify, drafts, SECONDS, f"measured on {whole.machine}")


def _draft_seconds(whole: Breakdown) -> float:
    parts = (part.microseconds for part in whole.parts if part.name in (DRAFT_OP, DRAFT))
    return 1e-6 * sum(parts)


def measured_acceptance(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    drafter: str | PreTrainedModel | Drafter,
    length: int,
    max_new_tokens: int = 128,
) -> list[float]:
    """Measure the conditional acceptance of positions 1 to ``length`` of chains, with greedy decoding.

    Args:
        model: the target.
        prompts: ids ``[rows, columns]``; one call each.
        drafter: as for :func:`specdec_ext.generate`.
        length: length of the drafts.
        max_new_tokens: new tokens per call.

    Raises:
        ValueError: if no draft was verified.
    """
    shape = _chains(length)
    total = SpeculationStats()
    for prompt in prompts:
        out: Any = generate(
            model,
            prompt,
            drafter=drafter,
            speculation=shape,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        total.add(out.speculation_stats)
    if not total.drafts:
        raise ValueError(
            "no draft was verified, so there is no acceptance to measure; pass --acceptance, another drafter "
            "or longer texts"
        )
    return total.conditional_acceptance


def _chains(length: int) -> SpeculationConfig:
    """Settings with which every step drafts a chain of this length."""
    return SpeculationConfig(shapes=[TreeConfig(depth=length)], may_rest=False)
