"""``check_model``: is what ``supports(model)`` claims true for these weights on this machine?

Hugging Face ``generate``, one token after the other, is the law. Each check generates the same greedy text
with drafts that are right, wrong or both, and compares the logits of every token:

- single step: no drafts at all;
- chain: right drafts, so several tokens in one pass;
- rollback: wrong, half right and right drafts in turn, so what was rejected must leave nothing behind;
- tree: the right text as first, middle and last branch among wrong ones, so branches must not see each other;
- batch: rows of different lengths, of which each accepts another part of its drafts.

Two ways to compute the same logits round differently. What rounding can do to this model is measured: the
*noise* is how far the law's own logits move if the embeddings are changed in their last bit. Larger
differences are a wrong claim; where texts part within that, it is a near-tie. ``compare_runs`` can't tell
the two apart here: it measures rounding by passes of several tokens, which are what is in doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext.delegation import class_generate
from specdec_ext.display import Summarised
from specdec_ext.evaluate.scripted import Script, Shape, branches, mixed, mixed_branches, right
from specdec_ext.generation import generate
from specdec_ext.models import Support, supports

Verdict = Literal["exact", "near-tie", "wrong", "idle"]

PROMPT_TOKENS = 24
# Rows with embeddings of their own whose noise is measured in one pass.
COPIES = 4
# Another formula for the same, such as a scan in chunks for a recurrence, has been seen to differ by 6 times
# the noise; what is wrong differs, in float32, by thousands.
SLACK = 8


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: ``"single step"``, ``"chain"``, ``"rollback"``, ``"tree"`` or ``"batch"``.
        verdict: ``"exact"``; ``"near-tie"``: another token of the same logits but for rounding; ``"wrong"``:
            logits that rounding does not explain; ``"idle"``: no draft was verified although that is claimed.
        delta: largest difference of a logit from Hugging Face ``generate``'s.
        bound: the largest that rounding explains.
        tokens: tokens compared, in all rows; of a row that parts from the law, up to there.
        accepted: accepted drafts among them.
        gap: where the texts part, by how much the law prefers its own token; None if they don't.
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


@dataclass(frozen=True, repr=False)
class ModelCheck(Summarised):
    """What :func:`check_model` found.

    Attributes:
        support: what is claimed.
        checks: one for each claim.
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

    def details(self) -> Iterable[tuple[str, ...]]:
        yield "check", "verdict", "largest difference", "rounding explains", "tokens", "accepted"
        for each in self.checks:
            differences = f"{each.delta:.2g}", f"{each.bound:.2g}"
            yield each.name, each.verdict, *differences, str(each.tokens), str(each.accepted)


@dataclass(frozen=True)
class _Law:
    """What Hugging Face ``generate`` makes of prompts.

    Attributes:
        inputs: ``input_ids`` and ``attention_mask``, ``[rows, columns]``, and what else there is.
        tokens: ``[rows, new]``.
        logits: ``[rows, new, vocab]`` float32.
        bound: of differences of its logits that rounding explains.
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
    """Verify ``supports(model)`` on the actual weights, in about a dozen passes per token.

    Args:
        model: any model that ``generate`` takes.
        input_ids: ``[1, length]`` prompt, of two tokens or more; by default a fixed one of random tokens.
        max_new_tokens: tokens to compare in each check.
        **inputs: further inputs of the model (images, encoder inputs), for the prompt's one row.

    Raises:
        ValueError: for a prompt of another shape, or a model that ``generate`` refuses.
    """
    if input_ids is None:
        input_ids = _random_prompt(model)
    if input_ids.ndim != 2 or len(input_ids) != 1 or input_ids.shape[1] < 2:
        raise ValueError(
            f"input_ids is {tuple(input_ids.shape)}; expected one prompt, [1, length], of two tokens or more"
        )
    support = supports(model)
    limits = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens, "use_cache": True}
    law = _law(model, {**_batch([input_ids]), **limits, **inputs})
    checks = [_check(model, "single step", law, None)]
    if support.chain:
        checks += [_check(model, "chain", law, right), _check(model, "rollback", law, mixed)]
    if support.tree:
        checks.append(_check(model, "tree", law, branches))
    if support.batch and not inputs:
        third = -(-input_ids.shape[1] // 3)
        texts = [input_ids, input_ids[:, third:], input_ids[:, -third:]]
        law = _law(model, {**_batch(texts), **limits})
        shape = mixed_branches if support.tree else mixed
        checks.append(_check(model, "batch", law, shape))
    return ModelCheck(support, tuple(checks))


def _batch(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Texts ``[1, length]``, padded on the left."""
    width = max(text.shape[1] for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.long, device=texts[0].device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, width - text.shape[1] :], mask[row, width - text.shape[1] :] = text[0], 1
    return {"input_ids": ids, "attention_mask": mask}


