"""``compare_runs``: decide whether two greedy texts of one prompt are equal, a near-tie apart, or a bug.

A 1-row and an n-row matrix product round differently, so in half precision the two largest logits of a
position may change places. The first difference of two texts is a *near-tie* if the gap between the logits of
the two tokens is at most twice the rounding error, or if the two logits are neighbours in their dtype, to
which each is rounded. The rounding error is the largest change of the position's logits, computed token by
token, when they are computed in passes over several tokens instead, or when the last bits of the embeddings
change. The latter matters where the model's own products round in the same way for all numbers of rows, as
those of bfloat16 do on some processors. Any other difference is a bug.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from specdec_ext.display import Summarised, Table
from specdec_ext.models.compat import cache_argument

# Rounding is measured with this many random changes of the embeddings.
CHANGES = 4
# What a verdict means, for ``explain()``.
_MEANINGS = {
    "equal": "The texts are equal, token for token.",
    "near-tie": (
        "The texts differ where the best two logits are closer than what rounding changes, so two correct "
        "computations may choose differently. Such differences are expected in half precision."
    ),
    "bug": (
        "The texts differ where the logits of the two tokens are further apart than rounding explains, or "
        "one of them ends early. Please report it, with the output of `specdec check`."
    ),
}


@dataclass(frozen=True)
class ComparedRuns(Summarised):
    """Verdict on two texts.

    Attributes:
        equal: whether the tokens are the same.
        position: column of the first difference, or None.
        verdict: ``"equal"``, ``"near-tie"`` or ``"bug"``.
        gap: absolute difference of the logits of the two tokens at ``position``, computed token by token.
        bound: largest gap of a near-tie: twice the rounding error at ``position``, at least the distance of
            neighbours in the logits' dtype.
    """

    equal: bool
    position: int | None
    verdict: Literal["equal", "near-tie", "bug"]
    gap: float = 0.0
    bound: float = 0.0

    def summary(self) -> str:
        if self.position is None:
            return self.verdict
        if math.isinf(self.gap):
            return f"{self.verdict}: one text ends at token {self.position}, prompt included"
        return (
            f"{self.verdict}: the first difference is at token {self.position}, prompt included; the logit "
            f"gap is {self.gap:.2g}, rounding explains {self.bound:.2g}"
        )

    def sentences(self) -> Iterable[str]:
        yield _MEANINGS[self.verdict]

    def tables(self) -> Iterable[Table]:
        if self.position is not None:
            yield Table(
                (
                    ("first difference at token", str(self.position)),
                    ("gap of the logits of the two tokens", f"{self.gap:.2g}"),
                    ("largest gap that rounding explains", f"{self.bound:.2g}"),
                )
            )


@torch.no_grad()
def compare_runs(
    model: PreTrainedModel,
    first: Tensor,
    second: Tensor,
    prompt_length: int,
    block_lengths: tuple[int, ...] = (2, 4, 8),
) -> ComparedRuns:
    """Compare two greedy continuations of one unpadded prompt.

    Args:
        model: the model that generated both.
        first, second: ``[length]`` ids, prompt included; may differ in length.
        prompt_length: number of tokens of the common prompt.
        block_lengths: numbers of tokens that verification may have scored in one pass; all are tried.

    Returns:
        The verdict on the first difference.

    Raises:
        ValueError: if the prompts differ or an input is not one-dimensional.
    """
    if first.ndim != 1 or second.ndim != 1:
        raise ValueError(
            f"expected two unbatched texts [length], got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    if not torch.equal(first[:prompt_length], second[:prompt_length]):
        raise ValueError(f"the texts differ within the prompt of {prompt_length} tokens")
    common = min(len(first), len(second))
    different = (first[:common] != second[:common]).nonzero()
    if not len(different):
        if len(first) == len(second):
            return ComparedRuns(True, None, "equal")
        # Only one of the two texts ended here.
        return ComparedRuns(False, common, "bug", float("inf"))
    position = int(different[0])
    prefix = first[None, :position]
    single = _logits_after(model, prefix, [prompt_length] + [1] * (position - prompt_length))
    others = [_logits_after(model, prefix, [position])]
    for length in block_lengths:
        if position - length >= 1:
            others.append(_logits_after(model, prefix, [position - length, length]))
    with changed_last_bits(model):
        others += [_logits_after(model, prefix, [position]) for _ in range(CHANGES)]
    wide, tokens = single.float(), [int(first[position]), int(second[position])]
    apart = max(float((wide - other.float()).abs().max()) for other in others)
    gap = abs(float(wide[tokens].diff()))
    bound = max(2 * apart, _spacing(single[tokens].abs().max()))
    return ComparedRuns(False, position, "near-tie" if gap <= bound else "bug", gap, bound)


@contextmanager
def changed_last_bits(model: PreTrainedModel) -> Iterator[None]:
    """While it is open, the last bit of every element of the embeddings changes, up or down at random.

    What that changes in the logits is an estimate of what rounding changes. The random numbers are the same
    each time it is opened.
    """
    generator = torch.Generator().manual_seed(0)

    def change(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        bits = torch.randint(2, output.shape, generator=generator, device="cpu")
        signs = bits.to(output.device) * 2 - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps * signs)).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _logits_after(model: PreTrainedModel, ids: Tensor, pieces: list[int]) -> Tensor:
    """``[vocab]`` logits after ``ids [1, length]``, computed in passes over ``pieces`` tokens."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    name: Any = cache_argument(inspect.signature(model.forward).parameters)
    start, logits = 0, None
    for length in pieces:
        piece = ids[:, start : start + length]
        logits = model(input_ids=piece, **{name: cache}, use_cache=True).logits[0, -1]
        start += length
    assert logits is not None
    return logits


def _spacing(x: Tensor) -> float:
    """The distance from a positive number to the next larger one of its dtype."""
    return float(torch.nextafter(x, torch.full_like(x, math.inf)).float() - x.float())
