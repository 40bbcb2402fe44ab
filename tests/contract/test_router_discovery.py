"""Workers that come and go under a DNS name, over sockets; every address of 127.0.0.0/8 is this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from common.telemetry.metrics import RouterMetrics
from services.router import RouterConfig, WorkerConfig
from services.router.policy import WorkerState
from services.router.workers import WorkerDirectory
from tests.support.fake_workers import FakeDecode, FakePrefill, Seen, serving
from tests.support.router_cluster import router_config

SEQUENCE = list(range(40, 60))


class Dns:
    def __init__(self) -> None:
        self.hosts: dict[str, list[str]] = {"prefill": [], "decode": []}
        self._num_asked = 0
        self._seen = Seen()

    async def __call__(self, host: str) -> list[str]:
        self._num_asked += 1
        self._seen.note()
        return self.hosts[host]

    async def asked_again(self) -> None:
        """What was known before was acted on: each name is asked again after that."""
        enough = self._num_asked + 2 * len(self.hosts) + 1
        await self._seen.until(lambda: self._num_asked >= enough, timeout_s=20)


class Following:
    """A directory that follows two names, and a wait for what it comes to know."""

    def __init__(self, config: RouterConfig, dns: Dns) -> None:
        self._changed = asyncio.Event()
        metrics = RouterMetrics(model=config.model).routing
        self.directory = WorkerDirectory(config, metrics=metrics, on_change=self._note, resolve=dns)

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_true():
                self._changed.clear()
                await self._changed.wait()

    def hosts(self, role: str) -> dict[str, WorkerState]:
        workers = self.directory.decode if role == "decode" else self.directory.prefill
        return {worker.address.rpartition(":")[0]: worker.load().state for worker in workers}

    def _note(self) -> None:
        self._changed.set()


@pytest.fixture
def dns() -> Dns:
    return Dns()


@contextlib.asynccontextmanager
async def following(
    tmp_path: Path, dns: Dns, *, prefill_port: int, decode_port: int
) -> AsyncIterator[Following]:
    config = replace(
        router_config(tmp_path),
        prefill_addresses=(f"dns:prefill:{prefill_port}",),
        decode_addresses=(f"dns:decode:{decode_port}",),
        workers=WorkerConfig(poll_period_s=0.02, poll_timeout_s=1.0, discovery_period_s=0.02),
    )
    following = Following(config, dns)
    watching = asyncio.create_task(following.directory.watch())
    try:
        yield following
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def test_workers_are_found_met_and_forgotten_with_their_addresses(
    tmp_path: Path, dns: Dns
) -> None:
    prefill, first, second = FakePrefill(SEQUENCE), FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)
    second.generation = "decode-2"
    async with contextlib.AsyncExitStack() as stack:
        prefill_server = await stack.enter_async_context(serving(prefill))
        first_server = await stack.enter_async_context(serving(first))
        prefill_port, decode_port = (
            int(server.address.rpartition(":")[2]) for server in (prefill_server, first_server)
        )
        system = await stack.enter_async_context(
            following(tmp_path, dns, prefill_port=prefill_port, decode_port=decode_port)
        )
        assert not system.directory.is_ready

        dns.hosts = {"prefill": ["127.0.0.1"], "decode": ["127.0.0.1"]}
        await system.until(lambda: system.directory.is_ready)
        await prefill.seen.until(lambda: len(prefill.connects) == 1)

        async with serving(second, decode_port, host="127.0.0.2"):
            dns.hosts["decode"] = ["127.0.0.1", "127.0.0.2"]
            await system.until(lambda: system.hosts("decode").get("127.0.0.2") is WorkerState.READY)
            await prefill.seen.until(lambda: len(prefill.connects) == 2)

            # Without a name but with an answer: a pod that drains, with its requests.
            dns.hosts["decode"] = ["127.0.0.1"]
            second.draining = True
            await system.until(
                lambda: system.hosts("decode").get("127.0.0.2") is WorkerState.DRAINING
            )
        await system.until(lambda: set(system.hosts("decode")) == {"127.0.0.1"})
        assert system.directory.is_ready


async def test_a_worker_that_carries_a_request_is_kept_until_the_request_has_ended(
    tmp_path: Path, dns: Dns
) -> None:
    dns.hosts["decode"] = ["127.0.0.1"]
    async with contextlib.AsyncExitStack() as stack:
        async with serving(FakeDecode(SEQUENCE)) as server:
            port = int(server.address.rpartition(":")[2])
            system = await stack.enter_async_context(
                following(tmp_path, dns, prefill_port=port, decode_port=port)
            )
            await system.until(lambda: system.hosts("decode") == {"127.0.0.1": WorkerState.READY})
            lost: list[str] = []
            carried = contextlib.ExitStack()
            (decode,) = system.directory.decode
            carried.enter_context(decode.carrying(1, lambda error: lost.append(error.message)))
            dns.hosts["decode"] = []
        await system.until(lambda: decode.state is WorkerState.UNREACHABLE)
        assert len(lost) == 1
        await dns.asked_again()
        assert system.directory.decode == [decode]
        carried.close()
        await system.until(lambda: system.directory.decode == [])


async def test_a_new_model_is_served_once_the_old_models_workers_are_forgotten(
    tmp_path: Path, dns: Dns
) -> None:
    old, new = FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)
    old.computes_prompt = new.computes_prompt = True
    new.fingerprint = "model-b"
    dns.hosts["decode"] = ["127.0.0.1"]
    async with contextlib.AsyncExitStack() as stack:
        leaving = contextlib.AsyncExitStack()
        port = int((await leaving.enter_async_context(serving(old))).address.rpartition(":")[2])
        await stack.enter_async_context(serving(new, port, host="127.0.0.2"))
        system = await stack.enter_async_context(
            following(tmp_path, dns, prefill_port=port, decode_port=port)
        )
        await system.until(lambda: system.hosts("decode") == {"127.0.0.1": WorkerState.READY})
        assert system.directory.model().fingerprint == "model-a"
        dns.hosts["decode"] = ["127.0.0.1", "127.0.0.2"]
        await system.until(
            lambda: (
                len(system.hosts("decode")) == 2
                and system.hosts("decode")["127.0.0.2"] is WorkerState.READY
            )
        )
        assert system.directory.model().fingerprint == "model-a"
        dns.hosts["decode"] = ["127.0.0.2"]
        await leaving.aclose()
        await system.until(lambda: list(system.hosts("decode")) == ["127.0.0.2"])
        assert system.directory.model().fingerprint == "model-b"
