"""``python profiling acceptance``: one row for each head, temperature, filter and shape."""

import json

from generation import acceptance

from specdec_ext import assets


def test_rows_and_files(tmp_path, capsys):
    out = tmp_path / "acceptance"
    some = ["--temperature", "1", "--filters", "top-k 50", "--repeats", "1", "--tokens", "12"]
    acceptance.main([*some, "--seeds", "2", "--out", str(out)])
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["shape"] for row in rows] == [*acceptance.SHAPES]
    for row in rows:
        assert row["texts"] == 2
        if row["shape"] != acceptance.EVERY:
            assert row["without"] >= 1 and row["coupled"] >= 1
        assert 0 <= row["first_without"] <= 1 and 0 <= row["first_coupled"] <= 1
    assert "level 1 coupled" in capsys.readouterr().out
    assert out.with_suffix(".md").exists()


def test_greedy_drafts_of_two_heads(capsys):
    """Greedy drafts have no noise, so that there is nothing to compare with."""
    other = assets.FOLDER / "tiny-python-head"
    heads = ["--head", acceptance.BUNDLED, "--head", str(other)]
    acceptance.main(["--temperature", "0", "--repeats", "1", "--tokens", "24", *heads])
    table = capsys.readouterr().out
    lines = [line.split() for line in table.splitlines() if "chain of 5" in line]
    assert [line[0] for line in lines] == [acceptance.BUNDLED, str(other)]
    assert lines[0][1:] == lines[1][1:]  # it is the same head
    assert "-" in lines[0]


def test_tokens_that_end_a_known_ngram():
    text = [1, 2, 3, 4, 9, 1, 2, 3, 4, 5]
    assert [i for i, known in enumerate(acceptance.repeating(text)) if known] == [8]
