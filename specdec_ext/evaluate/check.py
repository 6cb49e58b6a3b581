"""``check_model``: test the claims of ``supports(model)`` on these weights and this machine.

Hugging Face ``generate``, which decodes one token at a time, is the baseline. Each check generates the same
greedy text with drafts that are right, wrong or both, and compares the logits of every token with it:

- single step: no drafts;
- chain: right drafts, so one pass scores several tokens;
- rollback: wrong, half right and right drafts in turn, so rejected tokens must leave no trace;
- tree: the right text as first, middle and last branch among wrong ones, so branches must not see each other;
- batch: rows of different lengths, each of which accepts another part of its drafts.

Two ways to compute the same logits round differently. The effect of rounding on this model is measured: the
*noise* is the largest change of the baseline's logits when the last bit of the embeddings changes. A larger
difference than rounding explains means that the claim is wrong; if the texts differ while the logits agree
within that bound, it is a near-tie. ``compare_runs`` cannot decide this here: it measures rounding with
passes over several tokens, and whether these are right is the question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.delegation import class_generate
from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import tracked
from specdec_ext.evaluate.compare import CHANGES, changed_last_bits
from specdec_ext.evaluate.scripted import Script, Shape, branches, mixed, mixed_branches, right
from specdec_ext.generation import generate
from specdec_ext.models import Support, supports
from specdec_ext.models.passes.prompt import left_padded

Verdict = Literal["exact", "near-tie", "wrong", "idle"]

PROMPT_TOKENS = 24
# What a verdict means, for ``explain()``.
_MEANINGS: dict[Verdict, str] = {
    "exact": "the texts are equal, and the logits differ by no more than rounding explains.",
    "near-tie": (
        "the texts differ where two logits are so close that rounding decides; the logits agree. Such "
        "differences are expected in half precision."
    ),
    "wrong": (
        "the logits differ by more than rounding explains. Do not speculate on this model (pass "
        "drafter=None), and please report it."
    ),
    "idle": "no draft was accepted, so nothing was tested; pass other input_ids.",
}
# The bound is SLACK times the noise. Another formula for the same result, such as a chunked scan for a
# recurrence, differs by up to 6 times the noise; a wrong result differs, in float32, by thousands of times.
SLACK = 8


@dataclass(frozen=True)
class Check(Summarised):
    """Result of one check.

    Attributes:
        name: ``"single step"``, ``"chain"``, ``"rollback"``, ``"tree"`` or ``"batch"``.
        verdict: ``"exact"``: same tokens; ``"near-tie"``: another token, but the logits differ only by
            rounding; ``"wrong"``: the logits differ by more; ``"idle"``: no draft was accepted, so the claim
            was not tested.
        delta: largest difference of a logit from that of Hugging Face ``generate``.
        bound: largest difference that rounding explains.
        tokens: number of tokens compared, over all rows; in a row that differs, up to the first difference.
        accepted: number of accepted draft tokens.
        gap: where the texts first differ, logit of the baseline's token minus logit of ours; None if they
            are equal.
    """

    name: str
    verdict: Verdict
    delta: float
    bound: float
    tokens: int
    accepted: int
    gap: float | None = None

    @property
    def holds(self) -> bool:
        return self.verdict in ("exact", "near-tie")

    def summary(self) -> str:
        return (
            f"{self.name} {self.verdict}: {self.tokens} tokens compared, {self.accepted} draft tokens "
            f"accepted, logits differ by {self.delta:.2g} (rounding explains {self.bound:.2g})"
        )

    def sentences(self) -> Iterable[str]:
        yield f"{self.name} {self.verdict}: {_MEANINGS[self.verdict]}"

    def tables(self) -> Iterable[Table]:
        yield _table([self])


@dataclass(frozen=True, repr=False)
class ModelCheck(Summarised):
    """Result of :func:`check_model`.

    Attributes:
        support: the claims.
        checks: one check for each claim.
    """

    support: Support
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether every claim is true."""
        return all(check.holds for check in self.checks)

    def summary(self) -> str:
        verdict = "every claim holds" if self.holds else "NOT EVERY CLAIM HOLDS"
        return f"{verdict}: " + ", ".join(f"{each.name} {each.verdict}" for each in self.checks)

    def sentences(self) -> Iterable[str]:
        yield from self.support.sentences()
        yield (
            "Each claim was tested against Hugging Face generate, which decodes one token at a time: the "
            "logits of every token were compared."
        )
        for verdict in dict.fromkeys(each.verdict for each in self.checks):
            names = ", ".join(each.name for each in self.checks if each.verdict == verdict)
            yield f"{verdict} ({names}): {_MEANINGS[verdict]}"

    def tables(self) -> Iterable[Table]:
        yield _table(self.checks)


def _table(checks: Sequence[Check]) -> Table:
    """One row for each check; those that fail are marked."""
    rows = [
        (
            each.name,
            (each.verdict if each.holds else each.verdict.upper())
            + ("" if each.gap is None else f", gap {each.gap:.2g}"),
            f"{each.delta:.2g}",
            f"{each.bound:.2g}",
            str(each.tokens),
            str(each.accepted),
        )
        for each in checks
    ]
    headings = "check", "verdict", "logits differ by", "rounding explains", "tokens", "accepted"
    failed = [number for number, each in enumerate(checks) if not each.holds]
    return Table(rows, headings, marked=failed)


