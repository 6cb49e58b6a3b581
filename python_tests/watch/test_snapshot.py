"""Pages of metrics: what is read of them, of several engines and models, and what is refused."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_ext.serve import names
from specdec_ext.watch.snapshot import Snapshot, read

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 5.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 5.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE python_info gauge
python_info{version="3.11"} 1.0
"""


def test_engines_are_added_and_positions_count_from_one():
    found = read(PAGE, 7.0)
    assert found == Snapshot(
        at=7.0,
        model="m",
        counters={names.DRAFTS: 14},
        positions={names.ACCEPTED_PER_POSITION: (9, 0, 3)},
        gauges={names.RUNNING: 2},
        histograms={names.TIME_TO_FIRST_TOKEN: {0.1: 3, math.inf: 5}},
        began=1.7e9,
    )


def test_a_page_of_several_models_needs_a_name():
    page = PAGE + PAGE.replace('"m"', '"other"').replace("10.0", "20.0")
    with pytest.raises(ValueError, match="it serves m, other; pass one as --model"):
        read(page, 0.0)
    assert read(page, 0.0, "other").counters == {names.DRAFTS: 24}
    with pytest.raises(ValueError, match="it serves m, other, not third"):
        read(page, 0.0, "third")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("", "none of its 0 metrics is one of speculation"),
        ("python_info 1\n", "none of its 1 metrics is one of speculation"),
        ("<!doctype html><html><body>hello</body></html>", "this is no page of metrics"),
        ("vllm:spec_decode_num_drafts_total NaN\n", "_total is nan; expected a number from 0 on"),
        ("vllm:spec_decode_num_drafts_total -1\n", r"_total is -1.0; expected a number from 0 on"),
        ("vllm:num_requests_running +Inf\n", "running is inf; expected"),
        (
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="-1"} 1\n',
            "has position '-1'; expected 0, 1, 2",
        ),
        (
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="99999999"} 1\n',
            "has position '99999999'",
        ),
        ('vllm:time_to_first_token_seconds_bucket{le="x"} 1\n', "has the bound 'x'"),
    ],
    ids=lambda value: value[:25].strip() or "empty",
)
def test_what_is_no_page_of_such_metrics_is_refused(page, message):
    with pytest.raises(ValueError, match=message):
        read(page, 0.0)


@given(st.text() | st.text(alphabet='vlm:_{}="0.9 \n#\\'))
def test_no_text_is_another_error(text):
    for page in (text, PAGE[:-1] + text):
        with suppress(ValueError):
            read(page, 0.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("} 10.0", "} 1.0", id="a counter falls"),
        pytest.param('position="2"} 3.0', 'position="2"} 2.0', id="a position falls"),
        pytest.param('le="0.1",model_name="m"} 3.0', 'le="0.1",model_name="m"} 1.0', id="a bucket"),
        pytest.param("1.7e+09", "1.8e+09", id="all grow, and it began later"),
    ],
)
def test_a_server_that_was_started_again_is_recognised(old, new):
    before = read(PAGE, 0.0)
    grown = PAGE.replace("} 4.0", "} 9.0").replace('position="0"} 8.0', 'position="0"} 88.0')
    assert read(grown, 1.0).follows(before) and before.follows(before)
    assert old in grown
    assert not read(grown.replace(old, new), 1.0).follows(before)


def test_counters_that_vanish_are_a_new_beginning():
    """vLLM exports some counters only after their first use."""
    rest = "\n".join(line for line in PAGE.splitlines() if "per_pos" not in line) + "\n"
    assert read(PAGE, 1.0).follows(read(rest, 0.0))
    assert not read(rest, 1.0).follows(read(PAGE, 0.0))
