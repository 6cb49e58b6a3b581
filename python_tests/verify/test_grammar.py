"""Grammars: processors with a state that follows the text, as those of xgrammar and outlines.

Claim: such a processor is called once for every emitted position, in order, with the text of plain decoding.
In greedy decoding the text is that of ``model.generate``, in sampling that of plain decoding. The grammar
here raises an error in other calls.
"""

import pytest
import torch
from helpers.models.tiny import VOCAB, generated, make_drafter, prompts, tiny_model
from transformers import LogitsProcessor

import specdec_ext

BATCHES = {"one": (7,), "ragged": (12, 3, 9, 5)}
DRAFTERS = ["ngram", "self", "oracle_chain", "noisy_chain", "oracle_tree", "random_tree"]
NEW = 24
EOS = 42
OPEN, CLOSE = range(10, 25), range(25, 40)


class Brackets(LogitsProcessor):
    """Brackets that close in order, at most two deep; ``EOS`` where none is open, after at least one pair.

    As a matcher of xgrammar, it accepts a row token by token and raises an error for other tokens.
    """

    def __init__(self):
        self.columns = 0
        self.calls = 0
        self.open: list[list[int]] = []
        self.pairs: list[int] = []
        self.ended: list[bool] = []

    def __call__(self, input_ids, scores):
        rows = len(input_ids)
        if self.calls == 0:
            self.open, self.pairs = [[] for _ in range(rows)], [0] * rows
            self.ended = [False] * rows
        elif input_ids.shape != (len(self.open), self.columns + 1):
            raise RuntimeError(f"shown {tuple(input_ids.shape)} after {self.columns} columns")
        else:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                if not self.ended[row]:
                    self.accept(row, token)
        self.columns = input_ids.shape[1]
        self.calls += 1
        mask = torch.full_like(scores, -torch.inf)
        for row in range(rows):
            mask[row, self.allowed(row)] = 0
        return scores + mask

    def allowed(self, row: int) -> list[int]:
        tokens = list(OPEN[: 15 - 7 * min(2, self.pairs[row])]) if len(self.open[row]) < 2 else []
        if self.open[row]:
            tokens.append(self.open[row][-1] + len(OPEN))
        elif self.pairs[row]:
            tokens.append(EOS)
        return tokens

    def accept(self, row: int, token: int) -> None:
        if token not in self.allowed(row):
            raise RuntimeError(f"row {row} was shown {token}, which the grammar does not allow")
        if token == EOS:
            self.ended[row] = True
        elif token in OPEN:
            self.open[row].append(token)
        else:
            self.open[row].pop()
            self.pairs[row] += 1


def run(generate, batch: str, grammar: Brackets, **kwargs):
    ids, mask = prompts(BATCHES[batch])
    kwargs |= dict(attention_mask=mask, max_new_tokens=NEW, eos_token_id=EOS)
    return generate(inputs=ids, logits_processor=[grammar], **kwargs)


def ours(**kwargs):
    return specdec_ext.generate(tiny_model("llama"), **kwargs)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_and_calls_are_those_of_transformers(drafter, batch):
    model, theirs, grammar = tiny_model("llama"), Brackets(), Brackets()
    expected = run(model.generate, batch, theirs, do_sample=False)
    made = make_drafter(drafter, model, generated(expected, max(BATCHES[batch])))
    kwargs = dict(do_sample=False, speculation="fixed", return_dict_in_generate=True)
    out = run(ours, batch, grammar, drafter=made, **kwargs)
    assert torch.equal(out.sequences, expected)
    assert (grammar.calls, grammar.open, grammar.pairs) == (theirs.calls, theirs.open, theirs.pairs)
    if drafter == "oracle_chain":
        assert out.speculation_stats.emitted_per_step >= 3


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_text_and_calls_are_those_of_plain_decoding(drafter, batch):
    plain, grammar = Brackets(), Brackets()
    expected = run(ours, batch, plain, do_sample=True, seed=3, drafter=None)
    made = make_drafter(drafter, tiny_model("llama"), generated(expected, max(BATCHES[batch])))
    actual = run(ours, batch, grammar, do_sample=True, seed=3, drafter=made, speculation="fixed")
    assert torch.equal(actual, expected)
    assert grammar.calls == plain.calls


def test_rows_end_at_different_times():
    ids = run(ours, "ragged", Brackets(), do_sample=True, seed=3, drafter=None)
    ends = [row.index(EOS) if EOS in row else NEW for row in generated(ids, 12)]
    assert len(set(ends)) > 1 and min(ends) < NEW


def test_prefix_allowed_tokens_fn_is_called_in_order():
    """The function raises an error unless texts grow by one token."""

    def walker():
        known: dict[int, list[int]] = {}

        def allowed(row: int, text: torch.Tensor) -> list[int]:
            tokens = text.tolist()
            if row in known and tokens[:-1] != known[row]:
                raise RuntimeError(f"row {row} jumped to {len(tokens)} tokens")
            known[row] = tokens
            return [(tokens[-1] + step * (row + 1)) % VOCAB for step in range(1, 30)]

        return allowed

    model, (ids, mask) = tiny_model("llama"), prompts(BATCHES["ragged"])
    kwargs = dict(attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    expected = model.generate(ids, prefix_allowed_tokens_fn=walker(), **kwargs)
    for drafter in DRAFTERS:
        made = make_drafter(drafter, model, generated(expected, 12))
        options = dict(kwargs, speculation="fixed", prefix_allowed_tokens_fn=walker())
        assert torch.equal(specdec_ext.generate(model, ids, drafter=made, **options), expected)


@pytest.mark.parametrize("text", [[1, 2, 3], [1, 30]], ids=["a-column-too-many", "not-allowed"])
def test_grammar_raises_for_other_calls(text):
    grammar, scores = Brackets(), torch.zeros(1, VOCAB)
    grammar(torch.tensor([[1]]), scores)
    with pytest.raises(RuntimeError, match="shown"):
        grammar(torch.tensor([text]), scores)
