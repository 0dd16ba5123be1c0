"""The manifests of docs/deploy: Kubernetes accepts them, and what they say of our programs is true."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from debian_programs import packaged, program
from served_routes import ROUTES

from headrace.core.options.parsing import OptionParser, options_from_arguments, struct_from_arguments
from headrace.core.process.daemon import make_parser
from headrace.executor.placement.multinode import OWN_TO_A_NODE
from headrace.executor.placement.node_agent import LEAVE_GRACE_S
from headrace.frontend.cli.commands import ps, serve
from headrace.frontend.client.engine_metrics import ENGINE_METRICS
from headrace.frontend.http.options import ServeOptions, check_serve_options

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
CHART = DEPLOY / "helm"
COMPOSE = DEPLOY / "compose"
COMPOSE_SCHEMA = "usr/lib/python3/dist-packages/compose/config/compose_spec.json"
KUBERNETES = "1.31"
RENDERED: dict[str, dict[str, Any]] = {
    "kubernetes.yaml": {},
    "kubernetes-several-nodes.yaml": {
        "engines": {"nodes": 2, "tensorParallelSize": 2, "maxReplicas": 2},
        "apiKeySecret": "headrace-api-key",
    },
}
"""What the chart makes of these values."""
VARIABLES = {"$(LWS_LEADER_ADDRESS)": "headrace-engine-0.headrace-engine", "$(LWS_WORKER_INDEX)": "1"}
"""What a LeaderWorkerSet's controller sets in each pod."""


def documents(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((DEPLOY / name).read_text()) if each]


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = [each for each in documents(name) if each["kind"] == kind]
    return found


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["kind"] == "LeaderWorkerSet":
        group = document["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return [document["spec"]["template"]] if "template" in document.get("spec", {}) else []


def containers(name: str) -> Iterator[dict[str, Any]]:
    for document in documents(name):
        for template in pod_templates(document):
            yield from template["spec"]["containers"]


def arguments_of(container: dict[str, Any]) -> argparse.Namespace:
    """By the program's own parser, which refuses what it does not know."""
    args = list(container["args"])
    for variable, value in VARIABLES.items():
        args = [each.replace(variable, value) for each in args]
    if container["command"] == ["engine-core"]:
        parsed = make_parser().parse_args(args)
        options_from_arguments(parsed)
        return parsed
    assert container["command"] == ["headrace", "serve"]
    parser = OptionParser()
    serve.add_arguments(parser)
    parsed = parser.parse_args(args)
    check_serve_options(struct_from_arguments(parsed, ServeOptions))
    return parsed


@pytest.mark.parametrize("name", RENDERED)
def test_kubernetes_accepts_the_manifests(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra dev brings it")
    for document in documents(name):
        if document["kind"] == "LeaderWorkerSet":  # of another API; its pods are ordinary ones
            for template in pod_templates(document):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
                kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", RENDERED)
def test_every_flag_port_and_probe_is_one_of_ours(name: str) -> None:
    probes = argparse.ArgumentParser()
    ps.add_arguments(probes)
    paths = {route.path for route in ROUTES if route.method == "GET"}
    for container in containers(name):
        parsed = arguments_of(container)
        ports = [each["containerPort"] for each in container.get("ports", ())]
        if container["name"] == "engine":
            assert parsed.address.endswith(f":{ports[0]}")
        elif container["name"] == "frontend":
            assert [int(parsed.port)] == ports
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] in paths
                assert probe["httpGet"]["port"] in {each["name"] for each in container["ports"]}
            elif probe:
                command = probe["exec"]["command"]
                assert command[:2] == ["headrace", "ps"]
                assert probes.parse_args(command[2:]).engine == [f"tcp://127.0.0.1:{ports[0]}"]


@pytest.mark.parametrize("name", RENDERED)
def test_frontends_know_all_engines_that_may_come_and_pods_have_time_to_drain(name: str) -> None:
    several_nodes = name == "kubernetes-several-nodes.yaml"
    engines = of_kind(name, "LeaderWorkerSet" if several_nodes else "StatefulSet")
    (frontend,) = [each for each in containers(name) if each["name"] == "frontend"]
    most = engines["spec"].get("replicas")
    if most is None:
        most = of_kind(name, "HorizontalPodAutoscaler")["spec"]["maxReplicas"]
    host = engines["metadata"]["name"]
    assert arguments_of(frontend).engine == [f"tcp://{host}-{number}.{host}:5400" for number in range(most)]
    for document in documents(name):
        for template in pod_templates(document):
            for container in template["spec"]["containers"]:
                parsed = arguments_of(container)
                needed_s = float(parsed.shutdown_timeout) + (LEAVE_GRACE_S if container["name"] == "node" else 0)
                before_s = float(
                    container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1]
                )
                assert template["spec"]["terminationGracePeriodSeconds"] > needed_s + before_s


