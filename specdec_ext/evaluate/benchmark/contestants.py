"""Contestants: Hugging Face's and our ways to generate, as functions of a prompt with shared keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdec_ext.delegation import class_generate
from specdec_ext.drafters.base import Drafter
from specdec_ext.evaluate.benchmark.series import Prompt
from specdec_ext.evaluate.synthetic import SyntheticDrafter
from specdec_ext.generation import generate

# A PreTrainedModel that can generate; transformers has no type for that combination.
Model = Any
# Function of a prompt and, for some contestants, of ``streamer=``.
Contestant = Callable[..., Any]

LOOKUP_TOKENS = 10  # as in the example of transformers' documentation of prompt_lookup_num_tokens
SEED = 0


def generation_kwargs(max_new_tokens: int, temperature: float = 0.0, **more: Any) -> dict[str, Any]:
    """Keywords of ``generate`` that all contestants share: greedy for temperature 0, else sampling."""
    sampled = {"temperature": temperature, "top_k": 0} if temperature else {}
    return {"max_new_tokens": max_new_tokens, "do_sample": bool(temperature), **sampled, **more}


def hugging_face(model: Model, shared: Mapping[str, Any], **keywords: Any) -> Contestant:
    """``model.generate`` with ``keywords`` that speed it up; every call sets the same seed first."""

    def run(prompt: Prompt, streamer: Any = None) -> Tensor:
        torch.manual_seed(SEED)
        ids: Tensor = class_generate(model)(**prompt, **shared, **keywords, streamer=streamer)
        return ids

    return run


def ours(model: Model, drafter: Any, shared: Mapping[str, Any], **keywords: Any) -> Contestant:
    """``specdec_ext.generate`` with ``drafter``; the seed is fixed, so all drafters sample the same text."""
    keywords |= {**shared, "return_dict_in_generate": True}
    if shared["do_sample"]:
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
    shared: Mapping[str, Any],
    **keywords: Any,
) -> Contestant:
    """``drafter`` whose drafts are replaced by ones that are accepted as often as ``acceptance`` prescribes.

    Plain decoding of each prompt is run here, before anything is timed.

    Args:
        drafter: proposes chains; see :class:`SyntheticDrafter`.
        acceptance: conditional acceptance of each position.
        prompts: the prompts that the contestant will be called with.
    """
    answers = plain_texts(model, prompts, shared)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size

    def run(prompt: Prompt) -> Any:
        known = SyntheticDrafter(
            drafter, answers[key_of(prompt["input_ids"])], acceptance, vocab_size
        )
        return ours(model, known, shared, **keywords)(prompt)

    return run


def plain_texts(
    model: Model, prompts: Sequence[Prompt], shared: Mapping[str, Any]
) -> dict[tuple[int, ...], list[list[int]]]:
    """The tokens that plain decoding generates for each row of each prompt, by :func:`key_of` its ids."""
    plain = ours(model, None, shared)
    ids = [prompt["input_ids"] for prompt in prompts]
    return {
        key_of(each): plain(prompt).sequences[:, each.shape[1] :].tolist()
        for each, prompt in zip(ids, prompts, strict=True)
    }


def key_of(input_ids: Tensor) -> tuple[int, ...]:
    return tuple(input_ids.flatten().tolist())


@contextmanager
def endless(*models: Model) -> Iterator[None]:
    """Remove the end-of-sequence token from these models for a while, so that all texts have one length.

    ``min_new_tokens`` would do the same with a logits processor, which takes time in every step.
    """
    ends = [model.generation_config.eos_token_id for model in models]
    try:
        for model in models:
            model.generation_config.eos_token_id = None
        yield
    finally:
        for model, end in zip(models, ends, strict=True):
            model.generation_config.eos_token_id = end
