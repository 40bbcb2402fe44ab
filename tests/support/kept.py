"""State that a prefill worker keeps under a lease, and a decode worker that has nothing of it. Not what becomes of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from common.rpc import convert
from common.transfer.engine import TransferEngine
from common.transfer.memory import PoolMemory
from common.types import RequestContext
from dspark.v1 import prefill_service_pb2
from tests.support import engines
from tests.support.engines import HeldEngine
from tests.support.fake_engine import FakeEngine, loaded, token_after
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

NUM_TOKENS = 200
NUM_PAGES = 2


@dataclass(kw_only=True)
class Kept:
    """A finished prefill under a lease, and a second pair of workers whose decode worker has nothing of it."""

    first: Cluster
    other: Cluster
    sink: FakeEngine
    """Of the other decode worker."""
    held: HeldEngine
    first_token: int
    lease_id: str

    def later(self, num_committed: int, *, epoch: int = 1) -> RequestContext:
        """The request when so many tokens were committed."""
        context = a_context(NUM_TOKENS, epoch=epoch)
        positions = range(NUM_TOKENS, NUM_TOKENS + num_committed)
        context.committed.extend(token_after(context.prompt[0], p) for p in positions)
        return context

    def ask(self, context: RequestContext, reserved: Any, *, lease_id: str | None = None) -> Any:
        request = prefill_service_pb2.HandOffRequest(
            lease_id=self.lease_id if lease_id is None else lease_id,
            context=convert.context_to_pb(context),
            ticket=prefill_service_pb2.DecodeTicket(
                decode_address=self.other.decode_address,
                reservation_id=reserved.reservation_id,
                capability=reserved.capability,
            ),
        )
        return self.first.prefill_stub.HandOff(request, timeout=WAIT_S)

    async def go_on(self, context: RequestContext) -> Any:
        """Hand the state to the other decode worker; its Admitted."""
        stream = self.other.stream()
        reserved = await self.other.reserve(context)
        await stream.admit(context, reserved)
        done = (await self.ask(context, reserved)).done
        assert done.lease_id == self.lease_id
        admitted = await stream.next("admitted")
        await self.first.until(lambda: bool(self.sink.adopted))
        assert self.sink.wrong_rows == []
        verified = await stream.next("verified")
        assert verified.base == len(context.tokens) + admitted.HasField("first_token_id")
        await stream.abort(context)
        await stream.skip_to("finished")
        return admitted


@contextlib.asynccontextmanager
async def kept(engine: str = "grpc") -> AsyncIterator[Kept]:
    layout = small_layout()
    source, sink = FakeEngine(layout), FakeEngine(layout, draft_length=7)
    wrapped: list[HeldEngine] = []

    def wrap(inner: TransferEngine, memory: PoolMemory) -> HeldEngine:
        wrapped.append(HeldEngine(inner))
        return wrapped[-1]

    with engines.using(engine, wrap):
        async with (
            cluster(loaded(source), loaded(FakeEngine(layout))) as first,
            cluster(loaded(FakeEngine(layout)), loaded(sink)) as other,
        ):
            context, stream = a_context(NUM_TOKENS), first.stream()
            reserved = await first.reserve(context)
            await stream.admit(context, reserved)
            token, done = await first.hand_over(context, reserved)
            stream.call.cancel()  # its decode worker is lost
            yield Kept(
                first=first,
                other=other,
                sink=sink,
                held=wrapped[0],
                first_token=token.token_id,
                lease_id=done.lease_id,
            )
            await first.require_clean()
            await other.require_clean()


async def info_of(it: Kept) -> Any:
    request = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
    return (await it.first.prefill_stub.GetWorkerInfo(request, timeout=WAIT_S)).info
