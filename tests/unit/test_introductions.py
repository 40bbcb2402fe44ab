"""What a router knows of pairs that have met, and of those that have not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest

from dspark.v1 import prefill_service_pb2 as pb
from services.router import introductions
from services.router.introductions import Introductions
from services.router.policy import WorkerState
from tests.support.waiting import WAIT_S


class Worker:
    """A worker that can be met, or not."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.state = WorkerState.READY
        self.generation = "1"
        self.failure = ""
        self.status = grpc.StatusCode.UNAVAILABLE
        """What it fails with."""
        self.num_connects = 0

    async def connect(self, request: pb.ConnectRequest, timeout_s: float) -> pb.ConnectResponse:
        self.num_connects += 1
        if self.failure:
            raise grpc.aio.AioRpcError(
                self.status,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(),
                details=self.failure,
            )
        return pb.ConnectResponse(transfer_engine="fake")


class Router:
    """Introductions of one prefill worker to one decode worker."""

    def __init__(self) -> None:
        self.prefill, self.decode = Worker("prefill:1"), Worker("decode:1")
        self._changed = asyncio.Event()
        self.introductions = Introductions(self._changed.set)
        self.introductions.update([self.prefill], [self.decode])

    @property
    def has_failed(self) -> bool:
        return self.introductions.has_failed(self.prefill, self.decode)

    def why(self) -> str | None:
        return self.introductions.why_none_met([self.prefill], [self.decode])

    def doubt(self) -> None:
        self.introductions.doubt(self.prefill, self.decode)

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_true():
                await self._changed.wait()
                self._changed.clear()


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setattr(introductions, "FIRST_RETRY_S", 0.0)
    it = Router()
    await it.until(lambda: it.why() is None)
    yield it
    await it.introductions.close()


async def test_a_pair_that_is_doubted_counts_as_met_until_it_does_not_meet(router: Router) -> None:
    router.prefill.failure = "nothing arrived"
    router.doubt()
    assert router.why() is None
    await router.until(lambda: router.has_failed)
    why = router.why()
    assert why is not None
    assert "nothing arrived" in why
    router.prefill.failure = ""
    await router.until(lambda: router.why() is None)
    assert not router.has_failed


async def test_a_pair_that_is_just_meeting_is_not_met_twice_at_once(router: Router) -> None:
    router.doubt()
    router.doubt()
    await router.until(lambda: router.prefill.num_connects == 2)
    assert not router.has_failed


async def test_a_pair_of_which_one_has_left_is_not_met_again(router: Router) -> None:
    router.introductions.update([router.prefill], [])
    router.doubt()
    await asyncio.sleep(0)
    assert router.prefill.num_connects == 1
    assert not router.has_failed
    assert router.why() == "no prefill worker has met a decode worker yet"


async def test_a_pair_that_does_not_meet_is_tried_ever_slower_and_from_the_start_when_doubted(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 7:
            router.prefill.failure = ""

    monkeypatch.setattr(introductions, "FIRST_RETRY_S", 1.0)
    monkeypatch.setattr(introductions, "LONGEST_RETRY_S", 5.0)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    for _ in range(2):
        waits.clear()
        router.prefill.failure = "nothing arrived"
        router.doubt()
        await router.until(lambda: len(waits) == 7 and not router.has_failed)
        assert waits == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0]


async def test_hand_offs_that_go_on_failing_begin_no_more_introductions(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introductions, "FIRST_RETRY_S", WAIT_S)
    router.prefill.failure = "nothing arrived"
    router.doubt()
    await router.until(lambda: router.has_failed)
    for _ in range(10):
        router.doubt()
        await asyncio.sleep(0)
    assert router.prefill.num_connects == 2


async def test_an_older_prefill_worker_counts_as_met_when_it_is_doubted(router: Router) -> None:
    """It knows no introductions, and meets decode workers when it needs them."""
    router.prefill.failure, router.prefill.status = "no such method", grpc.StatusCode.UNIMPLEMENTED
    router.doubt()
    await router.until(lambda: router.prefill.num_connects == 2)
    assert not router.has_failed
    assert router.why() is None


async def test_a_pair_that_comes_back_is_met_anew_whatever_was_known(router: Router) -> None:
    router.prefill.failure = "nothing arrived"
    router.doubt()
    await router.until(lambda: router.has_failed)
    router.introductions.update([router.prefill], [])
    assert not router.has_failed
    assert router.why() == "no prefill worker has met a decode worker yet"
    router.prefill.failure = ""
    router.introductions.update([router.prefill], [router.decode])
    await router.until(lambda: router.why() is None)


async def test_a_pair_that_left_while_it_was_doubted_leaves_nothing_behind(router: Router) -> None:
    router.prefill.failure = "nothing arrived"
    router.doubt()
    await asyncio.sleep(0)
    router.introductions.update([router.prefill], [])
    for _ in range(3):
        await asyncio.sleep(0)
    assert not router.has_failed
    assert router.why() == "no prefill worker has met a decode worker yet"


async def test_nothing_is_begun_once_introductions_are_closed(router: Router) -> None:
    await router.introductions.close()
    router.doubt()
    await asyncio.sleep(0)
    assert router.prefill.num_connects == 1


async def test_nothing_is_known_of_another_process_at_the_same_address(router: Router) -> None:
    router.prefill.failure = "nothing arrived"
    router.doubt()
    await router.until(lambda: router.has_failed)
    router.decode.generation = "2"
    assert not router.has_failed
