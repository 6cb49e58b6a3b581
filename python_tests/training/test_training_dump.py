"""Hidden states on disk: they are complete or made again, and never those of another target."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from helpers.models.tiny import VOCAB, tiny_model
from safetensors.torch import load_file, save_file

from specdec_ext.training.data import dump as module
from specdec_ext.training.data.batches import Example, OnlineFeatures
from specdec_ext.training.data.dump import DumpedFeatures, dump_features, dump_size

LAYERS = (0, 2, -1)
LENGTHS = (9, 4, 9, 6, 12, 6)
BYTES = 8 + 4 * 32 * 4  # a token id, three auxiliary hidden states and the last one


def texts(seed=0):
    torch.manual_seed(seed)
    return [Example(torch.randint(VOCAB, (n,)), torch.rand(n) < 0.5) for n in LENGTHS]


def fresh_model():
    """A copy that a test may change."""
    return copy.deepcopy(tiny_model("llama"))


@pytest.fixture
def model():
    return fresh_model()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Shards have three, two and one text."""
    monkeypatch.setattr(module, "SHARD_BYTES", 23 * BYTES)


def assert_same(batch, expected, exact=True):
    assert torch.equal(batch.tokens, expected.tokens)
    assert torch.equal(batch.loss_mask, expected.loss_mask)
    assert torch.equal(batch.lengths, expected.lengths)
    columns = torch.arange(batch.tokens.shape[1])
    for row, length in enumerate(batch.lengths.tolist()):
        for name in ("features", "last_hidden"):
            states, wanted = getattr(batch, name)[row], getattr(expected, name)[row]
            assert states.dtype == wanted.dtype
            if exact:
                assert torch.equal(states[:length], wanted[:length])
            else:
                torch.testing.assert_close(states[:length], wanted[:length], rtol=1e-4, atol=1e-5)
            assert not states[columns >= length].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dumped_batches_are_those_of_the_target(tmp_path, monkeypatch, dtype):
    model = fresh_model().to(dtype)
    if dtype == torch.bfloat16:
        monkeypatch.setattr(module, "SHARD_BYTES", 23 * (8 + 4 * 32 * 2))
    examples = texts()
    dumped = dump_features(model, LAYERS, examples, tmp_path / "dump", batch=2)
    assert len(list(tmp_path.glob("dump/*.safetensors"))) == 3
    online = OnlineFeatures(model, LAYERS)
    # The batches of the dump: within a shard two texts of similar length at a time.
    for indices in ([1, 0], [2], [3, 4], [5]):
        batch = [examples[index] for index in indices]
        assert_same(dumped(batch), online(batch))
    batch = [examples[index] for index in (5, 0, 4)]
    if dtype == torch.float32:
        assert_same(dumped(batch), online(batch), exact=False)
    other_mask = Example(batch[0].tokens, ~batch[0].loss_mask)
    assert_same(dumped([other_mask]), online([other_mask]), exact=dtype != torch.float32)


