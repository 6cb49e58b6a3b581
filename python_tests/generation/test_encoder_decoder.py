"""Encoder-decoder models have the text of ``model.generate`` with every draft, and outputs of its class."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import (
    SHAPES,
    ScriptedDrafter,
    adversary_chain,
    generated,
    noisy_chain,
    oracle_chain,
    prompts,
    tiny_model,
)
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

import specdec_ext
from specdec_ext.models.compat import CACHE

NEW_TOKENS = 10
SOME_SHAPES = [oracle_chain, adversary_chain, noisy_chain]
START = 1
pytestmark = pytest.mark.filterwarnings("ignore:.*is decoded without speculation in a batch")
SOME = ["bart", "t5", "t5gemma2"]  # learned, relative and rotary positions
OTHERS = [
    *("bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "led", "longt5"),
    *("m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart"),
    *("t5gemma", "umt5"),
]
# Models whose pass over several tokens differs from passes over single tokens.
ONE_TOKEN = ["prophetnet", "fsmt", "switch_transformers"]
BERT = zoo.shrunk(AutoConfig.for_model("bert"), {}) | {"model_type": "bert"}
OVERRIDES: dict[str, dict[str, Any]] = {
    "encoder-decoder": {
        "encoder": {**BERT, "is_decoder": False},
        "decoder": {**BERT, "is_decoder": True, "add_cross_attention": True},
    },
}


@functools.cache
def build(kind: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """A random model of this kind, whose output rows are not its embeddings."""
    fields = OVERRIDES.get(kind) or zoo.shrunk(AutoConfig.for_model(kind), {})
    fields = {**fields, "decoder_start_token_id": START, "pad_token_id": 0}
    if kind != "encoder-decoder":
        fields.pop("is_decoder", None)
    config = AutoConfig.for_model(kind, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, kind)))
        model = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)](config)
        zoo.spread(model)
        for name, parameter in model.named_parameters():
            # The output of cross-attention is the same at every token and must not dominate.
            if re.search("encoder_attn|crossattention|EncDecAttention|cross_attn", name):
                parameter.data *= 0.5
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.randn(head.weight.shape) * 0.3)
    if attn_implementation:
        model.set_attn_implementation(attn_implementation)
    defaults = model.generation_config
    defaults.eos_token_id = defaults.forced_eos_token_id = defaults.forced_bos_token_id = None
    defaults.pad_token_id, defaults.decoder_start_token_id, defaults.num_beams = 0, START, 1
    return model.eval()


class Forces(LogitsProcessor):
    """Allows only the tokens of ``text``."""

    def __init__(self, text: list[int]):
        self.text = text

    def __call__(self, input_ids, scores):
        only = torch.full_like(scores, -torch.inf)
        only[:, self.text[input_ids.shape[1] - 1]] = 0.0
        return only


def inputs(rows: int, lengths: tuple[int, ...] = (9, 4, 6)) -> dict[str, Tensor]:
    ids, mask = prompts(lengths[:rows], 1, side="right")
    return {"input_ids": ids, "attention_mask": mask}


def check(kind: str, rows: int, shapes: Sequence[Callable] = SHAPES, **kwargs: Any) -> Tensor:
    """Check that scripted drafters of these shapes give the text of transformers, and return it."""
    model = build(kind)
    kwargs = {**inputs(rows), "max_new_tokens": NEW_TOKENS, "do_sample": False, **kwargs}
    expected = model.generate(**kwargs)
    start = kwargs["decoder_input_ids"].shape[1] if "decoder_input_ids" in kwargs else 1
    answers = generated(expected, start)
    for shape in shapes:
        options = dict(speculation="fixed", return_dict_in_generate=True, **kwargs)
        output = specdec_ext.generate(model, drafter=ScriptedDrafter(answers, shape), **options)
        assert torch.equal(output.sequences, expected), shape.__name__
        if shape.__name__ == "oracle_chain" and specdec_ext.supports(model).chain and rows == 1:
            assert output.speculation_stats.accepted_tokens > 0
    return expected


@pytest.mark.parametrize(
    "kind", [*SOME, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_that_of_transformers(kind, rows):
    # Without this keyword random models repeat themselves.
    text = check(kind, rows, no_repeat_ngram_size=2)
    assert len(set(text[0].tolist())) > 2


@pytest.mark.parametrize("kind", ONE_TOKEN)
def test_models_of_single_token_passes_are_decoded_plainly(kind):
    model = build(kind)
    kwargs = {**inputs(3), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**kwargs)
    with pytest.warns(UserWarning, match="without speculation"):
        text = specdec_ext.generate(model, **kwargs)
    assert torch.equal(text, expected)
    with pytest.raises(ValueError, match="can't be speculated on"):
        specdec_ext.generate(model, drafter="ngram", **kwargs)


DECODER_PROMPTS = {
    "one": torch.tensor([[START, 7, 8, 9]]),
    "padded": torch.tensor([[0, START, 7, 8], [START, 5, 6, 11], [0, 0, START, 3]]),
}


@pytest.mark.parametrize("name", DECODER_PROMPTS)
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_decoder_prompt_has_the_text_of_transformers(kind, name):
    ids = DECODER_PROMPTS[name]
    mask = (ids != 0).long()
    check(kind, len(ids), SOME_SHAPES, decoder_input_ids=ids, decoder_attention_mask=mask)


KEYWORDS: dict[str, dict[str, Any]] = {
    "forced_bos": {"forced_bos_token_id": 5},
    "forced_eos": {"forced_eos_token_id": 2},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 1},
    "encoder_penalty": {"encoder_repetition_penalty": 3.0},
    "min_new_tokens": {"eos_token_id": list(range(40)), "pad_token_id": 0, "min_new_tokens": 4},
    "bad_words": {"bad_words_ids": [[token] for token in range(50)]},
}


@pytest.mark.parametrize("name", KEYWORDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_keywords_have_the_text_of_transformers(name, rows):
    """Some keywords depend on the encoder's text, which here has most of the vocabulary."""
    read = inputs(rows, (90, 80, 70))
    changed = check("t5", rows, SOME_SHAPES, **read, **KEYWORDS[name])
    plain = build("t5").generate(**read, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert not torch.equal(changed, plain)


@pytest.mark.parametrize("rows", [1, 3])
def test_text_may_end_inside_a_block(rows):
    model = build("t5")
    text = model.generate(**inputs(rows), max_new_tokens=NEW_TOKENS, do_sample=False)
    for eos in set(text[0, 2:6].tolist()):
        check("t5", rows, SOME_SHAPES, eos_token_id=eos, pad_token_id=0)


def test_sampled_text_does_not_depend_on_drafts():
    model = build("t5")
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "seed": 3, "num_return_sequences": 2}
    plain = specdec_ext.generate(model, **inputs(1), drafter=None, **kwargs)
    assert plain.shape[0] == 2 and not torch.equal(plain[0], plain[1])
    for shape in SHAPES:
        drafter = ScriptedDrafter(generated(plain, 1), shape)
        text = specdec_ext.generate(model, **inputs(1), drafter=drafter, **kwargs)
        assert torch.equal(text, plain)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafts_are_copied_from_the_encoders_text(drafter):
    model = build("t5")
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    ids = inputs(1)["input_ids"]
    text = model.generate(ids, **kwargs)[:, 1:]
    processors = LogitsProcessorList([Forces(text[0].tolist())])
    ids = torch.cat([ids, text], dim=1)
    kwargs |= dict(speculation="fixed", logits_processor=processors, return_dict_in_generate=True)
    output = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
    assert torch.equal(output.sequences[:, 1:], text)
    assert output.speculation_stats.accepted_tokens > NEW_TOKENS // 2


