"""Metrics over HTTP."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from common.errors import ConfigError
from common.telemetry.admin import AdminServer
from common.telemetry.metrics import TransferMetrics


def test_an_admin_port_of_0_serves_nothing() -> None:
    AdminServer(TransferMetrics().registry, host="127.0.0.1", port=0).close()


def test_metrics_are_served_until_closed_and_a_taken_port_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    metrics = TransferMetrics()
    admin = AdminServer(metrics.registry, host="127.0.0.1", port=port)
    try:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*another admin_port"):
            AdminServer(metrics.registry, host="127.0.0.1", port=port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert b"dspark_kv_leases 0.0" in answer.read()
    finally:
        admin.close()
