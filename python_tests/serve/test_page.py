"""The page on the server: its commands and blocks run as printed, and its tables are complete."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from helpers.places import ROOT
from helpers.serving import httpx, serving, target, until

from specdec_ext import PairLock
from specdec_ext.serve.http import schemas

PAGE = (ROOT / "docs" / "guide" / "serve.md").read_text("utf-8")
SHOWN = "\n".join(
    path.read_text("utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
)
# Not those with a placeholder, such as MODEL.
COMMANDS = sorted(
    set(
        re.findall(
            r"^(?:\w+=\w+ )*specdec serve (?![^#\n]*MODEL)[^#\n]*[^#\s]", SHOWN, re.MULTILINE
        )
    )
)


def test_there_are_commands():
    assert len(COMMANDS) >= 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_serves_until_it_is_ended(command, tmp_path):
    words = shlex.split(command)
    place = words.index("specdec")
    environment = dict(word.split("=", 1) for word in words[:place])
    log = tmp_path / "log"
    if "--lock" in words:
        PairLock.of(target(), "auto").save(tmp_path / "pair.lock")
    arguments = [*words[place + 1 :], "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec_ext.cli", *arguments],
            stderr=file,
            cwd=tmp_path,
            env={**os.environ, **environment},
        )
    try:
        until(lambda: "serving" in log.read_text() or process.poll() is not None, 120)
        (url,) = re.findall(r"http://[\d.:]+", log.read_text())
        port = url.rpartition(":")[2]

        def answers():
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            except httpx.TransportError:
                return False

        until(answers, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_blocks_run_as_printed(capfd):
    (curl,) = re.findall(r"^curl .*$", PAGE, re.MULTILINE)
    of_client, of_engine = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with serving(model_name="bundled") as server:
        words = shlex.split(curl)
        assert words[1] == "http://127.0.0.1:8000/v1/completions" and words[4] == "-d"
        headers = dict([words[3].split(": ")])
        answer = server.http.post("/v1/completions", content=words[5], headers=headers)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        exec(of_client.replace("http://127.0.0.1:8000", server.url), {})
    assert "mean_acceptance_length" in capfd.readouterr().out
    variables: dict = {}
    exec(of_engine, variables)
    assert len(variables["texts"]) == 3 and all(variables["texts"])


def test_every_field_and_status_is_listed():
    listed = set(re.findall(r"`(\w+)`", PAGE))
    for model in (schemas.ChatRequest, schemas.CompletionRequest):
        fields = set(model.model_fields) - {"model", "prompt", "messages"}
        fields -= {"parallel_tool_calls", "add_special_tokens"}  # OpenAI's and vLLM's defaults
        assert fields <= listed, fields - listed
    assert listed >= schemas.HARMLESS
    source = "\n".join(
        path.read_text("utf-8") for path in (ROOT / "specdec_ext" / "serve").rglob("*.py")
    )
    raised = set(re.findall(r"ApiError\(\s*(\d{3})", source))
    assert raised <= set(re.findall(r"^\| (\d{3}) \|", PAGE, re.MULTILINE)) and len(raised) > 5
