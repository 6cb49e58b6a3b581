"""Checks that drafts of "poison" tokens do not change the text.

A token is poison if the model computes NaN, infinity or overflowing numbers for it. The text does not contain
it, so plain decoding never reads it, but a drafter may propose it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from helpers.checks.verdicts import BATCHES, LARGEST_DRIFT, inputs, told
from helpers.models import zoo
from helpers.models.tiny import VOCAB, ScriptedDrafter
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import specdec_ext
from specdec_ext.verify.sampler import Sampler, SpoiltLogits

ATTENTIONS = ("sdpa", "eager")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Where the numbers break: in the embedding of a token, or in later activations.
KINDS = {"embedding": ("nan", "inf", "huge"), "activations": ("keys", "others")}
NEW_TOKENS = 12
# Largest difference of logits, whose standard deviation is about 2. Logits of another token differ by more.
DRIFTS = {torch.float32: LARGEST_DRIFT, torch.bfloat16: 1.5, torch.float16: 0.3}
_KEYS = re.compile(
    r"w?(k|kv|key|qkv|key_value|query_key_value|c_attn|k_b|kv_a)(_proj\w*)?|index\w*"
)


def unread_tokens(count: int, *texts: Tensor) -> list[int]:
    """Tokens that neither occur in these texts nor are padding."""
    read = {0, *torch.cat([text.flatten() for text in texts]).tolist()}
    return [token for token in reversed(range(VOCAB)) if token not in read][:count]


@contextmanager
def poisoned(model: PreTrainedModel, tokens: Sequence[int], kind: str) -> Iterator[None]:
    """Make ``tokens`` poison within this context; the model is the same in all other respects."""
    spoil = _embeddings if kind == "embedding" else _activations
    with spoil(model, dict(zip(tokens, KINDS[kind], strict=True))):
        yield


@contextmanager
def _embeddings(model: PreTrainedModel, values: dict[int, str]) -> Iterator[None]:
    embedding: Any = model.get_input_embeddings()
    weight, before = embedding.weight.data, embedding.weight.data.clone()
    huge = torch.finfo(weight.dtype).max / 2
    for token, value in values.items():
        weight[token] = {"nan": torch.nan, "inf": torch.inf, "huge": huge}[value]
    try:
        yield
    finally:
        weight.copy_(before)


@contextmanager
def _activations(model: PreTrainedModel, where: dict[int, str]) -> Iterator[None]:
    """Let the linear modules of keys, or all others, return infinity for these tokens."""
    read: list[Tensor] = []

    def remember(module: nn.Module, args: Any, output: Any) -> None:
        read[:] = [args[0]]

    def spoil(token: int, output: Any) -> Any:
        if not (read and isinstance(output, Tensor) and output.shape[:2] == read[0].shape):
            return None
        at = (read[0] == token).view(*read[0].shape, *[1] * (output.ndim - 2))
        return output.masked_fill(at, torch.inf)

    handles = [model.get_input_embeddings().register_forward_hook(remember)]
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or module is model.get_output_embeddings():
            continue
        makes_keys = any(_KEYS.fullmatch(part) for part in name.lower().split("."))
        for token, place in where.items():
            if makes_keys == (place == "keys"):
                hook = lambda module, args, output, token=token: spoil(token, output)  # noqa: E731
                handles.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def spoilt_passes(repeated: Sequence[int] = ()) -> Iterator[list[int]]:
    """Collect the numbers of the verifications that drafts spoilt; those in ``repeated`` count as spoilt."""
    original, numbers, found = Sampler.verify, itertools.count(), []

    def verify(*args: Any) -> Any:
        number = next(numbers)
        try:
            if number in repeated:
                raise SpoiltLogits
            return original(*args)
        except SpoiltLogits:
            found.append(number)
            raise

    with mock.patch.object(Sampler, "verify", verify):
        yield found


class PoisonDrafter(ScriptedDrafter):
    """Proposes chains or trees of right tokens, most of them with poison at some depth.

    Args:
        answers: the right tokens of each original row.
        poison: the poison tokens.
        tree: whether to propose trees.
    """

    def __init__(self, answers: list[list[int]], poison: Sequence[int], tree: bool, seed: int = 0):
        super().__init__(answers, self._paths, seed)
        self._poison, self._tree = poison, tree

    def _paths(self, right: list[int], rng: Any) -> list[list[int]]:
        if rng.random() < 0.3:
            return [right[:3]]
        known, bad = right[: rng.randrange(4)], rng.choice(self._poison)
        if not self._tree:
            return [[*known, bad, *right[len(known) + 1 : len(known) + 3]]]
        return [[rng.choice(self._poison), *right[:1]], right[:3], [*known, bad]]


def judge(name: str) -> dict[str, str]:
    """Generate with each attention and dtype, and return a row of the table.

    Returns:
        ``name``; for each setting "right/all", the number of calls with the text of plain decoding and of all
        calls, or "" if there are none; and ``failed``, the failures.
    """
    row, failed = {"name": name}, []
    for dtype in DTYPES:
        for attention in ATTENTIONS:
            setting = f"{attention} {str(dtype).removeprefix('torch.')}"
            row[setting] = ""
            if (model := built(name, attention, dtype)) is None:
                continue
            wrong, count = faults(model)
            if count:
                row[setting] = f"{count - len(wrong)}/{count}"
                failed += [f"{setting}, {fault}" for fault in wrong]
    return {**row, "failed": "; ".join(failed)}


def built(name: str, attention: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """A model of the zoo; None if transformers lacks it or this attention of it."""
    try:
        model = zoo.build(name).to(dtype)
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != attention:
            model.set_attn_implementation(attention)
    except Exception:
        return None
    return model if config._attn_implementation == attention else None


def faults(model: PreTrainedModel) -> tuple[list[str], int]:
    """Return how calls with poison drafts differ from plain decoding, and the number of calls."""
    support = specdec_ext.supports(model)
    calls = {
        batch: inputs(batch, NEW_TOKENS) for batch in BATCHES if batch == "one" or support.batch
    }
    if not support.chain:
        return [], 0
    try:
        expected = {batch: model.generate(**call) for batch, call in calls.items()}
        if model.dtype != torch.float32:
            # Rounding may differ between the loop of transformers and ours, but not between ours with and
            # without drafts.
            expected = {
                batch: specdec_ext.generate(model, drafter=None, **call)
                for batch, call in calls.items()
            }
    except Exception:
        return [], 0  # the model can't run in this dtype, or its logits are NaN
    count, found = 0, []
    for kind, values in KINDS.items():
        tokens = unread_tokens(len(values), *(each.sequences for each in expected.values()))
        for batch, tree in itertools.product(calls, (False, True)):
            count += 1
            drafted = Drafted(model, calls[batch], expected[batch], tokens, tree)
            try:
                with poisoned(model, tokens, kind):
                    fault = drafted.difference()
                if fault and model.dtype != torch.float32 and drafted.as_with_harmless_tokens():
                    fault = ""
            except Exception as error:
                fault = told(error)
            if fault:
                shape = "tree" if tree else "chain"
                rows = len(expected[batch].sequences)
                found.append(f"{kind}, {shape}, batch of {rows}: {fault}")
    return found, count


@dataclass
class Drafted:
    """Compares a call whose drafts contain ``tokens`` with plain decoding.

    Attributes:
        model: the model under test.
        call: arguments of ``generate``.
        plain: the output without drafts.
        tokens: tokens to draft, which are not in the text.
        tree: whether to draft trees.
        drift: largest difference of logits that :meth:`difference` has seen.
        spoilt: the passes of the last call that drafts spoilt, so that they were repeated without drafts.
        repeated: passes that are repeated although nothing spoils them.
    """

    model: PreTrainedModel
    call: dict[str, Any]
    plain: Any
    tokens: Sequence[int]
    tree: bool
    drift: float = 0.0
    spoilt: Sequence[int] = ()
    repeated: Sequence[int] = ()

    def difference(self, seed: int = 0) -> str:
        """Describe the first difference from plain decoding, or return "".

        In half precision, rounding may choose between two nearly equal tokens; the rest of the row is then
        not compared.
        """
        dtype, columns = self.model.dtype, self.call["inputs"].shape[1]
        answers = self.plain.sequences[:, columns:].tolist()
        arguments: dict[str, Any] = {"remove_invalid_values": True} if self.tree else {}
        if dtype != torch.float32:
            # Another text that rounding chooses must not contain these tokens.
            arguments["suppress_tokens"] = self.tokens
        drafter = PoisonDrafter(answers, self.tokens, self.tree, seed)
        with spoilt_passes(self.repeated) as self.spoilt:
            ours = specdec_ext.generate(
                self.model, drafter=drafter, speculation="fixed", **self.call, **arguments
            )
        for row, answer in enumerate(answers):
            for step, (mine, logits) in enumerate(zip(ours.logits, self.plain.logits, strict=True)):
                drift = float((mine[row].float() - logits[row].float()).abs().max())
                if not drift <= self.drift:  # also true for NaN
                    self.drift = drift
                if not drift < DRIFTS[dtype]:
                    return f"logits of row {row}, token {step} differ by {drift:.2g}"
                if ours.sequences[row, columns + step] != answer[step]:
                    if dtype == torch.float32:
                        return f"row {row} differs from token {step} on"
                    break
        return ""

    def as_with_harmless_tokens(self) -> bool:
        """Whether logits drift as far without poison, by rounding alone, for example in a choice of experts.

        The same drafts come first, and the same passes are repeated without them; then other drafts. Must be
        called outside of :func:`poisoned`.
        """
        same = replace(self, drift=0.0, repeated=self.spoilt)
        others = replace(self, drift=0.0, repeated=())
        return any(
            bool(each.difference(seed)) and each.drift >= self.drift / 2
            for each, seed in [(same, 0), *((others, seed) for seed in range(1, 8))]
        )
