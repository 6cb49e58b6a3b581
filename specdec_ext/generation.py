"""``generate`` and ``custom_generate``: the entry points, called by users and by transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.decoding.call import Call
from specdec_ext.decoding.call_loop import CallLoop
from specdec_ext.decoding.preparation import PreparedCall, decode_through, prepare
from specdec_ext.delegation import Noticed, class_generate
from specdec_ext.drafters import Drafter
from specdec_ext.drafters.choice import Assistant, DrafterChoice
from specdec_ext.models import Target
from specdec_ext.models.patching.changes import current_changes, transactional
from specdec_ext.models.tensor_parallel import agreed_clock
from specdec_ext.output import AnyOutput, TokenStream
from specdec_ext.pretrained import unwrapped
from specdec_ext.schedule.controller import Controller
from specdec_ext.schedule.policy import Policy
from specdec_ext.schedule.settings import SpeculationConfig, resolve_speculation
from specdec_ext.verify.sampler import VERIFICATIONS


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
    hook = partial(
        custom_generate,
        drafter=drafter,
        speculation=speculation,
        verification=verification,
        graphs=graphs,
        seed=seed,
        generator=generator,
        streamer=streamer,
        tokenizer=tokenizer,
        synced_gpus=synced_gpus,
    )
    return decode_through(model, inputs, kwargs, hook)


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

    def decode(prepared: PreparedCall) -> Tensor | AnyOutput:
        return _decode(
            prepared,
            choice.drafter(prepared.model, prepared.config),
            choice.explicit,
            settings,
            verification,
            graphs,
            streamer,
        )

    return prepare(
        decode,
        seed=seed,
        generator=generator,
        tokenizer=tokenizer,
        stop_strings=stop_strings,
        synced_gpus=synced_gpus,
    )


def _decode(
    prepared: PreparedCall,
    drafter: Drafter | None,
    explicit: bool,
    speculation: SpeculationConfig | None,
    verification: str,
    graphs: bool | str,
    streamer: Any,
) -> Tensor | AnyOutput:
    recorder = prepared.recorder()
    target = prepared.target(recorder, graphs)
    current_changes().on_failure(target.abandon)
    drafter = _served(target, drafter, explicit, len(prepared.input_ids))
    call = Call.of(prepared, target, recorder, drafter, verification)
    if streamer is not None:
        call.stream = TokenStream(streamer, call.context)
    rule = call.sampler
    policy = policy_of(
        speculation, drafter, prepared.model, rule.temperature, rule.needs_draft_probs
    )
    sequences = call.context.sequences(CallLoop(target, drafter, call, policy).run())
    if call.stream is not None:
        call.stream.end()
    if prepared.config.return_dict_in_generate:
        call.stats.report = policy.report() if policy is not None else None
        columns = call.context.prompt_columns
        return call.recorder.result(sequences, target.cache, call.stats, columns)
    return sequences


def policy_of(
    speculation: SpeculationConfig | None,
    drafter: Drafter | None,
    model: PreTrainedModel,
    temperature: float | None,
    needs_draft_probs: bool = False,
) -> Policy | None:
    """The policy of a call or an engine; None without a drafter.

    Args:
        speculation: the settings; None for ``"fixed"``.
        drafter: proposes trees.
        model: the target.
        temperature: as in :class:`Controller`.
        needs_draft_probs: whether the rule that verifies is another than "match".

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
    if not needs_draft_probs:
        clock = agreed_clock(model, speculation.clock)
        return Controller(replace(speculation, clock=clock), drafter, model, temperature)
    if speculation == SpeculationConfig():  # "auto", or a SpeculationConfig equal to it
        return Policy(drafter)
    raise ValueError(
        "speculation chooses drafts by measured times, and under this verification rule the sampled text "
        "depends on the drafts, so one seed would give many texts. Pass speculation='fixed', "
        "SpeculationConfig(shapes=[...], may_rest=False) with one shape, or verification='match'"
    )


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
