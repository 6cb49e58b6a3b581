"""Two processes of a tensor-parallel model decode as one does, and serve as one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.places import ROOT, TESTS
from helpers.serving import httpx, openai, text_alone, until

pytest.importorskip("accelerate", reason="accelerate is not installed")

PROMPTS = ["import os\n", "def read(path):\n", "class Queue:\n", "x = [\n", "import re\n"]

TWO_RANKS = """
import sys
import torch
from helpers.serving import alone, ids_of
from specdec_ext import assets
from specdec_ext.drafters import resolve_drafter
from specdec_ext.engine.parallel import ParallelEngine
from specdec_ext.heads.checkpoints.language_model import load_language_model
from specdec_ext.verify.penalties import OccurrencePenalties
from torch.distributed.tensor import DTensor

prompts, drafters = sys.argv[1].split("|"), sys.argv[2:]
tokenizer = assets.load_tokenizer()
model = load_language_model(assets.FOLDER / "tiny-python-target", torch.float32, None)
assert isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)
for name in drafters:
    torch.manual_seed(torch.distributed.get_rank())
    drafter = resolve_drafter(name, model, tokenizer)
    engine = ParallelEngine(model, drafter=drafter, tokenizer=tokenizer, max_rows=3)
    if engine.rank:
        engine.follow()
        continue
    cancelled = engine.submit(ids_of(prompts[0]), max_new_tokens=400, eos_token_id=None)
    drawn = engine.submit(ids_of(prompts[0]), max_new_tokens=20, do_sample=True)  # its seed is drawn
    kinds = []
    for number, prompt in enumerate(prompts * 2):
        ids = ids_of(prompt)
        kind = dict(max_new_tokens=16 + 3 * number)
        if number % 2:
            kind |= dict(do_sample=True, seed=number, top_k=20)
        if number % 3 == 2:
            kind |= dict(logits_processor=[OccurrencePenalties(0.5, 0.1, len(ids))])
        kinds.append((ids, kind, engine.submit(ids, **kind)))
    for ids, kind, handle in kinds:
        assert handle.result(100) == alone(ids, **kind), (name, kind)
    assert len(drawn.result(100)) == 20
    cancelled.cancel()
    engine.shutdown(timeout=100)
    assert cancelled.finish_reason in ("cancelled", "length")
torch.distributed.destroy_process_group()
print("agrees")
"""


def environment() -> dict[str, str]:
    search = os.pathsep.join([str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    """With heads, a draft model and lookups, controlled by each rank's clock, which is rank 0's."""
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), "|".join(PROMPTS), "head", "draft", "suffix", "none"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2


@contextmanager
def served(log: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server of two ranks: its process, which is torchrun, and its address."""
    command = [sys.executable, "-m", "specdec_ext.cli", "serve", "bundled", "--tp", "2"]
    options = ["--dtype", "float32", "--port", "0", "--drafter", "head"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, *options], env=environment(), stderr=file)
    try:
        until(lambda: "url=" in log.read_text() or process.poll() is not None, 200)
        yield process, log.read_text().split("url=")[1].split()[0]
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_a_server_of_two_ranks_answers_as_one_and_ends_on_a_signal(tmp_path):
    log = tmp_path / "log"
    with served(log) as (process, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        asked = dict(model="bundled", max_tokens=24, temperature=0)
        for prompt in PROMPTS[:3]:
            choice = client.completions.create(prompt=prompt, **asked).choices[0]
            assert choice.text == text_alone(prompt, max_new_tokens=24)
        stopped = client.completions.create(prompt=PROMPTS[0], stop="Any", **asked).choices[0]
        assert stopped.text == text_alone(PROMPTS[0], max_new_tokens=24).partition("Any")[0]
        refused = dict(asked, prompt="a", response_format={"type": "json_object"})
        answer = httpx.post(f"{url}/completions", json=refused, timeout=60)
        assert answer.status_code == 400 and "can't be sent" in answer.json()["error"]["message"]
        long = client.completions.create(
            **dict(asked, prompt=PROMPTS[0], max_tokens=200), stream=True
        )
        text = next(long).choices[0].text
        process.terminate()
        text += "".join(chunk.choices[0].text for chunk in long)
        assert text == text_alone(PROMPTS[0], max_new_tokens=200)
        process.wait(60)
        assert log.read_text().count("ended; every accepted request was finished") == 1


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_server(tmp_path):
    """Nothing hangs: the others would wait for it forever."""
    with served(tmp_path / "log") as (process, url):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if b"RANK=1" in environment_of(pid)]
        os.kill(ranks[0], signal.SIGKILL)
        assert process.wait(90) != 0
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/models", timeout=5)


def environment_of(pid: str) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
