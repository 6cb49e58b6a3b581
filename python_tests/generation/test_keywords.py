"""Every keyword of the installed transformers is in the table, and each verdict of the table is true.

Claim: an exact keyword gives the ids and the recorded outputs of ``model.generate`` with the same keyword
(float32; tolerance of outputs 1e-4): in greedy decoding with partly right drafts, and in sampling with our
tokens, which transformers' loop is made to draw and must have the same scores for. A refused keyword is named
in the error, in every way to pass it. A keyword without a case here fails.
"""

import copy
import functools
import inspect

import pytest
import torch
from helpers.models.tiny import (
    VOCAB,
    ScriptedDrafter,
    generated,
    noisy_chain,
    prompts,
    random_tree,
    tiny_model,
)
from helpers.places import ROOT
from helpers.texts.stopping_cases import letters_tokenizer
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import logits_process as hf
from transformers.generation import stopping_criteria
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS, CompileConfig
from transformers.generation.streamers import BaseStreamer

import specdec_ext
from specdec_ext import keyword_table, keywords
from specdec_ext.decoding import preparation
from specdec_ext.drafters.choice import Assistant, DrafterChoice
from specdec_ext.errors import NotAcceleratedError
from specdec_ext.keyword_table import ARGUMENTS, CONFIG, PARTS, Verdict
from specdec_ext.models.compat import CACHE

EOS = 42  # occurs in some texts of this model
LENGTH = 12
BATCHES = {"one": (7,), "ragged": (9, 4, 7)}
every_batch = pytest.mark.parametrize(
    "batch", ["ragged", pytest.param("one", marks=pytest.mark.slow)]
)


def served(table) -> set[str]:
    return {name for name, keyword in table.items() if keyword.verdict is not Verdict.REFUSED}


def installed(names) -> list[str]:
    """The fields that the installed transformers has; the table holds those of all supported versions."""
    return [name for name in names if hasattr(GenerationConfig(), name)]


# --- completeness


def test_every_field_of_the_config_is_listed():
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= set(CONFIG)


def test_every_parameter_of_generate_is_listed():
    named = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    assert named <= set(ARGUMENTS)
    own = set(inspect.signature(specdec_ext.generate).parameters) - {"model"}
    ours = {"drafter", "speculation", "verification", "graphs", "seed", "generator"}
    assert own - set(ARGUMENTS) == ours


@pytest.mark.parametrize(
    "module, base",
    [(hf, hf.LogitsProcessor), (stopping_criteria, stopping_criteria.StoppingCriteria)],
    ids=["processors", "criteria"],
)
def test_every_processor_and_criterion_is_listed(module, base):
    classes = {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    assert classes - {"LogitsProcessorList", "StoppingCriteriaList"} <= set(PARTS)


def test_unlisted_field_is_refused_when_it_is_set(monkeypatch):
    """As with a newer transformers, which has a field that the table lacks."""
    monkeypatch.delitem(CONFIG, "repetition_penalty")
    keywords._unlisted_fields.cache_clear()
    try:
        call()  # at its default
        for kwargs in (
            dict(repetition_penalty=1.2),
            dict(generation_config=GenerationConfig(repetition_penalty=1.2, max_new_tokens=3)),
        ):
            with pytest.raises(
                NotAcceleratedError, match=r"repetition_penalty=1\.2 is a keyword of transfor"
            ):
                call(**kwargs)
    finally:
        keywords._unlisted_fields.cache_clear()


def test_unlisted_parameter_is_refused_when_it_is_set(monkeypatch):
    monkeypatch.delitem(ARGUMENTS, "negative_prompt_ids")
    keywords._unlisted_parameters.cache_clear()
    try:
        call(negative_prompt_ids=None)
        with pytest.raises(
            NotAcceleratedError, match=r"negative_prompt_ids=.* is a keyword of transformers"
        ):
            call(negative_prompt_ids=torch.ones(1, 3, dtype=torch.long))
    finally:
        keywords._unlisted_parameters.cache_clear()


def test_fields_of_other_code_are_ignored():
    """Checkpoints have fields for other code in generation_config.json, which transformers ignores, too."""
    assert call(generation_config=GenerationConfig(chat_format="chatml", max_new_tokens=3)).shape


def test_page_in_docs_is_the_table():
    page = (ROOT / "docs" / "reference" / "keywords.md").read_text()
    # As a set, because entries that a test removed and restored are at the end.
    lines = set(keyword_table.markdown().splitlines())
    assert {line for line in page.splitlines() if line.startswith("|")} == lines - {""}, (
        "the table has changed: put the output of `specdec keywords --markdown` into "
        "docs/reference/keywords.md"
    )


# --- what is refused

REFUSED = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "cache_implementation": "static",
    "token_healing": True,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "assistant_early_exit": 2,
    "is_assistant": True,
    "speculation_type": "dflash",
    "compile_config": CompileConfig(),
    "continuous_batching_config": "c",
}


