"""The options of the application for Ray Serve, and a replica without Ray."""

from __future__ import annotations

import asyncio

import pytest
from helpers.serving import httpx, text_alone

from specdec_ext.cluster.replicas import Replica, ReplicaOptions, _options


def test_texts_of_a_command_line_become_numbers():
    options = _options({"model": "bundled", "replicas": "2", "gpus": "0.5", "max_length": "64"})
    assert (options.replicas, options.gpus, options.max_length) == (2, 0.5, 64)
    assert options.scale == {"num_replicas": 2}
    assert options.settings.model_name == "bundled"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model: .*required.*; the options are .*max_replicas"),
        ({"model": "bundled", "rows": 4}, "rows: "),
        ({"model": "bundled", "replicas": "two"}, "replicas: "),
        ({"model": "bundled", "replicas": 0}, "replicas is 0; expected at least 1"),
        ({"model": "bundled", "replicas": 3, "max_replicas": 2}, "max_replicas is 2; expected"),
        ({"model": "bundled", "dtype": "int3"}, "dtype: "),
    ],
    ids=["no model", "unknown", "text", "none", "fewer at most", "dtype"],
)
def test_wrong_options_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        _options(args)


def test_a_replica_answers_until_its_engine_has_ended():
    options = ReplicaOptions("bundled", dtype="float32", served_model_name="tiny")
    replica = Replica(options)
    app = replica.__serve_build_asgi_app__()
    replica.check_health()

    async def answer() -> str:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://replica"
        ) as client:
            body = {"model": "tiny", "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
            return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]

    assert asyncio.run(answer()) == text_alone("import os\n", max_new_tokens=8)
    replica._engine.shutdown()
    with pytest.raises(RuntimeError, match="the engine has ended"):
        replica.check_health()
