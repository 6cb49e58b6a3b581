"""Every keyword of transformers' ``generate`` and what becomes of it here.

``CONFIG`` are the fields of ``GenerationConfig``, ``ARGUMENTS`` the parameters of ``generate`` and the model
inputs it takes, ``PARTS`` the logits processors and stopping criteria that come with transformers.
:mod:`specdec_ext.keywords` enforces the table; nothing that it says is said elsewhere. Neither torch nor
transformers is needed to read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What a keyword costs."""

    EXACT = "exact"
    SLOWER = "exact, slower path"
    REFUSED = "refused"


class Reads(Enum):
    """What a processor or a stopping criterion depends on, which decides when it may be called.

    SCORES: one row's scores alone: all nodes of a tree go through it at once, visited or not.
    PREFIX: one row's text before the token, too: called at the nodes that are visited, each row at its own
        pace, where the rule allows it also at others.
    ORDER: perhaps on its own past or on other rows: the very calls of plain decoding, once for each emitted
        position in order, for which the rows of a batch advance together.
    """

    SCORES = "on all nodes at once"
    PREFIX = "at every visited node, with the text up to it"
    ORDER = "once for every emitted position in order, the rows of a batch together"


@dataclass(frozen=True)
class Keyword:
    """One row of the table.

    Attributes:
        verdict: exact, exact on a slower path, or refused.
        note: how it is honoured; of a refused one why it is not, and the way out.
        harmless: values that ask for nothing.
        reads: of processors and criteria, what they depend on.
    """

    verdict: Verdict
    note: str
    harmless: tuple[Any, ...] = (None,)
    reads: Reads | None = None


def _exact(note: str, *harmless: Any) -> Keyword:
    return Keyword(Verdict.EXACT, note, (None, *harmless))


def _refused(note: str, *harmless: Any) -> Keyword:
    return Keyword(Verdict.REFUSED, note, (None, *harmless))


def _called(reads: Reads) -> Keyword:
    verdict = Verdict.EXACT if reads is Reads.SCORES else Verdict.SLOWER
    return Keyword(verdict, f"called {reads.value}", reads=reads)


_SCORES, _PREFIX, _ORDER = map(_called, Reads)
_COUNTED = Keyword(Verdict.EXACT, "decided from the token and the length", reads=Reads.SCORES)
_TIES = "of tokens that tie at the edge as many are kept as transformers keeps, but perhaps others"
_CODEBOOKS = _refused("it belongs to the audio codebooks of a model with a generate of its own")