def test_hosts_of_an_engine_have_the_same_options() -> None:
    """Others are refused when they join."""
    leader, node = (each for each in containers("kubernetes-several-nodes.yaml") if "--nnodes=2" in each["args"])
    ours, theirs = (options_from_arguments(arguments_of(each)) for each in (leader, node))
    differ = {name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)}
    assert differ <= {*OWN_TO_A_NODE}


@pytest.mark.parametrize("name", RENDERED)
def test_pods_have_the_least_privileges(name: str) -> None:
    """Those of Pod Security "restricted", and what it does not ask for."""
    secrets: dict[str, set[str]] = {}
    for document in documents(name):
        for template in pod_templates(document):
            pod = template["spec"]
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
            (container,) = pod["containers"]
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"], "the only folder to write to"
            mounted = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
            secrets[container["name"]] = mounted | {each["secretRef"]["name"] for each in container.get("envFrom", ())}
    assert secrets["frontend"] - {"headrace-api-key"} == {"headrace-frontend-keys"}, "the keys of a client"
    assert secrets.get("node", {"headrace-cluster"}) == {"headrace-cluster"}, "clients do not reach it"


@pytest.mark.parametrize("name", RENDERED)
def test_frontends_alone_reach_engines_in_either_kind_of_network(name: str) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in documents(name) if each["kind"] == "NetworkPolicy"}
    (of_frontends, *of_hosts) = policies["headrace-engine"]["ingress"]
    (sources,) = of_frontends["from"]
    assert sources["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "frontend"
    assert of_frontends["ports"] == [{"protocol": "TCP", "port": 5400}]
    assert len(of_hosts) == (name == "kubernetes-several-nodes.yaml")
    assert policies["headrace-frontend"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8000}]}]
    services = [each["spec"] for each in documents(name) if each["kind"] == "Service"]
    assert all(each["ipFamilyPolicy"] == "PreferDualStack" for each in services)
    assert "0.0.0.0" not in (DEPLOY / name).read_text()


UNITS = {"engine-core@": "engine-core", "headrace@": "headrace"}
"""Each unit's program."""
SERVER, ENGINE = "headrace@", "engine-core@"


def systemd_analyze() -> str:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    return analyze


