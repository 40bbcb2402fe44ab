"""The chart's pods: time to end, rights, threads, and when they are replaced."""

from __future__ import annotations

from typing import Any

import pytest

from services.cli.process import HURRY_S, STOP_MARGIN_S
from tests.support.chart import (
    EXAMPLES,
    NAMESPACE,
    config_of,
    container,
    named,
    pods,
    rendered,
    rendered_example,
    requires_helm,
)

pytestmark = requires_helm

ALL = ["", *EXAMPLES]


@pytest.mark.parametrize("example", ALL)
def test_the_router_looks_up_names_that_there_are(example: str) -> None:
    found = rendered_example(example)
    router = config_of(found, "router")["router"]
    for role in ("prefill", "decode"):
        (entry,) = router[f"{role}_workers"]
        kind, host, port = entry.split(":")
        service = named(found, "Service", f"-{role}-pods")
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