PARTS: dict[str, Keyword] = {
    "TemperatureLogitsWarper": _SCORES,
    "TopKLogitsWarper": _SCORES,
    "TopPLogitsWarper": replace(_SCORES, note=f"{_SCORES.note}; {_TIES}"),
    "MinPLogitsWarper": _SCORES,
    "TypicalLogitsWarper": _SCORES,
    "EpsilonLogitsWarper": _SCORES,
    "EtaLogitsWarper": _SCORES,
    # A function of the scores, too, but one that raises at NaN: not to be called at nodes nobody visits.
    "TopHLogitsWarper": _PREFIX,
    "LogitNormalization": _SCORES,
    "InfNanRemoveLogitsProcessor": _SCORES,
    "SuppressTokensLogitsProcessor": _SCORES,
    "BarkEosPrioritizerLogitsProcessor": _SCORES,
    "MinLengthLogitsProcessor": _PREFIX,
    "MinNewTokensLengthLogitsProcessor": _PREFIX,
    "RepetitionPenaltyLogitsProcessor": _PREFIX,
    "EncoderRepetitionPenaltyLogitsProcessor": _PREFIX,
    "NoRepeatNGramLogitsProcessor": _PREFIX,
    "EncoderNoRepeatNGramLogitsProcessor": _PREFIX,
    "SequenceBiasLogitsProcessor": _PREFIX,
    "NoBadWordsLogitsProcessor": _PREFIX,
    "ForcedBOSTokenLogitsProcessor": _PREFIX,
    "ForcedEOSTokenLogitsProcessor": _PREFIX,
    "ExponentialDecayLengthPenalty": _PREFIX,
    "SuppressTokensAtBeginLogitsProcessor": _PREFIX,
    "WatermarkLogitsProcessor": _PREFIX,
    "AlternatingCodebooksLogitsProcessor": _PREFIX,
    "WhisperTimeStampLogitsProcessor": _PREFIX,
    "PrefixConstrainedLogitsProcessor": _ORDER,  # calls a function of the user's
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
    """What transformers turns into this processor."""
    return Keyword(PARTS[part].verdict, f"`{part}`: {PARTS[part].note}")


_BEAMS = _exact("read by beam search alone: no effect here, as in plain decoding")
_CONTRASTIVE = "contrastive search looks ahead at hidden states; use model.generate for it"
_CONSTRAINED = "constrained beam search is not supported; use model.generate for it"
_ALIGNED = "drafts are aligned token by token, nothing is looked back for; leave it out"
_LENGTHS = "ends a row where plain decoding ends it, inside a block of drafts, too"
_RECORDED = "of the emitted tokens, as plain decoding records them"

CONFIG: dict[str, Keyword] = {
    "max_length": _exact(_LENGTHS),
    "max_new_tokens": _exact(_LENGTHS),
    "eos_token_id": _exact(_LENGTHS),
    "stop_strings": _exact(f"{_LENGTHS}; needs `tokenizer`"),
    "max_time": _exact("asked after every token, as in plain decoding"),
    "min_length": _by("MinLengthLogitsProcessor"),
    "min_new_tokens": _by("MinNewTokensLengthLogitsProcessor"),
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "diversity_penalty": _BEAMS,
    "do_sample": _exact("the law of plain decoding; one seed gives one text, whatever the drafter"),
    "num_beams": _refused("beam search keeps several hypotheses; use model.generate for it", 1),
    "num_beam_groups": _refused(
        "group beam search is not a law over tokens; use model.generate for it", 1
    ),
    "constraints": _refused(_CONSTRAINED),
    "force_words_ids": _refused(_CONSTRAINED),
    "penalty_alpha": _refused(_CONTRASTIVE, 0),
    "low_memory": _exact("read by contrastive search alone: no effect, as in plain decoding"),
    "dola_layers": _refused("DoLa contrasts layers at every token; use model.generate for it"),
    "use_cache": Keyword(
        Verdict.SLOWER, "without one the whole text runs in every pass, with its drafts"
    ),
    "cache_implementation": _refused(
        "it can't be rolled back; leave it out (the cache is preallocated and rolled back by specdec_ext)",
        "dynamic",
        "dynamic_full",  # what transformers before 5.17 chooses for assisted decoding
    ),
    "cache_config": _exact("read by quantised caches alone, which are refused"),
    "max_cache_len": _exact("read by static caches alone, which are refused"),
    "prefill_chunk_size": _exact("the prompt is read in chunks of so many columns"),
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
        "every copy of a row has its own noise (a list of seeds has one for each copy)"
    ),
    "return_dict_in_generate": _exact("a `SpeculativeOutput`: transformers' output and statistics"),
    "output_scores": _exact(_RECORDED),
    "output_logits": _exact(_RECORDED),
    "output_hidden_states": _exact(_RECORDED),
    "output_attentions": _exact(f"{_RECORDED}; needs attn_implementation='eager'"),
    "pad_token_id": _exact("fills rows that ended, as in plain decoding"),
    "bos_token_id": _exact("begins a call without a prompt, as in plain decoding"),
    "decoder_start_token_id": _exact("prepared by transformers"),
    "prompt_lookup_num_tokens": _exact("drafter='auto' becomes n-gram copies of this length"),
    "max_matching_ngram_size": _exact("drafter='auto' becomes n-gram copies behind such a match"),
    "num_assistant_tokens": _exact(
        "length of `assistant_model`'s drafts; transformers' default stands for the drafter's own",
        20,
    ),
    "assistant_confidence_threshold": _exact(
        "ends `assistant_model`'s drafts; transformers' default stands for the drafter's own", 0.4
    ),
    "num_assistant_tokens_schedule": _refused(
        "drafts of assistant_model have one length; leave it at 'constant'", "constant"
    ),
    "assistant_lookbehind": _refused(_ALIGNED, 10),
    "target_lookbehind": _refused(_ALIGNED, 10),
    "assistant_ensemble_weight": _refused(
        "it mixes the draft model's law into the text, which is lossy; leave it out"
    ),
    "assistant_early_exit": _refused("early-exit drafting is not supported; leave it out"),
    "is_assistant": _refused(
        "it is for the calls that transformers makes of a draft model; leave it out", False
    ),
    "use_mtp": _refused(
        "multi-token-prediction heads are not supported as drafters; leave it out", False
    ),
    "speculation_type": _refused("choose the drafter with drafter=... instead"),
    "compile_config": _refused("only static caches are compiled; torch.compile the model instead"),
    "disable_compile": _exact("nothing is compiled"),
    "continuous_batching_config": _refused("it is for generate_batch; leave it out"),
    "transformers_version": _exact("says who wrote the config"),
}

