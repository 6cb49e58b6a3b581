"""``prepare``: let transformers prepare a call, and check its arguments.

``model.generate(custom_generate=callable)`` prepares everything (prompt, processors, stopping criteria,
cache) and then calls ``callable`` instead of its own loop. It does not pass on some of its arguments
(streamer, tokenizer, stop_strings, assistant_model), so these are put into the callable.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from specdec_ext.delegation import check_loop, generate_through
from specdec_ext.keywords import check_arguments, check_config
from specdec_ext.models import Target, make_target
from specdec_ext.models.compat import cached_tokens
from specdec_ext.models.context_limit import Span
from specdec_ext.models.patching.changes import transactional
from specdec_ext.models.tensor_parallel import agreed_seed
from specdec_ext.models.wrapped import (
    check_ids,
    check_model,
    check_wrapping,
    graph_breaks_explained,
)
from specdec_ext.output import Recorder
from specdec_ext.verify.stopping import StopRule

# Cache slots reserved for a draft in addition to the text. For a larger tree the cache grows.
BLOCK_SLOTS = 64
# (seed, stream) of each row
Noise = list[tuple[int, int]]


@dataclass
class PreparedCall:
    """A call as transformers prepared it.

    Attributes:
        model: the target.
        input_ids: ``[rows, columns]`` int64.
        processors: the logits processors, warpers included.
        stop: the end of a row.
        config: the generation config.
        noise: of the rows.
        encoder_input: what the encoder reads; None without an encoder.
        model_kwargs: the inputs of the model's forward.
    """

    model: PreTrainedModel
    input_ids: Tensor
    processors: LogitsProcessorList
    stop: StopRule
    config: GenerationConfig
    noise: Noise
    encoder_input: Tensor | None
    model_kwargs: dict[str, Any]

    def recorder(self) -> Recorder:
        """What collects the outputs that the config asks for."""
        return Recorder(self.config, len(self.input_ids), self.model_kwargs.get("encoder_outputs"))

    def target(
        self,
        recorder: Recorder,
        graphs: bool | str,
        max_slots: int | None = None,
        shares_passes: bool = False,
    ) -> Target:
        """The target of the call.

        Args:
            recorder: collects its outputs.
            graphs: as in :func:`specdec_ext.generate`.
            max_slots: the most cache slots that the call may need; None for its own length and a draft.
            shares_passes: whether passes are shared with texts of any length, and read the prompt in parts.
        """
        span = self._span()
        if shares_passes:
            span = span._replace(start=0)
        return make_target(
            self.model,
            max_slots or self.stop.max_length + BLOCK_SLOTS,
            recorder.forward_kwargs,
            self.model_kwargs,
            self.config,
            span,
            graphs,
        )

    def _span(self) -> Span:
        inputs, ids = self.model_kwargs, self.input_ids
        rows, columns = inputs.get("inputs_embeds", ids).shape[:2]
        held = cached_tokens(inputs)
        mask = inputs.get("attention_mask")
        shortest = columns if mask is None else int(mask.sum(dim=-1).min())
        end = self.stop.max_length + columns - ids.shape[1]
        return Span(rows, min(held or shortest, shortest), end)


def prepare(
    decode: Callable[[PreparedCall], Any],
    *,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    synced_gpus: bool | None = None,
) -> Callable[..., Any]:
    """Return a callable for ``model.generate(custom_generate=...)`` that passes the prepared call on.

    Args:
        decode: receives the call; its result is that of ``model.generate``.
        seed, generator, tokenizer, stop_strings, synced_gpus: as in :func:`specdec_ext.generate`.
    """
    if stop_strings is not None and tokenizer is None:
        raise ValueError("stop_strings needs tokenizer=..., the tokenizer of the model")

    @transactional
    def speculate(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        check_config(generation_config)
        check_arguments({"synced_gpus": _waits_for_others(model, synced_gpus)})
        check_wrapping(model)
        check_loop(model)
        prompt = model_kwargs.get("inputs_embeds", input_ids)
        if not prompt.numel():
            raise ValueError(
                f"the prompt has shape {tuple(prompt.shape)}; expected at least one row and one token"
            )
        criteria = StoppingCriteriaList(stopping_criteria)
        if stop_strings is not None:
            with torch.device(input_ids.device):  # it creates tensors on the default device
                criteria.append(StopStringCriteria(tokenizer, stop_strings))
        sampled = generation_config.do_sample
        call = PreparedCall(
            model,
            input_ids.long(),  # ids may be int32
            logits_processor,
            StopRule(criteria, generation_config),
            generation_config,
            _noise(model, seed, generator, len(input_ids))
            if sampled
            else [(0, 0)] * len(input_ids),
            inputs_tensor if model.config.is_encoder_decoder else None,
            model_kwargs,
        )
        with graph_breaks_explained(model):
            return decode(call)

    return speculate


def decode_through(
    model: PreTrainedModel,
    inputs: Tensor | None,
    kwargs: dict[str, Any],
    hook: Callable[..., Callable[..., Any]],
) -> Any:
    """Check the arguments of a call, and pass it to ``model.generate`` with a hook.

    Args:
        model: the target.
        inputs: the prompt, if it is not one of ``kwargs``.
        kwargs: the arguments of ``model.generate``.
        hook: makes the hook; called with the keyword ``stop_strings``.
    """
    check_model(model, kwargs)
    check_ids(model, inputs, kwargs.get("input_ids"))
    check_arguments(kwargs)
    if kwargs.get("generation_config") is not None:
        check_config(kwargs["generation_config"])
    made = hook(stop_strings=_take_stop_strings(kwargs, model.generation_config))
    # Unwrapped, the hook's changes to the model belong to the transaction of this call. A transaction of the
    # hook's own would end when the hook returns.
    made = inspect.unwrap(made)
    with torch.no_grad():
        return generate_through(model, inputs, made, kwargs)


def _take_stop_strings(kwargs: dict[str, Any], defaults: GenerationConfig) -> Any:
    """Remove the stop strings from ``kwargs``, where transformers would fail, and return them."""
    config = kwargs.get("generation_config")
    of_call, of_model = getattr(config, "stop_strings", None), defaults.stop_strings
    stop_strings = kwargs.pop("stop_strings", of_model if of_call is None else of_call)
    if of_call is not None:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
    if of_model is not None:
        kwargs["stop_strings"] = None  # overrides those of the model
    return stop_strings


def _waits_for_others(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """Whether other processes run a part of every pass; the same decision as in transformers."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1:
        return False
    if synced_gpus is None:
        return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return synced_gpus


def _noise(
    model: PreTrainedModel,
    seed: int | Sequence[int] | None,
    generator: torch.Generator | None,
    batch: int,
) -> list[tuple[int, int]]:
    """(seed, stream) of each row: streams 0, 1, 2, ... of one seed, or stream 0 of each row's own seed."""
    if seed is None:
        device = "cpu" if generator is None else generator.device
        drawn = int(torch.randint(2**62, (), generator=generator, device=device))
        seed = agreed_seed(model, drawn)
    elif generator is not None:
        raise ValueError("seed and generator both determine the noise; pass only one of them")
    if not isinstance(seed, (list, tuple)):
        return [(checked_seed(seed), row) for row in range(batch)]
    seeds = [checked_seed(each) for each in seed]
    if len(seeds) != batch:
        raise ValueError(
            f"seed has {len(seeds)} entries; expected one int, or one per row of the batch of {batch} "
            "(num_return_sequences included)"
        )
    return [(each, 0) for each in seeds]


def checked_seed(seed: Any) -> int:
    """Return ``seed``.

    Raises:
        ValueError: it is not a 64-bit int.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a 64-bit int or a list of such ints, got {seed!r}")
    return seed