def call(**kwargs):
    ids, _ = prompts((6,))
    return specdec_ext.generate(tiny_model("llama"), ids, **{"max_new_tokens": 3, **kwargs})


def test_every_refused_keyword_has_a_case():
    assert set(REFUSED) == set(CONFIG) - served(CONFIG)


@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig")
@pytest.mark.parametrize("way", ["generate", "hook", "config"])
@pytest.mark.parametrize("name", installed(REFUSED))
def test_refused_keywords_are_named(name, way):
    value, ids = REFUSED[name], prompts((6,))[0]
    if (name, way) == ("token_healing", "hook"):
        pytest.skip("transformers needs a tokenizer for it before it calls the hook")
    with pytest.raises(ValueError) as raised:
        if way == "generate":
            call(**{name: value})
        elif way == "config":
            call(generation_config=GenerationConfig(max_new_tokens=3, **{name: value}))
        else:
            kwargs = {"custom_generate": specdec_ext.custom_generate(), name: value}
            tiny_model("llama").generate(ids, max_new_tokens=3, **kwargs)
    message = f"{name}={value!r} can't be combined with speculation: {CONFIG[name].note}"
    assert str(raised.value) == message
    assert isinstance(raised.value, NotAcceleratedError) == CONFIG[name].in_transformers


def test_notes_name_model_generate_where_it_is_the_way_out():
    for table in keyword_table.TABLES.values():
        for name, keyword in table.items():
            assert keyword.in_transformers == ("use model.generate" in keyword.note), name


@pytest.mark.parametrize("name", installed(REFUSED))
def test_values_without_effect_are_not_refused(name):
    for value in CONFIG[name].harmless[1:]:
        if name != "cache_implementation" or value in ALL_CACHE_IMPLEMENTATIONS:
            assert call(**{name: value}).shape == (1, 9)


def test_custom_generate_is_refused():
    with pytest.raises(ValueError, match=r"custom_generate=.* specdec_ext.generate uses it itself"):
        call(custom_generate=print)


@pytest.mark.parametrize("name", sorted(set(PARTS) - served(PARTS)))
def test_processors_of_audio_codebooks_are_refused(name):
    processor = getattr(hf, name).__new__(getattr(hf, name))
    with pytest.raises(ValueError, match=f"{name} is not supported: it belongs to the audio"):
        call(logits_processor=[processor])


# --- what is exact

# Each ends one row of the batches, inside a token.
STOPS = ["iab", "gbg", "eiie", "ijgj"]
SAMPLED = dict(do_sample=True, top_k=0)
AUDIO = GenerationConfig(eos_token_id=EOS)
AUDIO.no_timestamps_token_id = 70


class EvenAfterOdd(hf.LogitsProcessor):
    def __call__(self, input_ids, scores):
        same = (torch.arange(VOCAB)[None] % 2) == (input_ids[:, -1:] % 2)
        return scores.masked_fill(same, -torch.inf)


