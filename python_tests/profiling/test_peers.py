"""``python profiling peers``: rows from records, contestants, processes, and a whole run of fake programs."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
from bench import stopwatch
from helpers.peers.fake_program import Counting, Dying, Short
from helpers.places import ROOT
from peers import environments, models, process, race, results
from peers.cases import Work
from peers.contestants import PRECISIONS, Contestant, contestants
from peers.process import Failed, Process
from peers.programs import OWN, PROGRAMS
from peers.storage import built

from specdec_ext import assets


def record(contestant: str, work: Work, seconds: list[list[float]], **values: object) -> dict:
    texts = [[f"{index}, {row}" for row in range(work.rows)] for index in range(len(seconds))]
    known = {
        "run": f"{contestant} {work}",
        "model": "135m",
        "contestant": contestant,
        "work": vars(work),
        "seconds": seconds,
        "texts": texts,
        "others": [0.0, 1.0],
        "weight_bytes": 2e9,
        "read_gb_per_s": 40.0,
    }
    return known | values


def test_a_row_has_medians_over_rounds_and_then_over_prompts():
    """The mean, the least, or all measurements in one list would give other numbers."""
    first, whole = Work(1, 128, 1), Work(1, 128, 129)
    records = [
        record("a", first, [[0.9, 0.1, 0.2], [0.4, 0.4, 0.4], [0.3, 0.3, 0.9]]),
        record("a", whole, [[8.2, 6.6, 0.1], [16.4, 16.4, 0.1], [0.1, 4.3, 40.0]]),
    ]
    (row,) = results.rows_of(records)
    assert row["first_128"] == pytest.approx(300)
    # 128 tokens in 6.4, 16 and 4 seconds.
    assert row["decode_1"] == pytest.approx(20)
    assert row["floor"] == pytest.approx(20 * 2e9 / 40e9)
    assert "first_1024" not in row and "call" not in row and "decode_4" not in row


def test_batches_count_the_tokens_of_all_rows_and_have_no_floor():
    works = {Work(4, 128, 1): [[1.0]], Work(4, 128, 129): [[3.0]]}
    (row,) = results.rows_of(record("a", work, seconds) for work, seconds in works.items())
    assert row["decode_4"] == pytest.approx(4 * 128 / 2)
    assert "floor" not in row and "decode_1" not in row and "first_128" not in row


def test_drafts_have_no_floor():
    works = {Work(1, 128, 1): [[1.0]], Work(1, 128, 129): [[3.0]]}
    (row,) = results.rows_of(
        record("a", work, seconds, weight_bytes=None) for work, seconds in works.items()
    )
    assert row["decode_1"] == 64 and "floor" not in row


def test_texts_are_compared_row_by_row_with_those_of_hugging_face():
    """The text of a single token is not counted."""
    first, whole = Work(2, 128, 1), Work(2, 128, 129)
    theirs = [record(results.REFERENCE, work, [[1.0]]) for work in (first, whole)]
    ours = [
        record("a", first, [[1.0]], texts=[["x", "y"]]),
        record("a", whole, [[1.0]], texts=[["0, 0", "y"]]),
    ]
    rows = {row["contestant"]: row for row in results.rows_of([*theirs, *ours])}
    assert rows["a"]["equal"] == "1/2" and rows[results.REFERENCE]["equal"] == "2/2"
    assert "equal" not in results.rows_of(ours)[0]


def test_the_share_of_other_work_is_that_of_all_calls_together():
    """A call of a millisecond, in which a tick of the clock falls, counts for little."""
    works = {Work(1, 128, 1): [0.01, 0.002], Work(1, 1024, 1): [0.0, 0.998]}
    (row,) = results.rows_of(
        record("a", work, [[1.0]], others=others) for work, others in works.items()
    )
    assert row["others"] == pytest.approx(0.01)


def test_the_reference_is_the_name_of_a_contestant():
    assert Contestant("hf", "f32", "plain").title == results.REFERENCE


def test_only_the_bundled_model_has_drafts():
    random = contestants("135m", PROGRAMS, ["f32"])
    assert {each.way for each in random} == {"plain"}
    bundled = {(each.program, each.way) for each in contestants("bundled", PROGRAMS, ["f32"])}
    assert {("ours", "auto"), ("hf", "prompt lookup"), ("llama", "prompt lookup")} <= bundled


def test_a_contestant_needs_the_precision_and_titles_differ():
    found = contestants("bundled", PROGRAMS, PRECISIONS)
    titles = [each.title for each in found]
    assert len({*titles}) == len(titles)
    assert "CTranslate2, int8" in titles and not any(
        t.startswith("CTranslate2, bf") for t in titles
    )


def test_contestants_that_do_not_fit_in_memory_form_groups_in_their_order(monkeypatch):
    """With 10**9 weights one needs 5 GB in float32 and 2 GB in int8; llama.cpp's int8 has scales."""
    f32 = [Contestant(name, "f32", "plain") for name in ("ours", "hf", "openvino")]
    int8 = [Contestant(name, "int8", "plain") for name in ("openvino", "llama", "ctranslate2")]
    monkeypatch.setattr(race, "free_memory", lambda: 11 * 10**9)
    assert race.groups(f32 + int8, 10**9) == [f32[:2], [f32[2], *int8[:2]], int8[2:]]
    # One that is too large has a group of its own.
    monkeypatch.setattr(race, "free_memory", lambda: 10**9)
    assert race.groups(f32, 10**9) == [[each] for each in f32]


