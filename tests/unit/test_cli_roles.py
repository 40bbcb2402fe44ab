"""What a process does between its start-up and its first request, and when one that only has ranks ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from common.engine import mesh_start
from common.errors import WorkerLost
from services.cli.roles import run_decode, run_prefill, settle
from services.cli.settings import AllSettings
from tests.support.waiting import WAIT_S, until


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


class Cycle:
    """Only a collection can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_settled_process_keeps_what_start_up_left_out_of_later_collections() -> None:
    kept = Cycle()
    settle()
    assert gc.get_freeze_count() > 10_000
    assert not any(each is kept for each in gc.get_objects())


def test_what_comes_after_start_up_is_collected_as_ever() -> None:
    settle()
    freed: list[bool] = []

    class Late(Cycle):
        def __del__(self) -> None:
            freed.append(True)

    Late()
    gc.collect()
    assert freed == [True]


class Ranks:
    """The ranks of a second node, ended by the test where the first node would end them."""

    def __init__(self) -> None:
        self.was_killed = False
        self.is_waited_for = threading.Event()
        self._ended = threading.Event()
        self._code = 0

    def end(self, code: int = 0) -> None:
        self._code = code
        self._ended.set()

    def wait(self) -> int:
        self.is_waited_for.set()
        assert self._ended.wait(WAIT_S)
        return self._code

    def kill(self) -> None:
        self.was_killed = True
        self.end(-9)

    def why_lost_now(self) -> str | None:
        return "rank 3 of 4 failed: why" if self._code > 0 else None


class Stop(asyncio.Event):
    """Tells, too, when it was noticed."""

    was_noticed = False

    async def wait(self) -> bool:  # type: ignore[override]
        await super().wait()
        self.was_noticed = True
        return True


def second_node(role: str, shutdown_s: float) -> AllSettings:
    rendezvous = {"num_nodes": 2, "node_rank": 1, "address": "10.0.0.1:5000"}
    sections = {role: {"mesh": {"tp": 4}, "rendezvous": rendezvous}}
    return AllSettings(shutdown_s=shutdown_s, **sections)  # type: ignore[arg-type]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    with mock.patch.object(mesh_start, "start_node", return_value=ranks):
        yield ranks


async def begun(role: str, ranks: Ranks, stop: Stop, shutdown_s: float) -> asyncio.Task[None]:
    run = run_decode if role == "decode" else run_prefill
    task = asyncio.create_task(run(second_node(role, shutdown_s), lambda event: None, stop))
    await until(ranks.is_waited_for.is_set)
    stop.set()
    await until(lambda: stop.was_noticed)
    return task


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stopped_node_without_service_lives_until_the_first_node_ends_its_ranks(
    role: str, ranks: Ranks
) -> None:
    """Guards a former bug: it killed its ranks at once, and the first node lost the requests that it drained."""
    task = await begun(role, ranks, Stop(), shutdown_s=WAIT_S)
    ranks.end()
    await asyncio.wait_for(task, WAIT_S)
    assert not ranks.was_killed


async def test_ranks_that_no_first_node_ends_in_time_are_killed(ranks: Ranks) -> None:
    task = await begun("decode", ranks, Stop(), shutdown_s=0.01)
    await asyncio.wait_for(task, WAIT_S)
    assert ranks.was_killed


async def test_a_rank_that_fails_while_its_node_stops_is_named(ranks: Ranks) -> None:
    task = await begun("decode", ranks, Stop(), shutdown_s=WAIT_S)
    ranks.end(1)
    with pytest.raises(WorkerLost, match="rank 3 of 4 failed: why"):
        await asyncio.wait_for(task, WAIT_S)
    assert not ranks.was_killed
