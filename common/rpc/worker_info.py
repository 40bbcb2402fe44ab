"""What a worker says of itself. Knows the message; figures are handed in as numbers."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from importlib import metadata

from common.claims import RankMemory
from common.telemetry.metrics.process import ProcessMetrics
from dspark.v1 import worker_pb2

DISTRIBUTION = "dspark-serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMesh:
    """How a worker's ranks are arranged: `tp` of them in each of `dp` groups, experts spread over `ep`."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    device: str = "cpu"
    """Kind of device."""

    def __str__(self) -> str:
        return f"DP{self.dp} x TP{self.tp} EP{self.ep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What does not change while a worker process lives."""

    role: str
    model: str
    model_fingerprint: str
    max_context_length: int
    vocab_size: int
    draft_length: int
    num_pages: int
    num_slots: int
    mesh: WorkerMesh = field(default_factory=WorkerMesh)
    """Its data parallel groups have equal parts of pages and slots; a request fits into one part."""
    memory: tuple[RankMemory, ...] = ()
    """Of all ranks, in their order."""
    transfer_engines: tuple[str, ...]
    """Best first."""
    computes_prompts: bool = False
    generation: str = field(default_factory=lambda: secrets.token_hex(8))
    """Changes when the process restarts."""
    started_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """How full a worker is now."""

    num_free_pages: int
    num_free_slots: int
    queued_requests: int
    running_requests: int
    num_leases: int = 0
    num_quarantined_pages: int = 0
    draining: bool = False
    safe_to_delete: bool = False
    """Nothing is left of what a draining worker had."""
    details: dict[str, str] = field(default_factory=dict)
    """Figures by name, for people."""


def worker_info_to_pb(identity: WorkerIdentity, load: WorkerLoad) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        version=server_version(),
        role=identity.role,
        generation=identity.generation,
        model_fingerprint=identity.model_fingerprint,
        model=identity.model,
        max_context_length=identity.max_context_length,
        vocab_size=identity.vocab_size,
        draft_length=identity.draft_length,
        num_pages=identity.num_pages,
        num_free_pages=load.num_free_pages,
        num_slots=identity.num_slots,
        num_free_slots=load.num_free_slots,
        queued_requests=load.queued_requests,
        running_requests=load.running_requests,
        num_leases=load.num_leases,
        num_quarantined_pages=load.num_quarantined_pages,
        draining=load.draining,
        safe_to_delete=load.safe_to_delete,
        computes_prompts=identity.computes_prompts,
        uptime_s=time.monotonic() - identity.started_at,
        details=load.details,
        transfer_engines=identity.transfer_engines,
        mesh=_mesh_to_pb(identity.mesh),
        memory=[_memory_to_pb(memory) for memory in identity.memory],
    )


def _mesh_to_pb(mesh: WorkerMesh) -> worker_pb2.WorkerMesh:
    return worker_pb2.WorkerMesh(
        dp=mesh.dp, tp=mesh.tp, ep=mesh.ep, num_ranks=mesh.dp * mesh.tp, device=mesh.device
    )


def _memory_to_pb(memory: RankMemory) -> worker_pb2.RankMemory:
    return worker_pb2.RankMemory(
        rank=memory.rank,
        device=memory.device,
        claims=[
            worker_pb2.MemoryClaim(
                owner=claim.owner, kind=claim.kind.value, num_bytes=claim.num_bytes
            )
            for claim in memory.claims
        ],
    )


def describe(identity: WorkerIdentity, metrics: ProcessMetrics, **settings: object) -> None:
    """Say in metrics what does not change; `settings` are what the identity lacks."""
    metrics.describe_build(server_version())
    metrics.describe_config(
        {
            "max_context_length": identity.max_context_length,
            "draft_length": identity.draft_length,
            "num_pages": identity.num_pages,
            "num_slots": identity.num_slots,
            "transfer_engines": ",".join(identity.transfer_engines),
            "computes_prompts": identity.computes_prompts,
            "mesh": identity.mesh,
            "device": identity.mesh.device,
            **settings,
        }
    )


def server_version() -> str:
    """Version of the installed server package."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"  # run from a clone that was not installed
