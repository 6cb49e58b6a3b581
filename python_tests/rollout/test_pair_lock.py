"""Locks of pairs: what they record, that they find every changed file, and what they refuse to read."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.drafters.checkpoint_cases import random_head

import specdec_ext
from specdec_ext import assets
from specdec_ext.heads.checkpoints import load_draft, save_draft
from specdec_ext.heads.checkpoints.config.fields import Fields
from specdec_ext.rollout.lock import PairLock, ReferenceAcceptance

TARGET = assets.FOLDER / "tiny-python-target"
HEAD = assets.FOLDER / "tiny-python-head"
REFERENCE = ReferenceAcceptance(100, 500, (70, 50, 20), 120, 260, (100, 60, 40))


@pytest.fixture(scope="module")
def model():
    return assets.load_target()


@pytest.fixture
def pair(tmp_path):
    """Copies of the bundled target and head."""
    return [shutil.copytree(each, tmp_path / each.name) for each in (TARGET, HEAD)]


def flip(path):
    """Change one byte in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


# --- what is recorded --------------------------------------------------------------------------------


def test_a_lock_is_the_same_after_saving_and_loading(model, tmp_path):
    lock = PairLock.of(model, "auto", reference=REFERENCE, sampling={"temperature": 0.0})
    assert PairLock.load(lock.save(tmp_path / "pair.lock")) == lock
    assert lock.target.name == "tiny-python-target" and lock.draft.name == "tiny-python-head"
    assert list(lock.target.files) == ["config.json", "model.safetensors"]
    assert lock.drafter == "NgramDrafter + HeadDrafter"
    assert lock.versions["torch"] == torch.__version__
    assert "acceptance length 2.40" in str(lock)
    rows = [line.split() for line in lock.explain().splitlines()]
    assert ["2", "60", "50", "83%", "50%"] in rows  # 50 of the 60 drafts that had a second token


