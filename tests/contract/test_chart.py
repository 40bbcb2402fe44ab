"""The chart, rendered by the real helm: every example is what Kubernetes takes and what was reviewed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.process import HURRY_S, STOP_MARGIN_S
from tests.support.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    Manifest,
    config_of,
    container,
    helm,
    manifests,
    named,
    notes,
    of_kind,
    pods,
    rendered,
    rendered_example,
    requires_helm,
    selects,
)
from tests.support.kubernetes import complaints
from tools.chart_golden import golden_path, golden_text

pytestmark = requires_helm

ALL = ["", *EXAMPLES]
VERSIONS = ["1.29.0", "1.31.0", "1.34.0", "1.37.0"]
OURS = ("LeaderWorkerSet", "ScaledObject", "PodMonitor", "ServiceMonitor", "PrometheusRule")
"""Kinds that Kubernetes itself does not have."""


@pytest.mark.parametrize("example", ALL)
def test_helm_finds_nothing_to_say(example: str) -> None:
    chosen = ["--values", str(EXAMPLES[example])] if example else []
    assert "0 chart(s) failed" in helm("lint", str(CHART), "--strict", *chosen)


@pytest.mark.parametrize("example", ALL)
def test_what_is_rendered_is_what_was_reviewed(example: str) -> None:
    """`make chart` writes the files anew; their difference is the review."""
    path = golden_path(example)
    assert golden_text(example) == path.read_text(), f"{path.name} is old; make chart"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", ALL)
def test_every_version_of_kubernetes_takes_every_field(example: str, version: str) -> None:
    if example == "multinode-lws" and version < "1.33":
        pytest.skip("image volumes are newer, as test_chart_refusals has it")
    found = rendered(example, version=version)
    known = [manifest for manifest in found if manifest["kind"] not in OURS]
    assert known
    for manifest in known:
        assert complaints(manifest, version) == [], manifest["metadata"]["name"]
    for role, template in pods(of_kind(found, "LeaderWorkerSet")):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        assert complaints(pod, version) == [], role


def test_a_field_that_kubernetes_does_not_have_would_be_found() -> None:
    (manifest,) = of_kind(rendered(), "ServiceAccount")
    assert complaints(manifest | {"automountServiceAccountTokens": False}, "1.34.0")


@pytest.mark.parametrize("example", ALL)
def test_every_selector_finds_its_pods_and_every_port_its_container(example: str) -> None:
    found = rendered_example(example)
    templates = dict(pods(found))
    for service in of_kind(found, "Service"):
        chosen = [t for t in templates.values() if selects(service["spec"]["selector"], t)]
        assert len(chosen) == 1, service["metadata"]["name"]
        open_ports = {port["name"]: port["containerPort"] for port in container(chosen[0])["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in open_ports
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == open_ports[port["targetPort"]]
    for manifest in of_kind(found, "Deployment"):
        assert selects(manifest["spec"]["selector"]["matchLabels"], manifest["spec"]["template"])
    for budget in of_kind(found, "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        roles = {role.split()[0] for role, t in templates.items() if selects(selector, t)}
        assert roles == {budget["metadata"]["labels"]["app.kubernetes.io/component"]}
    for _, template in pods(found):
        for spread in template["spec"].get("topologySpreadConstraints", []):
            assert selects(spread["labelSelector"]["matchLabels"], template)


@pytest.mark.parametrize("example", ALL)
def test_the_network_policy_opens_what_is_listened_on_and_nothing_else(example: str) -> None:
    found = rendered_example(example)
    templates = dict(pods(found))
    policies = of_kind(found, "NetworkPolicy")
    for role, template in templates.items():
        if role == "test":
            continue
        (policy,) = (
            p for p in policies if selects(p["spec"]["podSelector"]["matchLabels"], template)
        )
        allowed = {
            port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])
        }
        listened = {p["containerPort"] for p in container(template).get("ports", [])}
        if " " not in role:  # the ranks of a worker that is several pods meet on more ports
            assert allowed == listened
        unlimited = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
        peers = {
            other.split()[0]
            for rule in unlimited
            for peer in rule["from"]
            for other, t in templates.items()
            if selects(peer["podSelector"]["matchLabels"], t)
        }
        assert peers == (set() if role == "router" else {"prefill", "decode"})


@pytest.mark.parametrize("example", ALL)
def test_what_scales_or_is_scraped_exists(example: str) -> None:
    found = rendered_example(example)
    names = {(m["kind"], m["metadata"]["name"]) for m in found}
    for scaler in of_kind(found, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
        (scaled,) = (
            m for m in of_kind(found, target["kind"]) if m["metadata"]["name"] == target["name"]
        )
        assert "replicas" not in scaled["spec"], "helm and the autoscaler would fight"
    for monitor in of_kind(found, "PodMonitor", "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        spec = monitor["spec"]
        (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
        roles = set()
        if monitor["kind"] == "PodMonitor":
            for role, template in pods(found):
                ports = {port["name"] for port in container(template).get("ports", [])}
                if selects(selector, template) and endpoint["port"] in ports:
                    roles.add(role.split()[0])
        else:
            for service in of_kind(found, "Service"):
                if selects(selector, service):
                    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
                    roles.add(service["metadata"]["labels"]["app.kubernetes.io/component"])
        assert roles == {"router", "prefill", "decode"}


@pytest.mark.parametrize("example", ALL)
def test_the_router_looks_up_names_that_there_are(example: str) -> None:
    found = rendered_example(example)
    router = config_of(found, "router")["router"]
    for role in ("prefill", "decode"):
        (entry,) = router[f"{role}_workers"]
        kind, host, port = entry.split(":")
        service = named(found, "Service", f"-{role}")
        assert (kind, host.split(".", 2)[:2]) == ("dns", [service["metadata"]["name"], NAMESPACE])
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert int(port) == config_of(found, role)[role]["port"]


@pytest.mark.parametrize("example", ALL)
def test_a_pod_has_time_to_finish_its_requests(example: str) -> None:
    found = rendered_example(example)
    for role, template in pods(found):
        if role == "test":
            continue
        hook = container(template).get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
        pause_s = hook["preStop"]["sleep"]["seconds"]
        shutdown_s = config_of(found, role.split()[0])["shutdown_s"]
        if "follower" in role:
            # Its ranks end with the leader's requests, and must not before.
            assert pause_s == shutdown_s
            shutdown_s = 0
        needed_s = pause_s + shutdown_s + STOP_MARGIN_S + HURRY_S
        assert template["spec"]["terminationGracePeriodSeconds"] >= needed_s, role


def test_the_grace_period_is_computed() -> None:
    drain = {"preStopSeconds": 7, "shutdownSeconds": 100}
    found = rendered(values={"router": {"drain": drain}})
    template = dict(pods(found))["router"]
    assert template["spec"]["terminationGracePeriodSeconds"] == 7 + 100 + 15
    assert container(template)["lifecycle"]["preStop"] == {"sleep": {"seconds": 7}}
    assert config_of(found, "router")["shutdown_s"] == 100
    old = dict(pods(rendered(values={"router": {"drain": drain}}, version="1.29.0")))["router"]
    assert container(old)["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "7"]}}


@pytest.mark.parametrize("example", ALL)
def test_pods_meet_the_restricted_standard_but_for_locked_memory(example: str) -> None:
    found = rendered_example(example)
    is_on_host = example == "ascend-a2-2p4d"
    for role, template in pods(found):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec.get("hostNetwork", False) is (is_on_host and role in ("prefill", "decode"))
        for part in (*spec["containers"], *spec.get("initContainers", [])):
            security = part["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            has_card = (
                "rdma/ib" in part["resources"].get("limits", {}) and part["name"] != "fetch-model"
            )
            assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if has_card else [])
        mounted = {mount["name"] for mount in container(template).get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in spec.get("volumes", [])}


def test_no_cluster_permission_is_asked_for() -> None:
    for example in ALL:
        kinds = {manifest["kind"] for manifest in rendered_example(example)}
        assert not {kind for kind in kinds if "Role" in kind}


def test_only_pods_whose_settings_changed_are_replaced() -> None:
    def checksums(values: dict[str, Any]) -> dict[str, str]:
        return {
            role: template["metadata"]["annotations"].get("checksum/config", "")
            for role, template in pods(rendered(values=values))
        }

    before = checksums({})

    def replaced(settings: dict[str, Any]) -> set[str]:
        after = checksums({"settings": settings})
        return {role for role in before if before[role] != after[role]}

    assert replaced({"decode": {"num_slots": 3}}) == {"decode"}
    assert replaced({"engine": {"draft_length": 3}}) == {"prefill", "decode"}
    assert replaced({"log": {"level": "debug"}}) == {"router", "prefill", "decode"}


def test_a_worker_has_as_many_threads_as_cores() -> None:
    def threads(limits: dict[str, Any], requests: dict[str, Any]) -> int | None:
        resources = {"requests": {"cpu": None, **requests}, "limits": {"cpu": None, **limits}}
        found = rendered(values={"decode": {"resources": resources}})
        count: int | None = config_of(found, "decode")["decode"].get("threads")
        return count

    assert threads({"cpu": "6"}, {"cpu": "2"}) == 6
    assert threads({"cpu": "2500m"}, {}) == 2
    assert threads({"cpu": "200m"}, {}) == 1
    assert threads({}, {"cpu": 3}) == 3
    assert threads({}, {}) is None
    own = rendered(values={"settings": {"decode": {"threads": 1}}})
    assert config_of(own, "decode")["decode"]["threads"] == 1


@pytest.mark.parametrize("example", ALL)
def test_the_notes_name_what_there_is(example: str) -> None:
    text = notes(yaml.safe_load(EXAMPLES[example].read_text()) if example else {})
    found = rendered_example(example)
    services = {m["metadata"]["name"] for m in of_kind(found, "Service")}
    deployments = {m["metadata"]["name"] for m in of_kind(found, "Deployment")}
    (service,) = re.findall(r"service/(\S+)", text)
    assert service in services
    assert set(re.findall(r"deployment/(\S+)", text)) <= deployments
    (port,) = (p["port"] for p in named(found, "Service", service)["spec"]["ports"])
    assert f"--endpoint 127.0.0.1:{port} " in text
    assert "<no value>" not in text and "%!" not in text
    for role in ("router", "prefill", "decode"):
        assert re.search(rf"^  {role} +\d", text, re.MULTILINE)


def test_rules_and_dashboards_are_the_committed_ones() -> None:
    found = rendered_example("cpu-tiny")
    groups = named(found, "PrometheusRule")["spec"]["groups"]
    files = [yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("rules/*.yaml"))]
    assert groups == [group for file in files for group in file["groups"]]
    boards = {
        name: json.loads(text)
        for manifest in of_kind(found, "ConfigMap")
        if manifest["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in manifest["data"].items()
    }
    assert boards == {p.name: json.loads(p.read_text()) for p in CHART.glob("dashboards/*.json")}
    assert len(boards) == 4


def test_a_threshold_can_be_set_and_no_other_rule_changes(tmp_path: Path) -> None:
    def rules(found: list[Manifest]) -> dict[str, Any]:
        groups = named(found, "PrometheusRule")["spec"]["groups"]
        return {rule.get("record") or rule["alert"]: rule for g in groups for rule in g["rules"]}

    before = rules(rendered_example("cpu-tiny"))
    found = rendered_example("nvidia-h200-1p1d")
    after = rules(found)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"dspark:threshold:first_token_seconds"}
    assert after["dspark:threshold:first_token_seconds"]["expr"] == "vector(3)"
    if promtool := shutil.which("promtool"):
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump(named(found, "PrometheusRule")["spec"]))
        subprocess.run([promtool, "check", "rules", file], check=True, capture_output=True)


def test_workers_are_scaled_by_figures_that_the_router_exports() -> None:
    documented = (CHART.parents[1] / "docs" / "metrics.md").read_text()
    found = rendered_example("nvidia-h200-1p1d")
    scaled = of_kind(found, "ScaledObject")
    assert {m["metadata"]["labels"]["app.kubernetes.io/component"] for m in scaled} == {
        "prefill",
        "decode",
    }
    for manifest in scaled:
        (trigger,) = manifest["spec"]["triggers"]
        query = trigger["metadata"]["query"]
        families = re.findall(r"\bdspark_\w+", query)
        assert families == ["dspark_role_queued_tokens", "dspark_role_running_tokens"]
        assert all(f"`{family}`" in documented for family in families)
        role = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        router = named(found, "Deployment", "-router")["metadata"]["name"]
        labels = re.findall(r"{(.*?)}", query)
        assert labels == [f'namespace="{NAMESPACE}",pod=~"{router}-.*",role="{role}"'] * 2


def test_extra_objects_are_installed_as_they_are() -> None:
    extra = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine"}}
    assert extra in manifests(
        helm("template", RELEASE, str(CHART), values={"extraObjects": [extra]})
    )
