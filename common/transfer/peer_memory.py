"""Whether what a peer says of its memory can be true and can hold our rows. Knows strides and blocks; no bytes and no peer."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ContractMismatch
from common.kv_cache.layout import CacheLayout, Region, Retention, num_pages_for
from common.transfer.handoff import HandoffTerms
from common.transfer.plan import RegionMemory


def require_addressable(
    layout: CacheLayout, ours: Sequence[RegionMemory], theirs: Sequence[RegionMemory], *, peer: str
) -> None:
    """Raise ContractMismatch, naming the field and both values, unless our rows can be written to a peer's memory.

    Blocks and layers that would overlap or end outside a region are refused too: a row would overwrite another one.
    """
    names, peer_names = [m.name for m in ours], [m.name for m in theirs]
    if names != peer_names:
        raise ContractMismatch(
            f"described regions differ: {names} here, {peer_names} at {peer}",
            metadata={"field": "name"},
        )
    for region, mine, other in zip(layout.regions, ours, theirs, strict=True):
        if mine.row_bytes != other.row_bytes:
            raise _mismatch(region, "row_bytes", f"{mine.row_bytes} here", other.row_bytes, peer)
        rows = other.rows_per_block
        if region.retention is Retention.PAGED and rows != region.rows_per_page:
            raise _mismatch(
                region, "rows_per_block", f"{region.rows_per_page} in the contract", rows, peer
            )
        if region.retention is Retention.RING and rows < region.window_rows:
            raise _mismatch(
                region, "rows_per_block", f"at least {region.window_rows} here", rows, peer
            )
        _require_apart(region, other, peer)


def require_placeable(
    layout: CacheLayout,
    memory: Sequence[RegionMemory],
    terms: HandoffTerms,
    num_tokens: int,
    *,
    peer: str,
) -> None:
    """Raise ContractMismatch, naming the field, unless the granted pages and slot are in a peer's addressable memory, each
    page once, and as many as `num_tokens` positions have."""
    pages, num_pages = terms.page_ids, num_pages_for(num_tokens)
    if len(pages) != num_pages:
        raise _refused(
            "page_ids", f"{peer} granted {len(pages)} pages; {num_tokens} tokens have {num_pages}"
        )
    if len(set(pages)) != len(pages):
        twice = next(page for page in pages if pages.count(page) > 1)
        raise _refused("page_ids", f"{peer} granted page {twice} twice")
    for region, described in zip(layout.regions, memory, strict=True):
        num_blocks = described.layer_stride_bytes // described.block_stride_bytes
        is_paged = region.retention is Retention.PAGED
        for block in (min(pages), max(pages)) if is_paged else (terms.slot,):
            if not 0 <= block < num_blocks:
                field, noun = ("page_ids", "page") if is_paged else ("slot", "slot")
                raise _refused(
                    field,
                    f"{peer} granted {noun} {block}; its region {region.name} has {num_blocks}",
                )


def _require_apart(region: Region, memory: RegionMemory, peer: str) -> None:
    """No two blocks and no two layers share a byte, and all are inside the region."""
    block_bytes = memory.rows_per_block * memory.row_bytes
    if memory.block_stride_bytes < block_bytes:
        least = f"at least {block_bytes} for {memory.rows_per_block} rows"
        raise _mismatch(region, "block_stride_bytes", least, memory.block_stride_bytes, peer)
    if memory.layer_stride_bytes < memory.block_stride_bytes:
        least = f"at least {memory.block_stride_bytes} for a block"
        raise _mismatch(region, "layer_stride_bytes", least, memory.layer_stride_bytes, peer)
    all_layers = len(region.layer_ids) * memory.layer_stride_bytes
    if all_layers > memory.total_bytes:
        least = f"at least {all_layers} for {len(region.layer_ids)} layers"
        raise _mismatch(region, "total_bytes", least, memory.total_bytes, peer)


def _mismatch(region: Region, field: str, ours: str, theirs: int, peer: str) -> ContractMismatch:
    return ContractMismatch(
        f"cache region {region.name}: {field} is {ours} but {theirs} at {peer}",
        metadata={"region": region.name, "field": field},
    )


def _refused(field: str, message: str) -> ContractMismatch:
    return ContractMismatch(message, metadata={"field": field})
