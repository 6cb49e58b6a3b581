"""Ways to generate, as functions of a prompt: Hugging Face's and ours, with one set of keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec_ext.delegation import class_generate
from specdec_ext.drafters.base import Drafter
from specdec_ext.evaluate.benchmark.series import Prompt
from specdec_ext.evaluate.synthetic import SyntheticDrafter
from specdec_ext.generation import generate

# A PreTrainedModel that can generate; transformers has no type that says both.
Model = Any
# Of a prompt, and perhaps ``streamer=``.
Contestant = Callable[..., Any]

LOOKUP_TOKENS = 10  # transformers' documentation of prompt_lookup_num_tokens
SEED = 0


def hugging_face(model: Model, law: Mapping[str, Any], **keywords: Any) -> Contestant:
    """``model.generate`` with ``keywords`` that speed it up; sampling begins each call with one seed."""

    def run(prompt: Prompt, streamer: Any = None) -> Tensor:
        torch.manual_seed(SEED)
        ids: Tensor = class_generate(model)(**prompt, **law, **keywords, streamer=streamer)
        return ids

    return run


def ours(model: Model, drafter: Any, law: Mapping[str, Any], **keywords: Any) -> Contestant:
    """``specdec_ext.generate`` with ``drafter``; all of ours draw the same text."""
    keywords |= {**law, "return_dict_in_generate": True}
    if law["do_sample"]:
        keywords["seed"] = SEED

    def run(prompt: Prompt, streamer: Any = None) -> Any:
        inputs: dict[str, Any] = {**prompt}
        return generate(model, drafter=drafter, streamer=streamer, **inputs, **keywords)

    return run


def synthetic(
    model: Model,
    drafter: Drafter,
    acceptance: Sequence[float],
    prompts: Sequence[Prompt],
    law: Mapping[str, Any],
    **keywords: Any,
) -> Contestant:
    """``drafter`` with its drafts replaced by ones that are right as often as ``acceptance`` prescribes.

    Plain decoding of each prompt is run here, before anything is timed.

    Args:
        drafter: proposes chains; see :class:`SyntheticDrafter`.
        acceptance: conditional, by position.
        prompts: those that the contestant will be given.
    """
    plain = ours(model, None, law)
    answers = {
        _key(prompt): plain(prompt).sequences[:, prompt["input_ids"].shape[1] :].tolist()
        for prompt in prompts
    }
    vocab_size = model.config.get_text_config(decoder=True).vocab_size

    def run(prompt: Prompt) -> Any:
        known = SyntheticDrafter(drafter, answers[_key(prompt)], acceptance, vocab_size)
        return ours(model, known, law, **keywords)(prompt)

    return run


def _key(prompt: Prompt) -> tuple[int, ...]:
    return tuple(prompt["input_ids"].flatten().tolist())


@contextmanager
def endless(*models: Model) -> Iterator[None]:
    """No end of sequence in these models: texts have one length without a processor that sees to it."""
    ends = [model.generation_config.eos_token_id for model in models]
    try:
        for model in models:
            model.generation_config.eos_token_id = None
        yield
    finally:
        for model, end in zip(models, ends, strict=True):
            model.generation_config.eos_token_id = end


def batches(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    batch: int,
    device: str | torch.device = "cpu",
) -> list[Prompt]:
    """Prompts of ``batch`` texts each, padded on the left; what does not fill a batch is left out.

    Raises:
        ValueError: if there are fewer texts than a batch has.
    """
    if len(texts) < batch:
        raise ValueError(f"a batch of {batch} needs as many prompts, and there are {len(texts)}")
    if batch > 1:
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    return [
        dict(
            tokenizer(list(texts[i : i + batch]), return_tensors="pt", padding=batch > 1).to(device)
        )
        for i in range(0, len(texts) - batch + 1, batch)
    ]
