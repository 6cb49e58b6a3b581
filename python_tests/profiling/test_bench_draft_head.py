"""The draft benchmark: all contestants draft the same trees, byte counts are right, reports are complete.

What runs on a GPU only is tested by the same code on a CPU.
"""

import json

import pytest
import torch
from baselines.draft_calls import DraftCall, RandomHead
from baselines.torch_draft_head import TorchHead
from bench import draft_head, stopwatch
from bench.draft_head import CONFIGS, DRAFTS, Draft, parsed, prepared
from bench.stopwatch import Stopwatch
from gpu.steps import read_table

CPU = torch.device("cpu")
CHAIN, TREE = DRAFTS["chain 5"], DRAFTS["tree 41"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setitem(stopwatch.LARGE, "cpu", 1 << 16)
    monkeypatch.setattr(stopwatch, "last_level_cache_bytes", lambda device: 1 << 16)


def tiny_call(tree, dtype=torch.float32, rows=2):
    return DraftCall.make(RandomHead(CONFIGS["tiny"], dtype, "cpu"), tree, 20, rows)


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_contestants_draft_the_same(tree):
    """Repeated calls do as well: the op's cache keeps the committed elements."""
    call = tiny_call(tree)
    for _ in range(3):
        for given, expected in zip(call.ours(), call.theirs(), strict=False):
            assert torch.equal(given, expected)


def test_a_difference_is_not_timed(monkeypatch):
    monkeypatch.setattr(TorchHead, "draft", lambda self, tokens, *_: (tokens, tokens))
    options = parsed(["--device", "cpu", "--context", "4"])
    assert not prepared(Draft("tiny", "float32"), Stopwatch(CPU), options).agree()
    assert prepared(Draft("tiny", "bfloat16"), Stopwatch(CPU), options).agree()  # not compared


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_needed_bytes(dtype, size):
    """Reads fc once, and all other weights and the caches of 2 rows for each of five levels."""
    weights = (2 + 2 + 2) * 32 * 128 + 64 * 64 + 3 * 64 * 96 + 128 * 64  # with MLP and lm_head
    cache = 2 * 2 * (20 + 3) * 32
    needed = tiny_call(CHAIN, dtype).needed_bytes
    assert needed == size * (64 * 3 * 64 + 5 * (weights + 2 * cache))


def test_a_run(tmp_path, capsys):
    case = ["--head", "tiny", "--dtype", "float32", "--batch", "2", "--context", "16"]
    drafts = ["--draft", "chain 3", "--draft", "tree 60", "--weights", "same", "--repeats", "5"]
    draft_head.main(["--device", "cpu", *case, *drafts, "--out", str(tmp_path / "report")])
    report = json.loads((tmp_path / "report.json").read_text())
    chain, tree = report["rows"]
    assert (chain["ours_us"] / chain["level_us"], tree["ours_us"] / tree["level_us"]) == (
        pytest.approx(3), pytest.approx(8),
    )  # fmt: skip
    for row in report["rows"]:
        assert row["agree"] == 1  # in float32
        assert row["gb_per_s"] == pytest.approx(row["moved_mb"] / row["ours_us"] * 1e3)
        share = 100 * row["gb_per_s"] / report["read_gb_per_s"]
        assert row["read_percent"] == pytest.approx(share)
        assert row["torch_us"] > 0
    printed = capsys.readouterr().out
    assert "caches flushed" in printed and read_table(printed) == "2 cases"
    line = printed.splitlines()[-1]
    assert line.split()[:6] == ["tiny", "float32", "same", "tree", "60", "2"]


def test_warm_calls_need_no_primers():
    draft, watch = Draft("tiny"), Stopwatch(CPU)
    cold, warm = (parsed(["--device", "cpu", "--context", "4", *how]) for how in ([], ["--warm"]))
    assert set(prepared(draft, watch, cold).primers) == {"ours", "coupled", "torch"}
    assert prepared(draft, watch, warm).primers is None


@pytest.mark.parametrize(
    "options, count",
    [([], 18), (["--head", "small"], 10), (["--batch", "8"], 16), (["--quick"], 14)],
)
def test_options_replace_the_values_of_the_cases(options, count):
    drafts = draft_head.chosen(parsed(["--device", "cpu", *options]))
    assert len(drafts) == len(set(drafts)) == count


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        draft_head.main(["--device", "cuda"])
    assert "needs a GPU and a CUDA build of torch; use --device cpu" in capsys.readouterr().err
