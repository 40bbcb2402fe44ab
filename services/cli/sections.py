"""The sections of settings, one for each part of a command. Knows names, defaults and bounds; not what is done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from common.config import CommaSeparated, Section
from common.telemetry.logging import Format, Level
from common.transfer.config import EngineChoice
from common.transfer.faults import FaultPlan

ROUTER_PORT = 50051
PREFILL_PORT = 50052
DECODE_PORT = 50053


class LogSection(Section):
    """Log lines on standard error; prompts are never among them."""

    level: Level = "info"
    format: Format = Field(default="auto", description="auto: text on a terminal, JSON elsewhere")


class TracingSection(Section):
    """One trace a request through all services, sent to an OpenTelemetry collector."""

    endpoint: str = Field(
        default="",
        description="where the collector takes OTLP over gRPC, such as http://collector:4317; nothing is traced if not "
        "given",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the requests that are traced; one whose client traces it is traced always",
    )


class AdminSection(Section):
    """What only those who run the system may ask, such as a profile."""

    key_file: Path | None = Field(
        default=None,
        description="file with the key that workers ask for, and that `dspark profile` shows them; nobody may if not "
        "given",
    )


class EngineSection(Section):
    """What all workers of a deployment have in common."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    quantization: Literal["dequantize", "native", "w8a8"] = Field(
        default="dequantize",
        description="what becomes of matrices that the checkpoint stores quantised. dequantize: values on load. native: they "
        "stay as stored and are dequantised while they are used, which takes a half or a quarter of the memory and more time "
        "for every product. w8a8: the same, but INT8 and FP8 matrices multiply activations quantised to 8 bits, as W8A8 "
        "checkpoints are made for; other results within the error of 8 bits",
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of a device's memory for weights and caches, from which pages are sized; 0.9 of an "
        "accelerator's if not given, and on a CPU all slots at the longest context",
    )
    max_context_length: int | None = Field(
        default=None,
        ge=128,
        description="prompt plus completion; the model's own limit if not given",
    )
    max_uncommitted_rounds: int = Field(
        default=2, ge=1, description="rounds that a request may run ahead of its client"
    )
    speculate: bool = Field(default=True, description="draft tokens and verify several at once")
    draft_length: int | None = Field(
        default=None,
        ge=1,
        le=63,
        description="tokens drafted per round; the checkpoint's own if not given",
    )
    slow_storage_mb_per_s: float = Field(
        default=500.0,
        ge=0,
        description="warn while weights load from storage that gives fewer 10^6 bytes per second; 0 never does",
    )


ADMIN_PORT: Any = Field(
    default=0,
    ge=0,
    le=65535,
    description="where metrics and probes are served over HTTP, counted up for further workers; 0 serves none",
)


class MeshSection(Section):
    """Ranks that are one worker together: dp groups of tp ranks."""

    dp: int = Field(default=1, ge=1, description="groups with requests of their own")
    tp: int = Field(default=1, ge=1, description="ranks that share the work of a group's requests")
    ep: int = Field(
        default=1,
        ge=1,
        description="ranks over which experts are spread: all of them, or 1 for every group to have all experts",
    )
    check_replicas: bool = Field(
        default=False,
        description="compare the caches of a group's ranks after every step, which is slow; to find faults",
    )


class RendezvousSection(Section):
    """Where the ranks of a mesh meet when they are on several machines."""

    address: str = Field(
        default="",
        description="host:port of the first machine; a free port of this one if not given",
    )
    num_nodes: int = Field(default=1, ge=1, description="machines, with equally many ranks each")
    node_rank: int = Field(
        default=0, ge=0, description="this machine's number; 0 has the service, others only ranks"
    )
    timeout_s: float = Field(
        default=60.0, gt=0, description="a rank that takes no part in a step for so long is lost"
    )
    start_timeout_s: float = Field(
        default=600.0, gt=0, description="ranks that have not loaded their weights by then are lost"
    )