def test_draft_model_may_be_a_decoder():
    model = build("t5")
    kwargs = {**inputs(1), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    text = specdec_ext.generate(model, drafter=tiny_model("llama"), **kwargs)
    assert torch.equal(text, model.generate(**kwargs))


@pytest.mark.parametrize("rows", [1, 3])
def test_outputs_are_those_of_transformers(rows):
    model = build("bart", "eager")
    recorded = ("scores", "logits", "hidden_states", "attentions")
    kwargs = {**inputs(rows), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    kwargs |= {"return_dict_in_generate": True, **{f"output_{name}": True for name in recorded}}
    expected = model.generate(**kwargs)
    drafter = ScriptedDrafter(generated(expected.sequences, 1), noisy_chain)
    output = specdec_ext.generate(model, drafter=drafter, **kwargs)
    assert isinstance(output, type(expected))
    assert output.speculation_stats.steps
    assert output[CACHE].get_seq_length() == output.sequences.shape[1] - 1
    for name in set(expected) - {CACHE}:
        torch.testing.assert_close(output[name], expected[name])


def test_fields_that_were_not_requested_are_absent():
    kwargs = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    output = specdec_ext.generate(build("t5"), **inputs(1), drafter="ngram", **kwargs)
    assert set(output) == {"sequences", CACHE}


@functools.cache
def whisper() -> PreTrainedModel:
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    fields = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in sizes.items()}
    fields |= dict(d_model=32, vocab_size=zoo.VOCAB, num_mel_bins=8)
    fields |= dict(max_source_positions=16, max_target_positions=64)
    fields |= dict(pad_token_id=0, bos_token_id=START, eos_token_id=2, decoder_start_token_id=START)
    config = WhisperConfig(**fields, suppress_tokens=None, begin_suppress_tokens=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(config).eval()
        zoo.spread(model)
    model.generation_config.no_timestamps_token_id = 60  # the ids above it are timestamps
    return model


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("timestamps", [False, True])
def test_whispers_own_generate_has_its_text(rows, timestamps):
    """It generates segments, with fallbacks and timestamps, and each segment is speculated on."""
    generator = torch.Generator().manual_seed(1)
    kwargs = {
        "input_features": torch.randn(rows, 8, 32, generator=generator),
        "max_new_tokens": 12,
        "do_sample": False,
        "return_timestamps": timestamps,
        "return_dict_in_generate": True,
    }
    expected = whisper().generate(**kwargs)
    for shape in SOME_SHAPES:
        drafter = ScriptedDrafter(generated(expected["sequences"], 0), shape)
        output = specdec_ext.generate(whisper(), drafter=drafter, **kwargs)
        assert torch.equal(output["sequences"], expected["sequences"])
