"""The text of a request is the one that ``generate`` returns for it alone, whatever else is running."""

import random

import pytest
import torch
from helpers.checks.engine_texts import SAMPLING, alone, check_texts, random_calls
from helpers.drafters.every_drafter import DRAFTERS
from helpers.drafters.mtp_cases import llama_heads, mtp_model, mtp_target, needs_mtp
from helpers.models.tiny import tiny_model

from specdec_ext import (
    CombinedDrafter,
    DraftModelDrafter,
    HeadDrafter,
    MtpDrafter,
    MtpHeads,
    NgramDrafter,
    TreeConfig,
    assets,
)
from specdec_ext.drafters import draft_cache
from specdec_ext.engine import Engine, engine
from specdec_ext.engine import loop as engine_loop

JOINABLE = [
    name for name, make in DRAFTERS.items() if (drafter := make()) is None or drafter.joinable
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", JOINABLE)
def test_texts_with_every_drafter(name, dtype, monkeypatch):
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 8)  # most prompts are read in several steps
    monkeypatch.setattr(draft_cache, "BLOCK_TOKENS", 8)
    model, make = tiny_model("llama", dtype=dtype), DRAFTERS[name]
    if name == "mtp":  # the heads of a model belong to it alone
        make = lambda: MtpDrafter(llama_heads(model))  # noqa: E731
    decoder = check_texts(model, make, random_calls(24, 30), max_rows=5)
    stats = decoder.stats()
    assert stats.emitted_tokens > 150
    assert (stats.drafts > 0) == (name != "none")


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *(("qwen3", torch.bfloat16), ("gemma3-window", torch.float32)),
        *(("gpt2", torch.bfloat16), ("deepseek_v32", torch.float32)),
    ],
)
def test_texts_of_architectures(architecture, dtype):
    model = tiny_model(architecture, dtype=dtype)
    make = DRAFTERS["ngram"]
    check_texts(model, make, random_calls(20, 24), max_rows=4, speculation="fixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_of_64_requests_to_the_bundled_pair(dtype):
    model, tokenizer = assets.load_target(dtype), assets.load_tokenizer()
    texts = [tokenizer(each["prompt"]).input_ids for each in assets.held_out_prompts()]
    rng = random.Random(1)
    calls = []
    for _, arguments in random_calls(64, 2, seed=2):
        arguments.pop("eos_token_id")
        arguments.pop("bad_words_ids", None)
        calls.append((rng.choice(texts)[: rng.choice([3, 30, 90, 300])], arguments))
    head = assets.load_head()
    make = lambda: CombinedDrafter(NgramDrafter(), HeadDrafter(head))  # noqa: E731
    check_texts(model, make, calls, max_rows=8, tokenizer=tokenizer)


def drafts_of(drafter, decode) -> dict[tuple[int, ...], list[int]]:
    """The draft of a drafter after each text for which ``decode`` has it draft."""
    propose, drafts = type(drafter).propose, {}

    def noted(context):
        tree = propose(drafter, context)
        for row, tokens, depths in zip(context.rows, tree.token_lists, tree.depths, strict=True):
            if max(depths) > 0:
                drafts[tuple(context.text(row))] = tokens
        return tree

    drafter.propose = noted
    decode()
    del drafter.propose
    return drafts


def check_drafts(model, drafter, calls) -> None:
    """After the same text, a joined row is drafted for as a call of its own is."""

    def together():
        with Engine(model, drafter=drafter, max_rows=2, speculation="fixed") as decoder:
            for handle in [decoder.submit(ids, **arguments) for ids, arguments in calls]:
                handle.result(60)

    def one_by_one():
        for ids, arguments in calls:
            alone(model, ids, drafter, speculation="fixed", **arguments)

    shared, drafts = drafts_of(drafter, together), drafts_of(drafter, one_by_one)
    common = shared.keys() & drafts.keys()
    assert len(common) > 10
    for text in common:
        for one, other in zip(shared[text], drafts[text], strict=False):
            assert one == other


MTP = pytest.param("mtp", marks=needs_mtp)


@pytest.mark.parametrize("name", ["head", "ngram", "medusa", "lookahead", "draft model", MTP])
def test_rows_take_the_place_of_ended_ones_without_a_trace(name):
    """They have their own text and noise."""
    calls = []
    for number, (ids, _) in enumerate(random_calls(8, 20, seed=5)):
        sampling = dict(do_sample=True, temperature=3.0, seed=number) if number % 2 else {}
        calls.append((ids, dict(max_new_tokens=12, **sampling)))
    check_drafts(tiny_model("llama"), DRAFTERS[name](), calls)


@needs_mtp
@pytest.mark.parametrize("name", ["glm4_moe-3", "deepseek_v3-2", "mellum-1"])
def test_rows_join_all_mtp_layers(name):
    """Beside a long text, for which all layers run. A prompt of one token is too short for several."""
    model = mtp_target(name)
    drafter = MtpDrafter(MtpHeads(model, mtp_model(model)), TreeConfig(depth=4))
    rng = random.Random(4)
    calls = [
        ([rng.randrange(1, 90) for _ in range(length)], dict(max_new_tokens=new))
        for length, new in [(20, 48), (9, 12), *((each, 12) for each in (1, 2, 3, 4, 12, 1))]
    ]
    check_drafts(model, drafter, calls)
    check_texts(model, lambda: drafter, calls, max_rows=4, speculation="fixed")


@pytest.mark.parametrize("block", [4, 256], ids=["in parts", "at once"])
def test_a_draft_model_that_is_the_target_is_always_right(block, monkeypatch):
    """Also for rows that have joined: it has read their text, and draws with their noise and filters."""
    monkeypatch.setattr(draft_cache, "BLOCK_TOKENS", block)
    model, calls = tiny_model("llama"), []
    for number, (ids, _) in enumerate(random_calls(24, 30, seed=3)):
        sampling = SAMPLING[number % len(SAMPLING)]
        seed = dict(seed=number) if sampling else {}
        calls.append(
            (ids, dict(max_new_tokens=random.Random(number).randrange(2, 40)) | sampling | seed)
        )
    make = lambda: DraftModelDrafter(model)  # noqa: E731
    decoder = check_texts(model, make, calls, max_rows=5, speculation="fixed")
    stats = decoder.stats()
    assert stats.accepted_per_position == stats.proposed_per_position
    assert stats.accepted_tokens > 150


def test_rows_beyond_the_positions_of_a_draft_model_go_on_without_drafts():
    """The draft model has 32 positions. Those of a long text do not end the drafts of others."""
    model, drafter = tiny_model("gpt2"), DraftModelDrafter(tiny_model("gpt2-short"))
    calls = [
        ([number + 5] * length, new)
        for number, (length, new) in enumerate([(20, 60), (50, 20), (4, 24)])
    ]
    with (
        pytest.warns(UserWarning, match="has 32 positions"),
        Engine(model, drafter=drafter, max_rows=3, speculation="fixed") as decoder,
    ):
        handles = [decoder.submit(ids, max_new_tokens=new) for ids, new in calls]
        texts = [handle.result(60) for handle in handles]
    for (ids, new), text in zip(calls, texts, strict=True):
        assert text == alone(model, ids, None, max_new_tokens=new)
    longer, longest, short = (handle.stats for handle in handles)
    assert 0 < longer.drafts <= 32 - 20 and longest.drafts == 0
    assert short.drafts > short.steps - 4  # the last token needs none


def test_one_place_serves_requests_of_any_sampling():
    """The place and the number of rows stay the same, but not the noise and the filters."""
    calls = []
    for number, sampling in enumerate(SAMPLING * 2):
        seed = dict(seed=number) if sampling else {}
        calls.append(([5, 9, 10 + number], dict(max_new_tokens=20, **sampling, **seed)))
    check_texts(tiny_model("llama"), DRAFTERS["ngram"], calls, max_rows=1)


def test_requests_join_while_others_are_decoded(monkeypatch):
    """Not one batch after another: a short request that comes later ends before a long one."""
    model = tiny_model("llama")
    joined = []
    join = engine_loop.EngineLoop.join

    def noted(self, request, output):
        joined.append(len(self.context.rows))
        join(self, request, output)

    monkeypatch.setattr(engine_loop.EngineLoop, "join", noted)
    with Engine(model, drafter=None, max_rows=3) as decoder:
        long = decoder.submit([5, 6], max_new_tokens=100)
        next(iter(long))
        short = [decoder.submit([7, 8, each], max_new_tokens=3) for each in range(4)]
        for handle in short:
            handle.result(60)
        assert long.finish_reason is None
        assert len(long.result(60)) == 100
    assert joined[0] == 0 and set(joined[1:]) <= {1, 2}