class AfterFifteen(stopping_criteria.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 15 == 0


class Silent(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


def config(**fields) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=LENGTH, pad_token_id=0, **fields)


def few_after(batch_id: int, text: torch.Tensor) -> list[int]:
    return [(int(text[-1]) + batch_id + step) % VOCAB for step in range(1, 40, 3)]


# Values that are functions are called for each side, so each has its own object.
FIELDS = {
    "max_length": dict(max_new_tokens=None, max_length=18),
    "max_new_tokens": dict(max_new_tokens=7),
    "eos_token_id": dict(eos_token_id=[EOS, 48]),
    "stop_strings": dict(stop_strings=STOPS, tokenizer=letters_tokenizer, eos_token_id=EOS),
    "max_time": dict(max_time=1e-9),
    "min_length": dict(eos_token_id=[EOS, 48], min_length=16),
    "min_new_tokens": dict(eos_token_id=[EOS, 48], min_new_tokens=9),
    "early_stopping": dict(early_stopping=True),
    "length_penalty": dict(length_penalty=0.5),
    "diversity_penalty": dict(diversity_penalty=0.3),
    "do_sample": SAMPLED,
    "low_memory": dict(low_memory=True),
    "cache_config": dict(cache_config={"nbits": 4}),
    "max_cache_len": dict(max_cache_len=64),
    "use_cache": dict(use_cache=False),
    "prefill_chunk_size": dict(prefill_chunk_size=4),
    "temperature": dict(temperature=0.6, **SAMPLED),
    "top_k": dict(do_sample=True, top_k=7),
    "top_p": dict(top_p=0.7, **SAMPLED),
    "min_p": dict(min_p=0.15, **SAMPLED),
    "top_h": dict(top_h=0.5, **SAMPLED),
    "typical_p": dict(typical_p=0.6, **SAMPLED),
    "epsilon_cutoff": dict(epsilon_cutoff=0.02, **SAMPLED),
    "eta_cutoff": dict(eta_cutoff=0.05, **SAMPLED),
    "repetition_penalty": dict(repetition_penalty=1.4),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.3),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=1),
    "bad_words_ids": dict(bad_words_ids=[[43], [48, 84], [66]]),
    "sequence_bias": dict(sequence_bias=[[[48, 23], 6.0], [[43], -4.0], [[19], 2.0]]),
    "forced_bos_token_id": dict(forced_bos_token_id=5, bos_token_id=3),  # begins without a prompt
    "forced_eos_token_id": dict(forced_eos_token_id=EOS, eos_token_id=EOS),
    "suppress_tokens": dict(suppress_tokens=[43, 48, 66]),
    "begin_suppress_tokens": dict(begin_suppress_tokens=[9, 48, 2, 35, 96]),
    "exponential_decay_length_penalty": dict(exponential_decay_length_penalty=(3, 1.7), eos_token_id=EOS),
    "remove_invalid_values": dict(remove_invalid_values=True),
    "renormalize_logits": dict(renormalize_logits=True, repetition_penalty=1.2),
    "guidance_scale": dict(guidance_scale=1.6, eos_token_id=EOS),
    "watermarking_config": dict(
        watermarking_config=lambda: SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 17])),
    "num_return_sequences": dict(num_return_sequences=2, **SAMPLED),
    "return_dict_in_generate": dict(return_dict_in_generate=True),
    "output_scores": dict(output_scores=True, repetition_penalty=1.2),
    "output_logits": dict(output_logits=True, repetition_penalty=1.2),
    "output_hidden_states": dict(output_hidden_states=True),
    "output_attentions": dict(output_attentions=True),
    "pad_token_id": dict(pad_token_id=5, eos_token_id=EOS),
    "bos_token_id": dict(bos_token_id=3),
    "decoder_start_token_id": dict(decoder_start_token_id=3),
    "disable_compile": dict(disable_compile=True),
    "transformers_version": dict(generation_config=lambda: config(transformers_version="5.0.0")),
}  # fmt: skip
# Fields that configure drafts, for which transformers uses its own assisted decoding.
DRAFTING = {
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 2,
    "num_assistant_tokens": 6,
    "assistant_confidence_threshold": 0.05,
    "use_mtp": True,
}
PASSED = {
    "attention_mask": {},
    "position_ids": dict(position_ids="as prepared"),
    "inputs_embeds": dict(inputs_embeds="of the prompt"),
    "past_key_values": dict(past_key_values=DynamicCache),
    "cache": dict(cache=DynamicCache),
    "generation_config": dict(generation_config=lambda: config(repetition_penalty=1.4)),
    "logits_processor": dict(logits_processor=lambda: [EvenAfterOdd()]),
    "stopping_criteria": dict(stopping_criteria=lambda: [AfterFifteen()]),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda: few_after),
    "negative_prompt_ids": dict(guidance_scale=1.6, negative_prompt_ids="another prompt"),
    "negative_prompt_attention_mask": dict(
        guidance_scale=1.6, negative_prompt_ids="another prompt", negative_prompt_attention_mask="its mask"),
    "streamer": dict(streamer=Silent),
    "tokenizer": dict(tokenizer=letters_tokenizer, stop_strings=STOPS, eos_token_id=EOS),
    "synced_gpus": dict(synced_gpus=False),
    "trust_remote_code": dict(trust_remote_code=False),
}  # fmt: skip
EOS_IDS = torch.tensor([EOS, 48])
MADE = {
    "TemperatureLogitsWarper": (0.6,),
    "TopKLogitsWarper": (7,),
    "TopPLogitsWarper": (0.7,),
    "MinPLogitsWarper": (0.15,),
    "TypicalLogitsWarper": (0.6,),
    "EpsilonLogitsWarper": (0.02,),
    "EtaLogitsWarper": (0.05,),
    "TopHLogitsWarper": (0.5,),
    "LogitNormalization": (),
    "InfNanRemoveLogitsProcessor": (),
    "SuppressTokensLogitsProcessor": ([43, 48, 66],),
    "BarkEosPrioritizerLogitsProcessor": (EOS_IDS, 0.02),
    "MinLengthLogitsProcessor": (16, EOS_IDS),
    "MinNewTokensLengthLogitsProcessor": (9, 9, EOS_IDS),
    "RepetitionPenaltyLogitsProcessor": (1.4,),
    "EncoderRepetitionPenaltyLogitsProcessor": (1.3, "the prompt"),
    "NoRepeatNGramLogitsProcessor": (2,),
    "EncoderNoRepeatNGramLogitsProcessor": (1, "the prompt"),
    "SequenceBiasLogitsProcessor": ([[[48, 23], 6.0], [[43], -4.0], [[19], 2.0]],),
    "NoBadWordsLogitsProcessor": ([[43], [48, 84], [66]],),
    "ForcedBOSTokenLogitsProcessor": (5,),
    "ForcedEOSTokenLogitsProcessor": (21, EOS),
    "ExponentialDecayLengthPenalty": ((3, 1.7), EOS_IDS, 9),
    "SuppressTokensAtBeginLogitsProcessor": ([9, 48, 2, 35, 96], 9),
    "WatermarkLogitsProcessor": (VOCAB, "cpu", 0.25, 3.0),
    "AlternatingCodebooksLogitsProcessor": (9, 20, 50),
    "WhisperTimeStampLogitsProcessor": (AUDIO, 9),
    "PrefixConstrainedLogitsProcessor": (few_after, 1),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": (1.6, "the model"),
    "SynthIDTextWatermarkLogitsProcessor": (3, [5, 9, 17], 64, 0, 8, "cpu"),
    "WhisperNoSpeechDetection": (5, 1),
    "MaxLengthCriteria": (17,),
    "EosTokenCriteria": (EOS_IDS,),
    "MaxTimeCriteria": (1e-9,),
    "StopStringCriteria": ("its tokenizer", STOPS),
    "ConfidenceCriteria": (0.3,),
}


