"""profiling/draw_tree.py shows a tree with its accepted path."""

import draw_tree


def test_text_and_picture(tmp_path, capsys):
    draw_tree.main(max_new_tokens=48, out=tmp_path / "tree.png")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0: ") and lines[0].endswith("✓")
    assert sum(line.endswith("✓") for line in lines) > 1 and not lines[-1].endswith("✓")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
