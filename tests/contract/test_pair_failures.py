"""Two workers between which something failed are met again, whatever it was."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from common.errors import DeadlinePassed, PairUnknown, ServingError, TransferFailed, WorkerLost
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.pairs import (
    GRPC,
    NIXL,
    connect,
    figure,
    hand_over,
    meetings,
    workers,
)
from tests.support.refusals import ended, refusal
from tests.support.transfer_engines import engine_params


@pytest.mark.parametrize("engine", engine_params("nixl"))
async def test_a_failed_write_ends_its_request_and_the_pair_is_met_again(engine: str) -> None:
    async with cluster(*workers(), transfer=NIXL) as it:
        await connect(it)
        nixl = cast(Any, it.prefill.pairs.engines.by_name["nixl"])
        nixl._peers.clear()  # as if NIXL had said that the peer is disconnected
        assert isinstance(await failure_of_one(it), TransferFailed)
        await it.until(lambda: len(it.prefill.pairs) == 1)
        assert await hand_over(it, "r2") == "nixl"
        assert figure(it, "transfer_failures_total", reason="write_failed") == 1
        await it.require_clean()


@pytest.mark.parametrize("lost", [WorkerLost("gone"), DeadlinePassed("slow")])
async def test_a_stream_of_bytes_that_is_cut_has_the_pair_met_again(
    lost: ServingError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_cut(*_: Any) -> None:
        raise lost

    async with cluster(*workers(), transfer=GRPC) as it:
        await connect(it)
        with monkeypatch.context() as patch:
            patch.setattr(it.prefill.pairs.engines.by_name["grpc"], "_write", is_cut)
            assert isinstance(await failure_of_one(it), TransferFailed)
        await it.until(lambda: meetings(it) == {"warm": 1, "again": 1})
        assert await hand_over(it, "r2") == "grpc"


@pytest.mark.parametrize("is_unknown_first", [False, True])
async def test_a_negotiation_that_fails_has_the_pair_met_again(
    is_unknown_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever asks next whether the two can meet would be told that they have met, which was before."""
    refusals = [PairUnknown("another process")] if is_unknown_first else []
    failure = TransferFailed("not now")
    has_failed = asyncio.Event()

    def negotiate(*_: Any) -> Any:
        if refusals:
            raise refusals.pop()
        has_failed.set()
        raise failure

    async with cluster(*workers(), transfer=GRPC) as it:
        await connect(it)
        meet_really = it.decode.meetings.meet

        def meet(*introduction: Any) -> Any:
            if has_failed.is_set():
                raise failure
            return meet_really(*introduction)

        with monkeypatch.context() as patch:
            patch.setattr(it.decode.intake, "negotiate", negotiate)
            patch.setattr(it.decode.meetings, "meet", meet)
            assert isinstance(await failure_of_one(it), TransferFailed)
            assert "not now" in (await refusal(connect(it))).message
        assert await hand_over(it, "r2") == "grpc"


async def failure_of_one(it: Cluster) -> ServingError:
    """How a prefill ends that is not to end well."""
    context = a_context(140)
    error = await ended(it.start_prefill(context, await it.reserve(context)))
    assert error is not None
    return error
