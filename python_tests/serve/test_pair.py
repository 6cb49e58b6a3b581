"""``GET /pair``: a server tells the files of its target and draft."""

from __future__ import annotations

import asyncio
from functools import partial

from helpers.serving import MODEL, serving, target

from specdec_ext import PairLock
from specdec_ext.serve.service import Service, Settings


def test_a_server_tells_its_pair_after_hashing_once():
    calls = []

    def pair():
        calls.append(1)
        return PairLock.of(target(), "head", speculation="fixed")

    with serving(pair=pair, api_key="secret") as server:
        assert server.http.get("/pair").status_code == 401
        key = {"Authorization": "Bearer secret"}
        first, second = (server.http.get("/pair", headers=key) for _ in range(2))
    assert first.status_code == 200 and first.json() == second.json() and calls == [1]
    assert first.json() == PairLock.of(target(), "head", speculation="fixed").record()


def test_clients_that_ask_while_files_are_hashed_wait_for_the_same_hashes():
    calls = []

    def pair():
        calls.append(1)
        return PairLock.of(target(), "head")

    async def ask_twice(service):
        return await asyncio.gather(service.pair(), service.pair())

    with serving() as server:
        first, second = asyncio.run(ask_twice(Service(server.engine, Settings(MODEL, pair=pair))))
    assert first == second and calls == [1]


def test_a_pair_without_files_is_an_error_with_its_reason():
    with serving(pair=partial(PairLock.of, "no/such/folder", None)) as server:
        answer = server.http.get("/pair")
        assert answer.status_code == 404
        assert "have no lock: 'no/such/folder' is neither" in answer.json()["error"]["message"]
    with serving() as server:
        assert "without the places" in server.http.get("/pair").json()["error"]["message"]
