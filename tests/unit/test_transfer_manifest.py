from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InvalidRequest, TransferFailed
from common.transfer import manifest as manifest_module
from common.transfer.manifest import ManifestEntry, manifest_of, require_complete
from common.transfer.memory import PoolMemory
from common.transfer.plan import live_rows
from tests.support.small_cache import small_layout, small_pool

LAYOUT = small_layout()
REGIONS = PoolMemory(small_pool(LAYOUT)).regions


def check(entries: list[ManifestEntry], num_tokens: int) -> None:
    rows = live_rows(LAYOUT, num_tokens, has_drafter_state=True)
    require_complete(entries, LAYOUT, REGIONS, rows)


def full(num_tokens: int) -> list[ManifestEntry]:
    return list(manifest_of(LAYOUT, REGIONS, live_rows(LAYOUT, num_tokens, has_drafter_state=True)))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 127, 128, 129, 255, 256, 257])
def test_what_a_whole_handoff_wrote_is_complete(num_tokens: int) -> None:
    check(full(num_tokens), num_tokens)


def test_the_rows_expected_of_130_tokens_are_these() -> None:
    assert {(e.region, e.first_row, e.num_rows) for e in full(130)} == {
        ("window", 2, 128),
        ("csa", 0, 32),
        ("index", 0, 32),
        ("csa_tail", 124, 6),
        ("index_tail", 124, 6),
        ("hca", 0, 1),
        ("hca_tail", 128, 2),
        ("drafter", 2, 128),
    }


def test_a_region_in_several_pieces_in_any_order_is_complete() -> None:
    entries = full(130)
    csa = entries.pop(1)
    row = csa.num_bytes // csa.num_rows
    entries += [
        replace(csa, first_row=20, num_rows=12, num_bytes=12 * row),
        replace(csa, first_row=0, num_rows=20, num_bytes=20 * row),
    ]
    check(entries, 130)


@pytest.mark.parametrize("region", range(8))
def test_a_region_that_did_not_come_is_named_with_its_rows(region: int) -> None:
    entries = full(130)
    gone = entries.pop(region)
    last = gone.first_row + gone.num_rows - 1
    with pytest.raises(
        TransferFailed, match=f"rows {gone.first_row} to {last} of {gone.region} are missing"
    ):
        check(entries, 130)


def test_a_gap_is_named() -> None:
    entries = full(130)
    entries[0] = replace(entries[0], num_rows=100, num_bytes=100 * 36)
    with pytest.raises(TransferFailed, match="rows 102 to 129 of window are missing"):
        check(entries, 130)


def test_rows_that_come_twice_are_refused() -> None:
    entries = full(130)
    with pytest.raises(InvalidRequest, match="row 2 of window twice"):
        check([*entries, entries[0]], 130)


def test_rows_that_should_not_come_are_refused() -> None:
    entries = full(131)
    with pytest.raises(
        InvalidRequest, match=r"rows of csa_tail up to 130; the last expected one is 129"
    ):
        check([*full(130)[:3], entries[3], *full(130)[4:]], 130)


def test_unknown_regions_and_wrong_byte_counts_and_endless_manifests_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = full(130)
    with pytest.raises(InvalidRequest, match="names region mystery"):
        check([*entries, replace(entries[0], region="mystery")], 130)
    with pytest.raises(InvalidRequest, match="counts 1 bytes for 128 rows of window"):
        check([replace(entries[0], num_bytes=1), *entries[1:]], 130)
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_ENTRIES", 7)
    with pytest.raises(InvalidRequest, match="has 8 entries; at most 7 are read"):
        check(entries, 130)