@dataclass(frozen=True)
class _Baseline:
    """Output of Hugging Face ``generate``, which the checks compare with.

    Attributes:
        inputs: ``input_ids`` and ``attention_mask``, ``[rows, columns]``, and the call's other arguments.
        tokens: ``[rows, new]``.
        logits: ``[rows, new, vocab]`` float32.
        bound: largest difference of logits that rounding explains.
    """

    inputs: dict[str, Any]
    tokens: list[list[int]]
    logits: Tensor
    bound: float = 0.0


def check_model(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    *,
    max_new_tokens: int = 16,
    **inputs: Any,
) -> ModelCheck:
    """Test ``supports(model)`` on the actual weights; takes about a dozen passes per token.

    Args:
        model: any model that ``generate`` takes.
        input_ids: ``[1, length]`` prompt of at least two tokens; by default 24 fixed random tokens.
        max_new_tokens: number of tokens to compare in each check.
        **inputs: further inputs of the model (images, encoder inputs) for this one row. With them the batch
            check is left out.

    Raises:
        ValueError: for a prompt of another shape, or a model that ``generate`` refuses.
    """
    if input_ids is None:
        input_ids = _random_prompt(model)
    if input_ids.ndim != 2 or len(input_ids) != 1 or input_ids.shape[1] < 2:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; expected one prompt [1, length] of at least 2 "
            "tokens"
        )
    support = supports(model)
    limits = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens, "use_cache": True}
    shapes: dict[str, Shape | None] = {"single step": None}
    if support.chain:
        shapes |= {"chain": right, "rollback": mixed}
    if support.tree:
        shapes["tree"] = branches
    in_batch = support.batch and not inputs
    with tracked("checking the model", len(shapes) + in_batch, "check") as work:
        baseline = _baseline(model, {**_batch([input_ids]), **limits, **inputs})
        checks = []
        for name, shape in shapes.items():
            checks.append(_check(model, name, baseline, shape))
            work.advance(note=name)
        if in_batch:
            third = -(-input_ids.shape[1] // 3)
            texts = [input_ids, input_ids[:, third:], input_ids[:, -third:]]
            baseline = _baseline(model, {**_batch(texts), **limits})
            shape = mixed_branches if support.tree else mixed
            checks.append(_check(model, "batch", baseline, shape))
    return ModelCheck(support, tuple(checks))


def _batch(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pad texts ``[1, length]`` on the left into one batch."""
    ids, mask = left_padded([text[0].tolist() for text in texts], texts[0].device)
    return {"input_ids": ids, "attention_mask": mask}


def _random_prompt(model: PreTrainedModel) -> Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab // 8, vocab, (1, PROMPT_TOKENS), generator=generator, device="cpu")
    return ids.to(model.device)


# Keywords of ``generate`` for a greedy text with its logits.
_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def _baseline(model: PreTrainedModel, inputs: dict[str, Any]) -> _Baseline:
    output: Any = class_generate(model)(**inputs, **_GREEDY)
    baseline = _Baseline(inputs, *_new(output))
    least = torch.finfo(model.dtype).eps * float(baseline.logits.abs().max())
    return replace(baseline, bound=SLACK * max(least, _noise(model, baseline)))


def _new(output: Any) -> tuple[list[list[int]], Tensor]:
    """Tokens and logits of the generated part."""
    logits = torch.stack(output.logits, dim=1).float()
    return output.sequences[:, -logits.shape[1] :].tolist(), logits


def _noise(model: PreTrainedModel, baseline: _Baseline) -> float:
    copies = {
        name: value.repeat_interleave(CHANGES, 0) if isinstance(value, Tensor) else value
        for name, value in baseline.inputs.items()
    }
    with changed_last_bits(model):
        output: Any = class_generate(model)(**copies, **_GREEDY)
    differences = _differences(baseline, *_new(output), copies=CHANGES)
    return max(difference for difference, _, _ in differences)


def _differences(
    baseline: _Baseline, tokens: list[list[int]], logits: Tensor, copies: int = 1
) -> list[tuple[float, int, float | None]]:
    """Per row: largest difference of a logit, tokens compared, gap where the texts first differ or None."""
    return [
        _difference(
            baseline.tokens[row // copies], baseline.logits[row // copies], tokens[row], logits[row]
        )
        for row in range(len(tokens))
    ]


def _difference(
    expected: list[int], expected_logits: Tensor, tokens: list[int], logits: Tensor
) -> tuple[float, int, float | None]:
    same = [ours == theirs for ours, theirs in zip(tokens, expected, strict=True)]
    parts = same.index(False) if False in same else None
    compared = len(same) if parts is None else parts + 1
    delta = float((logits[:compared] - expected_logits[:compared]).abs().max())
    if parts is None:
        return delta, compared, None
    scores = expected_logits[parts]
    return delta, compared, float(scores[expected[parts]] - scores[tokens[parts]])


def _check(model: PreTrainedModel, name: str, baseline: _Baseline, shape: Shape | None) -> Check:
    drafter = None if shape is None else Script(baseline.tokens, baseline.logits.shape[-1], shape)
    output: Any = generate(
        model, **baseline.inputs, **_GREEDY, drafter=drafter, speculation="fixed"
    )
    deltas, compared, gaps = zip(*_differences(baseline, *_new(output)), strict=True)
    parted = [gap for gap in gaps if gap is not None]
    accepted = output.speculation_stats.accepted_tokens
    verdict: Verdict = "near-tie" if parted else "exact"
    if max(deltas) > baseline.bound:
        verdict = "wrong"
    elif drafter is not None and not accepted:
        verdict = "idle"
    return Check(
        name,
        verdict,
        max(deltas),
        baseline.bound,
        sum(compared),
        accepted,
        max(parted, default=None),
    )
