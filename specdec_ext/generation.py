"""``generate`` and ``custom_generate``: the entry points, called by users and by transformers.

``model.generate(custom_generate=callable)`` prepares everything (prompt, processors, stopping criteria,
cache) and then calls ``callable`` instead of its own loop. It does not pass on some of its arguments
(streamer, tokenizer, stop_strings, assistant_model), so ``generate`` puts these into a closure.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
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

from specdec_ext.context import Context
from specdec_ext.delegation import Noticed, check_loop, class_generate, generate_through
from specdec_ext.drafters import Drafter
from specdec_ext.drafters.choice import Assistant, DrafterChoice
from specdec_ext.keywords import check_arguments, check_config
from specdec_ext.loop import DecodingLoop
from specdec_ext.models import Target, make_target
from specdec_ext.models.context_limit import Span
from specdec_ext.models.patching.changes import current_changes, transactional
from specdec_ext.models.tensor_parallel import agreed_clock, agreed_seed
from specdec_ext.models.wrapped import (
    check_ids,
    check_model,
    check_wrapping,
    graph_breaks_explained,
)
from specdec_ext.output import AnyOutput, Recorder, TokenStream
from specdec_ext.pretrained import unwrapped
from specdec_ext.schedule.controller import Controller
from specdec_ext.schedule.policy import Policy
from specdec_ext.schedule.settings import SpeculationConfig, resolve_speculation
from specdec_ext.transfer import Staging
from specdec_ext.verify.sampler import VERIFICATIONS, Sampler
from specdec_ext.verify.stopping import StopRule

# Cache slots reserved for a draft in addition to the text. For a larger tree the cache grows.
BLOCK_SLOTS = 64


@transactional
def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    drafter: Any = "auto",
    speculation: Any = "auto",
    verification: str = "match",
    graphs: bool | str = "auto",
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_model: PreTrainedModel | None = None,
    assistant_tokenizer: Any = None,
    synced_gpus: bool | None = None,
    **kwargs: Any,
) -> Tensor | AnyOutput:
    """``model.generate`` with speculative decoding: the same arguments, the same text, fewer target passes.

    Args:
        model: a Hugging Face model that generates text; see :func:`specdec_ext.supports`.
        inputs: ``[batch, length]`` prompt ids (or ``input_ids=``), padded on the left or on the right; for an
            encoder-decoder model, the input of its encoder.
        drafter: what proposes tokens:

            - ``"auto"``: n-gram lookup, combined with the draft head if the model's config names one, else
              with the MTP heads if the model's checkpoint contains some;
            - ``"ngram"``, ``"suffix"`` or ``"lookahead"``: a drafter that needs no model;
            - ``"head"`` or ``"draft"``: the draft head that ``model.config.specdec_ext_draft`` names, or the
              draft model that ``model.config.specdec_ext_draft_model`` names;
            - ``"mtp"``: the heads for multi-token prediction (MTP) in the model's checkpoint;
            - the folder or hub id of a draft head or draft model, which is loaded once per target, in the
              target's dtype and on its device;
            - a Hugging Face model with the same tokenizer (a classic draft model), or the target's Gemma-4
              assistant;
            - a :class:`Drafter`;
            - ``None`` or ``"none"``: plain decoding in the same loop.
        speculation: ``"auto"`` measures the costs and gains of drafting, and in each step drafts the shape
            that promises the most tokens per second, or nothing. ``"fixed"`` drafts in every step, in the
            drafter's default shape. A :class:`SpeculationConfig` restricts ``"auto"``. The text is the same
            with all of them. When sampling under a rule other than "match", the text depends on the drafts,
            and ``"auto"`` means ``"fixed"``.
        verification: the rule that accepts drafts when sampling. ``"match"`` works with all drafters, and one
            seed gives one text. ``"rejection"`` and ``"block"`` (chains) and ``"recursive"`` (trees) need a
            drafter that samples, such as ``DraftModelDrafter(model, sampled=True)``. They preserve the
            distribution of the text, but the text for a seed depends on the drafter. Greedy decoding is the
            same under all rules.
        graphs: whether passes over drafts are recorded once and replayed, on CUDA as one graph each.
            ``"auto"`` does so on CUDA for models that allow it. ``True`` raises an error for the others, and
            on the CPU runs the passes in the same fixed shapes. ``False`` records nothing. The recorded
            passes of a model, and a cache for its longest call, are kept until
            :func:`specdec_ext.free_graphs`.
        seed: seed of the sampling noise, one for the call or a list with one per row, where each of the
            ``num_return_sequences`` is a row. By default it is drawn from ``generator`` or from torch's
            global generator. One seed gives one text with every drafter. Rows that share a seed have
            different noise. With a list, the text of a row depends on its prompt and seed only, in any batch
            and with any padding.
        generator: the generator from which the seed is drawn.
        streamer: receives the prompt, and then one ``[batch]`` tensor per column as soon as every unfinished
            row has reached that column.
        tokenizer: the target's tokenizer. It is needed with ``stop_strings`` and ``assistant_tokenizer``,
            and is compared with the tokenizer in a draft model's folder.
        assistant_model: transformers' name for a draft model; the same as ``drafter=assistant_model``.
        assistant_tokenizer: the tokenizer of an ``assistant_model`` with another vocabulary.
        synced_gpus: True means that other processes run parts of each pass, which is refused. None detects
            it as transformers does.
        **kwargs: all other arguments of ``model.generate``; see :mod:`specdec_ext.keyword_table`.

    Returns:
        ``[batch, length]`` ids, or with ``return_dict_in_generate=True`` a :class:`SpeculativeOutput`
        (for an encoder-decoder model a :class:`SpeculativeEncoderDecoderOutput`).

    Raises:
        ValueError: for an argument that can't be honoured without changing the text. The message names the
            argument and a way out.
        OSError: for a drafter's folder or hub id that does not exist.
    """
    if isinstance(kwargs.get("custom_generate"), Noticed):
        return class_generate(model)(*(() if inputs is None else (inputs,)), **kwargs)
    check_model(model, kwargs)
    check_ids(model, inputs, kwargs.get("input_ids"))
    if assistant_model is not None:
        if not (isinstance(drafter, str) and drafter == "auto"):
            raise ValueError("assistant_model and drafter name two drafters; pass only one of them")
        texts = (None, None) if assistant_tokenizer is None else (assistant_tokenizer, tokenizer)
        drafter = Assistant(unwrapped(assistant_model), *texts)
    elif assistant_tokenizer is not None:
        raise ValueError(
            "assistant_tokenizer needs assistant_model, which is missing; pass assistant_model, or "
            "drafter=DraftModelDrafter(model, tokenizer=..., target_tokenizer=...)"
        )
    check_arguments(kwargs)
    if kwargs.get("generation_config") is not None:
        check_config(kwargs["generation_config"])
    hook = custom_generate(
        drafter=drafter,
        speculation=speculation,
        verification=verification,
        graphs=graphs,
        seed=seed,
        generator=generator,
        streamer=streamer,
        tokenizer=tokenizer,
        stop_strings=_take_stop_strings(kwargs, model.generation_config),
        synced_gpus=synced_gpus,
    )
    # Unwrapped, the hook's changes to the model belong to the transaction of this call. A transaction of the
    # hook's own would end when the hook returns.
    hook = inspect.unwrap(hook)
    with torch.no_grad():
        return generate_through(model, inputs, hook, kwargs)


def custom_generate(
    drafter: Any = "auto",
    *,
    speculation: Any = "auto",
    verification: str = "match",
    graphs: bool | str = "auto",
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    synced_gpus: bool | None = None,
) -> Callable[..., Tensor | AnyOutput]:
    """Return a callable for ``model.generate(..., custom_generate=...)``.

    The arguments are those of :func:`generate`. ``model.generate`` does not pass on its own ``streamer``,
    ``tokenizer``, ``stop_strings``, ``assistant_model`` and ``synced_gpus`` to the callable, so pass them
    here, ``assistant_model`` as ``drafter``.
    """
    choice = DrafterChoice(drafter, tokenizer)
    settings = resolve_speculation(speculation)
    if verification not in VERIFICATIONS:
        raise ValueError(
            f"verification={verification!r} is not known; expected one of {list(VERIFICATIONS)}"
        )
    if not isinstance(graphs, bool) and graphs != "auto":
        raise ValueError(f"graphs={graphs!r} is not known; expected 'auto', True or False")
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
    ) -> Tensor | AnyOutput:
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
        with graph_breaks_explained(model):
            return _decode(
                model,
                input_ids.long(),  # ids may be int32
                logits_processor,
                StopRule(criteria, generation_config),
                generation_config,
                choice.drafter(model, generation_config),
                choice.explicit,
                settings,
                _noise(model, seed, generator, len(input_ids))
                if generation_config.do_sample
                else [(0, 0)] * len(input_ids),
                verification,
                graphs,
                streamer,
                inputs_tensor if model.config.is_encoder_decoder else None,
                **model_kwargs,
            )

    return speculate


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    stop: StopRule,
    config: GenerationConfig,
    drafter: Drafter | None,
    explicit: bool,
    speculation: SpeculationConfig | None,
    noise: list[tuple[int, int]],
    verification: str,
    graphs: bool | str,
    streamer: Any,
    encoder_input: Tensor | None = None,
    past_key_values: Any = None,
    **model_kwargs: Any,
) -> Tensor | AnyOutput:
    recorder = Recorder(config, len(input_ids), model_kwargs.get("encoder_outputs"))
    slots = stop.max_length + BLOCK_SLOTS
    target = make_target(
        model,
        past_key_values,
        slots,
        recorder.forward_kwargs,
        model_kwargs,
        config,
        _span(input_ids, past_key_values, model_kwargs, stop),
        graphs,
    )
    current_changes().on_failure(target.abandon)
    drafter = _served(target, drafter, explicit, len(input_ids))
    target.staging = Staging(input_ids.device)
    attention_mask = target.admit(input_ids, model_kwargs, config)
    sampler = Sampler(processors, config.do_sample, noise, target.staging, verification)
    if sampler.needs_draft_probs and drafter is not None and not drafter.sampled:
        raise ValueError(
            f"verification={verification!r} needs a drafter that samples its drafts from known "
            f"probabilities, such as DraftModelDrafter(model, sampled=True); {type(drafter).__name__} does "
            "not. Use verification='match', the default"
        )
    pad = config._pad_token_tensor
    context = Context(
        input_ids,
        attention_mask,
        0 if pad is None else int(pad),
        stop.max_length,
        sampler.draw,
        sampler.sample,
        target.offset,
        _ids_of(encoder_input, len(input_ids), target.vocab_size),
        target.staging,
        sampler.draft_noise,
        target.committed_keys,
    )
    stream = TokenStream(streamer, context) if streamer is not None else None
    policy = _policy(speculation, drafter, model, sampler)
    decoder = DecodingLoop(target, drafter, sampler, stop, context, recorder, stream, policy)
    sequences = context.sequences(decoder.run())
    if stream is not None:
        stream.end()
    if config.return_dict_in_generate:
        decoder.stats.report = policy.report() if policy is not None else None
        return recorder.result(sequences, target.cache, decoder.stats, context.prompt_columns)
    return sequences


def _policy(
    speculation: SpeculationConfig | None,
    drafter: Drafter | None,
    model: PreTrainedModel,
    sampler: Sampler,
) -> Policy | None:
    """The policy of the call; None without a drafter.

    Raises:
        ValueError: if the text would depend on measured times, because the rule's text depends on the drafts
            and the settings leave choices open.
    """
    if drafter is None:
        return None
    if speculation is None:
        return Policy(drafter)
    if speculation.is_fixed:
        assert speculation.shapes is not None
        return Policy(drafter, speculation.shapes[0])
    if not sampler.needs_draft_probs:
        clock = agreed_clock(model, speculation.clock)
        return Controller(replace(speculation, clock=clock), drafter, model, sampler.temperature)
    if speculation == SpeculationConfig():  # "auto", or a SpeculationConfig equal to it
        return Policy(drafter)
    raise ValueError(
        "speculation chooses drafts by measured times, and under this verification rule the sampled text "
        "depends on the drafts, so one seed would give many texts. Pass speculation='fixed', "
        "SpeculationConfig(shapes=[...], may_rest=False) with one shape, or verification='match'"
    )


def _span(input_ids: Tensor, cache: Any, inputs: dict[str, Any], stop: StopRule) -> Span:
    rows, columns = inputs.get("inputs_embeds", input_ids).shape[:2]
    held = 0 if cache is None else int(cache.get_seq_length())
    mask = inputs.get("attention_mask")
    shortest = columns if mask is None else int(mask.sum(dim=-1).min())
    end = stop.max_length + columns - input_ids.shape[1]
    return Span(rows, min(held or shortest, shortest), end)


def _ids_of(encoder_input: Tensor | None, batch: int, vocab_size: int) -> Tensor | None:
    """``[batch, columns]`` ids that the encoder reads; None if the decoder's vocabulary lacks them."""
    if encoder_input is None or encoder_input.ndim != 2 or encoder_input.is_floating_point():
        return None
    if int(encoder_input.max()) >= vocab_size:
        return None
    return encoder_input.repeat_interleave(batch // len(encoder_input), dim=0)


def _served(target: Target, drafter: Drafter | None, explicit: bool, batch: int) -> Drafter | None:
    """Return the drafter, or None with a warning if only plain decoding is exact for this model or batch.

    Raises:
        ValueError: the same, if the caller chose the drafter explicitly.
    """
    support = target.support
    if drafter is None or (support.chain and (support.batch or batch == 1)):
        return drafter
    name, why = type(target.model).__name__, "; ".join(support.reasons)
    if explicit and not support.chain:
        raise ValueError(
            f"{name} can't be speculated on: {why}. Pass drafter=None for plain decoding."
        )
    where, way_out = "", "Pass"
    if support.chain:
        where, way_out = f" in a batch of {batch}", "Generate one row at a time, or pass"
    warnings.warn(
        f"{name} is decoded without speculation{where}: {why}. {way_out} drafter=None to say so.",
        stacklevel=4,
    )
    return None


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
