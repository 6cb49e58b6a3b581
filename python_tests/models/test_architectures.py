"""Every architecture of transformers has the text and logits of its own generation, or a reason why not.

``make test-architectures`` tests all of them and writes the tables; ``make test`` tests one of every kind.
Another table has drafted tokens for which a model computes NaN, by attention and dtype.
"""

from __future__ import annotations

import pytest
from helpers.checks import poison, verdicts
from helpers.checks.engine_texts import check_texts, random_calls
from helpers.drafters.every_drafter import DRAFTERS
from helpers.models import zoo
from helpers.models.tiny import noisy_chain, oracle_chain, oracle_tree, prompts, random_tree
from helpers.versions import before
from huggingface_hub.errors import StrictDataclassError

import specdec_ext
from specdec_ext.errors import CantJoinError, NotAcceleratedError

# One of every kind of attention, cache, position and mask.
REPRESENTATIVE = {
    "exact-tree": [
        *("bart", "bert", "bloom", "deepseek_v3", "deepseek_v32", "falcon", "gemma2", "gemma3n_text", "git"),
        *("gpt2", "gpt_neo", "gpt_oss", "llama", "llama4_text", "mixtral", "mpt", "opt", "phi3"),
        *("falcon_h1", "jamba", "lfm2", "mamba", "mamba2", "nemotron_h", "qwen3_next"),
        *("openai-gpt", "recurrent_gemma", "rwkv"),
    ],
    "exact-plain": ["bert+encoder", "xlm"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "outcome"),
    [(name, outcome) for outcome, names in REPRESENTATIVE.items() for name in names],
)
def test_representative_architectures_are_exact(name, outcome):
    verdict = verdicts.judge(name, [oracle_chain, noisy_chain, oracle_tree, random_tree], 14)
    # With older transformers fewer architectures are speculated on, but the text has to be right.
    expected = verdicts.EXACT if before("5.23") else [outcome]
    assert verdict.outcome in expected, verdict


def test_text_that_depends_on_rounding_is_not_speculated_on():
    """Behind its window Doge keeps the best of equal tokens, which depends on rounding."""
    model, (ids, _) = zoo.build("doge"), prompts((11,))
    arguments = {"do_sample": False, "max_new_tokens": 250}
    message = "from 256 tokens on it attends to the best-scored tokens only"
    with pytest.raises(ValueError, match=message):
        specdec_ext.generate(model, ids, drafter="ngram", **arguments)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*zoo.ARCHITECTURES, *zoo.VARIANTS])
def test_every_architecture_is_exact_or_has_a_reason(name, record_property):
    verdict = verdicts.judge(name)
    record_property("verdict", verdict.row())
    assert verdict.outcome not in verdicts.FAILURES, verdict


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*zoo.ARCHITECTURES, *zoo.VARIANTS])
def test_every_architecture_serves_requests_or_has_a_reason(name):
    try:
        model = zoo.build(name)
    except (ImportError, ValueError, StrictDataclassError) as error:
        pytest.skip(f"transformers can't build it: {error}")
    make = DRAFTERS["ngram"]
    try:
        check_texts(model, make, random_calls(8, 24, vocab=60), max_rows=3, speculation="fixed")
    except (CantJoinError, NotAcceleratedError) as error:
        pytest.skip(str(error))


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*zoo.ARCHITECTURES, *zoo.VARIANTS])
def test_every_architecture_tolerates_poison(name, record_property):
    row = poison.judge(name)
    record_property("poison", row)
    assert not row["failed"], row
