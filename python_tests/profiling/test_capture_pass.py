"""The pass of a target over a draft tree: it never waits for the host, and a CUDA graph could repeat it.

``REMAINING`` lists what still changes from one round to the next, and so keeps a graph from being used.
A new entry is a regression.
"""

from __future__ import annotations

import re

import pytest
from baselines.random_targets import TINY, tiny_target
from generation import capture_pass
from generation.cuda_like import cuda_like, to_device
from generation.trace import ADDRESS, FROM_HOST, LAUNCH, NUMBER, TO_HOST

CASES = [(batch, nodes) for batch in capture_pass.BATCHES for nodes in capture_pass.TREES]
# (cause, place without its line) of every difference between the passes of two rounds.
REMAINING = {
    # The numbers of the rows and the tree of a round are copied to new memory.
    (ADDRESS, "specdec_ext/models/slots/layout.py numbers"),
    (ADDRESS, "specdec_ext/ops/tree_mask.py tree_mask"),
    (ADDRESS, "transformers/ forward"),
    # Keys and values are written and read by slices that end at the round's slot.
    (NUMBER, "specdec_ext/models/cache/layers.py update"),
    # Starts relative to the first visible key of a window, computed with a number of the host.
    (NUMBER, "specdec_ext/models/passes/attention.py starts_behind"),
}


@pytest.fixture(scope="module")
def found():
    return {(each.model, each.batch, each.nodes): each for each in capture_pass.run()}


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize(("batch", "nodes"), CASES)
def test_a_pass_has_no_copy_and_its_replay_scores_other_tokens(found, model, batch, nodes):
    case = found[model, batch, nodes]
    assert case.first.count(TO_HOST) == case.first.count(FROM_HOST) == 0
    assert case.replays


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize(("batch", "nodes"), CASES)
def test_nothing_else_changes_from_round_to_round(found, model, batch, nodes):
    causes = found[model, batch, nodes].causes
    assert {(each.cause, place(each.site)) for each in causes} <= REMAINING


def place(site: str) -> str:
    """The site without its line; places in transformers are one place per function."""
    site = re.sub(r":\d+ ", " ", site)
    return re.sub(r"^transformers/\S+", "transformers/", site)


@pytest.mark.parametrize("model", TINY)
def test_recorded_pass_makes_the_same_calls_in_every_round(model):
    """No copy, and no number, address or shape that changes: what a CUDA graph repeats is right."""
    with cuda_like():
        target = to_device(tiny_target(model))
        for batch, nodes in CASES:
            first, causes = capture_pass.recorded_passes(target, batch, nodes)
            assert first.count(LAUNCH) > 10
            assert not [call for call in first.calls if call.is_copy]
            assert not causes, causes[0]