def settings_of(unit: str) -> dict[str, list[str]]:
    """Of an instance called qwen."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / f"{unit}.service").read_text().replace("%i", "qwen").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_systemd_accepts_the_units_and_rates_them_ok(tmp_path: Path) -> None:
    for unit, name in UNITS.items():
        text = (DEPLOY / f"{unit}.service").read_text()
        assert f"ExecStart=/usr/local/bin/{name} " in text
        ours = Path(sys.executable).parent / name
        (tmp_path / f"{unit}qwen.service").write_text(text.replace(f"/usr/local/bin/{name}", str(ours)))
    units = sorted(tmp_path.iterdir())
    checked = subprocess.run(
        [systemd_analyze(), "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    for each in units:
        rated = subprocess.run(
            [systemd_analyze(), "security", "--offline=true", "--threshold=30", "--no-pager", each],
            capture_output=True,
            text=True,
            check=False,
        )
        assert rated.returncode == 0, rated.stdout[-500:] + rated.stderr


def test_the_units_commands_are_ours_and_meet_at_one_socket(tmp_path: Path) -> None:
    """With the files of docs/deploy/systemd.md."""
    page = (DEPLOY / "systemd.md").read_text()
    written = {name: text for text, name in re.findall(r"(?:echo|printf) '(.*)' > /etc/headrace/qwen/(\S+)", page)}
    assert written.keys() == {"engine.yaml", "server.yaml"}
    for name, text in written.items():
        (tmp_path / name).write_text(text.replace("\\n", "\n"))
    parsed = {}
    for unit, name in UNITS.items():
        (start,) = settings_of(unit)["ExecStart"]
        command = start.removeprefix(f"/usr/local/bin/{name} ").replace("/etc/headrace/qwen", str(tmp_path)).split()
        is_server = command[0] == "serve"
        program_of = [name, command.pop(0)] if is_server else [name]
        parsed[unit] = arguments_of({"command": program_of, "args": command})
    assert parsed[SERVER].engine == [parsed[ENGINE].address]
    assert parsed[ENGINE].address.startswith(f"ipc:///run/{settings_of(ENGINE)['RuntimeDirectory'][0]}/")
    for unit in UNITS:
        settings = settings_of(unit)
        assert f"HEADRACE_RUNTIME_DIR=/run/{settings['RuntimeDirectory'][0]}" in settings["Environment"][0]
        assert int(settings["TimeoutStopSec"][0]) > float(parsed[unit].shutdown_timeout)
        assert settings["User"] == ["headrace"], "one user: sockets are in folders that only their owner enters"


# --- Compose ---------------------------------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return loaded


def test_compose_accepts_the_file() -> None:
    """By the schema that Debian's docker-compose has in it; a newer one is on no index that can be reached."""
    schema = json.loads(packaged("docker-compose", COMPOSE_SCHEMA).read_text())
    jsonschema.validate(compose(), schema, jsonschema.Draft7Validator)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"services": {"server": {"imagined": True}}}, schema, jsonschema.Draft7Validator)


def test_composes_server_has_our_options_the_least_privileges_and_time_to_drain() -> None:
    server = compose()["services"]["server"]
    (model, *arguments) = server["command"]
    parsed = arguments_of({"command": ["headrace", "serve"], "args": ["MODEL", *arguments]})
    assert model.startswith("${MODEL:?")
    assert server["ports"] == [f"${{HTTP_PORT:-8000}}:{ServeOptions().port}"]
    assert int(server["stop_grace_period"].removesuffix("s")) > float(parsed.shutdown_timeout)
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    for name, service in compose()["services"].items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:") or name == "server", "no key guards it"


