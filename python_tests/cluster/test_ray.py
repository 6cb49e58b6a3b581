"""Ray Data and Ray Serve with two processes on this machine; ``make test-cluster`` has Ray."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.places import ROOT
from helpers.serving import httpx, openai, text_alone, until

ray = pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")

from ray import serve  # noqa: E402
from ray._common.utils import import_attr  # noqa: E402

from specdec_ext import assets  # noqa: E402
from specdec_ext.cluster import Completer, EngineOptions  # noqa: E402
from specdec_ext.cluster.replicas import application  # noqa: E402
from specdec_ext.serve.server import bound  # noqa: E402

MODEL = "bundled"
PAGE = (ROOT / "docs" / "guide" / "many-machines.md").read_text()
# As many tokens as keep each replica busy while one is killed.
TOKENS = 96


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def prompts(count: int) -> list[str]:
    """Different beginnings of the bundled prompts."""
    texts = [each["prompt"] for each in assets.held_out_prompts()]
    return [texts[i % len(texts)][: 60 + i] for i in range(count)]


def test_a_hundred_prompts_through_ray_data_equal_a_single_process(cluster):
    rows = [{"prompt": text, "number": i} for i, text in enumerate(prompts(100))]
    completed = ray.data.from_items(rows, override_num_blocks=8).map_batches(
        Completer,
        fn_constructor_args=[EngineOptions(MODEL, dtype="float32")],
        fn_constructor_kwargs={"max_new_tokens": 16},
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
        batch_size=10,
    )
    found = sorted(completed.take_all(), key=lambda row: row["number"])
    assert [row["prompt"] for row in found] == [row["prompt"] for row in rows]
    assert not [row["error"] for row in found if row["error"]]
    alone = Completer(EngineOptions(MODEL, dtype="float32", drafter="none"), max_new_tokens=16)
    single = alone({"prompt": [row["prompt"] for row in rows]})
    assert [row["text"] for row in found] == single["text"].tolist()
    assert found[7]["text"] == text_alone(rows[7]["prompt"], max_new_tokens=16)


def test_the_blocks_of_the_page_run_as_printed(cluster):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert len(names["rows"]) == 20 and all(row["text"] for row in names["rows"])


def test_the_command_of_the_page_is_understood(cluster):
    """``serve run`` imports the path, and passes the words behind it as a dict of texts."""
    (command,) = re.findall(r"^serve run (.*)$", PAGE, re.MULTILINE)
    path, *words = command.split()
    built = import_attr(path)(dict(word.split("=") for word in words))
    assert isinstance(built, serve.Application)


def free_port() -> int:
    with bound("127.0.0.1", 0) as place:
        return place.getsockname()[1]


def replicas() -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["name"].startswith("SERVE_REPLICA::")]


class Reader:
    """A client that asks again for what it did not get as a whole."""

    def __init__(self, url: str):
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._lock = threading.Lock()
        self.finished = self.broken = 0

    def read(self, number: int, prompt: str) -> str:
        asked = dict(model=MODEL, prompt=prompt, max_tokens=TOKENS, temperature=0)
        end = time.monotonic() + 120
        while True:
            try:
                text = self._streamed(asked) if number % 2 else self._whole(asked)
            except openai.APIError:
                assert time.monotonic() < end, "no replica answers any more"
                text = None
            with self._lock:
                self.finished += text is not None
                self.broken += text is None
            if text is not None:
                return text
            time.sleep(0.2)

    def _whole(self, asked) -> str:
        choice = self._client.completions.create(**asked).choices[0]
        assert choice.finish_reason is not None
        return choice.text

    def _streamed(self, asked) -> str | None:
        """The text of a stream; None if it ended before its last chunk."""
        text, reason = "", None
        try:
            for chunk in self._client.completions.create(**asked, stream=True):
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason
        except httpx.HTTPError:  # the connection broke within the stream
            return None
        return None if reason is None else text


def test_a_replica_that_is_killed_under_load_loses_no_finished_text(cluster):
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = application(
        {"model": MODEL, "dtype": "float32", "replicas": 2, "cpus": "0.5", "max_rows": 4}
    )
    serve.run(app, route_prefix="/")
    reader, asked = Reader(f"http://127.0.0.1:{port}"), prompts(40)
    with ThreadPoolExecutor(8) as threads:
        texts = [threads.submit(reader.read, i, prompt) for i, prompt in enumerate(asked)]
        until(lambda: reader.finished >= 6, 120)
        killed = replicas()[0]
        ray.kill(ray.get_actor(killed, namespace="serve"), no_restart=True)
        found = [each.result(240) for each in texts]
    assert found == [text_alone(prompt, max_new_tokens=TOKENS) for prompt in asked]
    assert reader.finished == 40 and reader.broken > 0  # it was killed while it had requests
    until(lambda: len(set(replicas()) - {killed}) == 2, 60)
    serve.shutdown()


def test_scale(cluster):
    config = application({"model": MODEL, "max_replicas": "3", "max_rows": 8})._bound_deployment
    scaled = config._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas) == (1, 3)
    assert scaled.target_ongoing_requests == 8
    assert config._deployment_config.max_ongoing_requests == 16