def test_bundled_prompts_have_the_length_and_end_as_the_held_out_texts():
    batches = models.prompts_of("bundled", 2, 1024, 2)
    assert [[len(prompt) for prompt in batch] for batch in batches] == [[1024] * 2] * 2
    tokenizer = assets.load_tokenizer()
    prompts = [prompt for batch in batches for prompt in batch]
    for prompt, text in zip(prompts, assets.held_out_prompts(), strict=False):
        ids = tokenizer(text["prompt"]).input_ids
        assert len(ids) < 1024 and prompt[-len(ids) :] == ids
    assert len({*map(tuple, prompts)}) == 4


def test_random_prompts_are_ids_of_every_tokenizer():
    (batch,) = models.prompts_of("135m", 3, 64, 1)
    assert [len(prompt) for prompt in batch] == [64] * 3
    assert min(map(min, batch)) > 0 and max(map(max, batch)) < models.VOCAB


def test_the_bundled_checkpoint_takes_long_prompts(tmp_path):
    folder = models.checkpoint("bundled", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == models.POSITIONS
    assert models.weights_of_a_step(folder) == 5_475_584  # embedding and output are one matrix


def test_an_unfinished_folder_is_made_again(tmp_path):
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        built(tmp_path / "a", fail)
    assert not (tmp_path / "a").exists()
    made = built(tmp_path / "a", lambda folder: folder.mkdir())
    assert made == tmp_path / "a" and not [*made.iterdir()]
    assert built(made, fail) == made


@pytest.fixture
def bare(monkeypatch):
    """Environments are a link to this Python, and pip has no index, so that it installs nothing."""

    def create(folder: Path, clear: bool, with_pip: bool) -> None:
        assert with_pip
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(environments.venv, "create", create)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_a_package_that_pip_does_not_find_is_reported(bare, tmp_path):
    with pytest.raises(Failed, match=r"pip install nothing failed(.|\n)*No matching distribution"):
        environments.python_of("counting", Counting, tmp_path)
    assert not (tmp_path / "counting" / environments.STAMP).exists()


def test_an_environment_is_made_once_for_its_requirements(bare, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(environments, "_pip", lambda python, log, *words: asked.append(words))
    monkeypatch.setattr(Counting, "unwanted", ("more",))
    for _ in range(2):
        python = environments.python_of("counting", Counting, tmp_path)
        assert python == tmp_path / "counting" / "bin" / "python"
    assert asked == [("install", "nothing"), ("uninstall", "--yes", "more")]
    monkeypatch.setattr(Counting, "requirements", ("nothing", "else"))
    environments.python_of("counting", Counting, tmp_path)
    assert asked[2] == ("install", "nothing", "else")


def test_our_programs_run_in_this_environment(tmp_path):
    for name in OWN:
        assert environments.python_of(name, PROGRAMS[name], tmp_path) == Path(sys.executable)
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def workers(monkeypatch):
    """Workers find the fake programs."""
    monkeypatch.setattr(process, "PATHS", (*process.PATHS, ROOT / "python_tests"))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_process_is_stopped_between_commands(workers, tmp_path):
    with closing(Process(Path(sys.executable), Counting, 1, tmp_path / "log")) as running:
        files = tmp_path / "files"
        running.ask("export", model="", out=str(files), format="whole")
        answer = running.ask("load", files=str(files), format="whole", way="plain", threads=1)
        assert answer["version"]
        answer = running.ask("generate", prompts=[[1, 5], [2, 7]], count=3)
        assert answer["tokens"] == [[6, 7, 8], [8, 9, 10]] and answer["seconds"] > 0
        assert state(running._process.pid) == "T"
        assert running.cpu_seconds() > 0
        assert "counting ..." in (tmp_path / "log").read_text()
        with pytest.raises(Failed, match="TypeError"):
            running.ask("generate", prompts=[[1]])
        os.killpg(running._process.pid, signal.SIGKILL)
        with pytest.raises(Failed, match="the process has ended"):
            running.ask("generate", prompts=[[1]], count=1)


RACE = """
import os, sys
from pathlib import Path
from helpers.peers.fake_program import Counting
from peers import process
process.PATHS = [*map(Path, sys.path)]
running = process.Process(Path(sys.executable), Counting, 1, Path(sys.argv[1]) / "log")
running.ask("export", model="", out=sys.argv[1] + "/files", format="whole")
print(running._process.pid, flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_a_stopped_worker_ends_with_the_race(tmp_path):
    """Also when the race is killed and closes nothing."""
    paths = os.pathsep.join(map(str, (ROOT / "python_tests", *process.PATHS)))
    with subprocess.Popen(
        [sys.executable, "-c", RACE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as run:
        worker = int(run.stdout.readline())
        handle = os.pidfd_open(worker)
        run.stdin.close()
        # The handle is readable when the worker has ended.
        try:
            assert select.select([handle], [], [], 30)[0]
        except AssertionError:
            os.kill(worker, signal.SIGKILL)
            raise
        finally:
            os.close(handle)


def test_a_text_that_is_too_short_is_an_error(workers, tmp_path):
    with closing(Process(Path(sys.executable), Short, 1, tmp_path / "log")) as running:
        running.ask("export", model="", out=str(tmp_path / "files"), format="whole")
        running.ask("load", files=str(tmp_path / "files"), format="whole", way="plain", threads=1)
        with pytest.raises(Failed, match=r"texts of \[4\] tokens instead of 5"):
            running.ask("generate", prompts=[[1]], count=5)


@pytest.fixture
def fakes(workers, monkeypatch):
    """Programs of this run: one of them dies, one makes short texts, and one can't be installed."""

    def python_of(name, program, place):
        if name == "absent":
            raise Failed("no matching\ndistribution")
        return Path(sys.executable)

    named = {"counting": Counting, "short": Short, "dying": Dying, "absent": Counting}
    monkeypatch.setattr(race, "OWN", ())
    monkeypatch.setattr(race, "python_of", python_of)
    monkeypatch.setitem(stopwatch.LARGE, "cpu", 1 << 16)
    monkeypatch.setattr(stopwatch, "last_level_cache_bytes", lambda device: 1 << 16)
    # monkeypatch would put the programs back in another order.
    with patch.dict(PROGRAMS, named, clear=True):
        yield


def test_a_run_measures_what_works_and_names_what_does_not(fakes, tmp_path, capfd):
    out = tmp_path / "results" / "race"
    options = ["--models", "bundled", "--repeats", "2", "--work", str(tmp_path / "work")]
    options += ["--out", str(out), "--add"]
    assert race.main([*options, "--cases", "ttft,call", "--precisions", "f32"]) == 1
    written = json.loads(out.with_suffix(".json").read_text())
    rows = {row["contestant"]: row for row in written["rows"]}
    assert [*rows] == [
        "counting, whole",
        "counting, lookup, whole",
        "short, whole",
        "short, lookup, whole",
    ]
    assert rows["counting, whole"]["call"] > 0 and rows["counting, whole"]["first_1024"] > 0
    assert "call" not in rows["short, whole"] and rows["short, whole"]["first_128"] > 0
    # The warm-up is not among them.
    assert all(len(each) == 2 for record in written["records"] for each in record["seconds"])
    calls = [record for record in written["records"] if record["work"]["new"] == 128]
    assert {len(record["seconds"]) for record in calls} == {5}
    page = out.with_suffix(".md").read_text()
    assert "- Left out: counting: no matching distribution" in page
    assert "- Left out: dying, whole, bundled: the process has ended: no such instruction" in page
    assert page.count("texts of [127] tokens instead of 128") == 2
    assert out.with_suffix(".png").stat().st_size > 0
    assert "left out: dying" in capfd.readouterr().err
    # Another run adds its rows, and has the first one's.
    only = ["--peers", "counting", "--cases", "decode,batch4", "--precisions", "f32,int8"]
    assert race.main([*options, *only]) == 0
    written = json.loads(out.with_suffix(".json").read_text())
    rows = {row["contestant"]: row for row in written["rows"]}
    assert rows["counting, whole"].keys() >= {"call", "first_1024", "decode_1", "decode_4", "floor"}
    assert "decode_4" in rows["counting, bytes"] and "call" not in rows["counting, bytes"]
    assert "decode_1" in rows["counting, lookup, whole"]
    assert "decode_4" not in rows["counting, lookup, whole"]  # it takes one row
    assert "first_128" in rows["short, whole"]


def test_preparing_measures_nothing(fakes, tmp_path):
    options = ["--models", "bundled", "--work", str(tmp_path), "--prepare", "--peers", "counting"]
    assert race.main([*options, "--out", str(tmp_path / "race")]) == 0
    assert not (tmp_path / "race.json").exists()
    formats = {each.name for each in (tmp_path / "files" / "counting").iterdir()}
    assert formats == {"bundled-whole", "bundled-bytes"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "bundled,7b"], "no 7b; there are bundled, 135m, 494m, 1100m"),
        (["--peers", "ours"], "no ours; there are openvino"),
        (["--repeats", "0"], "--repeats 0: expected at least 1 round"),
    ],
    ids=["model", "peer", "rounds"],
)
def test_options_are_checked_before_the_work(options, message, capsys):
    with pytest.raises(SystemExit):
        race.main(options)
    assert message in capsys.readouterr().err
