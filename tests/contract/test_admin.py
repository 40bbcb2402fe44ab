"""Metrics and probes over HTTP."""

from __future__ import annotations

import socket

import pytest
from prometheus_client import CollectorRegistry, Gauge

from common.errors import ConfigError
from common.telemetry import admin
from common.telemetry.admin import AdminServer
from common.telemetry.probes import Probes
from services.cli.ports import free_ports
from tests.support.http import get
from tests.support.waiting import WAIT_S


@pytest.fixture
def port() -> int:
    (number,) = free_ports("127.0.0.1", 1)
    return number


def test_an_admin_port_of_0_serves_nothing() -> None:
    AdminServer(CollectorRegistry(), Probes(), host="127.0.0.1", port=0).close()


def test_metrics_are_served_until_closed_and_a_taken_port_is_named(port: int) -> None:
    registry = CollectorRegistry()
    Gauge("eggs", "In the basket.", registry=registry).set(12)
    server = AdminServer(registry, Probes(), host="127.0.0.1", port=port)
    try:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*another admin_port"):
            AdminServer(CollectorRegistry(), Probes(), host="127.0.0.1", port=port)
        status, text = get(port, "/metrics")
        assert status == 200
        assert "eggs 12.0" in text
    finally:
        server.close()
    with pytest.raises(ConnectionRefusedError):
        get(port, "/metrics")


def test_every_probe_answers_ok_or_503_with_its_reason(port: int) -> None:
    probes = Probes()
    server = AdminServer(CollectorRegistry(), probes, host="127.0.0.1", port=port)
    paths = ("/startupz", "/readyz", "/livez")
    try:
        probes.begin("weights")
        starting = (503, "starting: weights\n")
        assert [get(port, path) for path in paths] == [starting, starting, (200, "ok\n")]
        probes.started(why_not_ready=lambda: "draining")
        ok = (200, "ok\n")
        assert [get(port, path) for path in paths] == [ok, (503, "draining\n"), ok]
        probes.started(why_not_ready=lambda: None)
        assert [get(port, path) for path in paths] == [ok, ok, ok]
    finally:
        server.close()


def test_a_connection_that_says_nothing_is_closed_and_keeps_nobody_waiting(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admin._QuietHandler, "timeout", 0.5)
    server = AdminServer(CollectorRegistry(), Probes(), host="127.0.0.1", port=port)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as silent:
            assert get(port, "/livez") == (200, "ok\n")
            assert silent.recv(1) == b""
    finally:
        server.close()
    assert capfd.readouterr().err == ""
