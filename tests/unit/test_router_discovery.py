"""Which addresses a name has, with a resolver of its own."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import ConfigError
from services.router.discovery import Discovery, WorkerName, resolve_host


class Dns:
    """Answers what it was told last; a name without an answer does not exist."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        if host not in self.answers:
            raise OSError(f"{host} is not known")
        return self.answers[host]


async def test_every_address_of_a_name_is_a_worker() -> None:
    dns = Dns(decode=["10.0.0.1", "10.0.0.2", "10.0.0.1"])
    discovery = Discovery(["dns:decode:50053"], resolve=dns, timeout_s=1.0)
    assert await discovery.look() == {"10.0.0.1:50053", "10.0.0.2:50053"}


async def test_fixed_addresses_are_always_there_and_never_looked_up() -> None:
    dns = Dns(decode=["10.0.0.1"])
    discovery = Discovery(["host:1", "dns:decode:2"], resolve=dns, timeout_s=1.0)
    assert discovery.fixed == ("host:1",)
    assert await discovery.look() == {"host:1", "10.0.0.1:2"}
    assert dns.asked == ["decode"]


async def test_addresses_follow_the_name() -> None:
    dns = Dns(decode=["10.0.0.1", "10.0.0.2"])
    discovery = Discovery(["dns:decode:1"], resolve=dns, timeout_s=1.0)
    await discovery.look()
    dns.answers["decode"] = ["10.0.0.3", "10.0.0.2"]
    assert await discovery.look() == {"10.0.0.2:1", "10.0.0.3:1"}


async def test_a_name_that_fails_keeps_the_addresses_that_it_had() -> None:
    dns = Dns(decode=["10.0.0.1"])
    discovery = Discovery(["dns:decode:1"], resolve=dns, timeout_s=1.0)
    await discovery.look()
    del dns.answers["decode"]
    assert await discovery.look() == {"10.0.0.1:1"}


async def test_a_name_that_does_not_exist_yet_has_no_workers_and_harms_no_other() -> None:
    dns = Dns(old=["10.0.0.1"])
    discovery = Discovery(["dns:new:1", "dns:old:1"], resolve=dns, timeout_s=1.0)
    assert await discovery.look() == {"10.0.0.1:1"}


async def test_a_resolver_that_never_answers_is_given_up() -> None:
    async def hang(host: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    discovery = Discovery(["dns:decode:1"], resolve=hang, timeout_s=0.01)
    assert await discovery.look() == frozenset()


async def test_addresses_of_the_newer_family_are_bracketed() -> None:
    discovery = Discovery(["dns:decode:1"], resolve=Dns(decode=["fd00::1"]), timeout_s=1.0)
    assert await discovery.look() == {"[fd00::1]:1"}


async def test_the_system_knows_this_machine() -> None:
    assert "127.0.0.1" in await resolve_host("127.0.0.1")


@pytest.mark.parametrize("text", ["dns:decode", "dns::1", "dns:decode:http", "dns:decode:70000"])
def test_what_names_no_port_or_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give dns:host:port"):
        WorkerName.parse(text)
