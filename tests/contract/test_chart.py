"""The chart, rendered by the real helm: every example is what Kubernetes takes and what was reviewed."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.support.chart import (
    CHART,
    EXAMPLES,
    RELEASE,
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
    for manifest in of_kind(found, "LeaderWorkerSet"):
        # Its controller makes a Service of that name for the pods of a worker to find one another.
        names = {service["metadata"]["name"] for service in of_kind(found, "Service")}
        assert manifest["metadata"]["name"] not in names
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


def test_no_cluster_permission_is_asked_for() -> None:
    for example in ALL:
        kinds = {manifest["kind"] for manifest in rendered_example(example)}
        assert not {kind for kind in kinds if "Role" in kind}


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


def test_extra_objects_are_installed_as_they_are() -> None:
    extra = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine"}}
    assert extra in manifests(
        helm("template", RELEASE, str(CHART), values={"extraObjects": [extra]})
    )
