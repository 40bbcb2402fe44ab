"""A prefill and a decode worker with fake engines that are to meet, and what they have counted of it."""

from __future__ import annotations

from typing import Any

from common.kv_cache.layout import CacheLayout
from common.transfer.config import TransferConfig
from dspark.v1 import prefill_service_pb2
from tests.support import figures
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import Cluster, a_context
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

LAYOUT = small_layout()
NIXL = TransferConfig(engine="nixl", connect_timeout_s=WAIT_S)
GRPC = TransferConfig(engine="grpc")
AUTO = TransferConfig(engine="auto", connect_timeout_s=WAIT_S)


def workers(layout: CacheLayout = LAYOUT) -> tuple[Any, Any]:
    return loaded(FakeEngine(layout)), loaded(FakeEngine(LAYOUT))


async def connect(it: Cluster, generation: str | None = None) -> Any:
    """As a router does."""
    request = prefill_service_pb2.ConnectRequest(
        decode_address=it.decode_address,
        decode_generation=it.decode.identity.generation if generation is None else generation,
    )
    return await it.prefill_stub.Connect(request, timeout=WAIT_S)


async def hand_over(it: Cluster, request_id: str = "r") -> str:
    """The engine by which a request's state went."""
    context, stream = a_context(140, request_id=request_id), it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    _, done = await it.hand_over(context, reserved)
    await stream.next("admitted")
    await stream.abort(context)
    await stream.skip_to("finished")
    return str(done.transfer_engine)


def figure(it: Cluster, name: str, **labels: str) -> float:
    return figures.figure(it.prefill.metrics.registry, f"dspark_kv_{name}", **labels)


def decode_figure(it: Cluster, name: str, **labels: str) -> float:
    return figures.figure(it.decode.metrics.registry, f"dspark_kv_{name}", **labels)


def meetings(it: Cluster) -> dict[str, float]:
    kinds = ("warm", "cold", "again")
    counts = {kind: figure(it, "pair_meetings_total", kind=kind) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}
