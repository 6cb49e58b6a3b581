"""``python profiling acceptance``: one row for each temperature, filter and shape."""

import json

from generation import acceptance


def test_rows_and_files(tmp_path, capsys):
    out = tmp_path / "acceptance"
    some = ["--temperature", "1", "--filters", "top-k 50", "--repeats", "1", "--tokens", "12"]
    acceptance.main([*some, "--seeds", "2", "--out", str(out)])
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["shape"] for row in rows] == [*acceptance.SHAPES]
    for row in rows:
        assert row["texts"] == 2 and row["without"] >= 1 and row["coupled"] >= 1
        assert 0 <= row["first_without"] <= 1 and 0 <= row["first_coupled"] <= 1
    assert "level 1 coupled" in capsys.readouterr().out
    assert out.with_suffix(".md").exists()
