"""What a peer says of its memory is believed only where it can be true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from common.errors import ContractMismatch
from common.transfer.handoff import HandoffTerms
from common.transfer.memory import PoolMemory
from common.transfer.peer_memory import require_addressable, require_placeable
from tests.support.small_cache import small_layout, small_pool

LAYOUT = small_layout()
OURS = PoolMemory(small_pool(LAYOUT, num_pages=12, draft_length=5)).regions
NUM_PAGES, NUM_SLOTS = 9, 4
THEIRS = PoolMemory(
    small_pool(LAYOUT, num_pages=NUM_PAGES, num_slots=NUM_SLOTS, draft_length=1)
).regions


def test_a_peer_with_other_pages_slots_and_rings_is_written_to() -> None:
    require_addressable(LAYOUT, OURS, THEIRS, peer="decode")


@pytest.mark.parametrize(
    ("index", "field", "value", "words"),
    [
        (1, "name", "csb", "csb"),
        (0, "row_bytes", 6, "window: row_bytes is 12 here but 6 at decode"),
        (0, "rows_per_block", 127, "window: rows_per_block is at least 128 here but 127"),
        (1, "rows_per_block", 64, "csa: rows_per_block is 32 in the contract but 64 at decode"),
        (0, "block_stride_bytes", -1, "window: block_stride_bytes is at least 1560 for 130 rows"),
        (0, "block_stride_bytes", 1559, "but 1559 at decode"),
        (1, "block_stride_bytes", 0, "csa: block_stride_bytes is at least"),
        (1, "layer_stride_bytes", 1, "csa: layer_stride_bytes is at least"),
        (1, "layer_stride_bytes", -8, "but -8 at decode"),
        (1, "total_bytes", 10, "csa: total_bytes is at least"),
    ],
)
def test_memory_that_cannot_hold_our_rows_apart_is_refused_by_region_and_field(
    index: int, field: str, value: int, words: str
) -> None:
    changes: dict[str, object] = {field: value}
    theirs = list(THEIRS)
    theirs[index] = replace(theirs[index], **changes)  # type: ignore[arg-type]
    with pytest.raises(ContractMismatch, match=re.escape(words)) as caught:
        require_addressable(LAYOUT, OURS, theirs, peer="decode")
    assert caught.value.metadata["field"] == field


def test_layers_that_end_outside_their_region_are_refused_by_a_single_byte() -> None:
    csa = THEIRS[1]
    exact = len(LAYOUT.regions[1].layer_ids) * csa.layer_stride_bytes
    theirs = list(THEIRS)
    theirs[1] = replace(csa, total_bytes=exact)
    require_addressable(LAYOUT, OURS, theirs, peer="decode")
    theirs[1] = replace(csa, total_bytes=exact - 1)
    with pytest.raises(ContractMismatch, match=f"total_bytes is at least {exact} for 2 layers"):
        require_addressable(LAYOUT, OURS, theirs, peer="decode")


def place(page_ids: tuple[int, ...], slot: int, num_tokens: int = 300) -> None:
    terms = HandoffTerms(page_ids=page_ids, slot=slot, generation="g")
    require_placeable(LAYOUT, THEIRS, terms, num_tokens, peer="decode")


def test_any_pages_and_slot_of_the_peer_are_written_to() -> None:
    place((NUM_PAGES - 1, 0, 3), NUM_SLOTS - 1)


@pytest.mark.parametrize(
    ("page_ids", "slot", "field", "words"),
    [
        ((1, 2), 0, "page_ids", "decode granted 2 pages; 300 tokens have 3"),
        ((1, 2, 3, 4), 0, "page_ids", "decode granted 4 pages"),
        ((1, 2, 1), 0, "page_ids", "decode granted page 1 twice"),
        ((1, 2, NUM_PAGES), 0, "page_ids", "page 9; its region csa has 9"),
        ((1, -1, 2), 0, "page_ids", "page -1; its region csa has 9"),
        ((1, 2, 3), NUM_SLOTS, "slot", "slot 4; its region window has 4"),
        ((1, 2, 3), -1, "slot", "slot -1; its region window has 4"),
    ],
)
def test_pages_and_slots_that_are_not_the_peers_are_refused_by_field(
    page_ids: tuple[int, ...], slot: int, field: str, words: str
) -> None:
    with pytest.raises(ContractMismatch, match=words) as caught:
        place(page_ids, slot)
    assert caught.value.metadata["field"] == field
