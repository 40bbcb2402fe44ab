"""What the chart tells Prometheus, Grafana and autoscalers is there and is meant."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    Manifest,
    container,
    named,
    of_kind,
    pods,
    rendered_example,
    requires_helm,
    selects,
)

pytestmark = requires_helm

ALL = ["", *EXAMPLES]


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
