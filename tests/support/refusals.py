"""How calls end that are not to end well, and what a decode worker has counted of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from common.errors import ServingError
from common.rpc.status import error_of_call
from common.telemetry.metrics.transfer import REFUSALS
from tests.support import figures
from tests.support.handoff_cluster import Cluster


async def refusal(call: Any) -> ServingError:
    """How a call ended that has one answer and was to have none."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of_call(caught.value, peer="peer")


async def ended(call: Any) -> ServingError | None:
    """How a prefill call ended that is not expected to end well."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error_of_call(error, peer="prefill")
    except asyncio.CancelledError:
        return None
    raise AssertionError("the prefill ended well")


def refusals(it: Cluster) -> dict[str, float]:
    """What the decode worker has counted, by reason; nothing that is 0."""
    name = "dspark_kv_refusals_total"
    registry = it.decode.metrics.registry
    counts = {reason: figures.figure(registry, name, reason=reason) for reason in REFUSALS}
    return {reason: count for reason, count in counts.items() if count}
