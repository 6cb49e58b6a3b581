"""``RowLayout`` against literal numbers: where rows begin and end, and what a pass is told of them."""

import pytest
import torch

from specdec_ext.models.passes.prompt import Prompt
from specdec_ext.models.slots.layout import RowLayout
from specdec_ext.transfer import Staging

MAX_SLOTS = 9


def layout(*rows: list[int], position_ids: torch.Tensor | None = None) -> RowLayout:
    """The layout after a prompt with these attention masks."""
    prompt = Prompt(torch.tensor(rows, dtype=torch.bool), past=0)
    return RowLayout.of(prompt, MAX_SLOTS, Staging(torch.device("cpu")), position_ids)


def numbers(rows: RowLayout) -> dict[str, list[int]]:
    return {name: tensor.tolist() for name, tensor in rows.numbers._asdict().items()}


def test_after_a_prompt():
    rows = layout([1, 1, 1, 1], [0, 0, 1, 1])
    assert (rows.start, rows.aligned, rows.padded, rows.holes, rows.slack) == (4, True, True, 0, 0)
    assert numbers(rows) == {
        "root_positions": [4, 2],
        "ends": [4, 4],
        "first_slots": [0, 2],
        "lengths": [4, 2],
        "block_starts": [4, 4],
    }
    assert rows.slot_valid.tolist() == [[True] * 10, [False] * 2 + [True] * 8]
    assert rows.slot_positions.tolist() == [[*range(10)], [0, 0, *range(8)]]


def test_rows_that_end_at_different_slots():
    rows = layout([1, 1, 1, 1], [0, 0, 1, 1])
    before = rows.numbers
    rows.move_ends([6, 5])
    assert (rows.start, rows.aligned, rows.slack) == (6, False, 1)
    assert numbers(rows) == {
        "root_positions": [6, 3],
        "ends": [6, 5],
        "first_slots": [0, 2],
        "lengths": [6, 3],
        "block_starts": [6, 6],
    }
    assert before.ends.tolist() == [4, 4]


def test_padding_between_tokens_takes_slots_of_a_window():
    rows = layout([1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1])
    assert (rows.holes, rows.slack, rows.first_slots, rows.paddings) == (2, 2, [0, 1, 0], [2, 2, 0])
    rows.move_ends([5, 7, 6])
    assert rows.slack == 4
    assert rows.numbers.root_positions.tolist() == [3, 5, 6]
    assert rows.slot_positions[0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("picked", [[1], [1, 0], [0, 0, 1, 1, 1]], ids=str)
def test_selected_rows_leave_the_others_as_they_are(picked):
    """A row may be picked several times: once for each branch of its tree."""
    rows = layout([1, 1, 1, 1], [0, 0, 1, 1])
    rows.move_ends([6, 5])
    everything = numbers(rows)
    some = rows.select(picked, torch.tensor(picked))
    start = max(everything["ends"][row] for row in picked)
    expected = {name: [each[row] for row in picked] for name, each in everything.items()}
    assert numbers(some) == {**expected, "block_starts": [start] * len(picked)}
    assert (some.start, some.aligned) == (start, len(set(picked)) == 1)
    assert torch.equal(some.slot_valid, rows.slot_valid[picked])
    assert torch.equal(some.slot_positions, rows.slot_positions[picked])
    some.move_ends([end + 1 for end in some.ends])
    assert numbers(rows) == everything and rows.ends == [6, 5]


def test_positions_of_the_model():
    nodes = torch.tensor([[4, 5, 5], [2, 3, 3]])
    assert layout([1, 1, 1, 1], [0, 0, 1, 1]).model_positions(nodes) is nodes
    # An image of 3 tokens takes 2 positions in row 0, and row 1 has none.
    shifted = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 1]])
    rows = layout([1, 1, 1, 1], [0, 0, 1, 1], position_ids=shifted)
    assert rows.model_positions(nodes).tolist() == [[3, 4, 4], [2, 3, 3]]
    axes = torch.stack([shifted, shifted + 1])
    rows = layout([1, 1, 1, 1], [0, 0, 1, 1], position_ids=axes)
    assert rows.model_positions(nodes).tolist() == [
        [[3, 4, 4], [2, 3, 3]],
        [[4, 5, 5], [3, 4, 4]],
    ]
    one = rows.select([1], torch.tensor([1]))
    assert one.model_positions(nodes[1:]).tolist() == [[[2, 3, 3]], [[3, 4, 4]]]