ARGUMENTS: dict[str, Keyword] = {
    "inputs": _exact("the prompt, left or right padded; also as `input_ids`"),
    "attention_mask": _exact("0 where the prompt has paddings"),
    "position_ids": _exact("if they count the unpadded tokens of a row; others are refused"),
    "past_key_values": _exact(
        "a `DynamicCache`, filled or not, laid out like `sequences[:, :-1]` afterwards"
    ),
    "inputs_embeds": _exact(
        "the prompt as embeddings, with or without `input_ids`; drafters that copy text see the ids alone"
    ),
    "kwargs": Keyword(
        Verdict.SLOWER,
        "fields of the config, and other inputs of the model (token types, images, encoder outputs): then "
        "transformers prepares every pass, and a single row is speculated on",
    ),
    "generation_config": _exact("is not changed; its fields are those of this table"),
    "logits_processor": Keyword(
        Verdict.SLOWER, f"processors of your own, called {Reads.ORDER.value}"
    ),
    "stopping_criteria": Keyword(
        Verdict.SLOWER, f"criteria of your own, called {Reads.ORDER.value}"
    ),
    "prefix_allowed_tokens_fn": _by("PrefixConstrainedLogitsProcessor"),
    "negative_prompt_ids": _exact("of `guidance_scale`"),
    "negative_prompt_attention_mask": _exact("of `guidance_scale`"),
    "streamer": _exact(
        "gets a column as soon as all rows have it; with custom_generate pass it to the hook"
    ),
    "tokenizer": _exact("of `stop_strings`; with custom_generate pass it to the hook"),
    "assistant_model": _exact("the drafter; with custom_generate pass it to the hook as drafter"),
    "assistant_tokenizer": _exact(
        "with `tokenizer`, for an `assistant_model` of another vocabulary"
    ),
    "synced_gpus": _refused(
        "with several processes that share a model every one has to run as many passes as the others, but "
        "rows advance at different paces; gather the model on each rank, or use model.generate",
        False,
    ),
    "custom_generate": _refused("it is how specdec_ext.generate works itself; leave it out"),
    "trust_remote_code": _exact("of hub code that custom_generate names: no effect"),
}

TABLES: dict[str, dict[str, Keyword]] = {
    "Field of GenerationConfig": CONFIG,
    "Argument of generate": ARGUMENTS,
    "Logits processor or stopping criterion": PARTS,
}


def markdown() -> str:
    """The table for people."""
    lines: list[str] = []
    for title, table in TABLES.items():
        lines += [f"| {title} | verdict | |", "|---|---|---|"]
        lines += [
            f"| `{name}` | {keyword.verdict.value} | {keyword.note} |"
            for name, keyword in table.items()
        ]
        lines.append("")
    return "\n".join(lines)
