"""What operators see: clients that leave, signals, metrics, logs, the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from helpers.command_line import run, words
from helpers.serving import (
    MODEL,
    PROMPT,
    TEMPLATE,
    held_steps,
    httpx,
    openai,
    record_handles,
    serving,
    target,
    text_alone,
    tokenizer,
    until,
)

from specdec_ext import assets
from specdec_ext.engine import Engine
from specdec_ext.rollout.lock import PairLock, ReferenceAcceptance
from specdec_ext.serve.app import create_app
from specdec_ext.serve.logs import configure
from specdec_ext.serve.service import Settings

LONG = dict(
    model=MODEL,
    prompt=PROMPT,
    max_tokens=480,
    temperature=0,
    ignore_eos=True,
    speculation="none",
)


@pytest.fixture
def server():
    with serving() as running:
        yield running


# --- clients that leave -----------------------------------------------------------------------------


@contextmanager
def left_behind(server, raw: bytes):
    """Send a request, do what the block does, and leave."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(raw)
        yield


def raw_request(path: str, **body) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 20])
def test_a_client_that_leaves_cancels_its_request(server, monkeypatch, stream, steps):
    handles = record_handles(server.engine, monkeypatch)
    with held_steps(free=steps):
        with left_behind(server, raw_request("/v1/completions", stream=stream, **LONG)):
            until(lambda: handles and len(handles[0].tokens) == 1 + steps)
        (handle,) = handles
        until(lambda: handle.is_cancelled)
    until(lambda: server.engine.load.running == 0)
    assert handle.finish_reason == "cancelled" and len(handle.tokens) <= 2 + steps
    label = (
        f'vllm:request_success_total{{engine="0",finished_reason="abort",model_name="{MODEL}"}} 1.0'
    )
    until(lambda: label in server.http.get("/metrics").text)


def test_a_client_that_leaves_before_its_turn_never_runs(monkeypatch):
    with serving(dict(max_rows=1)) as server, held_steps() as go, ThreadPoolExecutor() as pool:
        handles = record_handles(server.engine, monkeypatch)
        first = pool.submit(server.post, "/v1/completions", **LONG)
        until(lambda: server.engine.load.running == 1)
        with left_behind(server, raw_request("/v1/completions", **LONG)):
            until(lambda: server.engine.load.waiting == 1)
        until(lambda: handles[1].is_cancelled)
        go.set()
        assert first.result(60).json()["usage"]["completion_tokens"] == LONG["max_tokens"]
        until(lambda: server.engine.load.waiting == 0)
        assert handles[1].finish_reason == "cancelled" and not handles[1].tokens


# --- signals ----------------------------------------------------------------------------------------


