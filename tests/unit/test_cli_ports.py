"""Ports that are chosen now and listened on later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.cli import ports
from services.cli.failures import Failure


def test_free_ports_are_different_and_none_that_the_system_gives_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker takes seconds from its command to its port; connections are made all the time."""
    given_away = tmp_path / "range"
    given_away.write_text("20000\t60999\n", encoding="ascii")
    monkeypatch.setattr(ports, "SYSTEMS_PORTS", given_away)
    found = ports.free_ports("127.0.0.1", 50)
    assert len(set(found)) == 50
    assert all(ports.FIRST_PORT <= port < 20_000 for port in found)


def test_where_the_system_gives_all_of_them_away_or_does_not_say_it_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("1024 65535\n", ""):
        given_away = tmp_path / "range"
        given_away.write_text(text, encoding="ascii")
        monkeypatch.setattr(ports, "SYSTEMS_PORTS", given_away)
        first, second = ports.free_ports("127.0.0.1", 2)
        assert first != second


def test_a_port_that_is_taken_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = int(server.getsockname()[1])
        monkeypatch.setattr(ports, "_candidates", lambda: iter((taken, 0)))
        (found,) = ports.free_ports("127.0.0.1", 1)
        assert found not in (taken, 0)


def test_a_port_in_use_is_said_with_the_flag_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Failure, match=f"cannot listen on 127.0.0.1:{port} .*--port"):
            ports.require_free("127.0.0.1", port, "--port")
    ports.require_free("127.0.0.1", 0, "--port")
