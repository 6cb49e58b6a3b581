"""``Completer`` without Ray: texts, rows that can't be completed, and batches that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.serving import text_alone

from specdec_ext.cluster import Completer, EngineOptions

OPTIONS = EngineOptions("bundled", dtype="float32", speculation="fixed", max_rows=2)
PROMPTS = ["import os\n", "def read(path):\n", "class Queue:\n"]


def test_rows_keep_their_columns_and_get_their_own_texts():
    batch = {"prompt": np.array(PROMPTS), "id": np.array([4, 5, 6])}
    done = Completer(OPTIONS, max_new_tokens=8)(batch)
    assert done["id"].tolist() == [4, 5, 6] and done["prompt"].tolist() == PROMPTS
    assert done["text"].tolist() == [text_alone(each, max_new_tokens=8) for each in PROMPTS]
    assert done["completion_tokens"].tolist() == [8, 8, 8]
    assert done["finish_reason"].tolist() == ["length"] * 3
    assert done["error"].tolist() == [""] * 3


def test_seeds_of_rows():
    sampled = dict(max_new_tokens=8, do_sample=True, top_k=0)
    completer = Completer(OPTIONS, column="code", seed_column="s", **sampled)
    done = completer({"code": np.array([PROMPTS[0]] * 2), "s": np.array([3, 9])})
    assert done["text"].tolist() == [text_alone(PROMPTS[0], seed=s, **sampled) for s in (3, 9)]


def test_a_row_that_cant_be_completed_has_an_error_and_the_others_a_text():
    wrong = [None, 7, "", "\ud800", "x = 1\n" * 2000]
    prompts = np.array([PROMPTS[0], *wrong, PROMPTS[1]], object)
    done = Completer(OPTIONS, max_new_tokens=8)({"prompt": prompts})
    assert [bool(error) for error in done["error"]] == [False, *[True] * 5, False]
    assert done["text"].tolist()[1:-1] == [""] * 5
    assert done["finish_reason"].tolist()[1:-1] == ["error"] * 5
    assert [done["text"][0], done["text"][-1]] == [
        text_alone(each, max_new_tokens=8) for each in PROMPTS[:2]
    ]
    assert done["error"][1].startswith("column 'prompt' is missing or null; expected text")
    assert "the request may have" in done["error"][5]


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"text": ["a"]}, KeyError, "no column 'prompt'; it has .'text'.*"),
        ({"prompt": ["a"], "error": ["b"]}, ValueError, r"columns \['error'\] already"),
        ([{"prompt": "a"}], TypeError, "the batch is a list; expected a mapping of columns"),
    ],
    ids=["missing column", "taken column", "list"],
)
def test_wrong_batches_are_refused(batch, error, message):
    with pytest.raises(error, match=message):
        Completer(OPTIONS, max_new_tokens=1)(batch)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "max_new_tokens is"),
        ({"max_new_tokens": 4, "tempature": 1}, "tempature is not an argument of a request"),
        ({"max_new_tokens": 4, "seed": 1, "seed_column": "s"}, "seed_column and seed are given"),
    ],
    ids=["no length", "unknown", "two seeds"],
)
def test_wrong_requests_are_refused_before_any_row(request_, message):
    with pytest.raises(ValueError, match=message):
        Completer(OPTIONS, **request_)


def test_an_engine_that_has_ended_fails_the_batch():
    completer = Completer(OPTIONS, max_new_tokens=8)
    completer._engine.shutdown()
    with pytest.raises(RuntimeError, match="accepts no requests"):
        completer({"prompt": ["a"]})
