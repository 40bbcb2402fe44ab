"""The names of all metrics, and the figures of one process. Knows names and labels; not where the numbers come from.

One class per kind of process; a file per noun. `docs/metrics.md` is written from here.
"""

from __future__ import annotations

from common.telemetry.compat import Compat
from common.telemetry.metrics.families import Families, process_registry
from common.telemetry.metrics.load import RoleMetrics
from common.telemetry.metrics.process import ProcessMetrics
from common.telemetry.metrics.router import RequestMetrics, RoutingMetrics
from common.telemetry.metrics.spec_decode import SpecDecodeMetrics
from common.telemetry.metrics.transfer import TransferMetrics
from common.telemetry.metrics.vllm import VllmAliases
from common.telemetry.metrics.worker import EngineMetrics

__all__ = ["RouterMetrics", "TransferMetrics", "WorkerMetrics"]


class RouterMetrics:
    """All metrics of one router, with a registry of their own."""

    def __init__(self, *, model: str, compat: Compat = "none") -> None:
        self.registry = process_registry()
        own = Families(self.registry, model=model, role="router")
        # What tells of workers has their role; what tells of requests has none.
        families = Families(self.registry, model=model)
        self.process = ProcessMetrics(own)
        self.requests = RequestMetrics(families)
        self.routing = RoutingMetrics(families)
        self.roles = RoleMetrics(families)
        self.families = (*own.declared, *families.declared)
        if compat == "vllm":
            self.registry.register(VllmAliases(families))


class WorkerMetrics:
    """All metrics of one worker, with a registry of their own: the same families with the same labels for both roles."""

    def __init__(self, *, model: str, role: str, compat: Compat = "none") -> None:
        self.registry = process_registry()
        families = Families(self.registry, model=model, role=role)
        self.process = ProcessMetrics(families)
        self.engine = EngineMetrics(families)
        self.spec_decode = SpecDecodeMetrics(families)
        self.transfer = TransferMetrics(families)
        self.families = tuple(families.declared)
        if compat == "vllm":
            self.registry.register(VllmAliases(families))
