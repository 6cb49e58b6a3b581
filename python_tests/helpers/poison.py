"""Checks that drafts of "poison" tokens do not change the text.

A token is poison if reading it gives NaN, infinity, or numbers that overflow. The text does not contain it,
so plain decoding never reads it, but a drafter may draft it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import zoo
from tiny import VOCAB, ScriptedDrafter
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from verdicts import BATCHES, LARGEST_DRIFT, inputs, told

import specdec_ext

ATTENTIONS = ("sdpa", "eager")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# By where the numbers break: in the embedding of a token, or in activations behind it.
KINDS = {"embedding": ("nan", "inf", "huge"), "activations": ("keys", "others")}
NEW_TOKENS = 12
# Of logits whose standard deviation is about 2: of other tokens they differ by more.
DRIFTS = {torch.float32: LARGEST_DRIFT, torch.bfloat16: 1.5, torch.float16: 0.3}
_KEYS = re.compile(
    r"w?(k|kv|key|qkv|key_value|query_key_value|c_attn|k_b|kv_a)(_proj\w*)?|index\w*"
)


def unread_tokens(count: int, *texts: Tensor) -> list[int]:
    """Tokens that none of these texts contains, nor a padding is."""
    read = {0, *torch.cat([text.flatten() for text in texts]).tolist()}
    return [token for token in reversed(range(VOCAB)) if token not in read][:count]


@contextmanager
def poisoned(model: PreTrainedModel, tokens: Sequence[int], kind: str) -> Iterator[None]:
    """Within this context every one of ``tokens`` is poison, for the same model in all other respects."""
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
    """Linear modules that make keys, or all others, return infinity for these tokens."""
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


class PoisonDrafter(ScriptedDrafter):
    """Drafts right tokens and poison: chains or trees with poison at any depth, and drafts without poison.

    Args:
        answers: for each original row, the right tokens.
        poison: the poison tokens.
        tree: whether it drafts trees.
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
    """Generate with each attention and dtype; as a row of the table.

    Returns:
        The name; for each setting how many of how many calls gave the text of plain decoding, or "" if there
        is none to compare; and in ``failed`` what went wrong where, "" if nothing.
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
    """The model of the zoo; None if transformers has none, or none with this attention."""
    try:
        model = zoo.build(name).to(dtype)
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != attention:
            model.set_attn_implementation(attention)
    except Exception:
        return None
    return model if config._attn_implementation == attention else None


def faults(model: PreTrainedModel) -> tuple[list[str], int]:
    """What calls with poison drafts do other than plain decoding, and the number of calls."""
    support = specdec_ext.supports(model)
    calls = {
        batch: inputs(batch, NEW_TOKENS) for batch in BATCHES if batch == "one" or support.batch
    }
    if not support.chain:
        return [], 0
    try:
        expected = {batch: model.generate(**call) for batch, call in calls.items()}
        if model.dtype != torch.float32:
            # Between transformers' loop and ours rounding may decide; between drafts and none it should not.
            expected = {
                batch: specdec_ext.generate(model, drafter=None, **call)
                for batch, call in calls.items()
            }
    except Exception:
        return [], 0  # it can't be run in this dtype, or its logits are NaN
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
    """A call with drafts of ``tokens``, beside plain decoding.

    Attributes:
        model: under test.
        call: arguments of ``generate``.
        plain: what they give without drafts.
        tokens: that are drafted and not in the text.
        tree: whether trees are drafted.
        drift: largest difference of logits that :meth:`difference` has seen.
    """

    model: PreTrainedModel
    call: dict[str, Any]
    plain: Any
    tokens: Sequence[int]
    tree: bool
    drift: float = 0.0

    def difference(self, seed: int = 0) -> str:
        """Describe how the output differs from that of plain decoding; "" if it does not.

        In half precision two tokens that tie but for rounding are the same to it, and the row's rest is left
        out.
        """
        dtype, columns = self.model.dtype, self.call["inputs"].shape[1]
        answers = self.plain.sequences[:, columns:].tolist()
        arguments: dict[str, Any] = {"remove_invalid_values": True} if self.tree else {}
        if dtype != torch.float32:
            # Where rounding chooses another text, that is not to hold these tokens.
            arguments["suppress_tokens"] = self.tokens
        drafter = PoisonDrafter(answers, self.tokens, self.tree, seed)
        ours = specdec_ext.generate(
            self.model, drafter=drafter, speculation="fixed", **self.call, **arguments
        )
        for row, answer in enumerate(answers):
            for step, (mine, logits) in enumerate(zip(ours.logits, self.plain.logits, strict=True)):
                drift = float((mine[row].float() - logits[row].float()).abs().max())
                if not drift <= self.drift:  # NaN is no drift, and stays
                    self.drift = drift
                if not drift < DRIFTS[dtype]:
                    return f"logits of row {row}, token {step} differ by {drift:.2g}"
                if ours.sequences[row, columns + step] != answer[step]:
                    if dtype == torch.float32:
                        return f"row {row} differs from token {step} on"
                    break
        return ""

    def as_with_harmless_tokens(self) -> bool:
        """Whether logits drift as far by rounding alone, of experts that are chosen, say.

        To be asked outside of :func:`poisoned`.
        """
        harmless = replace(self, drift=0.0)
        return any(
            bool(harmless.difference(seed)) and harmless.drift >= self.drift / 2
            for seed in range(8)
        )