def test_hashes_are_those_of_sha256sum(tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    shutil.copy(HEAD / "config.json", folder)
    (folder / "model.safetensors").write_bytes(b"abc")
    lock = PairLock.of(TARGET, folder)
    # FIPS 180-2, appendix B.1
    assert lock.draft.files["model.safetensors"] == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_reference_of_a_call_is_what_its_statistics_say(model):
    ids = assets.load_tokenizer()("import os\n", return_tensors="pt")["input_ids"]
    output = specdec_ext.generate(
        model,
        ids,
        drafter="head",
        speculation="fixed",
        max_new_tokens=32,
        return_dict_in_generate=True,
    )
    stats = output.speculation_stats
    found = PairLock.of(model, "head", reference=stats).reference
    assert found.drafts == stats.drafts > 0 and found.steps == stats.steps
    assert found.accepted_tokens == stats.accepted_tokens > 0
    assert found.mean_acceptance_length == stats.mean_acceptance_length
    assert found.emitted_per_step == stats.emitted_per_step
    shares = stats.acceptance_per_position
    assert found.acceptance_per_position == [share for share in shares if share]
    positions = len(found.accepted_per_position)
    assert list(found.reached) == stats.reached_per_position[:positions]
    given = [share for share in stats.conditional_acceptance if share]
    assert given == [
        accepted / reached
        for accepted, reached in zip(found.accepted_per_position, found.reached, strict=True)
    ]


def test_a_lock_of_format_1_is_read_without_the_counts_that_it_lacks(model, tmp_path):
    path = PairLock.of(model, "auto", reference=REFERENCE).save(tmp_path / "pair.lock")
    record = json.loads(path.read_text())
    record["pair_lock"] = 1
    del record["reference"]["reached_per_position"]
    path.write_text(json.dumps(record))
    old = PairLock.load(path)
    assert old.reference.reached_per_position is None
    assert list(old.reference.reached) == [100, 70, 50]  # as if all drafts had three tokens
    assert "reached at most" in old.explain()
    assert PairLock.load(old.save(path)) == old  # saved again, they are still unknown
    assert old.differences(model, "auto") == []


def test_a_reference_without_drafts():
    record = {"drafts": 0, "draft_tokens": 0, "steps": 9, "emitted_tokens": 9}
    found = ReferenceAcceptance.read(Fields({**record, "accepted_per_position": [0]}, "lock"))
    assert found.acceptance_per_position == [] and found.mean_acceptance_length == 1.0
    assert found.emitted_per_step == 1.0


@pytest.mark.parametrize(
    ("drafter", "kind", "files"),
    [
        ("none", "none", None),
        (None, "none", None),
        ("ngram", "NgramDrafter", None),
        ("head", "HeadDrafter", "tiny-python-head"),
        ("draft", "DraftModelDrafter", "tiny-python-draft"),
        (HEAD, "HeadDrafter", "tiny-python-head"),
    ],
)
def test_kinds_of_drafters(model, drafter, kind, files):
    lock = PairLock.of(model, drafter)
    assert lock.drafter == kind and (lock.draft and lock.draft.name) == files
    assert lock.differences(model, drafter) == []


def test_commit_of_a_snapshot_in_the_hubs_cache(tmp_path):
    commit = "0123456789" * 4
    folder = tmp_path / "models--org--some-head" / "snapshots" / commit
    shutil.copytree(HEAD, folder)
    lock = PairLock.of(TARGET, folder)
    assert (lock.draft.name, lock.draft.revision) == ("org/some-head", commit)
    assert lock.differences(TARGET, HEAD) == []  # a copy elsewhere is the same head


# --- what is found -----------------------------------------------------------------------------------


def test_one_wrong_byte_is_found_in_each_file(pair):
    lock = PairLock.of(*pair)
    assert lock.differences(*pair) == []
    for what, folder in zip(("target", "draft"), pair, strict=True):
        path = folder / "model.safetensors"
        flip(path)
        (found,) = lock.differences(*pair)
        assert found.startswith(f"{what} {folder.name}: model.safetensors has SHA-256 ")
        with pytest.raises(ValueError, match=f"not the locked pair: {what} .*model.safetensors"):
            lock.verify(*pair)
        flip(path)
    lock.verify(*pair)


def test_one_wrong_shard_is_found_by_name(tmp_path, model):
    model.save_pretrained(tmp_path, max_shard_size="2MB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    lock = PairLock.of(tmp_path, HEAD)
    assert len(lock.target.files) == len(shards) + 2
    flip(shards[1])
    (found,) = lock.differences(tmp_path, HEAD)
    assert shards[1].name in found
    shards[1].unlink()
    with pytest.raises(OSError, match=f"lists '{shards[1].name}', which is missing"):
        lock.differences(tmp_path, HEAD)


def test_every_difference_is_named(pair, model):
    lock = PairLock.of(*pair)
    config = pair[0] / "config.json"
    config.write_text(config.read_text() + "\n")
    (pair[1] / "model.safetensors").rename(pair[1] / "other.safetensors")
    found = lock.differences(*pair)
    assert len(found) == 3
    assert "config.json has SHA-256" in found[0]
    assert found[1].endswith("model.safetensors is missing")
    assert found[2].endswith("other.safetensors is not a file of tiny-python-head")


def test_another_drafter_is_named(model):
    lock = PairLock.of(model, "auto")
    assert lock.differences(model, "head") == [
        "the drafter is HeadDrafter, not NgramDrafter + HeadDrafter"
    ]
    found = lock.differences(model, "ngram")
    assert len(found) == 2 and "no draft with files, such as tiny-python-head" in found[1]
    (found,) = PairLock.of(TARGET, None).differences(TARGET, HEAD)
    assert found == "draft tiny-python-head is not part of the lock"


def test_a_head_alone_is_compared_without_its_drafter(model):
    lock = PairLock.of(model, "auto")
    assert lock.differences(None, load_draft(HEAD)) == []
    assert lock.differences(TARGET, HEAD) == []


# --- what is refused ---------------------------------------------------------------------------------


def test_parts_without_files_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="'a head made in memory' has no files to hash"):
        PairLock.of(TARGET, random_head("eagle3"))
    with pytest.raises(ValueError, match="pass the loaded target"):
        PairLock.of(TARGET, "auto")
    fresh = type(model)(model.config.__class__(num_hidden_layers=1, hidden_size=64))
    with pytest.raises(ValueError, match="the target was made in memory"):
        PairLock.of(fresh, None)
    saved = save_draft(random_head("eagle3"), tmp_path / "head")
    assert PairLock.of(TARGET, saved).draft.name == "head"


def changed(*path, to):
    def edit(record):
        for name in path[:-1]:
            record = record[name]
        record[path[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (changed("pair_lock", to=3), "pair_lock is 3; expected 2.* of a later version"),
        (changed("pair_lock", to=None), "pair_lock is None"),
        (changed("target", to=[]), r"target is \[\]; expected an object"),
        (changed("target", to=None), "target has 0 files"),
        (changed("target", "name", to=""), "target has no name"),
        (
            changed("target", "files", "../x", to="a" * 64),
            "expected the name of a file and its SHA",
        ),
        (
            changed("draft", "files", "config.json", to="abc"),
            "draft: files has 'config.json': 'abc'",
        ),
        (changed("draft", "files", "config.json", to=5), "expected the name of a file"),
        (changed("drafter", to=7), "drafter is 7; expected a string"),
        (changed("speculation", to="maybe"), "speculation is 'maybe'"),
        (changed("reference", "drafts", to=-1), "drafts is -1"),
        (changed("reference", "drafts", to=60), "expected counts that never rise"),
        (changed("reference", "drafts", to=200), "not more drafts than steps"),
        (changed("reference", "draft_tokens", to=100), "expected counts that never rise"),
        (changed("reference", "accepted_per_position", to=[-1]), "expected counts that never rise"),
        (changed("reference", "accepted_per_position", to=[0.5]), "expected a list of integers"),
        (changed("reference", "accepted_per_position", to=[0] * 5000), "expected counts"),
        (changed("reference", "reached_per_position", to=[100, 60]), "as many of one as of the"),
        (changed("reference", "reached_per_position", to=[99, 60, 40]), "counts that never rise"),
        (changed("reference", "reached_per_position", to=[100, 49, 40]), "counts that never rise"),
        (changed("reference", "reached_per_position", to=[100, 71, 40]), "counts that never rise"),
        (changed("reference", "reached_per_position", to="100"), "expected a list of integers"),
        (changed("reference", "draft_tokens", to=199), "expected counts that never rise"),
        (changed("sampling", "temperature", to=[1]), "'temperature' is"),
        (changed("versions", "torch", to=2), "expected a value of type str"),
    ],
)
def test_a_damaged_lock_is_refused_by_name(edit, message, model, tmp_path):
    path = PairLock.of(model, "auto", reference=REFERENCE).save(tmp_path / "pair.lock")
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        PairLock.load(path)


def test_files_that_are_no_locks(tmp_path):
    path = tmp_path / "pair.lock"
    with pytest.raises(FileNotFoundError):
        PairLock.load(path)
    with pytest.raises(IsADirectoryError, match="expected a lock of a pair"):
        PairLock.load(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not JSON"):
        PairLock.load(path)