SILENT = {"InfNanRemoveLogitsProcessor", "WhisperNoSpeechDetection"}  # change nothing here


def made(name: str, batch: str) -> dict:
    """The keywords that pass a new processor or criterion."""
    stand_ins = {"the prompt": prompts(BATCHES[batch])[0], "the model": tiny_model("llama")}
    stand_ins["its tokenizer"] = letters_tokenizer()
    arguments = [stand_ins.get(a, a) if isinstance(a, str) else a for a in MADE[name]]
    if hasattr(hf, name):
        return dict(logits_processor=[getattr(hf, name)(*arguments)])
    return dict(stopping_criteria=[getattr(stopping_criteria, name)(*arguments)])


def test_every_exact_keyword_has_a_case():
    assert set(FIELDS) | set(DRAFTING) == served(CONFIG)
    shown_below = {"assistant_model", "assistant_tokenizer", "kwargs", "inputs"}
    assert set(PASSED) | shown_below == served(ARGUMENTS) | {"synced_gpus"}
    assert set(MADE) == served(PARTS)


def check_against_transformers(batch: str, kwargs: dict, monkeypatch):
    """Check ids and outputs against those of transformers for the same keywords, and return the latter."""
    ids, mask = prompts(BATCHES[batch])
    other, other_mask = prompts(tuple(length - 2 for length in BATCHES[batch]), seed=5)
    stand_ins = {
        "as prepared": (mask.cumsum(1) - 1).clamp(min=0),
        "another prompt": other,
        "its mask": other_mask,
        "of the prompt": tiny_model("llama").get_input_embeddings()(ids).detach(),
    }
    recorded = any(name.startswith("output_") for name in kwargs)
    if recorded or kwargs.get("do_sample"):
        kwargs = {**kwargs, "return_dict_in_generate": True}
    if kwargs.get("do_sample"):
        kwargs.update(output_scores=True, output_logits=True)
    if "generation_config" not in kwargs:
        kwargs = {"max_new_tokens": LENGTH, "do_sample": False, **kwargs}
    implementation = "eager" if "output_attentions" in kwargs else None
    model = tiny_model("llama", implementation)

    def run(generate, **extra):
        fresh = {name: value() if callable(value) else value for name, value in kwargs.items()}
        for name, value in fresh.items():
            if isinstance(value, str):
                fresh[name] = stand_ins.get(value, value)
        fresh.update(fresh.pop("part", {}))
        if "bos_token_id" not in fresh:
            fresh.update(inputs=ids, attention_mask=mask)
        return generate(**fresh, **extra)

    def ours(drafter):
        seed = dict(seed=11) if kwargs.get("do_sample") else {}
        return run(functools.partial(specdec_ext.generate, model), drafter=drafter, **seed)

    columns = 1 if "bos_token_id" in kwargs else ids.shape[1]
    if kwargs.get("do_sample"):
        plain = ours(None).sequences
        actual = ours(ScriptedDrafter(generated(plain, columns), noisy_chain))
        assert torch.equal(actual.sequences, plain)
        draw(monkeypatch, actual.sequences[:, columns:])
        expected = run(model.generate)
        assert_same(actual, expected)
        return expected
    expected = run(model.generate)
    answers = generated(getattr(expected, "sequences", expected), columns)
    for shape in (noisy_chain, random_tree):
        assert_same(ours(ScriptedDrafter(answers, shape)), expected)
    return expected