def test_prometheus_and_grafana_find_what_compose_mounts(tmp_path: Path) -> None:
    services = compose()["services"]
    mounted = {}
    for name, service in services.items():
        for each in service["volumes"]:
            source, target = each.removesuffix(":ro").rsplit(":", 1)
            mounted[name, target] = source
            assert source in compose()["volumes"] or source.startswith("${") or (COMPOSE / source).exists(), source
    (scrape,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["server:8000"]}]
    (secret,) = services["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert f"--api-key-file=/run/secrets/{secret}" in services["server"]["command"]
    (dashboards,) = yaml.safe_load((COMPOSE / "grafana/dashboards/headrace.yaml").read_text())["providers"]
    assert mounted["grafana", f"{dashboards['options']['path']}/grafana.json"] == "../grafana.json"
    (source,) = yaml.safe_load((COMPOSE / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    key = tmp_path / "api_key"
    key.write_text("a")
    (tmp_path / "prometheus.yml").write_text(
        (COMPOSE / "prometheus.yml").read_text().replace("/run/secrets/api_key", str(key))
    )
    checked = subprocess.run(
        [program("prometheus", "usr/bin/promtool"), "check", "config", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_environment_variable_that_is_named_is_one_that_is_read() -> None:
    sources = [DEPLOY.parents[1] / each for each in ("core", "executor", "frontend", "headrace", "ipc")]
    read = {
        name
        for folder in sources
        for path in folder.rglob("*.py")
        for name in re.findall(r"\bHEADRACE_[A-Z_]+\b", path.read_text())
    }
    named = {
        (path.name, name)
        for path in [*DEPLOY.rglob("*"), DOCKERFILE]
        if path.is_file() and path.suffix not in (".json", ".pyc")
        for name in re.findall(r"\bHEADRACE_[A-Z_]+\b", path.read_text())
    }
    assert len(named) > 10
    assert {each for each in named if each[1] not in read} - OF_BUILDS == set()


OF_BUILDS = {("Dockerfile", "HEADRACE_VERSION"), ("Dockerfile", "HEADRACE_WHEEL_KERNELS")}
"""Read by setup.py."""


# --- images ----------------------------------------------------------------------------------------------------------


DOCKERFILE = DEPLOY.parents[1] / "docker" / "Dockerfile"


def image_targets() -> set[str]:
    return set(re.findall(r"^FROM base AS (\w+)$", DOCKERFILE.read_text(), re.MULTILINE))


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health/ready" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_an_images_health_is_asked_of_the_server_itself(tmp_path: Path) -> None:
    """Of no proxy, and by Python's own modules: the folder of the container is its cache, where others' files are."""
    (command,) = map(json.loads, re.findall(r"^ +CMD (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE))
    for name in ("urllib", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:1", "PYTHONPATH": str(tmp_path), "no_proxy": ""}

    def status(port: int) -> int:
        asked = [sys.executable, *(word.replace(":8000/", f":{port}/") for word in command[1:])]
        return subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert status(server.server_port) == 0
        finally:
            server.shutdown()
            thread.join()
    assert status(server.server_port) == 1


def test_manifests_name_images_that_we_build() -> None:
    assert image_targets() == {"client", "cpu", "cuda"}
    (of_compose,) = re.findall(r"^\$\{IMAGE:-(.+)\}$", compose()["services"]["server"]["image"])
    named = {each["image"] for name in RENDERED for each in containers(name)} | {of_compose}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert named == {values["image"], values["frontends"]["image"]}
    assert named <= {f"headrace:{version}-{target}" for target in image_targets()}
    for name in RENDERED:
        for container in containers(name):
            is_frontend = container["name"] == "frontend"
            assert container["image"].endswith("-client") == is_frontend, "an engine needs torch, a frontend none"


def test_an_images_dependencies_are_those_of_the_package(tmp_path: Path) -> None:
    root = DEPLOY.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (tmp_path / "pyproject.toml").write_bytes((root / "pyproject.toml").read_bytes())

    def listed(*arguments: str) -> list[str]:
        command = [sys.executable, str(root / "docker" / "requirements.py"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()

    engine = project["optional-dependencies"]["engine"]
    assert listed() == project["dependencies"]
    assert listed("engine") == [*project["dependencies"], *engine]
    assert {*listed("engine")} - {*listed("engine", "--without", "triton")} == {
        each for each in engine if each.startswith("triton")
    }


def test_the_autoscaler_goes_by_a_metric_that_there_is() -> None:
    (metric,) = of_kind("kubernetes.yaml", "HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert metric["object"]["metric"]["name"] == rule["name"]["as"]
    names = {f"headrace:{name}" for _, name, *_ in ENGINE_METRICS}
    assert any(f'__name__="{name}"' in rule["seriesQuery"] for name in names)
    services = {each["metadata"]["name"] for each in documents("kubernetes.yaml") if each["kind"] == "Service"}
    assert metric["object"]["describedObject"]["name"] in services


@pytest.mark.parametrize("name", RENDERED)
def test_the_manifests_are_what_the_chart_makes(name: str) -> None:
    """`python tests/cli/test_deploy.py` writes them anew."""
    assert (DEPLOY / name).read_text() == rendered(RENDERED[name])


def rendered(values: dict[str, Any]) -> str:
    """As `helm template` does, by Helm's own Go code."""
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk brings Helm's renderer")
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="headrace", namespace="default")
    parts = [text.strip() for path, text in sorted(files.items()) if path.endswith(".yaml") and text.strip()]
    return "---\n".join(part + "\n" for part in parts)


if __name__ == "__main__":
    for name, values in RENDERED.items():
        (DEPLOY / name).write_text(rendered(values))
