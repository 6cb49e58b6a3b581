"""``break_even``: the exercises of the field with their known answers, costs, and the command."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import command_line
from helpers.models.tiny import tiny_model

from specdec_ext import NgramDrafter, assets
from specdec_ext.planning.break_even import break_even, needed_acceptance
from specdec_ext.planning.costs import PLAIN_STEPS, StepCosts
from specdec_ext.planning.measure import measured_acceptance, measured_costs
from specdec_ext.planning.traffic import TextKind, Traffic, ahead, conditional

FREE = StepCosts.relative(0.0)


def length_of(rate: float, length: int) -> float:
    """Leviathan et al. (2023), equation 1."""
    return (1 - rate ** (length + 1)) / (1 - rate)


@pytest.mark.parametrize("rate", [0.4, 0.7, 0.9])
@pytest.mark.parametrize("length", [1, 5, 9])
def test_equal_acceptance_gives_the_geometric_sum(rate, length):
    assert Traffic.uniform([rate]).acceptance_length(length) == pytest.approx(
        length_of(rate, length)
    )


def test_later_positions_are_accepted_only_after_earlier_ones():
    """Not 1 + K * a: the measured shares of the bundled head add up to 2.98, not to 5 * 0.761."""
    shares = [0.761, 0.632, 0.582, 0.522, 0.484]
    traffic = Traffic.uniform(conditional(shares))
    assert traffic.acceptance_length(5) == pytest.approx(3.98, abs=0.005)
    assert traffic.acceptance_length(3) == pytest.approx(2.975)
    assert ahead([0.5, 0.0], 4) == [0, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("length", "rate"), [(1, 0.55), (3, 0.73), (5, 0.81), (7, 0.85)])
def test_what_55_percent_of_drafted_tokens_means(length, rate):
    """Accepted over drafted tokens of 0.55 is another conditional acceptance at each draft length."""
    assert needed_acceptance(1 + 0.55 * length, length) == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize(("speed_up", "rate"), [(2, 0.51), (3, 0.71)])
def test_5_tokens_that_are_to_be_2_or_3_times_as_fast(speed_up, rate):
    """With free drafts a step must emit 2 or 3 tokens; with costs, it must emit more."""
    assert needed_acceptance(speed_up, 5) == pytest.approx(rate, abs=0.005)
    assert length_of(needed_acceptance(speed_up, 5), 5) == pytest.approx(speed_up)
    dear = needed_acceptance(speed_up, 5, ratio=1.41)
    assert length_of(dear, 5) == pytest.approx(1.41 * speed_up)
    assert needed_acceptance(6.01, 5) is None and needed_acceptance(0.5, 5) == pytest.approx(0)


def test_70_percent_chat_and_30_percent_code_are_blended_as_times_are():
    traffic = Traffic((TextKind(0.7, (0.7,)), TextKind(0.3, (0.4,))))
    assert traffic.acceptance_length(5) == pytest.approx(2.39, abs=0.005)
    mean_rate = length_of(0.7 * 0.7 + 0.3 * 0.4, 5)
    assert mean_rate == pytest.approx(2.43, abs=0.005)  # the common mistake


@pytest.mark.parametrize(
    ("rate", "cost", "length"), [(0.8, 0.05, 8), (0.8, 0.0, 12), (0.5, 0.1, 2)]
)
def test_speed_up_and_best_length_are_those_of_the_formula(rate, cost, length):
    """Leviathan et al. (2023), theorem 3.8: S = (1 - a^(K + 1)) / ((1 - a) (K c + 1))."""
    found = break_even(StepCosts.relative(cost), [rate], range(1, 13))
    for each in found.estimates:
        expected = length_of(rate, each.length) / (each.length * cost + 1)
        assert each.speed_up == pytest.approx(expected)
    wanted = max(range(1, 13), key=lambda k: length_of(rate, k) / (k * cost + 1))
    assert found.best(1).length == wanted == length


def test_drafts_that_do_not_pay():
    found = break_even(StepCosts.relative(0.6, node=0.5), [0.3], [1, 2])
    assert found.best(1) is None and "1 row: does not pay" in str(found)
    assert [each.needed[1.0] for each in found.estimates] == [None, None]
    assert "no acceptance makes up for the time of a step" in " ".join(found.explain().split())
    # Break-even at 1.4 tokens per step: 0.4 of the only draft token.
    found = break_even(StepCosts.relative(0.3, node=0.1), [0.3], [1])
    assert found.estimates[0].needed[1.0] == pytest.approx(0.4)
    assert found.estimates[0].speed_up == pytest.approx(1.3 / 1.4)
    text = " ".join(found.explain().split())
    assert "drafts of 1 would have to be accepted with probability 0.40 at each position" in text


def test_wider_batches_prefer_shorter_drafts():
    """Every further node costs more if the pass is wider already."""
    verify = [(rows, 1 + k, 1 + 0.01 * rows * k) for rows in (1, 32) for k in range(8)]
    drafts = [(rows, k, 0.03 * k) for rows in (1, 32) for k in range(1, 8)]
    found = break_even(StepCosts.of(verify, drafts), [0.75], range(1, 8), [1, 32])
    assert found.best(1).length > found.best(32).length
    assert found.best(1).ratio == pytest.approx(1 + 0.04 * found.best(1).length)


def test_costs_are_read_as_they_were_written():
    costs = StepCosts.of(
        [(1, 1, 2e-3), (1, 4, 3e-3), (8, 1, 4e-3)], [(1, 3, 1e-3)], origin="a test"
    )
    again = StepCosts.from_record(json.loads(json.dumps(costs.record())), "a file")
    assert again.record() == {**costs.record(), "origin": "a file"}
    assert again.step(1, 3) == pytest.approx(4e-3) and again.ratio(1, 3) == pytest.approx(2)
    assert again.plain(8) == pytest.approx(4e-3)
    # Sizes between and beyond measured ones follow the controller's curves.
    curve = again.verify.curve(1, 1)
    assert again.step(1, 2) == pytest.approx(curve(3) + again.drafts.curve(1, _chain())(2))


def _chain():
    from specdec_ext.schedule.options import CHAIN

    return CHAIN


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], r"expected an object with 'verify' and 'draft'"),
        ({"verify": 3}, r"verify is 3; expected a list of \[rows, size, time\]"),
        ({"verify": [[1, 1, True]], "draft": []}, "expected a list"),
        ({"verify": [[1, 1.5, 1]], "draft": []}, "expected a list"),
        ({"verify": [[0, 1, 1]], "draft": []}, "with 1 to"),
        ({"verify": [[1, 1, -1]], "draft": []}, "a finite time"),
        ({"verify": [[1, 1, 0]], "draft": []}, "a pass of the target takes time"),
        ({"verify": [[1, 4, 1]], "draft": []}, "no time of a plain step"),
        ({"verify": [[1, 1, 1]], "draft": [], "unit": "years"}, "unit is 'years'"),
    ],
)
def test_damaged_costs_are_refused(record, message):
    with pytest.raises(ValueError, match=message):
        StepCosts.from_record(record, "costs.json")


def test_invalid_traffic_is_refused():
    for shares in ([0.5, 0.6], [1.2], [0.5, -0.1], []):
        with pytest.raises(ValueError, match="must be in \\[0, 1\\] and can't rise"):
            conditional(shares)
    with pytest.raises(ValueError, match=r"add up to 0\.8; expected 1"):
        Traffic((TextKind(0.5, (0.5,)), TextKind(0.3, (0.5,))))
    with pytest.raises(ValueError, match="expected a probability"):
        Traffic.uniform([])
    with pytest.raises(ValueError, match="share=0"):
        TextKind(0, (0.5,))
    with pytest.raises(ValueError, match="expected at least one length"):
        break_even(FREE, [0.5], [])


def test_costs_and_acceptance_of_a_real_head_are_measured():
    target, tokenizer = assets.load_target(), assets.load_tokenizer()
    prompt = tokenizer(assets.held_out_prompts()[0]["prompt"], return_tensors="pt")["input_ids"]
    rates = measured_acceptance(target, [prompt], "head", 3, 48)
    assert len(rates) == 3 and rates[0] > 0.3
    costs = measured_costs(target, {1: [prompt], 2: [prompt.expand(2, -1)]}, "head", [1, 3], 16)
    assert sorted(size for size in costs.record()["draft"]) and costs.unit == "seconds"
    for rows in (1, 2):
        assert 0 < costs.plain(rows) < costs.step(rows, 3)
    record = costs.record()
    assert [entry[:2] for entry in record["verify"]] == [[r, n] for r in (1, 2) for n in (1, 2, 4)]
    assert [entry[:2] for entry in record["draft"]] == [[r, n] for r in (1, 2) for n in (1, 3)]
    assert "measured on" in costs.origin


def test_a_drafter_without_shapes_can_not_be_measured():
    prompt = torch.ones(1, 8, dtype=torch.long)
    with pytest.raises(ValueError, match="speculation pins shapes, but NgramDrafter accepts none"):
        measured_acceptance(tiny_model("llama"), [prompt], NgramDrafter(), 3, 8)


def run(*arguments) -> tuple[int, str]:
    result = command_line.run("breakeven", *arguments, columns=100)
    return result.exit_code, command_line.words(result.output)


def test_the_command_with_given_numbers(tmp_path):
    files = tmp_path / "found.json", tmp_path / "figure.png"
    given = ["--draft-cost", 0.05, "--acceptance", "0.7:0.7", "--acceptance", "0.3:0.4"]
    options = ["--draft-length", "1,5", "--batch", "1,4", "--speed-up", "2"]
    code, text = run(*given, *options, "--json", files[0], "--plot", files[1])
    assert code == 0, text
    assert "1 5 2.39 1.25 1.91x" in text and "a, 2x" in text
    assert files[1].read_bytes().startswith(b"\x89PNG")
    record = json.loads(files[0].read_text())
    assert record["best"] == {"1": 5, "4": 5} and record["costs"]["unit"] == PLAIN_STEPS
    code, again = run("--costs", files[0], *given[2:], *options)
    assert code == 0 and "1 5 2.39 1.25 1.91x" in again
    code, text = run("--draft-cost", 0.5, "--acceptance", "0.3", "--draft-length", 1)
    assert code == 0 and "does not pay" in text


def test_shares_of_all_drafts_can_be_given():
    shares = "0.761,0.632,0.582,0.522,0.484"
    given = ["--draft-cost", 0, "--acceptance", shares, "--draft-length", 5]
    assert "1 5 3.98 1.00 3.98x" in run(*given, "--unconditional")[1]
    assert "3.98" not in run(*given)[1]


def test_the_command_measures_the_bundled_model(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("def area(width, height):\n")
    options = ["--prompts", file, "--draft-length", "1,3", "--max-new-tokens", 16]
    code, text = run("bundled", *options)
    assert code == 0 and "measured on" in text and "latency in ms" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass either MODEL, whose steps are measured, or costs"),
        (["bundled", "--draft-cost", "1"], "pass either MODEL"),
        (["--draft-cost", "1"], "--acceptance is missing"),
        (["--node-cost", "1", "--acceptance", "0.5"], "--node-cost needs --draft-cost"),
        (["--draft-cost", "1", "--acceptance", "half"], "--acceptance half: expected A1,A2,..."),
        (
            ["--draft-cost", "1", "--acceptance", "0.5", "--acceptance", "0.5:0.5"],
            "expected SHARE:A1,A2,...",
        ),
        (["--draft-cost", "1", "--acceptance", "0.5", "--batch", "1,x"], "--batch 1,x: expected"),
        (["--draft-cost", "1", "--acceptance", "2"], "expected a probability"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused(arguments, message):
    code, text = run(*arguments)
    assert code == 2 and message in text
