"""Models without an argument for positions: trees and ragged rows have those of transformers' own loop.

Claim: for decoders that compute positions themselves, text is that of ``model.generate``, and the logits of a
tree are those of each of its branches alone, within 1e-4 in float32.
"""

import threading

import pytest
import torch
from helpers.checks.lossless import check_generated_text
from helpers.checks.tree_logits import check_tree_logits
from helpers.models.tiny import (
    COUNTING,
    ScriptedDrafter,
    every_batch,
    generated,
    prompts,
    tiny_model,
)
from helpers.versions import skip_unless_drafted

import specdec_ext
from specdec_ext.models.compat import CACHE
from specdec_ext.models.families.patches import patched
from specdec_ext.models.families.positions import positions_of
from specdec_ext.models.passes.masks import visibility
from specdec_ext.models.passes.visibility import BlockVisibility, current_block


@pytest.mark.parametrize("name", COUNTING)
def test_logits_of_a_tree_are_those_of_its_branches(name):
    skip_unless_drafted(tiny_model(name))
    check_tree_logits(tiny_model(name), (12, 3, 9, 5))


@every_batch
@pytest.mark.parametrize("name", COUNTING)
def test_text_is_that_of_transformers(name, batch):
    model = tiny_model(name)
    skip_unless_drafted(model)
    check_generated_text(model, batch, new_tokens=10)


def test_positions_reach_a_decoder_whose_model_has_no_argument_for_them():

    class Wrapped(type(tiny_model("llama"))):
        def forward(self, input_ids=None, past_key_values=None, attention_mask=None, **kwargs):
            kwargs[CACHE] = past_key_values
            return super().forward(input_ids, attention_mask=attention_mask, **kwargs)

    model = Wrapped(tiny_model("llama").config).eval()
    model.load_state_dict(tiny_model("llama").state_dict())
    model.generation_config = tiny_model("llama").generation_config
    check_tree_logits(model, (12, 3, 9, 5))


def test_models_with_position_ids_are_not_changed():
    assert positions_of(tiny_model("llama")) == []
    assert positions_of(tiny_model("gpt2")) == []


def _block(rows: int, nodes: int, columns: torch.Tensor) -> BlockVisibility:
    everything = torch.ones(rows, nodes, nodes, dtype=torch.bool)
    return BlockVisibility(
        everything[:, :, :0].flatten(1), everything, columns, columns, columns=columns
    )


@pytest.mark.parametrize("name", ["bart", "marian", "trocr-sinusoidal", "whisper"])
def test_nodes_have_the_embeddings_of_their_positions(name):
    """With siblings, rows of different lengths, and a token that is the padding token."""
    model = tiny_model(name)
    embed = next(m for n, m in model.named_modules() if n.endswith("decoder.embed_positions"))
    tokens, columns = torch.tensor([[3, 4, 0], [7, 8, 9]]), torch.tensor([[5, 6, 6], [2, 3, 4]])
    given = tokens.shape if name == "marian" else tokens
    with visibility(_block(2, 3, columns)), patched(positions_of(model)):
        together = embed(given, 11)
    for row in range(2):
        for node in range(3):
            one = tokens[row, node].view(1, 1)
            alone = embed(one.shape if name == "marian" else one, int(columns[row, node]))
            assert torch.equal(together[row, node], alone.view(-1))


def test_other_threads_and_later_calls_are_unaffected():
    model = tiny_model("bart")
    ids, _ = prompts((7,))
    expected = model(ids).logits
    seen = []
    with visibility(_block(1, 7, torch.full((1, 7), 3))), patched(positions_of(model)):
        inside = model(ids, attention_mask=torch.ones(1, 7)).logits
        thread = threading.Thread(target=lambda: seen.append((current_block(), model(ids).logits)))
        thread.start()
        thread.join()
    assert not torch.equal(inside, expected)
    assert seen[0][0] is None and torch.equal(seen[0][1], expected)
    assert not any("forward" in vars(module) for module in model.modules())


def test_text_may_use_the_last_position():
    model = tiny_model("bart")
    table = model.config.max_position_embeddings
    ids, mask = prompts((table - 8, table - 20))
    kwargs = dict(attention_mask=mask, max_length=table, do_sample=False)
    expected = model.generate(ids, **kwargs)
    answers = generated(expected, ids.shape[1])
    drafter = ScriptedDrafter(answers, lambda right, rng: [right, [1] * 6])
    assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)