@contextmanager
def serve_command(tmp_path, *options: str):
    """A real server: (process, its address, a function that returns the log)."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "specdec_ext.cli", "serve", "bundled", "--port", "0"]
    command += ["--dtype", "float32", "--chat-template", str(template), "--log-format", "json"]
    with log.open("w") as file:
        started = subprocess.Popen(
            [*command, *options, "--served-model-name", MODEL], stderr=file, env={**os.environ}
        )
    try:
        until(lambda: '"serving"' in log.read_text() or started.poll() is not None, 120)
        line = next(line for line in log.read_text().splitlines() if '"serving"' in line)
        url = json.loads(line)["url"]
        until(lambda: _answers(url), 60)
        yield started, url, log.read_text
    finally:
        started.kill()
        started.wait()


@pytest.fixture
def process(tmp_path):
    with serve_command(tmp_path) as running:
        yield running


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/models").status_code == 200
    except httpx.TransportError:
        return False


# The arguments of the streams.
STREAMED = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=60)


async def _streams(url: str, count: int, on_first, max_tokens: int = 60) -> list[str]:
    """The texts of streams that are all open when ``on_first`` is called."""
    opened = 0

    async def one(client, seed):
        nonlocal opened
        stream = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=max_tokens, seed=seed, stream=True
        )
        opened += 1
        if opened == count:
            on_first()
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(one(client, seed) for seed in range(count)))


def test_sigterm_under_load_finishes_every_stream(process):
    started, url, log = process
    texts = asyncio.run(_streams(url, 6, lambda: started.send_signal(signal.SIGTERM)))
    assert texts == [text_alone(PROMPT, seed=seed, **STREAMED) for seed in range(6)]
    assert started.wait(60) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/models")
    lines = [json.loads(line) for line in log().splitlines()]
    assert sum(line["message"] == "request" for line in lines) == 6
    assert lines[-1]["message"].startswith("ended")


def test_requests_share_the_passes_of_a_draft_model(tmp_path):
    folder = str(assets.FOLDER / "tiny-python-draft")
    with serve_command(tmp_path, "--drafter", folder, "--speculation", "fixed") as (_, url, log):
        texts = asyncio.run(_streams(url, 6, lambda: None))
        state = httpx.get(url.replace("/v1", "/state")).json()
    assert texts == [text_alone(PROMPT, seed=seed, **STREAMED) for seed in range(6)]
    assert (state["drafter"], state["max_rows"]) == ("DraftModelDrafter", 16)
    assert state["accepted_tokens"] > 0
    assert "one after another" not in log()


def test_a_second_signal_ends_at_once(process):
    started, url, _ = process
    killed = threading.Event()

    def twice():
        started.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        started.send_signal(signal.SIGTERM)
        killed.set()

    with pytest.raises((openai.APIError, httpx.TransportError)):
        asyncio.run(_streams(url, 30, twice, max_tokens=480))
    assert killed.is_set()
    assert started.wait(10) == 128 + signal.SIGTERM


def test_health_is_503_when_the_engine_has_ended():
    engine = Engine(target(), tokenizer=tokenizer())
    app = create_app(engine, Settings(model_name=MODEL))

    async def health():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first = await client.get("/health")
            engine.shutdown()
            answer = await client.post("/v1/completions", json={"prompt": "a"})
            return first.status_code, (await client.get("/health")).status_code, answer

    healthy, ended, answer = asyncio.run(health())
    assert (healthy, ended, answer.status_code) == (200, 503, 503)
    assert answer.json()["error"]["code"] == "shutting_down"


# --- metrics ----------------------------------------------------------------------------------------

# As vLLM 0.33 names them; `vllm bench serve` and dashboards read these.
COUNTERS = {
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "specdec:spec_decode_num_reached_per_pos_total",
    "specdec:steps_total",
    "specdec:step_tokens_total",
    "specdec:timed_seconds_total",
    "specdec:plain_seconds_total",
}
GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "specdec:chunk_gap_seconds",
}


ENDED = ("vllm:request_success_total", "finished_reason=length")


def samples(page: str) -> dict[tuple[str, str], float]:
    """(name, labels other than those of the server) -> value."""
    found = {}
    for name, labels, value in re.findall(r"^([\w:]+)\{(.*)\} (\S+)$", page, re.MULTILINE):
        given = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert given.pop("model_name") == MODEL and given.pop("engine") == "0", name
        found[name, ",".join(f"{key}={each}" for key, each in given.items())] = float(value)
    return found


def test_what_earlier_prompts_have_in_common_is_counted(server):
    ids = [1 + number % 50 for number in range(400)]
    given = dict(model=MODEL, max_tokens=4, temperature=0)
    first = server.client.completions.create(prompt=ids[:300], **given)
    later = server.client.completions.create(prompt=[ids, ids[10:]], n=2, **given)
    reused = [each.usage.prompt_tokens_details.cached_tokens for each in (first, later)]
    assert reused == [0, 256]  # the other prompt begins in another way
    until(lambda: samples(server.http.get("/metrics").text)[ENDED] == 5)
    found = samples(server.http.get("/metrics").text)
    assert found["vllm:prefix_cache_queries_total", ""] == 300 + 2 * (400 + 390)
    assert found["vllm:prefix_cache_hits_total", ""] == 2 * 256 + 256


def test_metrics_have_the_names_of_vllm_and_the_counts_of_the_requests(server):
    statistics = []
    for stream in (False, True):
        body = dict(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0)
        answer = server.client.completions.create(
            stream=stream, extra_body={"speculation": "fixed"}, **body
        )
        last = [*answer][-1] if stream else answer
        statistics.append(last.metrics["speculative_decoding"])
    until(lambda: 'finished_reason="length"' in server.http.get("/metrics").text)
    found = samples(server.http.get("/metrics").text)
    names = {name for name, _ in found}
    assert names >= COUNTERS | GAUGES
    for name in HISTOGRAMS:
        assert {f"{name}_{part}" for part in ("bucket", "count", "sum")} <= names
    prompt = len(tokenizer()(PROMPT)["input_ids"])
    assert found["vllm:prompt_tokens_total", ""] == 2 * prompt
    assert found["vllm:generation_tokens_total", ""] == 80
    assert found["vllm:request_success_total", "finished_reason=length"] == 2
    for name, key in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        expected = sum(each[key] for each in statistics)
        assert found[f"vllm:spec_decode_{name}_total", ""] == expected > 0
    by_position = [
        value
        for (name, _), value in found.items()
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    ]
    assert sum(by_position) == sum(each["num_accepted_draft_tokens"] for each in statistics)
    by_position = {
        name: [found[f"{name}_per_pos_total", f"position={position}"] for position in range(3)]
        for name in ("vllm:spec_decode_num_accepted_tokens", "specdec:spec_decode_num_reached")
    }
    stats = server.engine.stats()
    assert list(by_position.values()) == [
        stats.accepted_per_position[:3],
        stats.reached_per_position[:3],
    ]
    assert found["specdec:steps_total", ""] == stats.steps > 0
    assert found["specdec:step_tokens_total", ""] == stats.emitted_tokens == 78  # without the first
    assert not any(name.startswith("specdec:reference") for name in names)
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time"):
        assert found[f"vllm:{name}_seconds_count", ""] == 2
    # One sample per token after the first burst, which has one token; chunks are fewer.
    assert found["vllm:inter_token_latency_seconds_count", ""] == 78
    assert 0 < found["specdec:chunk_gap_seconds_count", ""] < 78
    gaps = found["specdec:chunk_gap_seconds_sum", ""]
    assert found["vllm:inter_token_latency_seconds_sum", ""] == pytest.approx(gaps)
    fine = [labels for name, labels in found if name == "vllm:inter_token_latency_seconds_bucket"]
    assert sum(float(label.removeprefix("le=")) < 0.01 for label in fine) >= 6


def test_metrics_have_the_times_of_the_controller_and_the_acceptance_in_the_lock():
    """``speculation="auto"`` times its steps, and positions of a lock count from 0 like those of requests."""
    reference = ReferenceAcceptance(1000, 3000, (800, 600), 1200, 2600, (1000, 700))
    with serving({"speculation": "auto", "drafter": "ngram"}, reference=reference) as server:
        body = dict(model=MODEL, prompt=PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
        server.post("/v1/completions", **body)
        until(lambda: samples(server.http.get("/metrics").text)[ENDED] == 1)
        found = samples(server.http.get("/metrics").text)
    assert found["specdec:timed_seconds_total", ""] > 0
    assert found["specdec:plain_seconds_total", ""] > 0
    expected = {"accepted": {0: 800, 1: 600}, "reached": {0: 1000, 1: 700}}
    for name, counts in expected.items():
        shown = {
            labels: value
            for (metric, labels), value in found.items()
            if metric == f"specdec:reference_{name}_per_pos"
        }
        assert shown == {f"position={position}": count for position, count in counts.items()}


def test_a_server_with_a_lock_exports_its_reference(tmp_path):
    reference = ReferenceAcceptance(1000, 3000, (800, 600), 1200, 2600)
    lock = PairLock.of(target(), "ngram", reference=reference).save(tmp_path / "pair.lock")
    with serve_command(tmp_path, "--drafter", "ngram", "--lock", str(lock)) as (_, url, _log):
        found = samples(httpx.get(url.replace("/v1", "/metrics")).text)
    assert found["specdec:reference_reached_per_pos", "position=1"] == 800
    assert found["specdec:reference_accepted_per_pos", "position=1"] == 600


def test_gauges_show_the_load(server):
    long = dict(model=MODEL, prompt=PROMPT, max_tokens=400, temperature=0)
    with held_steps(), server.client.completions.create(stream=True, **long) as stream:
        next(iter(stream))
        assert samples(server.http.get("/metrics").text)["vllm:num_requests_running", ""] == 1
    until(lambda: server.engine.load.running == 0)
    assert samples(server.http.get("/metrics").text)["vllm:num_requests_running", ""] == 0


# --- logs -------------------------------------------------------------------------------------------


@pytest.fixture
def configured():
    """Restores the loggers that ``configure`` changes."""
    names = ("specdec_ext", "uvicorn", "py.warnings")
    loggers = [logging.getLogger(name) for name in names]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    yield configure
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_each_request_has_one_line(configured, capsys, log_format):
    configured(log_format)
    with serving() as server:
        body = dict(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0)
        answer = server.client.completions.create(extra_body={"speculation": "fixed"}, **body)
        server.post("/v1/completions", prompt="a", temperature=-1)
    lines = capsys.readouterr().err.splitlines()
    (request,) = [line for line in lines if answer.id in line]
    (refused,) = [line for line in lines if "refused" in line]
    if log_format == "json":
        told, prompt = json.loads(request), len(tokenizer()(PROMPT)["input_ids"])
        assert (told["prompt_tokens"], told["completion_tokens"]) == (prompt, 40)
        assert told["finish_reason"] == "length" and told["acceptance_length"] > 1
        assert told["total_ms"] >= told["first_token_ms"] >= told["queue_ms"] >= 0
        assert json.loads(refused)["status"] == 400
    else:
        assert "INFO request id=" in request and "completion_tokens=40" in request
        assert 'error="temperature: Input should be' in refused


# --- the command line -------------------------------------------------------------------------------


def test_errors_of_the_command_line():
    assert "Folder or hub id" in words(run("serve", "--help").output)
    missing = run("serve")
    assert missing.exit_code == 2 and "missing argument 'model'" in words(missing.output).lower()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run("serve", "bundled", "--port", port)
        assert refused.exit_code == 2
        assert f"can't listen on 127.0.0.1, port {port}: Address" in words(refused.output)
    unknown = run("serve", "no/such/model", "--port", 0)
    assert unknown.exit_code == 2 and "no/such/model" in words(unknown.output)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = run("serve", "bundled")
    assert result.exit_code == 2
    assert "specdec serve needs prometheus_client" in words(result.output)
    assert ".[serve]" in words(result.output)
