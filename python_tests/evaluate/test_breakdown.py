"""``breakdown``: it finds every part of a step, excludes nested parts, and leaves no timer behind."""

import pytest
import torch
from helpers.models.tiny import tiny_model
from matplotlib.figure import Figure

from specdec_ext import ops
from specdec_ext.decoding.loop import DecodingLoop
from specdec_ext.evaluate.breakdown import INSIDE, PARTS, Breakdown, Part, _Clock, breakdown
from specdec_ext.models.slots import SlotTarget
from specdec_ext.verify.sampler import Sampler

PROMPT = torch.tensor([[5, 6, 7, 5, 6]])


def test_every_part_of_a_step_is_timed():
    seen = breakdown(tiny_model("llama"), [PROMPT, PROMPT[:, 1:]], "ngram", 6)
    assert 2 <= seen.steps <= 10
    assert seen.tokens_per_step * seen.steps == 10  # each call's first token is the prompt's
    names = [part.name for part in seen.parts]
    assert names == [name for name in PARTS if name in names]
    assert {"draft, around it", "target, linears", "verify", "commit", "loop"} <= {*names}
    assert all(part.microseconds > 0 for part in seen.parts)
    assert all(
        part.calls > 0 for part in seen.parts if part.name != "loop"
    )  # one call holds all steps
    assert seen.microseconds == pytest.approx(sum(part.microseconds for part in seen.parts))
    outside = sum(part.microseconds for part in seen.parts if part.name not in INSIDE)
    assert seen.outside == pytest.approx(outside)
    assert 0 < outside < seen.microseconds
    for name in (*names, "NgramDrafter", "float32", "outside target forward and draft op"):
        assert name in seen.explain()


def test_times_exclude_nested_parts(monkeypatch):
    """The time of the inner part is excluded from the outer one, and calls in a prefill do not count."""
    now = [0.0]
    monkeypatch.setattr("specdec_ext.evaluate.breakdown.time.perf_counter", lambda: now[0])
    clock = _Clock()
    clock.begin()

    def pass_by(seconds):
        now[0] += seconds

    inner = clock.timed(lambda: pass_by(3), "inner")

    def around():
        pass_by(2)
        inner()
        pass_by(1)

    clock.timed(around, "outer")()
    clock.timed(inner, "prefill")()
    assert dict(clock._step.seconds) == {"outer": 3, "inner": 3, "prefill": 3}
    assert dict(clock._step.calls) == {"outer": 1, "inner": 1, "prefill": 1}


def test_timers_are_removed():
    model = tiny_model("llama")

    def functions():
        return [
            DecodingLoop._propose,
            Sampler.verify,
            SlotTarget.forward,
            ops.linear,
            type(model).__call__,
        ]

    before = functions()
    with pytest.raises(ValueError, match="drafter"):
        breakdown(model, [PROMPT], "nonsense", 4)
    breakdown(model, [PROMPT], None, 4)
    assert functions() == before and "__call__" not in vars(type(model))


def test_calls_that_can_not_be_measured_are_refused():
    with pytest.raises(ValueError, match="prompts is empty"):
        breakdown(tiny_model("llama"), [], None, 4)
    with pytest.raises(ValueError, match="max_new_tokens=1 leaves no step"):
        breakdown(tiny_model("llama"), [PROMPT], None, 1)


def test_plot_has_a_bar_per_breakdown(tmp_path):
    pytest.importorskip("matplotlib")
    bar = Breakdown((Part("verify", 5.0, 1.0), Part("commit", 2.0, 1.0)), 3, 1.0, "none", "here")
    bar.plot(tmp_path / "bars.png", [bar])
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_bars_and_parts_are_distinct_in_a_plot(tmp_path, monkeypatch):
    """Two heads have different names, and all parts different colours."""
    parts = tuple(Part(name, 1.0, 1.0) for name in PARTS)
    first, second = (Breakdown(parts, 1, 1.0, name, "a machine") for name in ("one", "two"))
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: drawn.append(self.axes[0]))
    first.plot(tmp_path / "x.png", [second])
    (axes,) = drawn
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert len({bars[0].get_facecolor() for bars in axes.containers}) == len(PARTS)
