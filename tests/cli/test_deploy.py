"""The manifests of docs/deploy: Kubernetes accepts them, and what they say of our programs is true."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from served_routes import ROUTES

from headrace.core.options.parsing import OptionParser, options_from_arguments, struct_from_arguments
from headrace.core.process.daemon import make_parser
from headrace.executor.placement.multinode import OWN_TO_A_NODE
from headrace.executor.placement.node_agent import LEAVE_GRACE_S
from headrace.frontend.cli.commands import ps, serve
from headrace.frontend.client.engine_metrics import ENGINE_METRICS
from headrace.frontend.http.process.options import ServeOptions, check_serve_options

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
CHART = DEPLOY / "helm"
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


def test_the_systemd_unit_is_valid_and_hardened() -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = DEPLOY / "headrace.service"
    (start,) = re.findall(r"^ExecStart=\S+ serve (.*)$", unit.read_text(), re.MULTILINE)
    parser = OptionParser()
    serve.add_arguments(parser)
    check_serve_options(struct_from_arguments(parser.parse_args(start.split()), ServeOptions))
    rated = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=30", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert rated.returncode == 0, rated.stdout[-500:] + rated.stderr


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
