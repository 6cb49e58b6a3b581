"""The support table: every keyword of transformers' ``generate`` and how it is handled here.

``CONFIG`` holds the fields of ``GenerationConfig``, ``ARGUMENTS`` the parameters of ``generate`` and the
model inputs that it takes, ``PARTS`` the logits processors and stopping criteria of transformers. This is the
only source of this information; :mod:`specdec_ext.keywords` enforces it. Importing this module needs neither
torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Verdict(Enum):
    """How a keyword is supported."""

    EXACT = "exact"
    SLOWER = "exact, slower path"
    REFUSED = "refused"


class Reads(Enum):
    """What a processor or stopping criterion depends on. This decides when it may be called.

    SCORES: the scores of one row. It is called once for all nodes of a tree, visited or not.
    PREFIX: also the row's text before the token. One op computes the common ones at all nodes; others are
        called at visited nodes, each row at its own pace, and by rules 2 to 4 at all nodes.
    ORDER: possibly earlier calls or other rows. It gets exactly the calls of plain decoding: once for each
        emitted position in order, for all rows of a batch together.
    """

    SCORES = "on all nodes at once"
    PREFIX = "at every visited node, with the text up to it"
    ORDER = "once for every emitted position, in order, for all rows of a batch together"


@dataclass(frozen=True)
class Keyword:
    """One row of the table.

    Attributes:
        verdict: exact, exact on a slower path, or refused.
        note: how it is honoured; if it is refused, why, and what to do instead.
        harmless: values that have no effect and are never refused.
        reads: what a processor or criterion depends on.
        in_transformers: for a refused keyword, whether the way out is ``model.generate`` with transformers'
            own loop.
    """

    verdict: Verdict
    note: str
    harmless: tuple[Any, ...] = (None,)
    reads: Reads | None = None
    in_transformers: bool = False


def _exact(note: str, *harmless: Any) -> Keyword:
    return Keyword(Verdict.EXACT, note, (None, *harmless))


def _refused(note: str, *harmless: Any) -> Keyword:
    return Keyword(Verdict.REFUSED, note, (None, *harmless))


def _in_transformers(note: str, *harmless: Any) -> Keyword:
    return replace(_refused(note, *harmless), in_transformers=True)


def _called(reads: Reads) -> Keyword:
    verdict = Verdict.EXACT if reads is Reads.SCORES else Verdict.SLOWER
    return Keyword(verdict, f"called {reads.value}", reads=reads)


_SCORES, _PREFIX, _ORDER = map(_called, Reads)
# Computed by the op adjust_logits, except next to processors that are called otherwise.
_ADJUSTED = Keyword(
    Verdict.EXACT, "computed at all nodes at once, each with the text up to it", reads=Reads.PREFIX
)
_SINGLE = replace(
    _ADJUSTED, note=f"single tokens: {_ADJUSTED.note}; longer sequences: {_PREFIX.note}"
)
_COUNTED = Keyword(Verdict.EXACT, "decided from the token and the length", reads=Reads.SCORES)
_TIES = "among tokens tied at the threshold, it keeps as many as transformers, but maybe other ones"
_CODEBOOKS = _refused("it belongs to the audio codebooks of models with their own generate")

PARTS: dict[str, Keyword] = {
    "TemperatureLogitsWarper": _SCORES,
    "TopKLogitsWarper": _SCORES,
    "TopPLogitsWarper": replace(_SCORES, note=f"{_SCORES.note}; {_TIES}"),
    "MinPLogitsWarper": _SCORES,
    "TypicalLogitsWarper": _SCORES,
    "EpsilonLogitsWarper": _SCORES,
    "EtaLogitsWarper": _SCORES,
    # It depends on the scores only, but raises an error for NaN, so it is not called at unvisited nodes.
    "TopHLogitsWarper": _PREFIX,
    "LogitNormalization": _SCORES,
    "InfNanRemoveLogitsProcessor": _SCORES,
    "SuppressTokensLogitsProcessor": _SCORES,
    "BarkEosPrioritizerLogitsProcessor": _SCORES,
    "MinLengthLogitsProcessor": _ADJUSTED,
    "MinNewTokensLengthLogitsProcessor": _ADJUSTED,
    "RepetitionPenaltyLogitsProcessor": _ADJUSTED,
    "EncoderRepetitionPenaltyLogitsProcessor": _PREFIX,
    "NoRepeatNGramLogitsProcessor": _ADJUSTED,
    "EncoderNoRepeatNGramLogitsProcessor": _PREFIX,
    "SequenceBiasLogitsProcessor": _SINGLE,
    "NoBadWordsLogitsProcessor": _SINGLE,
    "ForcedBOSTokenLogitsProcessor": _ADJUSTED,
    "ForcedEOSTokenLogitsProcessor": _ADJUSTED,
    "ExponentialDecayLengthPenalty": _PREFIX,
    "SuppressTokensAtBeginLogitsProcessor": _ADJUSTED,
    "WatermarkLogitsProcessor": _PREFIX,
    "AlternatingCodebooksLogitsProcessor": _PREFIX,
    "WhisperTimeStampLogitsProcessor": _PREFIX,
    "PrefixConstrainedLogitsProcessor": _ORDER,  # calls a function of the user
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _ORDER,
    "SynthIDTextWatermarkLogitsProcessor": _ORDER,
    "WhisperNoSpeechDetection": _ORDER,
    "ClassifierFreeGuidanceLogitsProcessor": _CODEBOOKS,
    "DiaClassifierFreeGuidanceLogitsProcessor": _CODEBOOKS,
    "DiaEOSChannelFilterLogitsProcessor": _CODEBOOKS,
    "DiaEOSDelayPatternLogitsProcessor": _CODEBOOKS,
    "MaxLengthCriteria": _COUNTED,
    "EosTokenCriteria": _COUNTED,
    "MaxTimeCriteria": _PREFIX,
    "StopStringCriteria": _PREFIX,
    "ConfidenceCriteria": _ORDER,
}


def _by(part: str) -> Keyword:
    """A keyword that transformers implements with this processor."""
    return Keyword(PARTS[part].verdict, f"`{part}`: {PARTS[part].note}")


_BEAMS = _exact("only beam search reads it: no effect here, as in plain decoding")
_CONTRASTIVE = "contrastive search is not supported; use model.generate for it"
_CONSTRAINED = "constrained beam search is not supported; use model.generate for it"
_ALIGNED = "the two vocabularies are matched token by token, without lookbehind; leave it out"
_LENGTHS = "ends a row exactly where plain decoding ends it, also inside an accepted draft"
_RECORDED = "recorded for the emitted tokens, as in plain decoding"

CONFIG: dict[str, Keyword] = {
    "max_length": _exact(_LENGTHS),
    "max_new_tokens": _exact(_LENGTHS),
    "eos_token_id": _exact(_LENGTHS),
    "stop_strings": _exact(f"{_LENGTHS}; needs `tokenizer`"),
    "max_time": _exact("checked after every token, as in plain decoding"),
    "min_length": _by("MinLengthLogitsProcessor"),
    "min_new_tokens": _by("MinNewTokensLengthLogitsProcessor"),
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "diversity_penalty": _BEAMS,
    "do_sample": _exact(
        "the distribution of plain decoding; one seed gives one text with every drafter"
    ),
    "num_beams": _in_transformers("beam search is not supported; use model.generate for it", 1),
    "num_beam_groups": _in_transformers(
        "group beam search is not supported; use model.generate for it", 1
    ),
    "constraints": _in_transformers(_CONSTRAINED),
    "force_words_ids": _in_transformers(_CONSTRAINED),
    "penalty_alpha": _in_transformers(_CONTRASTIVE, 0),
    "low_memory": _exact("only contrastive search reads it: no effect, as in plain decoding"),
    "dola_layers": _in_transformers("DoLa decoding is not supported; use model.generate for it"),
    "use_cache": Keyword(
        Verdict.SLOWER, "with False, every pass runs over the whole text and its drafts"
    ),
    "cache_implementation": _refused(
        "it can't be rolled back; leave it out (specdec_ext preallocates a cache and rolls it back)",
        "dynamic",
        "dynamic_full",  # the choice of transformers before 5.17 for assisted decoding
    ),
    "cache_config": _exact("only quantised caches read it, which are refused"),
    "max_cache_len": _exact("only static caches read it, which are refused"),
    "prefill_chunk_size": _exact("the prompt is read in chunks of this many columns"),
    "temperature": _by("TemperatureLogitsWarper"),
    "top_k": _by("TopKLogitsWarper"),
    "top_p": _by("TopPLogitsWarper"),
    "min_p": _by("MinPLogitsWarper"),
    "top_h": _by("TopHLogitsWarper"),
    "typical_p": _by("TypicalLogitsWarper"),
    "epsilon_cutoff": _by("EpsilonLogitsWarper"),
    "eta_cutoff": _by("EtaLogitsWarper"),
    "repetition_penalty": _by("RepetitionPenaltyLogitsProcessor"),
    "encoder_repetition_penalty": _by("EncoderRepetitionPenaltyLogitsProcessor"),
    "no_repeat_ngram_size": _by("NoRepeatNGramLogitsProcessor"),
    "encoder_no_repeat_ngram_size": _by("EncoderNoRepeatNGramLogitsProcessor"),
    "bad_words_ids": _by("NoBadWordsLogitsProcessor"),
    "sequence_bias": _by("SequenceBiasLogitsProcessor"),
    "forced_bos_token_id": _by("ForcedBOSTokenLogitsProcessor"),
    "forced_eos_token_id": _by("ForcedEOSTokenLogitsProcessor"),
    "suppress_tokens": _by("SuppressTokensLogitsProcessor"),
    "begin_suppress_tokens": _by("SuppressTokensAtBeginLogitsProcessor"),
    "exponential_decay_length_penalty": _by("ExponentialDecayLengthPenalty"),
    "remove_invalid_values": _by("InfNanRemoveLogitsProcessor"),
    "renormalize_logits": _by("LogitNormalization"),
    "guidance_scale": _by("UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    "watermarking_config": Keyword(
        Verdict.SLOWER, "`WatermarkLogitsProcessor` or `SynthIDTextWatermarkLogitsProcessor`"
    ),
    "token_healing": _refused("token healing rewrites the prompt; heal it before the call", False),
    "num_return_sequences": _exact(
        "every copy of a row has its own noise; a list of seeds needs one for each copy"
    ),
    "return_dict_in_generate": _exact(
        "returns a `SpeculativeOutput`: transformers' output and statistics"
    ),
    "output_scores": _exact(_RECORDED),
    "output_logits": _exact(_RECORDED),
    "output_hidden_states": _exact(_RECORDED),
    "output_attentions": _exact(f"{_RECORDED}; needs attn_implementation='eager'"),
    "pad_token_id": _exact("fills ended rows, as in plain decoding"),
    "bos_token_id": _exact("the prompt of a call without one, as in plain decoding"),
    "decoder_start_token_id": _exact("prepared by transformers"),
    "prompt_lookup_num_tokens": _exact(
        "drafter='auto' becomes n-gram lookup with drafts of this length"
    ),
    "max_matching_ngram_size": _exact(
        "drafter='auto' becomes n-gram lookup with this longest match"
    ),
    "num_assistant_tokens": _exact(
        "length of `assistant_model`'s drafts; transformers' default value means the drafter's default",
        20,
    ),
    "assistant_confidence_threshold": _exact(
        "ends `assistant_model`'s drafts; transformers' default value means the drafter's default",
        0.4,
    ),
    "num_assistant_tokens_schedule": _refused(
        "the drafts of assistant_model have a fixed length; use 'constant'", "constant"
    ),
    "assistant_lookbehind": _refused(_ALIGNED, 10),
    "target_lookbehind": _refused(_ALIGNED, 10),
    "assistant_ensemble_weight": _refused(
        "it mixes the draft model's distribution into the text, which is lossy; leave it out"
    ),
    "assistant_early_exit": _refused("early-exit drafting is not supported; leave it out"),
    "is_assistant": _refused(
        "it is for transformers' own calls of a draft model; leave it out", False
    ),
    "use_mtp": _exact("the checkpoint's own heads for multi-token prediction draft", False),
    "speculation_type": _refused("choose the drafter with drafter=..."),
    "compile_config": _refused("only static caches are compiled; torch.compile the model instead"),
    "disable_compile": _exact("nothing is compiled"),
    "continuous_batching_config": _refused("it is for generate_batch; leave it out"),
    "transformers_version": _exact("the version that wrote the config: no effect"),
}

ARGUMENTS: dict[str, Keyword] = {
    "inputs": _exact("the prompt, padded on the left or right; also as `input_ids`"),
    "attention_mask": _exact("0 where the prompt has paddings"),
    "position_ids": _exact("exact if they count the unpadded tokens of a row; others are refused"),
    "past_key_values": _exact(
        "a `DynamicCache`, empty or filled; after the call it holds `sequences[:, :-1]`"
    ),
    "cache": _exact("the name of `past_key_values` since transformers 5.24, which knows both"),
    "inputs_embeds": _exact(
        "the prompt as embeddings, with or without `input_ids`; lookup drafters read the ids only"
    ),
    "kwargs": Keyword(
        Verdict.SLOWER,
        "fields of the config, and other inputs of the model (token types, images, encoder outputs): with "
        "such inputs transformers prepares every pass, and only a single row is drafted for",
    ),
    "generation_config": _exact("not modified; its fields are listed in this table"),
    "logits_processor": Keyword(Verdict.SLOWER, f"your own processors, called {Reads.ORDER.value}"),
    "stopping_criteria": Keyword(Verdict.SLOWER, f"your own criteria, called {Reads.ORDER.value}"),
    "prefix_allowed_tokens_fn": _by("PrefixConstrainedLogitsProcessor"),
    "negative_prompt_ids": _exact("used with `guidance_scale`"),
    "negative_prompt_attention_mask": _exact("used with `guidance_scale`"),
    "streamer": _exact(
        "receives a column as soon as all rows have it; with custom_generate, pass it to the hook"
    ),
    "tokenizer": _exact("used with `stop_strings`; with custom_generate, pass it to the hook"),
    "assistant_model": _exact("the drafter; with custom_generate, pass it to the hook as drafter"),
    "assistant_tokenizer": _exact(
        "used with `tokenizer`, for an `assistant_model` with another vocabulary"
    ),
    "synced_gpus": _in_transformers(
        "if several processes share a model, each must run the same number of passes, but with drafts "
        "rows advance at different paces; gather the model on each rank, or use model.generate",
        False,
    ),
    "custom_generate": _refused("specdec_ext.generate uses it itself; leave it out"),
    "trust_remote_code": _exact("for hub code that custom_generate names: no effect"),
}

TABLES: dict[str, dict[str, Keyword]] = {
    "Field of GenerationConfig": CONFIG,
    "Argument of generate": ARGUMENTS,
    "Logits processor or stopping criterion": PARTS,
}


def markdown() -> str:
    """The table in Markdown."""
    lines: list[str] = []
    for title, table in TABLES.items():
        lines += [f"| {title} | verdict | |", "|---|---|---|"]
        lines += [
            f"| `{name}` | {keyword.verdict.value} | {keyword.note} |"
            for name, keyword in table.items()
        ]
        lines.append("")
    return "\n".join(lines)