class WorkerSection(Section):
    """One worker."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 takes a free one")
    threads: int | None = Field(
        default=None,
        ge=1,
        description="cores to compute with; all of them divided by the workers if not given",
    )
    mesh: MeshSection = Field(default_factory=MeshSection)
    rendezvous: RendezvousSection = Field(default_factory=RendezvousSection)
    num_slots: int = Field(default=16, ge=1, description="requests that may hold state at once")
    num_pages: int | None = Field(
        default=None,
        ge=1,
        description="cache pages of 128 tokens; all slots at the longest context if not given",
    )
    max_step_rows: int = Field(default=512, ge=1, description="tokens computed in one step")
    stall_s: float = Field(
        default=30.0, gt=0, description="a step that takes longer makes the worker not ready"
    )
    dead_s: float = Field(
        default=120.0, gt=0, description="a step that takes longer fails the liveness probe"
    )
    admin_port: int = ADMIN_PORT


class TransferSection(Section):
    """How cache rows travel from prefill to decode workers."""

    engine: EngineChoice = Field(
        default="auto",
        description="where both sides have it; gRPC is what is left. auto: the fastest that is installed",
    )
    host: str = Field(
        default="",
        description="where peers reach this machine's memory, for Mooncake; the worker's host if not given",
    )
    protocol: str = Field(default="tcp", description="Mooncake's: tcp, rdma or ascend")
    connect_timeout_s: float = Field(
        default=3.0,
        gt=0,
        description="a peer to which a few bytes take longer is written to by a slower engine",
    )


class PrefillSection(WorkerSection):
    """The prefill worker."""

    port: int = Field(default=PREFILL_PORT, ge=0, le=65535, description="0 takes a free one")
    advertise_host: str = Field(
        default="",
        description="where decode workers reach this one; the host, or the machine's name, if not given",
    )
    lease_s: float = Field(
        default=30.0,
        ge=0,
        description="how long handed-over state is kept for another decode worker; routers renew it while its request runs",
    )
    transfer_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="a write that has not arrived by then is given up and its request placed again; larger writes have more "
        "time, as min_transfer_mb_per_s says",
    )
    min_transfer_mb_per_s: float = Field(
        default=10.0,
        gt=0,
        description="a write has as many more seconds as its bytes take at so many 10^6 bytes per second",
    )
    sends_drafter_state: bool = Field(
        default=True,
        description="hand the drafter's rows over; without them decode drafts only after its own first tokens, which shows "
        "what they are worth",
    )
    faults: str = Field(
        default="",
        description="writes that go wrong on purpose, for drills: kind:write,kind:write:value with kinds fail, delay, "
        "drop, duplicate, corrupt, stall and die",
    )

    @field_validator("faults")
    @classmethod
    def _require_faults(cls, text: str) -> str:
        FaultPlan.parse(text)
        return text


class DecodeSection(WorkerSection):
    """The decode worker."""

    port: int = Field(default=DECODE_PORT, ge=0, le=65535, description="0 takes a free one")
    computes_prompts: bool = Field(
        default=False, description="compute prompts too, so that no prefill worker is needed"
    )
    reservation_s: float = Field(
        default=30.0, gt=0, description="a reservation that nothing is heard of for so long ends"
    )


class RouterSection(Section):
    """The router."""

    host: str = "127.0.0.1"
    port: int = Field(default=ROUTER_PORT, ge=0, le=65535, description="0 takes a free one")
    prefill_workers: CommaSeparated = Field(
        default=(f"127.0.0.1:{PREFILL_PORT}",),
        description="host:port,host:port; dns:host:port is every address of a name",
    )
    decode_workers: CommaSeparated = Field(
        default=(f"127.0.0.1:{DECODE_PORT}",),
        description="host:port,host:port; dns:host:port is every address of a name",
    )
    admin_port: int = ADMIN_PORT
    request_timeout_s: float = Field(
        default=1800.0, gt=0, description="longest life of a request, whatever its client allows"
    )
    max_queued: int = Field(default=1024, ge=1, description="requests that may wait for a place")
    queue_timeout_s: float = Field(
        default=60.0, gt=0, description="a request that found no place for so long is refused"
    )


class UpSection(Section):
    """A whole deployment on this machine."""

    prefills: int = Field(
        default=1, ge=0, le=64, description="prefill workers; with 0 decode workers compute prompts"
    )
    decodes: int = Field(default=1, ge=1, le=64, description="decode workers")
    ready_timeout_s: float = Field(
        default=300.0, gt=0, description="give up when not ready by then"
    )


class SamplingSection(Section):
    """How tokens are drawn and when generation ends."""

    temperature: float = Field(default=0.0, ge=0, le=100, description="0 is greedy")
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="same seed, same text")
    max_tokens: int | None = Field(default=None, ge=1, description="as many as fit if not given")
    stop: tuple[str, ...] = Field(
        default=(), description="texts that end the answer, as a,b or as a JSON list"
    )
