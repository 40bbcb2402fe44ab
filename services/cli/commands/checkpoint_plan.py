"""`dspark checkpoint plan`: memory per rank on a mesh, and the context and batch that fit."""

from __future__ import annotations

from common.checkpoint.contract import check_contract
from common.checkpoint.contract_report import ContractReport
from common.checkpoint.plan import CacheFormat, MemoryPlan, PlanRequest, make_plan
from common.checkpoint.weight_bytes import WeightsHeld
from common.parallel.mesh import MeshShape
from services.cli.checkpoint_settings import PlanSettings
from services.cli.checkpoints import checkpoint_failures, gib, open_checkpoint, show
from services.cli.failures import EXIT_OK


def run(settings: PlanSettings) -> int:
    opened = open_checkpoint(settings.checkpoint)
    with checkpoint_failures():
        mesh = MeshShape(dp=settings.dp, tp=settings.tp, ep=settings.ep)
    request = PlanRequest(
        mesh=mesh,
        device_bytes=int(settings.device_gib * 2**30),
        utilization=settings.utilization,
        cache=CacheFormat(settings.cache),
        weights=WeightsHeld(settings.weights),
        draft_length=settings.draft_length,
        context_length=settings.context_length,
    )
    with checkpoint_failures():
        plan = make_plan(opened.config, opened.headers, opened.format, request)
    report = check_contract(opened.config, opened.headers)
    as_json = settings.output == "json"
    show(_json(plan, report) if as_json else _text(plan, report), settings.output)
    return EXIT_OK


def _text(plan: MemoryPlan, report: ContractReport) -> dict[str, object]:
    mesh, request = plan.request.mesh, plan.request
    ranks = f"{mesh.num_ranks} rank{'s' if mesh.num_ranks > 1 else ''}"
    fits = plan.longest_context > 0
    figures: dict[str, object] = {
        "mesh": f"dp {mesh.dp} x tp {mesh.tp}, ep {mesh.ep}: {ranks} of {gib(request.device_bytes)}",
        "usable per rank": f"{gib(plan.usable_bytes)} ({request.utilization:.0%})",
        "weights": f"{gib(plan.weight_bytes)} per rank, {request.weights.value}",
        "  experts": f"{gib(plan.expert_bytes)} of it",
        "  drafter": f"{gib(plan.drafter_weight_bytes)} of it",
        "tables": gib(plan.table_bytes),
        "left for caches": gib(plan.free_bytes),
        "page": f"{plan.page_bytes:,} bytes for 128 tokens, {plan.token_bytes:,.2f} bytes per token ({request.cache.value})",
        "rings": f"{plan.ring_bytes / 2**20:.2f} MiB per request",
        "drafter rings": f"{plan.drafter_bytes / 2**10:.0f} KiB per request",
        "longest context": f"{plan.longest_context:,} tokens"
        if fits
        else "none: the weights leave no room; more ranks share them",
        "largest batch": f"{plan.largest_batch:,} requests of {plan.batch_context:,} tokens on all ranks together",
        "  pages": f"{gib(plan.batch_page_bytes)} per rank then",
        "  rings": f"{plan.batch_ring_bytes / 2**20:.2f} MiB per rank",
        "  drafter rings": f"{plan.batch_drafter_bytes / 2**20:.2f} MiB per rank",
    }
    if mesh.num_ranks > 1:
        figures["  host memory"] = (
            f"{gib(plan.host_bytes)} of the first node: its first rank copies the cache of all groups there"
        )
    if not report.is_met:
        figures["note"] = (
            f"this checkpoint cannot be served: {report.summary()} (see dspark checkpoint validate); planned is what its "
            "config.json asks for"
        )
    return figures


def _json(plan: MemoryPlan, report: ContractReport) -> dict[str, object]:
    mesh = plan.request.mesh
    return {
        "dp": mesh.dp,
        "tp": mesh.tp,
        "ep": mesh.ep,
        "usable_bytes": plan.usable_bytes,
        "weight_bytes": plan.weight_bytes,
        "expert_bytes": plan.expert_bytes,
        "drafter_weight_bytes": plan.drafter_weight_bytes,
        "table_bytes": plan.table_bytes,
        "token_bytes": plan.token_bytes,
        "page_bytes": plan.page_bytes,
        "ring_bytes": plan.ring_bytes,
        "drafter_bytes": plan.drafter_bytes,
        "longest_context": plan.longest_context,
        "batch_context": plan.batch_context,
        "largest_batch": plan.largest_batch,
        "batch_page_bytes": plan.batch_page_bytes,
        "batch_ring_bytes": plan.batch_ring_bytes,
        "batch_drafter_bytes": plan.batch_drafter_bytes,
        "host_bytes": plan.host_bytes,
        "is_contract_met": report.is_met,
        "contract_summary": report.summary(),
    }
