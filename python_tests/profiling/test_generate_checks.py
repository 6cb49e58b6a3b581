"""``python profiling generate-checks`` passes on the CPU, and detects a different text."""

import pytest
import torch
from gpu import generate_checks, steps

ON_CPU = ["--device", "cpu", "--dtype", "float32", "--new-tokens", "12"]


def test_generate_passes_on_the_cpu(capsys):
    assert generate_checks.main(ON_CPU) == 0
    # Two batches, two kinds of text, four drafters; greedy text without a drafter.
    assert steps.read_checks(capsys.readouterr().out) == "18 cases"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda tokens, logits: (tokens + 1, logits), "row 0 has token"),
        (lambda tokens, logits: (tokens, logits + 1), "a logit of row 0 differs by 1"),
        (lambda tokens, logits: (tokens, logits * float("nan")), "a logit of row 0 differs by nan"),
    ],
)
def test_a_text_that_is_another_one_fails(spoil, why):
    tokens, logits = torch.tensor([[3, 4]]), torch.randn(1, 2, 10)
    run = tokens, logits
    assert generate_checks.why_different(run, run, torch.float32) is None
    assert generate_checks.why_different(spoil(*run), run, torch.float32).startswith(why)


def test_16_bit_texts_may_part_at_a_near_tie_alone():
    logits = torch.zeros(1, 2, 10)
    logits[0, :, 3] = 8.0
    tied = logits.clone()
    tied[0, 1, 4] = 7.99
    ours, theirs = (torch.tensor([[3, 4]]), tied), (torch.tensor([[3, 3]]), tied)
    assert generate_checks.why_different(ours, theirs, torch.bfloat16) is None
    assert (
        generate_checks.why_different(ours, theirs, torch.float32)
        == "row 0 has token 4 at position 1, expected 3"
    )
    theirs = torch.tensor([[3, 3]]), logits
    assert "differs by 8" in generate_checks.why_different(ours, theirs, torch.bfloat16)
