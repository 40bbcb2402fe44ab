"""Messages of cache.proto and handoff_service.proto to the nouns of a hand-off and back. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InvalidRequest
from common.kv_cache.layout import DRAFTER_REGION, CacheLayout, Region, Retention
from common.rpc import convert
from common.transfer.handoff import (
    CacheContract,
    HandoffKey,
    HandoffOffer,
    HandoffResult,
    HandoffTerms,
)
from common.transfer.manifest import ManifestEntry
from common.transfer.meeting import Acquaintance, EngineDescriptor, Introduction
from common.transfer.plan import RegionMemory
from common.types import RequestId
from dspark.v1 import cache_pb2, handoff_service_pb2

_RETENTION_TO_PB = {
    Retention.PAGED: cache_pb2.RETENTION_PAGED,
    Retention.RING: cache_pb2.RETENTION_RING,
}
_RETENTION_FROM_PB = {value: key for key, value in _RETENTION_TO_PB.items()}


def key_to_pb(key: HandoffKey) -> handoff_service_pb2.HandoffKey:
    return handoff_service_pb2.HandoffKey(
        request_id=key.request_id,
        epoch=key.epoch,
        reservation_id=key.reservation_id,
        prefill_generation=key.prefill_generation,
    )


def key_from_pb(message: handoff_service_pb2.HandoffKey) -> HandoffKey:
    return HandoffKey(
        request_id=RequestId(message.request_id),
        epoch=message.epoch,
        reservation_id=message.reservation_id,
        prefill_generation=message.prefill_generation,
    )


def contract_to_pb(contract: CacheContract) -> cache_pb2.CacheContract:
    return cache_pb2.CacheContract(
        model_fingerprint=contract.model_fingerprint,
        regions=[_region_to_pb(region) for region in contract.layout.regions],
        drafter_fingerprint=contract.drafter_fingerprint,
    )


def contract_from_pb(message: cache_pb2.CacheContract) -> CacheContract:
    """Raises InvalidRequest on a retention that this version does not know, and on regions behind the drafter's."""
    regions = tuple(_region_from_pb(region) for region in message.regions)
    if any(region.name == DRAFTER_REGION for region in regions[:-1]):
        raise InvalidRequest(f"cache region {DRAFTER_REGION} is not the last one")
    return CacheContract(
        model_fingerprint=message.model_fingerprint,
        layout=CacheLayout(regions=regions),
        drafter_fingerprint=message.drafter_fingerprint,
    )


def introduction_to_pb(introduction: Introduction) -> handoff_service_pb2.MeetRequest:
    return handoff_service_pb2.MeetRequest(
        prefill_generation=introduction.generation,
        prefill_address=introduction.address,
        contract=contract_to_pb(introduction.contract),
        transfer_engines=introduction.transfer_engines,
    )


def introduction_from_pb(message: handoff_service_pb2.MeetRequest) -> Introduction:
    """Raises InvalidRequest as `contract_from_pb` does."""
    return Introduction(
        generation=message.prefill_generation,
        address=message.prefill_address,
        contract=contract_from_pb(message.contract),
        transfer_engines=tuple(message.transfer_engines),
    )


def acquaintance_to_pb(acquaintance: Acquaintance) -> handoff_service_pb2.MeetResponse:
    engine = acquaintance.engine
    return handoff_service_pb2.MeetResponse(
        decode_generation=acquaintance.generation,
        engine=handoff_service_pb2.EngineDescriptor(
            name=engine.name,
            endpoint=engine.endpoint,
            region_addresses=engine.region_addresses,
            probe_address=engine.probe_address,
            device=engine.device,
        ),
        memory=[_memory_to_pb(memory) for memory in acquaintance.memory],
        transfer_engines=acquaintance.transfer_engines,
        drafter_difference=acquaintance.drafter_difference,
    )


def acquaintance_from_pb(message: handoff_service_pb2.MeetResponse) -> Acquaintance:
    engine = message.engine
    return Acquaintance(
        generation=message.decode_generation,
        engine=EngineDescriptor(
            name=engine.name,
            endpoint=engine.endpoint,
            region_addresses=tuple(engine.region_addresses),
            probe_address=engine.probe_address,
            device=engine.device,
        ),
        memory=tuple(_memory_from_pb(memory) for memory in message.memory),
        transfer_engines=tuple(message.transfer_engines),
        drafter_difference=message.drafter_difference,
    )


def offer_from_pb(message: handoff_service_pb2.NegotiateRequest) -> HandoffOffer:
    return HandoffOffer(
        num_tokens=message.num_tokens,
        decode_generation=message.decode_generation,
        transfer_engine=message.transfer_engine,
        sender_address=message.sender_address,
    )