def draw(monkeypatch, tokens: torch.Tensor) -> None:
    """Let transformers' loop draw ``tokens [rows, steps]``, a column in each step."""
    columns = iter(tokens.T.tolist())
    monkeypatch.setattr(
        torch, "multinomial", lambda probs, num_samples: torch.tensor(next(columns))[:, None]
    )


def assert_same(actual, expected) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
        return
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert (getattr(actual, name) is None) == (getattr(expected, name) is None)
        if getattr(expected, name) is not None:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)


@every_batch
@pytest.mark.parametrize("name", installed(FIELDS))
def test_fields_of_the_config_are_exact(name, batch, monkeypatch):
    check_against_transformers(batch, FIELDS[name], monkeypatch)


@every_batch
@pytest.mark.parametrize("name", [name for name in PASSED if name != "cache" or name == CACHE])
def test_arguments_of_generate_are_exact(name, batch, monkeypatch):
    check_against_transformers(batch, PASSED[name], monkeypatch)


@pytest.mark.parametrize("name", [name for name in MADE if hasattr(hf, name)])
def test_processors_given_as_objects_are_exact(name, monkeypatch):
    """In sampling, where scores are compared; each processor but ``SILENT`` changes some."""
    kwargs = {"part": functools.partial(made, name, "ragged"), **SAMPLED}
    if name == "ForcedBOSTokenLogitsProcessor":
        kwargs["bos_token_id"] = 3  # it acts on texts of one token
    expected = check_against_transformers("ragged", kwargs, monkeypatch)
    pairs = zip(expected.scores, expected.logits, strict=True)
    assert any(not torch.equal(*pair) for pair in pairs) == (name not in SILENT)


