"""Manifests for Kubernetes: the pair is pinned, options and endpoints exist, and requests are finished.

The manifests of Kustomize and of the Helm chart go through the same checks. Those of rendered manifests need
``kubectl`` or ``helm``, and are skipped without it. Nothing here talks to a cluster.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from functools import cache

import jsonschema
import pytest
import typer
import yaml
from helpers.places import ROOT

from specdec_ext.cli import app
from specdec_ext.rollout.lock import FORMAT, READABLE, PairLock
from specdec_ext.serve.http.guards import OPEN_PATHS

DEPLOY = ROOT / "deploy"
BASE, OVERLAY = DEPLOY / "kustomize" / "base", DEPLOY / "kustomize" / "overlays" / "gpu"
CHART = DEPLOY / "helm"
PIN = re.compile(r"[0-9a-f]{40}")
LOCK = (OVERLAY / "pair.lock").read_text()
PAIR = dict(line.split("=") for line in (OVERLAY / "pair.env").read_text().splitlines())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
EXAMPLE = {
    "target": {"repository": PAIR["TARGET"], "revision": PAIR["TARGET_REVISION"]},
    "draft": {"repository": PAIR["DRAFT"], "revision": PAIR["DRAFT_REVISION"]},
    "lock": LOCK,
}


def output(program: str, *arguments: object) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def parsed(text: str) -> list[dict]:
    return [each for each in yaml.safe_load_all(text) if each]


@cache
def of_kustomize() -> list[dict]:
    return parsed(output("kubectl", "kustomize", OVERLAY))


@pytest.fixture(scope="module")
def chart_values(tmp_path_factory):
    path = tmp_path_factory.mktemp("helm") / "values.yaml"
    path.write_text(yaml.safe_dump(EXAMPLE))
    return path


@pytest.fixture(scope="module", params=["kustomize", "helm"])
def manifests(request, chart_values) -> list[dict]:
    if request.param == "kustomize":
        return of_kustomize()
    return parsed(output("helm", "template", "specdec", CHART, "--values", chart_values))


@pytest.fixture(scope="module")
def deployment(manifests):
    return one(manifests, "Deployment")


def one(manifests: list[dict], kind: str, contains: str = "") -> dict:
    (found,) = [
        each for each in manifests if each["kind"] == kind and contains in each["metadata"]["name"]
    ]
    return found


def pod_of(deployment: dict) -> dict:
    return deployment["spec"]["template"]["spec"]


def server_of(pod: dict) -> dict:
    (server,) = pod["containers"]
    return server


def base_pod() -> dict:
    """The pod as it is written, which needs no tools."""
    return pod_of(yaml.safe_load((BASE / "deployment.yaml").read_text()))


# --- without tools ----------------------------------------------------------------------------------


def options_of(arguments: list[str], tmp_path) -> dict:
    """The parameters of the command that a container runs; the command is parsed, and not called."""
    (tmp_path / "pair.lock").write_text(LOCK)
    words = [each.replace("/etc/specdec", str(tmp_path)) for each in arguments]
    command = typer.main.get_command(app)
    context = command.make_context("specdec", list(words))
    name, serve, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    assert name == "serve"
    return serve.make_context(name, rest, parent=context).params


def test_the_options_of_the_server_exist(tmp_path):
    given = options_of(server_of(base_pod())["args"], tmp_path)
    assert (given["model"], given["drafter"]) == ("/models/target", "/models/draft")
    assert given["lock"].name == "pair.lock" and given["host"] == "0.0.0.0"


def test_accepted_requests_are_finished(tmp_path):
    """The wait before SIGTERM and the longest request fit into the time that a pod is given to end."""
    pod = base_pod()
    given = options_of(server_of(pod)["args"], tmp_path)
    program, wait = server_of(pod)["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    needed = int(wait) + given["request_timeout"]
    assert needed + 10 <= pod["terminationGracePeriodSeconds"]


def test_probes_and_prometheus_ask_endpoints_that_need_no_key(tmp_path):
    deployment = yaml.safe_load((BASE / "deployment.yaml").read_text())
    server = server_of(pod_of(deployment))
    port = options_of(server["args"], tmp_path)["port"]
    assert server["ports"] == [{"name": "http", "containerPort": port}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = server[probe]["httpGet"]
        assert asked == {"path": "/health", "port": "http"} and asked["path"] in OPEN_PATHS
    scraped = deployment["spec"]["template"]["metadata"]["annotations"]
    assert scraped["prometheus.io/path"] in OPEN_PATHS
    assert scraped["prometheus.io/port"] == str(port) and scraped["prometheus.io/scrape"] == "true"


def test_the_pair_of_the_overlay_is_that_of_its_lock():
    lock = PairLock.load(OVERLAY / "pair.lock")
    assert lock.reference is not None and lock.draft is not None
    assert {
        "TARGET": lock.target.name,
        "TARGET_REVISION": lock.target.revision,
        "DRAFT": lock.draft.name,
        "DRAFT_REVISION": lock.draft.revision,
    } == PAIR
    assert all(PIN.fullmatch(PAIR[f"{each}_REVISION"]) for each in ("TARGET", "DRAFT"))


def test_the_chart_uses_all_of_its_values():
    text = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    known = {
        f"{name}.{key}" if name in ("target", "draft", "image", "service") else name
        for name, value in VALUES.items()
        for key in (value if isinstance(value, dict) and value else [""])
    }
    assert used == known
    assert set(SCHEMA["properties"]) == {*VALUES, "global"}


def wrong_values(**changes):
    values = copy.deepcopy(VALUES) | copy.deepcopy(EXAMPLE)
    for place, value in changes.items():
        *path, last = place.split("__")
        part = values
        for name in path:
            part = part[name]
        part[last] = value
    return list(jsonschema.Draft7Validator(SCHEMA).iter_errors(values))


def test_a_pair_that_is_not_pinned_is_refused():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert not wrong_values()
    for place, value in (
        ("target__revision", "main"),
        ("draft__revision", PAIR["DRAFT_REVISION"][:7]),
        ("target__repository", "no-owner"),
        ("lock", ""),
        ("image__tag", "latest"),
        ("image__tag", ""),
        ("options", ["max-rows=8"]),
        ("no_such_value", 1),
    ):
        assert wrong_values(**{place: value}), place
    for number in READABLE:  # the chart takes the locks that the server takes
        assert not wrong_values(
            lock=LOCK.replace(f'"pair_lock": {FORMAT}', f'"pair_lock": {number}')
        )
    assert wrong_values(lock=LOCK.replace(f'"pair_lock": {FORMAT}', f'"pair_lock": {FORMAT + 1}'))
    defaults = {error.path[0] for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(VALUES)}
    assert defaults == {"target", "draft", "lock"}


# --- rendered ---------------------------------------------------------------------------------------


def test_manifests_have_the_schema_of_kubernetes(manifests):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    kinds = sorted(each["kind"] for each in manifests)
    assert kinds == ["ConfigMap", "ConfigMap", "Deployment", "Service"]
    for each in manifests:
        validate.validate(each, "1.33", strict=True)


def test_the_pair_is_pinned(manifests, deployment):
    pair, lock = (one(manifests, "ConfigMap", name) for name in ("-pair", "-lock"))
    assert pair["data"] == PAIR and lock["data"] == {"pair.lock": LOCK}
    pod = pod_of(deployment)
    (fetch,) = pod["initContainers"]
    (script,) = fetch["args"]
    for line in script.splitlines():
        name = re.fullmatch(
            r'hf download "\$(\w+)" --revision "\$(\w+)" --local-dir /models/\w+', line
        )
        assert name and name[2] == f"{name[1]}_REVISION" and {name[1], name[2]} <= set(PAIR)
    for container in (fetch, server_of(pod)):
        assert container["envFrom"] == [{"configMapRef": {"name": pair["metadata"]["name"]}}]
    (mounted,) = [each for each in pod["volumes"] if each["name"] == "lock"]
    assert mounted["configMap"]["name"] == lock["metadata"]["name"]


def test_images_are_pinned_and_the_same(deployment):
    pod = pod_of(deployment)
    images = {each["image"] for each in [*pod["initContainers"], *pod["containers"]]}
    assert images == {f"{VALUES['image']['repository']}:{VALUES['image']['tag']}"}


def test_containers_may_do_little(deployment):
    pod = pod_of(deployment)
    (user,) = re.findall(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == int(user) > 0
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_service_finds_the_pods(manifests, deployment):
    service = one(manifests, "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], deployment["spec"]["selector"]["matchLabels"]):
        assert selector and selector.items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] == "http"


def test_helm_and_kustomize_make_the_same_pod(chart_values):
    """The two are written separately; only the names of ConfigMaps may differ, and what helm adds."""
    pods = [
        pod_of(one(manifests, "Deployment"))
        for manifests in (
            of_kustomize(),
            parsed(output("helm", "template", "specdec", CHART, "--values", chart_values)),
        )
    ]
    for pod in pods:
        for name in ("nodeSelector", "tolerations"):
            assert not pod.pop(name, None)
        for container in [*pod["initContainers"], *pod["containers"]]:
            container.pop("imagePullPolicy", None)
            container["envFrom"][0]["configMapRef"]["name"] = "pair"
        pod["volumes"].sort(key=lambda each: each["name"])
        for volume in pod["volumes"]:
            if "configMap" in volume:
                volume["configMap"]["name"] = "lock"
    assert pods[0] == pods[1]


def test_the_chart_takes_another_timeout_options_and_volume(tmp_path):
    values = tmp_path / "values.yaml"
    claim = {"persistentVolumeClaim": {"claimName": "weights"}}
    given = {
        "requestTimeout": 60,
        "options": ["--max-rows=8"],
        "models": {"emptyDir": None, **claim},
    }
    values.write_text(yaml.safe_dump(EXAMPLE | given))
    pod = pod_of(
        one(parsed(output("helm", "template", "x", CHART, "--values", values)), "Deployment")
    )
    assert pod["terminationGracePeriodSeconds"] == 90
    options = options_of(server_of(pod)["args"], tmp_path)
    assert (options["request_timeout"], options["max_rows"]) == (60, 8)
    assert {"name": "models", **claim} in pod["volumes"]


def test_the_chart_is_clean_and_refuses_what_is_not_pinned(chart_values):
    output("helm", "lint", CHART, "--strict", "--values", chart_values)
    done = subprocess.run(["helm", "template", "x", CHART], capture_output=True, text=True)
    assert done.returncode and "/target/revision" in done.stderr and "/lock" in done.stderr