def offer_to_pb(
    offer: HandoffOffer, key: HandoffKey, capability: bytes
) -> handoff_service_pb2.NegotiateRequest:
    return handoff_service_pb2.NegotiateRequest(
        key=key_to_pb(key),
        capability=capability,
        num_tokens=offer.num_tokens,
        decode_generation=offer.decode_generation,
        transfer_engine=offer.transfer_engine,
        sender_address=offer.sender_address,
    )


def terms_to_pb(terms: HandoffTerms) -> handoff_service_pb2.NegotiateResponse:
    return handoff_service_pb2.NegotiateResponse(
        page_ids=terms.page_ids, slot=terms.slot, generation=terms.generation
    )


def terms_from_pb(message: handoff_service_pb2.NegotiateResponse) -> HandoffTerms:
    return HandoffTerms(
        page_ids=tuple(message.page_ids), slot=message.slot, generation=message.generation
    )


def entries_to_pb(entries: Iterable[ManifestEntry]) -> list[cache_pb2.ManifestEntry]:
    return [
        cache_pb2.ManifestEntry(
            region=entry.region,
            first_row=entry.first_row,
            num_rows=entry.num_rows,
            num_bytes=entry.num_bytes,
        )
        for entry in entries
    ]


def entries_from_pb(messages: Iterable[cache_pb2.ManifestEntry]) -> tuple[ManifestEntry, ...]:
    return tuple(
        ManifestEntry(
            region=message.region,
            first_row=message.first_row,
            num_rows=message.num_rows,
            num_bytes=message.num_bytes,
        )
        for message in messages
    )


def result_to_pb(
    result: HandoffResult, key: HandoffKey, capability: bytes
) -> handoff_service_pb2.CompleteRequest:
    logprob = result.first_logprob
    return handoff_service_pb2.CompleteRequest(
        key=key_to_pb(key),
        capability=capability,
        manifest=entries_to_pb(result.manifest),
        region_digests=result.digests,
        first_token_id=result.first_token_id,
        first_logprob=convert.logprob_to_pb(logprob) if logprob else None,
        proposal=convert.proposal_to_pb(result.proposal),
        has_drafter_state=result.has_drafter_state,
    )


def result_from_pb(message: handoff_service_pb2.CompleteRequest) -> HandoffResult:
    return HandoffResult(
        manifest=entries_from_pb(message.manifest),
        digests=tuple(message.region_digests),
        first_token_id=message.first_token_id,
        first_logprob=(
            convert.logprob_from_pb(message.first_logprob)
            if message.HasField("first_logprob")
            else None
        ),
        proposal=convert.proposal_from_pb(message.proposal),
        has_drafter_state=message.has_drafter_state,
    )


def _region_to_pb(region: Region) -> cache_pb2.CacheRegion:
    return cache_pb2.CacheRegion(
        name=region.name,
        layer_ids=region.layer_ids,
        ratio=region.ratio,
        row_width=region.row_width,
        dtype=region.dtype,
        retention=_RETENTION_TO_PB[region.retention],
        window_rows=region.window_rows,
        tail_group=region.tail_group,
    )


def _region_from_pb(message: cache_pb2.CacheRegion) -> Region:
    retention = _RETENTION_FROM_PB.get(message.retention)
    if retention is None:
        raise InvalidRequest(
            f"cache region {message.name}: retention {message.retention} is not known here"
        )
    return Region(
        name=message.name,
        layer_ids=tuple(message.layer_ids),
        ratio=message.ratio,
        row_width=message.row_width,
        dtype=message.dtype,
        retention=retention,
        window_rows=message.window_rows,
        tail_group=message.tail_group,
    )


def _memory_to_pb(memory: RegionMemory) -> cache_pb2.RegionMemory:
    return cache_pb2.RegionMemory(
        name=memory.name,
        total_bytes=memory.total_bytes,
        layer_stride_bytes=memory.layer_stride_bytes,
        block_stride_bytes=memory.block_stride_bytes,
        rows_per_block=memory.rows_per_block,
        row_bytes=memory.row_bytes,
    )


def _memory_from_pb(message: cache_pb2.RegionMemory) -> RegionMemory:
    return RegionMemory(
        name=message.name,
        total_bytes=message.total_bytes,
        layer_stride_bytes=message.layer_stride_bytes,
        block_stride_bytes=message.block_stride_bytes,
        rows_per_block=message.rows_per_block,
        row_bytes=message.row_bytes,
    )