@pytest.mark.parametrize("name", [name for name in MADE if hasattr(stopping_criteria, name)])
def test_criteria_given_as_objects_are_exact(name, monkeypatch):
    kwargs = {"part": functools.partial(made, name, "ragged")}
    if name == "ConfidenceCriteria":
        kwargs["output_scores"] = True
    check_against_transformers("ragged", kwargs, monkeypatch)


# --- drafters that keywords of transformers request


def test_every_drafting_keyword_has_a_case():
    asked = {name for name in CONFIG if "assistant_model" in CONFIG[name].note} | set(LOOKUPS)
    asked.add("use_mtp")  # drafters/heads/test_mtp.py
    assert asked & served(CONFIG) == set(DRAFTING)


LOOKUPS = {
    "prompt_lookup_num_tokens": (3, dict(num_draft_tokens=3, min_ngram=2, max_ngram=6)),
    "max_matching_ngram_size": (1, dict(num_draft_tokens=10, min_ngram=1, max_ngram=1)),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_prompt_lookup_is_the_ngram_drafter(name):
    value, shape = LOOKUPS[name]
    config = GenerationConfig(**{name: value})
    drafter = DrafterChoice("auto").drafter(tiny_model("llama"), config)
    assert isinstance(drafter, specdec_ext.NgramDrafter)
    assert {field: getattr(drafter, field) for field in shape} == shape
    ids = prompts((7,))[0].repeat(1, 2)
    expected = tiny_model("llama").generate(ids, max_new_tokens=LENGTH, do_sample=False)
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False, "return_dict_in_generate": True}
    out = specdec_ext.generate(tiny_model("llama"), ids, **kwargs, **{name: value})
    assert torch.equal(out.sequences, expected)
    assert out.speculation_stats.drafter == "NgramDrafter"


def other_config(**fields):
    """A model like the target whose ``generation_config`` has these fields."""
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.update(**fields)
    return model


