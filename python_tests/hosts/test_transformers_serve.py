"""``transformers serve FOLDER --trust-remote-code`` speculates with the code of the folder.

Claim: the server runs in a process of its own, and its answers, streamed and not, greedy, stopped and sampled
with a seed, are the texts of plain decoding. That process counts the accepted drafts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from helpers.models.folders import shared_folder
from helpers.places import ROOT
from helpers.texts.chats import TEMPLATE
from transformers.utils import import_utils

import specdec_ext
from specdec_ext import assets

serves = getattr(import_utils, "is_serve_available", lambda: False)
pytestmark = pytest.mark.skipif(
    not serves(), reason="transformers serve needs fastapi, uvicorn and openai, not installed here"
)

SECONDS = 60  # in which the server must have started
CHAT = [{"role": "user", "content": "class Stack with push and pop"}]
# The command ``transformers`` with one addition: every call of our loop appends its statistics to a file.
COUNTED = """
import json, os
from specdec_ext.decoding.call_loop import CallLoop
from transformers.cli.transformers import main

run = CallLoop.run

def counted(self):
    result = run(self)
    with open(os.environ["SPECDEC_COUNTS"], "a") as file:
        call = {"drafter": self.stats.drafter, "accepted": self.stats.accepted_tokens}
        file.write(json.dumps(call) + "\\n")
    return result

CallLoop.run = counted
main()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A running server: its address, the model's folder and the file of its statistics."""
    place = tmp_path_factory.mktemp("served")
    # "fixed", so that the drafts do not depend on the load of the machine.
    folder = shared_folder(place / "pair", speculation="fixed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_MODULES_CACHE": str(place / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SPECDEC_COUNTS": str(place / "counts"),
    }
    options = ["--trust-remote-code", "--dtype", "float32", "--device", "cpu"]
    address = ["--host", "127.0.0.1", "--port", port]
    with open(place / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", COUNTED, "serve", folder, *options, *address],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, place / "log")
        yield f"http://127.0.0.1:{port}/v1", str(folder), place / "counts"
    finally:
        server.terminate()
        server.wait(SECONDS)


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        assert server.poll() is None, log.read_text()
        try:
            urlopen(url, timeout=SECONDS).close()
            return
        except URLError:
            time.sleep(0.2)
    raise TimeoutError(log.read_text())


@pytest.fixture
def ask(served):
    """Ask for an answer and return its text; drafts must have been accepted for it."""
    from openai import OpenAI

    url, folder, counts = served
    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS)

    def answer(**request):
        counts.unlink(missing_ok=True)
        request = {"model": folder, "messages": CHAT, "max_tokens": 24, **request}
        reply = client.chat.completions.create(**request)
        if request.get("stream"):
            pieces = [chunk.choices[0].delta.content for chunk in reply]
            text = "".join(piece for piece in pieces if piece)
        else:
            text = reply.choices[0].message.content
        (call,) = map(json.loads, counts.read_text().splitlines())
        assert call["drafter"] == "CombinedDrafter" and call["accepted"] > 0
        return text

    return answer


def expected(generate, **kwargs):
    """The answer of ``generate`` to the same prompt, in this process."""
    tokenizer = assets.load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    inputs = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = generate(**inputs, **{"max_new_tokens": 24, **kwargs})
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_greedy_answers_are_those_of_generate(ask):
    text = expected(assets.load_target().generate, do_sample=False)
    assert text and ask() == text
    assert ask(stream=True) == text


def test_stop_strings_end_answers(ask):
    generate, tokenizer = assets.load_target().generate, assets.load_tokenizer()
    text = expected(generate, do_sample=False, stop_strings=["0000"], tokenizer=tokenizer)
    assert text != expected(generate, do_sample=False)
    assert ask(stop=["0000"]) == text


def test_seed_of_a_request_gives_the_text_of_plain_decoding(ask):
    sampled = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0}

    def plain(**kwargs):
        torch.manual_seed(7)  # as the server does with the seed of a request
        return specdec_ext.generate(assets.load_target(), drafter=None, **kwargs)

    text = expected(plain, **sampled)
    assert text != expected(assets.load_target().generate, do_sample=False)
    for stream in (False, True):
        extra = {"generation_config": json.dumps(sampled)}
        assert ask(seed=7, stream=stream, extra_body=extra) == text
