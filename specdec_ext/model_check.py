"""``check_model``: is what ``supports(model)`` claims true for these weights on this machine?

Hugging Face ``generate``, one token after the other, is the law. Each check generates the same greedy text
with drafts that are right, wrong or both, and compares the logits of every token:

- single step: no drafts at all;
- chain: right drafts, so several tokens in one pass;
- rollback: wrong, half right and right drafts in turn, so what was rejected must leave nothing behind;
- tree: the right text as first, middle and last branch among wrong ones, so branches must not see each other;
- batch: rows of different lengths, of which each accepts another part of its drafts, against each row alone.

Two ways to compute the same logits round differently. What rounding can do to this model is measured: the
*noise* is how far the law's own logits move if the embeddings are changed in their last bit. Larger
differences are a wrong claim; where texts part within that, it is a near-tie. ``compare_runs`` can't tell
the two apart here: it measures rounding by passes of several tokens, which are what is in doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.generation import generate
from specdec_ext.target import Support, supports
from specdec_ext.tree import DraftTree

Verdict = Literal["exact", "near-tie", "wrong", "idle"]
# (the next right tokens, vocabulary, count of drafts so far) -> paths of the tree
Shape = Callable[[list[int], int, int], list[list[int]]]

PROMPT_TOKENS = 24
# Draft tokens in one pass; passes of a few tokens show what passes of many would.
DEPTH = 4
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


@dataclass(frozen=True)
class ModelCheck:
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


@dataclass(frozen=True)
class _Law:
    """What Hugging Face ``generate`` makes of one prompt.

    Attributes:
        tokens: the new ones.
        logits: ``[new, vocab]`` float32.
        bound: of differences of its logits that rounding explains.
    """

    tokens: list[int]
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
    texts = [input_ids]
    if support.batch and not inputs:
        third = -(-input_ids.shape[1] // 3)
        texts += [input_ids[:, third:], input_ids[:, -third:]]
    limits = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": max_new_tokens,
        "use_cache": True,
        **inputs,
    }
    laws = [_law(model, text, limits) for text in texts]

    def check(name: str, shape: Shape | None, rows: int = 1) -> Check:
        return _check(model, name, texts[:rows], laws[:rows], shape, limits)

    checks = [check("single step", None)]
    if support.chain:
        checks += [check("chain", _right), check("rollback", _mixed)]
    if support.tree:
        checks.append(check("tree", _branches))
    if len(texts) > 1:
        checks.append(check("batch", _mixed_branches if support.tree else _mixed, len(texts)))
    return ModelCheck(support, tuple(checks))


def _random_prompt(model: PreTrainedModel) -> Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab // 8, vocab, (1, PROMPT_TOKENS), generator=generator)
    return ids.to(model.device)


def _law(model: PreTrainedModel, input_ids: Tensor, limits: dict[str, Any]) -> _Law:
    output = _plain(model, input_ids, limits)
    logits = torch.stack([step[0].float() for step in output.logits])
    law = _Law(output.sequences[0, -len(logits) :].tolist(), logits)
    least = torch.finfo(model.dtype).eps * float(logits.abs().max())
    return replace(law, bound=SLACK * max(least, _noise(model, input_ids, law, limits)))


def _plain(model: PreTrainedModel, input_ids: Tensor, limits: dict[str, Any]) -> Any:
    return model.generate(  # type: ignore[operator]
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
        **limits,
    )


def _noise(model: PreTrainedModel, input_ids: Tensor, law: _Law, limits: dict[str, Any]) -> float:
    generator = torch.Generator().manual_seed(0)

    def flip_last_bits(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        signs = torch.randint(2, output.shape, generator=generator).to(output.device) * 2 - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps * signs)).to(output.dtype)

    copies = {
        name: value.repeat_interleave(COPIES, 0) if isinstance(value, Tensor) else value
        for name, value in limits.items()
    }
    hook = model.get_input_embeddings().register_forward_hook(flip_last_bits)
    try:
        output = _plain(model, input_ids.repeat(COPIES, 1), copies)
    finally:
        hook.remove()
    tokens = output.sequences[:, -len(law.tokens) :].tolist()
    logits = torch.stack(output.logits, dim=1).float()
    return max(_difference(law, row, logits[i])[0] for i, row in enumerate(tokens))


def _difference(
    law: _Law, tokens: Sequence[int], logits: Tensor
) -> tuple[float, int, float | None]:
    """Largest difference of a logit, tokens compared, and the gap where the texts part if they do."""
    same = [ours == theirs for ours, theirs in zip(tokens, law.tokens, strict=True)]
    parts = same.index(False) if False in same else None
    compared = len(same) if parts is None else parts + 1
    delta = float((logits[:compared] - law.logits[:compared]).abs().max())
    if parts is None:
        return delta, compared, None
    scores = law.logits[parts]
    return delta, compared, float(scores[law.tokens[parts]] - scores[tokens[parts]])


def _check(
    model: PreTrainedModel,
    name: str,
    texts: list[Tensor],
    laws: list[_Law],
    shape: Shape | None,
    limits: dict[str, Any],
) -> Check:
    width = max(text.shape[1] for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.long, device=texts[0].device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, width - text.shape[1] :], mask[row, width - text.shape[1] :] = text[0], 1
    vocab = laws[0].logits.shape[-1]
    drafter = None if shape is None else _Script([law.tokens for law in laws], vocab, shape)
    output: Any = generate(
        model,
        ids,
        attention_mask=mask,
        drafter=drafter,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
        **limits,
    )
    tokens = output.sequences[:, -len(laws[0].tokens) :].tolist()
    logits = torch.stack(output.logits, dim=1).float()
    found = [_difference(law, tokens[i], logits[i]) for i, law in enumerate(laws)]
    deltas, compared, gaps = zip(*found, strict=True)
    parted = [gap for gap in gaps if gap is not None]
    accepted = output.speculation.accepted_tokens
    verdict: Verdict = "near-tie" if parted else "exact"
    bound = max(law.bound for law in laws)
    if max(deltas) > bound:
        verdict = "wrong"
    elif drafter is not None and not accepted:
        verdict = "idle"
    return Check(
        name, verdict, max(deltas), bound, sum(compared), accepted, max(parted, default=None)
    )


class _Script(Drafter):
    """Drafts what a shape makes of the law's text, row by row."""

    def __init__(self, answers: list[list[int]], vocab: int, shape: Shape):
        self._answers, self._vocab, self._shape = answers, vocab, shape
        self._drafts = 0

    def propose(self, context: Context) -> DraftTree:
        paths = []
        for row in context.rows:
            done = len(context.generated[row])
            right = self._answers[row][done : done + DEPTH]
            paths.append(self._shape(right, self._vocab, self._drafts + row))
        self._drafts += 1
        return DraftTree.from_paths(context.roots, paths)


def _wrong(tokens: list[int], vocab: int, by: int = 1) -> list[int]:
    return [(token + by) % vocab for token in tokens]


def _right(right: list[int], vocab: int, turn: int) -> list[list[int]]:
    return [right]


def _mixed(right: list[int], vocab: int, turn: int) -> list[list[int]]:
    half = len(right) // 2
    return [[_wrong(right, vocab), right[:half] + _wrong(right[half:], vocab), right][turn % 3]]


def _branches(right: list[int], vocab: int, turn: int) -> list[list[int]]:
    """The right branch at a place that changes; one of the others leaves it after the first token."""
    others = [_wrong(right, vocab, 2), right[:1] + _wrong(right[1:], vocab)]
    others.insert(turn % 3, right)
    return others


def _mixed_branches(right: list[int], vocab: int, turn: int) -> list[list[int]]:
    drafts = _mixed(right, vocab, turn)[0]
    return [_wrong(right, vocab, 2), drafts, right[:1] + _wrong(right[1:], vocab, 3)]
