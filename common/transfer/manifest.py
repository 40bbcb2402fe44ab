"""What a hand-off says it wrote, and whether that is everything. Knows rows; never bytes themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest, TransferFailed
from common.kv_cache.layout import CacheLayout
from common.transfer.plan import RegionMemory, Rows

MAX_MANIFEST_ENTRIES = 65_536
"""Of one hand-off; a manifest with more is refused unread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """Rows that were written, for every layer of a region."""

    region: str
    first_row: int
    num_rows: int
    num_bytes: int
    """Over all layers."""


def manifest_of(
    layout: CacheLayout, memory: Sequence[RegionMemory], rows: Rows
) -> tuple[ManifestEntry, ...]:
    """The manifest of a hand-off that wrote exactly `rows`."""
    return tuple(
        ManifestEntry(
            region=region.name,
            first_row=written.start,
            num_rows=len(written),
            num_bytes=len(written) * len(region.layer_ids) * described.row_bytes,
        )
        for region, described, written in zip(layout.regions, memory, rows, strict=True)
        if len(written)
    )


def require_complete(
    entries: Sequence[ManifestEntry],
    layout: CacheLayout,
    memory: Sequence[RegionMemory],
    expected: Rows,
) -> None:
    """Raise TransferFailed that names the rows which a manifest lacks, InvalidRequest for one that no sender may send: too
    long, with rows twice or unasked for, or with other bytes than its rows have."""
    if len(entries) > MAX_MANIFEST_ENTRIES:
        raise _malformed(
            f"the manifest has {len(entries)} entries; at most {MAX_MANIFEST_ENTRIES} are read"
        )
    by_region: dict[str, list[ManifestEntry]] = {region.name: [] for region in layout.regions}
    for entry in entries:
        if entry.region not in by_region:
            raise _malformed(f"the manifest names region {entry.region}, which is not expected")
        by_region[entry.region].append(entry)
    for region, described, rows in zip(layout.regions, memory, expected, strict=True):
        _require_rows(region.name, by_region[region.name], rows)
        row_bytes = len(region.layer_ids) * described.row_bytes
        for entry in by_region[region.name]:
            if entry.num_bytes != entry.num_rows * row_bytes:
                raise _malformed(
                    f"the manifest counts {entry.num_bytes} bytes for {entry.num_rows} rows of {region.name}; "
                    f"they are {entry.num_rows * row_bytes}"
                )


def _require_rows(region: str, entries: list[ManifestEntry], expected: range) -> None:
    reached = expected.start
    for entry in sorted(entries, key=lambda entry: entry.first_row):
        if entry.first_row > reached:
            raise _missing(region, range(reached, entry.first_row))
        if entry.first_row < reached:
            raise _malformed(
                f"the manifest has row {entry.first_row} of {region} twice or before the first "
                f"expected row {expected.start}"
            )
        reached += entry.num_rows
    if reached < expected.stop:
        raise _missing(region, range(reached, expected.stop))
    if reached > expected.stop:
        raise _malformed(
            f"the manifest has rows of {region} up to {reached - 1}; the last expected one is {expected.stop - 1}"
        )


def _malformed(message: str) -> InvalidRequest:
    return InvalidRequest(message, metadata={"field": "manifest"})


def _missing(region: str, rows: range) -> TransferFailed:
    return TransferFailed(
        f"rows {rows.start} to {rows.stop - 1} of {region} are missing from the manifest",
        metadata={
            "region": region,
            "first_row": str(rows.start),
            "num_rows": str(len(rows)),
        },
    )