def _random_prompt(model: PreTrainedModel) -> Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab // 8, vocab, (1, PROMPT_TOKENS), generator=generator, device="cpu")
    return ids.to(model.device)


# A greedy text whose logits can be compared.
_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def _law(model: PreTrainedModel, inputs: dict[str, Any]) -> _Law:
    output: Any = class_generate(model)(**inputs, **_GREEDY)
    law = _Law(inputs, *_new(output))
    least = torch.finfo(model.dtype).eps * float(law.logits.abs().max())
    return replace(law, bound=SLACK * max(least, _noise(model, law)))


def _new(output: Any) -> tuple[list[list[int]], Tensor]:
    """Tokens and logits of what was generated."""
    logits = torch.stack(output.logits, dim=1).float()
    return output.sequences[:, -logits.shape[1] :].tolist(), logits


def _noise(model: PreTrainedModel, law: _Law) -> float:
    generator = torch.Generator().manual_seed(0)

    def flip_last_bits(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        bits = torch.randint(2, output.shape, generator=generator, device="cpu")
        signs = bits.to(output.device) * 2 - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps * signs)).to(output.dtype)

    copies = {
        name: value.repeat_interleave(COPIES, 0) if isinstance(value, Tensor) else value
        for name, value in law.inputs.items()
    }
    hook = model.get_input_embeddings().register_forward_hook(flip_last_bits)
    try:
        output: Any = class_generate(model)(**copies, **_GREEDY)
    finally:
        hook.remove()
    differences = _differences(law, *_new(output), copies=COPIES)
    return max(difference for difference, _, _ in differences)


def _differences(
    law: _Law, tokens: list[list[int]], logits: Tensor, copies: int = 1
) -> list[tuple[float, int, float | None]]:
    """Per row: largest difference of a logit, tokens compared, the gap where the texts part if they do."""
    return [
        _difference(law.tokens[row // copies], law.logits[row // copies], tokens[row], logits[row])
        for row in range(len(tokens))
    ]


def _difference(
    law: list[int], law_logits: Tensor, tokens: list[int], logits: Tensor
) -> tuple[float, int, float | None]:
    same = [ours == theirs for ours, theirs in zip(tokens, law, strict=True)]
    parts = same.index(False) if False in same else None
    compared = len(same) if parts is None else parts + 1
    delta = float((logits[:compared] - law_logits[:compared]).abs().max())
    if parts is None:
        return delta, compared, None
    scores = law_logits[parts]
    return delta, compared, float(scores[law[parts]] - scores[tokens[parts]])


def _check(model: PreTrainedModel, name: str, law: _Law, shape: Shape | None) -> Check:
    drafter = None if shape is None else Script(law.tokens, law.logits.shape[-1], shape)
    output: Any = generate(model, **law.inputs, **_GREEDY, drafter=drafter, speculation="fixed")
    deltas, compared, gaps = zip(*_differences(law, *_new(output)), strict=True)
    parted = [gap for gap in gaps if gap is not None]
    accepted = output.speculation.accepted_tokens
    verdict: Verdict = "near-tie" if parted else "exact"
    if max(deltas) > law.bound:
        verdict = "wrong"
    elif drafter is not None and not accepted:
        verdict = "idle"
    return Check(
        name,
        verdict,
        max(deltas),
        law.bound,
        sum(compared),
        accepted,
        max(parted, default=None),
    )