def test_size_is_known_before_the_dump(model, tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    size = dump_size(model, LAYERS, texts(), folder)
    assert (size.tokens, size.bytes_per_token, size.done) == (46, BYTES, 0)
    assert size.total == 46 * BYTES
    assert str(size).startswith(f"46 tokens x {BYTES:,} bytes = 0.00 GB; ")
    assert not (tmp_path / "not").exists()
    dump_features(model, LAYERS, texts(), folder)
    size = dump_size(model, LAYERS, texts(), folder)
    assert size.total < size.done < size.total + 3 * 500  # and the headers of three files
    assert "are written" in str(size)


def test_full_disk_is_refused_before_a_file_is_written(model, tmp_path, monkeypatch):
    free = 46 * BYTES + module.SPARE_BYTES
    monkeypatch.setattr(module, "free_bytes", lambda path: free - 1)
    with pytest.raises(ValueError, match=r"too little space .* 46 tokens x 520 bytes"):
        dump_features(model, LAYERS, texts(), tmp_path / "dump")
    assert not (tmp_path / "dump").exists()
    monkeypatch.setattr(module, "free_bytes", lambda path: free)
    dump_features(model, LAYERS, texts(), tmp_path / "dump")
    monkeypatch.setattr(module, "free_bytes", lambda path: module.SPARE_BYTES + 1500)
    dump_features(model, LAYERS, texts(), tmp_path / "dump")  # nothing lacks


def test_stopped_dump_is_continued(model, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def stop(dump, number, batch, work):
        if number:
            raise Stopped
        write_shard(dump, number, batch, work)

    write_shard = module._Dump._write_shard
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(module._Dump, "_write_shard", stop)
        dump_features(model, LAYERS, texts(), tmp_path)
    with pytest.raises(ValueError, match="lacks 2 of 3 shards"):
        DumpedFeatures(model, LAYERS, tmp_path)
    first = tmp_path / "hidden-00000.safetensors"
    written = first.stat().st_mtime_ns
    monkeypatch.setattr(
        module, "SHARD_BYTES", 5 * BYTES
    )  # a dump keeps the size that it began with
    assert dump_size(model, LAYERS, texts(), tmp_path).done == first.stat().st_size
    dumped = dump_features(model, LAYERS, texts(), tmp_path)
    assert first.stat().st_mtime_ns == written
    assert_same(dumped(texts()), OnlineFeatures(model, LAYERS)(texts()), exact=False)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_shard_is_made_again(model, tmp_path, damage):
    dump_features(model, LAYERS, texts(), tmp_path)
    shard = tmp_path / "hidden-00001.safetensors"
    whole = shard.read_bytes()
    if damage == "flipped":
        shard.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    elif damage == "cut":
        shard.write_bytes(whole[:-40])
    else:
        shard.unlink()
    others = [path for path in tmp_path.glob("*.safetensors") if path != shard]
    written = [path.stat().st_mtime_ns for path in others]
    dump_features(model, LAYERS, texts(), tmp_path)
    assert [path.stat().st_mtime_ns for path in others] == written
    assert shard.read_bytes() == whole


def test_dump_with_other_settings_is_refused(model, tmp_path):
    dump_features(model, LAYERS, texts(), tmp_path)
    other = fresh_model()
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    for arguments, named in (
        ((other, LAYERS, texts()), "target"),
        ((model, (0, 1, -1), texts()), "layers"),
        ((model, LAYERS, texts(seed=1)), "texts"),
        ((other, (0,), texts()[:2]), "target and layers and texts"),
    ):
        for make in (dump_size, dump_features):
            with pytest.raises(ValueError, match=f"dump with different {named}"):
                make(*arguments, tmp_path)
    for arguments in ((other, LAYERS), (model, (0, 1, -1))):
        with pytest.raises(ValueError, match="dump with different"):
            DumpedFeatures(*arguments, tmp_path)


def test_texts_that_were_not_dumped_are_refused(model, tmp_path):
    dumped = dump_features(model, LAYERS, texts(), tmp_path)
    with pytest.raises(ValueError, match="a text of 5 tokens is not in the dump"):
        dumped([texts()[0], Example(texts()[0].tokens[:5], texts()[0].loss_mask[:5])])
    with pytest.raises(ValueError, match="is not a dump of hidden states"):
        DumpedFeatures(model, LAYERS, tmp_path / "other")
    with pytest.raises(ValueError, match="examples is empty"):
        dump_features(model, LAYERS, [], tmp_path)
    with pytest.raises(ValueError, match="batch is 0"):
        dump_features(model, LAYERS, texts(), tmp_path, batch=0)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        {"format": 2},
        {"files": []},
        {"files": {"0": {"bytes": "9", "sha256": ""}}},
        {"shards": -1},
        {"shard_bytes": 0},
        {"shard_bytes": None},
    ],
    ids=str,
)
def test_damaged_index_is_refused(model, tmp_path, content):
    dump_features(model, LAYERS, texts(), tmp_path)
    path = tmp_path / module.INDEX
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content})
    path.write_text(content)
    for use in (
        lambda: dump_features(model, LAYERS, texts(), tmp_path),
        lambda: DumpedFeatures(model, LAYERS, tmp_path),
    ):
        with pytest.raises(ValueError, match="damaged"):
            use()


@pytest.mark.parametrize("damage", ["header", "lengths", "rows"])
def test_shard_with_other_content_is_not_read(model, tmp_path, damage):
    """Its size is right, so only its content is wrong."""
    dump_features(model, LAYERS, texts(), tmp_path)
    shard = tmp_path / "hidden-00001.safetensors"
    if damage == "header":
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    else:
        states = load_file(shard)
        if damage == "lengths":
            states["lengths"] += 1
        else:
            rows, width = states["features"].shape
            states["features"] = states["features"].reshape(rows // 2, width * 2)
        size = shard.stat().st_size
        save_file(states, shard)
        index = json.loads((tmp_path / module.INDEX).read_text())
        index["files"]["1"]["bytes"] = shard.stat().st_size
        (tmp_path / module.INDEX).write_text(json.dumps(index))
        assert abs(size - shard.stat().st_size) <= 8
    with pytest.raises(ValueError, match="call dump_features again"):
        DumpedFeatures(model, LAYERS, tmp_path)
    dump_features(model, LAYERS, texts(), tmp_path)
