"""``python profiling generate-checks`` passes on the CPU, and detects a different text."""

import pytest
import torch
from gpu import generate_cases, generate_checks, steps

ON_CPU = ["--device", "cpu", "--dtype", "float32", "--new-tokens", "12"]


def test_generate_passes_on_the_cpu(capsys):
    assert generate_checks.main(ON_CPU) == 0
    printed = capsys.readouterr().out
    # Two batches, two kinds of text: four drafters and none; greedy text of transformers; 14 other calls.
    assert steps.read_checks(printed) == "36 cases"
    assert "NONE (one GPU) generate second device, head, a tree, float32\n" in printed
    assert list(generate_cases.verdicts(printed)) == list(generate_cases.case_names(["float32"]))


def test_dry_run_lists_the_cases(capsys):
    assert generate_checks.main(["--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == list(generate_cases.case_names())


def test_every_call_has_a_name_and_a_drafter():
    assert generate_checks.CALLS.keys() == generate_cases.CALLS.keys()
    known = {*generate_cases.DRAFTERS, "sampled draft model"}
    assert {*generate_cases.CALLS.values()} <= known


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([[1, 2, 3]], None),
        ([[1, 2]], "row 0 has 2 tokens, expected 3"),
        ([[1, 2, 4]], "row 0 has token 4 in column 2, expected 3"),
    ],
)
def test_a_call_with_other_tokens_fails(tokens, why):
    texts = {"device": tokens, "cpu": [[1, 2, 3]]}
    arguments = (lambda world, drafter: texts[world]), "device", None, "cpu", None
    assert generate_checks._why_call_fails(*arguments) == why


def test_an_exception_is_a_verdict():
    def fail() -> str | None:
        raise ValueError("first line\nsecond line")

    assert generate_checks._attempt(fail) == "ValueError: first line"


def test_verdicts_are_a_table():
    names = list(generate_cases.case_names())
    (second,) = (name for name in names if "second device" in name)
    lines = [f"PASS {name}" for name in names[1:-1] if name != second]
    lines += [f"NONE (one GPU) {second}"]
    lines += [f"FAIL (row 0 has (other) tokens) {names[0]}", "PASS once tree_mask small, 64 nodes"]
    table = generate_cases.verdict_table(generate_cases.verdicts("\n".join(lines))).splitlines()
    assert table[0] == "| generate | float32 | bfloat16 | float16 |"
    assert table[2] == "| no drafter, as on the CPU, greedy, 1 row | FAIL |  |  |"
    assert "| head, a tree, greedy, 1 row | pass | pass | pass |" in table
    assert "| draft model, sampled, ragged | pass | pass | did not run |" in table
    assert "| second device, head, a tree | none |  |  |" in table
    assert table[-2:] == [
        f"- {names[0]}: FAIL (row 0 has (other) tokens)",
        f"- {second}: none (one GPU)",
    ]


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
