"""From settings to the frozen configurations of the services. Knows both; imports the services' only when asked, because
workers bring torch with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.checkpoint.folder import checkpoint_folder, model_name, tokenizer_folder
from services.cli.sections import WorkerSection
from services.cli.settings import AllSettings

if TYPE_CHECKING:
    from common.engine.settings import EngineSettings
    from common.telemetry.tracing import TracingConfig
    from common.transfer.config import TransferConfig
    from services.decode.config import DecodeConfig
    from services.prefill.config import PrefillConfig
    from services.router.config import RouterConfig


def router_config(settings: AllSettings) -> RouterConfig:
    from services.router.config import QueueConfig, RouterConfig

    router = settings.router
    return RouterConfig(
        host=router.host,
        port=router.port,
        admin_port=router.admin_port,
        metrics_compat=settings.metrics_compat,
        prefill_addresses=router.prefill_workers,
        decode_addresses=router.decode_workers,
        checkpoint_dir=tokenizer_folder(settings.model),
        model=model_name(settings.model),
        request_timeout_s=router.request_timeout_s,
        drain_timeout_s=settings.shutdown_s,
        queue=QueueConfig(max_queued=router.max_queued, queue_timeout_s=router.queue_timeout_s),
    )


def prefill_config(settings: AllSettings) -> PrefillConfig:
    from common.transfer.faults import FaultPlan
    from services.prefill.config import HandoffConfig, PrefillConfig

    prefill = settings.prefill
    return PrefillConfig(
        host=prefill.host,
        port=prefill.port,
        model=model_name(settings.model),
        engine=engine_settings(settings, prefill),
        transfer=transfer_config(settings),
        admin_port=prefill.admin_port,
        metrics_compat=settings.metrics_compat,
        advertise_host=prefill.advertise_host,
        handoff=HandoffConfig(
            transfer_timeout_s=prefill.transfer_timeout_s,
            min_transfer_mb_per_s=prefill.min_transfer_mb_per_s,
            lease_s=prefill.lease_s,
            sends_drafter_state=prefill.sends_drafter_state,
        ),
        faults=FaultPlan.parse(prefill.faults),
        admin_key_file=settings.admin.key_file,
        stall_s=prefill.stall_s,
        dead_s=prefill.dead_s,
        drain_s=settings.shutdown_s,
    )


def decode_config(settings: AllSettings) -> DecodeConfig:
    from services.decode.config import DecodeConfig

    decode = settings.decode
    return DecodeConfig(
        host=decode.host,
        port=decode.port,
        model=model_name(settings.model),
        engine=engine_settings(settings, decode),
        transfer=transfer_config(settings),
        admin_port=decode.admin_port,
        metrics_compat=settings.metrics_compat,
        computes_prompts=decode.computes_prompts,
        reservation_s=decode.reservation_s,
        admin_key_file=settings.admin.key_file,
        stall_s=decode.stall_s,
        dead_s=decode.dead_s,
        drain_s=settings.shutdown_s,
    )


def tracing_config(settings: AllSettings) -> TracingConfig:
    from common.telemetry.tracing import TracingConfig

    tracing = settings.tracing
    return TracingConfig(endpoint=tracing.endpoint, sample_ratio=tracing.sample_ratio)


def transfer_config(settings: AllSettings) -> TransferConfig:
    from common.transfer.config import TransferConfig

    transfer = settings.transfer
    return TransferConfig(
        engine=transfer.engine,
        host=transfer.host,
        protocol=transfer.protocol,
        connect_timeout_s=transfer.connect_timeout_s,
    )


def engine_settings(settings: AllSettings, worker: WorkerSection) -> EngineSettings:
    from common.engine.settings import EngineSettings, Rendezvous
    from common.parallel.mesh import MeshShape

    engine, mesh, rendezvous = settings.engine, worker.mesh, worker.rendezvous
    return EngineSettings(
        checkpoint_dir=checkpoint_folder(settings.model),
        dtype=engine.dtype,
        device=engine.device,
        quantization=engine.quantization,
        memory_fraction=engine.memory_fraction,
        mesh=MeshShape(dp=mesh.dp, tp=mesh.tp, ep=mesh.ep),
        rendezvous=Rendezvous(
            address=rendezvous.address,
            num_nodes=rendezvous.num_nodes,
            node_rank=rendezvous.node_rank,
            timeout_s=rendezvous.timeout_s,
            start_timeout_s=rendezvous.start_timeout_s,
        ),
        checks_replicas=mesh.check_replicas,
        num_slots=worker.num_slots,
        num_pages=worker.num_pages,
        draft_length=engine.draft_length,
        speculate=engine.speculate,
        max_context_length=engine.max_context_length,
        max_step_rows=worker.max_step_rows,
        max_uncommitted_rounds=engine.max_uncommitted_rounds,
        slow_storage_mb_per_s=engine.slow_storage_mb_per_s,
    )
