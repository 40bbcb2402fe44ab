from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from common.transfer.grant import WriteGrant
from common.transfer.memory import PoolMemory
from common.transfer.plan import live_rows, plan_writes
from tests.support.small_cache import small_layout, small_pool

LAYOUT = small_layout()
MEMORY = PoolMemory(small_pool(LAYOUT))
GRANT = WriteGrant(LAYOUT, MEMORY.placement(page_ids=(4, 5, 9), slot=2))
WINDOW, CSA = 0, 1


def test_everything_that_a_plan_for_this_placement_writes_is_granted() -> None:
    source = MEMORY.placement(page_ids=(0, 1, 2), slot=0)
    destination = MEMORY.placement(page_ids=(4, 5, 9), slot=2)
    rows = live_rows(LAYOUT, 384, has_drafter_state=True)
    for r in plan_writes(LAYOUT, source, destination, rows):
        GRANT.require(r.region, r.destination_offset, r.length)


@pytest.mark.parametrize(
    ("region", "block", "is_granted"),
    [
        (CSA, 4, True),
        (CSA, 9, True),
        (CSA, 3, False),
        (CSA, 8, False),
        (WINDOW, 2, True),
        (WINDOW, 1, False),
    ],
)
def test_pages_and_slots_of_others_are_refused_on_every_layer(
    region: int, block: int, is_granted: bool
) -> None:
    described = MEMORY.regions[region]
    for layer in (0, 1):
        offset = layer * described.layer_stride_bytes + block * described.block_stride_bytes
        if is_granted:
            GRANT.require(region, offset, described.block_stride_bytes)
        else:
            with pytest.raises(
                InvalidRequest, match=f"of region {described.name} touches block {block}"
            ):
                GRANT.require(region, offset, 1)


def test_one_byte_beyond_a_granted_block_is_refused() -> None:
    described = MEMORY.regions[CSA]
    offset = 4 * described.block_stride_bytes
    GRANT.require(CSA, offset, 2 * described.block_stride_bytes)
    with pytest.raises(InvalidRequest, match="touches block 6"):
        GRANT.require(CSA, offset, 2 * described.block_stride_bytes + 1)
    with pytest.raises(InvalidRequest, match="touches block 3"):
        GRANT.require(CSA, offset - 1, 2)


def test_regions_and_offsets_that_do_not_exist_are_refused() -> None:
    total = MEMORY.regions[CSA].total_bytes
    with pytest.raises(InvalidRequest, match="write to region 8; the contract has regions 0 to 7"):
        GRANT.require(8, 0, 1)
    with pytest.raises(InvalidRequest, match=f"of region csa, which has {total}"):
        GRANT.require(CSA, total - 1, 2)
    with pytest.raises(InvalidRequest, match="csa"):
        GRANT.require(CSA, -1, 2)
    with pytest.raises(InvalidRequest, match="csa"):
        GRANT.require(CSA, 2**63, 1)
