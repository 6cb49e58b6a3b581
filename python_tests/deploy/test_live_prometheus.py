"""A Prometheus scrapes a running server: every rule evaluates, and every panel of the dashboard has data."""

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request

import pytest
import yaml
from helpers.places import ROOT
from helpers.serving import MODEL, PROMPT, serving, until

from specdec_ext.rollout.lock import ReferenceAcceptance

FOLDER = ROOT / "deploy" / "prometheus"
PANELS = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())["panels"]
# What Grafana puts in place of its variables.
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*", "$model": ".*"}


class Prometheus:
    """A running Prometheus with the rules, which scrapes a server every second."""

    def __init__(self, folder, server: str):
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "rules.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.partition("://")[2]]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._url = f"http://{address}/api/v1/"
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stderr=self._log,
        )

    def get(self, path: str):
        with urllib.request.urlopen(self._url + path) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict]:
        return self.get(f"query?query={urllib.parse.quote(expression)}")["result"]

    def has(self, expression: str) -> bool:
        try:
            return bool(self.query(expression))
        except OSError:  # it is starting
            return False

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_rules_and_panels_work_on_a_running_server(tmp_path):
    reference = ReferenceAcceptance(5000, 15000, (4900, 4800, 4700), 6000, 20000)
    with serving({"speculation": "auto"}, reference=reference) as server:
        prometheus = Prometheus(tmp_path, server.url)
        try:
            until(lambda: prometheus.has("vllm:generation_tokens_total"), 60)

            def work() -> bool:
                body = dict(prompt=PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
                server.post("/v1/completions", model=MODEL, **body)
                return prometheus.has("specdec:drift_error:10m > 0")

            until(work, 60)
            rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
            assert {rule["name"]: rule["health"] for rule in rules if rule["health"] != "ok"} == {}
            for panel in PANELS:
                for target in panel["targets"]:
                    expression = target["expr"]
                    for name, value in VARIABLES.items():
                        expression = expression.replace(name, value)
                    found = prometheus.query(expression)  # an error is a status other than 200
                    assert found or panel["title"] == "Alerts", expression
        finally:
            prometheus.end()
