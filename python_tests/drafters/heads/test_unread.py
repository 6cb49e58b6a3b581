"""The text that a head has not read yet, when rows take the numbers of rows that have ended."""

import pytest
import torch

from specdec_ext.context import Context
from specdec_ext.drafters.heads import unread
from specdec_ext.models import TargetOutput
from specdec_ext.verify.sampler import Accepted


def context_of(rows: int) -> Context:
    context = Context(torch.arange(3 * rows).view(rows, 3), None, 0, 99, draw=None, sample=None)
    context.emit(range(rows), [50 + row for row in range(rows)])
    return context


def step(context: Context, text: unread.UnreadText, value: float) -> None:
    """Every active row emits a token after a state of this value."""
    rows = len(context.rows)
    tokens = [[70 + row] for row in context.rows]
    for row, (token,) in zip(context.rows, tokens, strict=True):
        context.extend(row, [token])
    nothing = torch.zeros(rows, 1, dtype=torch.long)
    accepted = Accepted(nothing, nothing[:, 0], tokens, [0] * rows, [False] * rows)
    states = torch.full((rows, 1, 2), value)
    text.add(context, accepted, TargetOutput(torch.zeros(rows, 1, 4), (states,)))


@pytest.mark.parametrize("merged", [1, 256], ids=["merged", "as steps"])
@pytest.mark.parametrize("read", [True, False])
def test_a_row_that_joins_has_its_own_prompt_and_steps_alone(merged, read, monkeypatch):
    monkeypatch.setattr(unread, "MERGED_NODES", merged)
    context, text = context_of(2), unread.UnreadText(2)
    for row in context.rows:
        text.join(context, [row], [torch.zeros(1, 3, 2)])
    if read:
        text.take(context)
    step(context, text, 1.0)
    step(context, text, 2.0)
    context.rows = [0]  # row 1 has ended
    newcomer = context_of(1)
    newcomer.generated[0][:] = [60]
    context.share(1, newcomer)
    context.rows = [0, 1]
    text.join(context, [1], [torch.full((1, 3, 2), 5.0)])
    step(context, text, 3.0)
    taken = text.take(context)
    prompt = [] if read else [1, 2, 50]
    assert taken.tokens == [[*prompt, 70, 70, 70], [1, 2, 60, 71]]
    values = [taken.features[row, : len(taken.tokens[row]), 0].tolist() for row in (0, 1)]
    assert values == [[*[0.0] * len(prompt), 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 3.0]]
    assert not text
