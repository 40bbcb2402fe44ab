"""Router, prefill and decode as processes, with their metrics' addresses. Knows commands; asks nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.cli.deployment import Deployment
from services.cli.ports import free_ports
from services.cli.settings import AllSettings
from services.cli.timeline import Timeline
from tools.observe.prometheus import Target

ROLES = ("router", "prefill", "decode")
NAMESPACE = "observed"
READY_S = 180.0
STOP_S = 15.0

NUM_SLOTS = 2
"""Fewer than there are clients, so that requests wait for a place."""
QUEUE_S = 240.0
FAULTS = "fail:5," + ",".join(f"corrupt:{write}" for write in range(12, 60, 8))
"""A few writes of the prefill worker go wrong, so that the figures of failures move; no client sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where a running cluster answers."""

    address: str
    targets: tuple[Target, ...]


@contextlib.asynccontextmanager
async def running_cluster(model: str) -> AsyncIterator[Cluster]:
    """One router, one prefill and one decode worker; all gone at the end. Raises a Failure that says why there is none."""
    ports = dict(zip(ROLES, free_ports("127.0.0.1", len(ROLES)), strict=True))
    settings = AllSettings.model_validate(
        {
            "model": model,
            "metrics_compat": "vllm",
            "router": {
                "port": 0,
                "admin_port": ports["router"],
                "queue_timeout_s": QUEUE_S,
            },
            "prefill": {"admin_port": ports["prefill"], "faults": FAULTS},
            "decode": {"admin_port": ports["decode"], "num_slots": NUM_SLOTS},
            "log": {"level": "warning"},
        }
    )
    deployment = await Deployment.start(settings, Timeline())
    try:
        address = await deployment.ready(READY_S)
        targets = tuple(
            Target(address=f"127.0.0.1:{port}", labels={"namespace": NAMESPACE, "pod": f"{role}-0"})
            for role, port in ports.items()
        )
        yield Cluster(address=address, targets=targets)
    finally:
        await deployment.stop(STOP_S)