def test_assistant_is_the_draft_model():
    """The call configures it, else its own generation_config, as in transformers."""
    defaults = GenerationConfig(**GenerationConfig._get_default_generation_params())
    call_config = GenerationConfig(num_assistant_tokens=6, assistant_confidence_threshold=0.05)
    model = other_config(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    for assistant, config, shape in (
        (tiny_model("llama"), defaults, (4, 0.0)),
        (model, defaults, (3, 0.0)),
        (model, call_config, (6, 0.05)),
    ):
        drafter = DrafterChoice(Assistant(assistant)).drafter(tiny_model("llama"), config)
        assert (drafter.num_draft_tokens, drafter.min_confidence) == shape


@every_batch
def test_text_with_an_assistant_is_the_targets(batch):
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model("llama")
    kwargs = dict(attention_mask=mask, max_new_tokens=LENGTH, do_sample=False)
    expected = model.generate(ids, **kwargs)
    kwargs |= dict(assistant_model=model, return_dict_in_generate=True)
    for names in (
        {},
        dict(num_assistant_tokens=6, assistant_confidence_threshold=0.05),
        dict(tokenizer=letters_tokenizer(), assistant_tokenizer=letters_tokenizer()),
    ):
        out = specdec_ext.generate(model, ids, **kwargs, **names)
        assert torch.equal(out.sequences, expected)
        assert out.speculation_stats.drafter == "DraftModelDrafter"
        assert out.speculation_stats.emitted_per_step > 2


# --- further arguments


def test_priority_of_stop_strings():
    """As in transformers the call has priority, None included, then its config, then the model's config."""
    model = other_config(stop_strings=["ggfg"])
    ids, mask = prompts(BATCHES["one"])
    deh = config(stop_strings=["deh"])
    lengths = []
    for kwargs in (
        dict(max_new_tokens=LENGTH),
        dict(max_new_tokens=LENGTH, stop_strings="bjed"),
        dict(max_new_tokens=LENGTH, stop_strings=None),
        dict(generation_config=deh),
        dict(generation_config=deh, stop_strings=["eigg"]),
        dict(generation_config=GenerationConfig(max_new_tokens=LENGTH)),
    ):
        kwargs = dict(attention_mask=mask, tokenizer=letters_tokenizer(), **kwargs)
        expected = model.generate(ids, **kwargs)
        assert torch.equal(specdec_ext.generate(model, ids, **kwargs), expected)
        lengths.append(expected.shape[1] - ids.shape[1])
    assert lengths == [7, 4, 12, 5, 9, 7]
    assert deh.stop_strings == ["deh"] and model.generation_config.stop_strings == ["ggfg"]


@pytest.mark.filterwarnings("ignore:.* is decoded without speculation in a batch")
@every_batch
def test_further_inputs_reach_the_model(batch):
    """GPT-2 adds embeddings of token types."""
    ids, mask = prompts(BATCHES[batch])
    model = tiny_model("gpt2")
    kwargs = dict(attention_mask=mask, max_new_tokens=LENGTH, do_sample=False)
    without = model.generate(ids, **kwargs)
    kwargs["token_type_ids"] = torch.full_like(ids, 3)
    expected = model.generate(ids, **kwargs)
    assert not torch.equal(expected, without)
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), random_tree)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)


def test_callers_config_is_not_changed():
    given = config(repetition_penalty=1.1, stop_strings=["ei"])
    before = copy.deepcopy(vars(given))
    call(generation_config=given, tokenizer=letters_tokenizer(), max_new_tokens=4)
    assert vars(given) == before


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_synced_gpus_has_no_effect_in_one_process(process_group):
    assert torch.equal(call(synced_gpus=True), call())


@pytest.mark.parametrize("way", ["call", "hook", "fsdp"])
def test_synced_gpus_is_refused_in_two_processes(process_group, monkeypatch, way):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"synced_gpus=True .* rows advance at different paces"):
        if way == "call":
            call(synced_gpus=True)
        elif way == "hook":
            hook = specdec_ext.custom_generate(synced_gpus=True)
            tiny_model("llama").generate(prompts((6,))[0], custom_generate=hook, max_new_tokens=3)
        else:
            monkeypatch.setattr(preparation, "is_fsdp_managed_module", lambda _: True)
            call()
    monkeypatch.setattr(preparation, "is_fsdp_managed_module", lambda _: True)
    assert call(synced_gpus=False).shape == (1, 9)  # the caller overrules it
