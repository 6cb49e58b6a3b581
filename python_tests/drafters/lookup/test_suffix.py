"""``SuffixDrafter`` and ``SuffixHistory``: drafts from the request and past outputs, files, lossless text."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from helpers.checks.lossless import check_same_text, every_decoding, generate, plain_text
from helpers.drafters.drafting_contexts import context_of, started
from helpers.models.tiny import VOCAB, every_batch, prompts, tiny_model
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

import specdec_ext
from specdec_ext import SuffixDrafter, SuffixHistory
from specdec_ext.context import Context
from specdec_ext.drafters.lookup.suffix import FILE_FORMAT

every_shape = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


# ---------------------------------------------------------------- proposals


def test_drafts_come_from_the_request_and_the_history():
    history = SuffixHistory()
    history.add([7, 8, 9, 10, 11])
    context = context_of([[1, 2, 3, 1, 2], [5, 6, 7, 8, 9], [4, 5, 6, 7, 4]])
    drafter = started(SuffixDrafter(history=history), context)
    tree = drafter.propose(context)
    assert tree.tokens.tolist() == [[2, 3, 1], [9, 10, 11], [4, 5, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, 0, 1], [-1, 0, -2]]
    assert drafter.match_lengths == [2, 3, 1]


def test_remaining_rows_keep_their_texts():
    context = context_of([[1, 2, 3, 1], [4, 5, 6, 4], [7, 8, 9, 7]])
    drafter = started(SuffixDrafter(), context)
    assert drafter.propose(context).tokens.tolist() == [[1, 2], [4, 5], [7, 8]]
    context.rows = [2, 0]
    context.emit([2, 0], [8, 2])
    assert drafter.propose(context).tokens.tolist() == [[8, 9, 7], [2, 3, 1]]


def test_drafts_of_a_row_do_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, length).tolist() for length in (30, 9, 55, 2)]
    together = context_of(texts)
    batch = started(SuffixDrafter(), together).propose(together)
    for row, text in enumerate(texts):
        alone = context_of([text])
        tree = started(SuffixDrafter(), alone).propose(alone)
        nodes = int((batch.parents[row] != -2).sum())
        assert tree.num_nodes == nodes
        assert torch.equal(tree.tokens[0], batch.tokens[row, :nodes])
        assert torch.equal(tree.parents[0], batch.parents[row, :nodes])


def test_paddings_are_not_matched():
    """Token 0 pads the prompt; as text, 0 0 0 would be the longest match."""
    ids, mask = torch.tensor([[0, 0, 0, 5, 0]]), torch.tensor([[0, 0, 0, 1, 1]])
    context = Context(ids, mask, 0, 50, draw=None, sample=None)
    context.generated = [[5]]
    drafter = started(SuffixDrafter(), context)
    assert drafter.propose(context).tokens.tolist() == [[5, 0]]


# ---------------------------------------------------------------- lossless, and faster where text repeats


@every_shape
@every_batch
@every_decoding
def test_text_is_that_of_plain_decoding(batch, decoding, tree):
    """A second call finds its text in the history of the first and takes fewer steps."""
    drafter = SuffixDrafter(tree=tree, factor=2.0, offset=2.0)
    first = check_same_text(drafter, batch, decoding)
    again = check_same_text(drafter, batch, decoding)
    assert again.accepted_tokens > first.accepted_tokens
    assert again.steps < first.steps / 2


@every_decoding
def test_history_of_other_text_leaves_the_text_unchanged(decoding):
    history = SuffixHistory()
    rng = np.random.default_rng(1)
    for _ in range(200):
        history.add(rng.integers(0, VOCAB, 60).tolist())
    stats = check_same_text(SuffixDrafter(offset=4.0, history=history), "five-ragged", decoding)
    assert stats.draft_tokens > 0


def test_outputs_are_added_to_the_history_when_they_end():
    drafter = SuffixDrafter()
    generate(drafter, "five-ragged", "greedy")
    assert len(drafter.history) == 5 and drafter.history.num_tokens == 5 * 32
    stop = int(plain_text("one", "greedy")[0, 7 + 9])
    drafter = SuffixDrafter()
    text = generate(drafter, "one", "greedy", eos_token_id=stop).sequences[0, 7:].tolist()
    assert text[-1] == stop and drafter.history.num_tokens == len(text)


def test_calls_by_name_have_their_own_histories():
    stats = [generate("suffix", "one", "greedy").speculation_stats for _ in range(2)]
    assert stats[0].steps == stats[1].steps


def test_threads_may_share_a_history():
    history, texts = SuffixHistory(), {}

    def work(number):
        drafter = SuffixDrafter(history=history, offset=2.0)
        texts[number] = [generate(drafter, "one", "greedy").sequences for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(history) == 9
    for found in texts.values():
        assert all(torch.equal(text, plain_text("one", "greedy")) for text in found)


# ---------------------------------------------------------------- files


def test_saved_history_drafts_the_same(tmp_path):
    history = SuffixHistory(1000)
    for output in ([1, 2, 3], [4, 5], [1, 2, 6]):
        history.add(output)
    history.save(tmp_path / "history")
    assert [path.name for path in tmp_path.iterdir()] == ["history"]
    loaded = SuffixHistory.load(tmp_path / "history")
    assert (len(loaded), loaded.num_tokens, loaded.largest_token) == (3, 8, 6)
    context = context_of([[9, 1, 2]])
    drafters = [SuffixDrafter(history=each) for each in (history, loaded)]
    trees = [started(drafter, context).propose(context) for drafter in drafters]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist() == [[2, 6, 3]]
    assert SuffixHistory.load(tmp_path / "history", max_tokens=5).num_tokens == 3
    SuffixHistory().save(tmp_path / "history")
    assert len(SuffixHistory.load(tmp_path / "history")) == 0


def write(path, tokens, counts, file_format=FILE_FORMAT):
    save_file({"tokens": tokens, "counts": counts}, path, {"format": file_format})


def write_bfloat16(path):
    tensors = {"tokens": torch.zeros(3, dtype=torch.bfloat16), "counts": torch.tensor([3])}
    save_torch_file(tensors, path, {"format": FILE_FORMAT})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "not a complete safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 100), "not a complete safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "not a complete safetensors file"),
        (lambda path: write(path, np.arange(3), np.array([2])), "counts add up to 2, but there are 3"),
        (lambda path: write(path, np.arange(3), np.array([-1, 4])), "must not be negative"),
        (lambda path: write(path, np.arange(3) - 1, np.array([3])), r"tokens\[0\] is -1"),
        (lambda path: write(path, np.arange(3) * 2**31, np.array([3])), r"tokens\[1\] is 2147483648"),
        (lambda path: write(path, np.arange(3.0), np.array([3])), "tokens is F64"),
        (lambda path: write(path, np.zeros((2, 2), np.int64), np.array([4])), r"I64 \[2, 2\]"),
        (lambda path: write(path, np.arange(3), np.array([1.5, 1.5])), "counts is F64"),
        # numpy has no bfloat16.
        (lambda path: write_bfloat16(path), "tokens is BF16"),
        (lambda path: write(path, np.arange(3), np.array([3]), "other"), "has format 'other'"),
        (lambda path: save_file({"x": np.arange(3)}, path), r"format None and tensors \['x'\]"),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, damage, message):
    path = tmp_path / "history"
    write(path, np.arange(3), np.array([3]))
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        SuffixHistory.load(path)
    assert str(path) in str(error.value)


def test_missing_file_is_refused():
    with pytest.raises(FileNotFoundError, match="/nonexistent/history"):
        SuffixHistory.load("/nonexistent/history")


def test_pipe_is_refused(tmp_path):
    """Opening one would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a pipe, a socket or a device; expected a file that Suff"):
        SuffixHistory.load(tmp_path / "pipe")


def test_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match=f"{tmp_path} is a folder"):
        SuffixHistory.load(tmp_path)


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "history"
    write(path, np.arange(3), np.array([3]))
    before = path.read_bytes()

    def no_space(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("specdec_ext.drafters.lookup.suffix.os.replace", no_space)
    with pytest.raises(OSError, match="no space"):
        SuffixHistory().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------- messages


def test_history_of_another_vocabulary_is_refused():
    history = SuffixHistory()
    history.add([1, VOCAB])
    message = f"history contains token {VOCAB}, but LlamaForCausalLM has a vocab"
    with pytest.raises(ValueError, match=message):
        generate(SuffixDrafter(history=history), "one", "greedy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens must be in"),
        ({"max_match": 100}, "max_match must be in"),
        ({"factor": -2}, "factor must be"),
        ({"min_probability": 0}, "min_probability must be in"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(**arguments)


def test_call_may_end_with_its_first_token():
    ids, _ = prompts((1,))
    kwargs = dict(max_new_tokens=1, do_sample=False)
    texts = [
        specdec_ext.generate(tiny_model("llama"), ids, drafter=each, **kwargs)
        for each in ("suffix", None)
    ]
    assert torch.equal(*texts)
