"""How much of a prompt's state is left to send when its last step begins to sample: arithmetic of the layouts."""

from __future__ import annotations

import pytest

from common.checkpoint.folder import DEFAULT_MODEL, checkpoint_folder
from common.kv_cache.layout import CacheLayout, Retention
from common.model.cache_layout import cache_layout
from common.model.config import ModelConfig
from common.transfer.plan import Rows, final_rows, live_rows, rows_after
from tools.make_sparse_checkpoint import PUBLISHED

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
STEP_ROWS = 512


def layout_of(name: str) -> CacheLayout:
    if name == DEFAULT_MODEL:
        config = ModelConfig.load(checkpoint_folder(name))
        return cache_layout(config, dtype="float32")
    return cache_layout(ModelConfig.from_json(PUBLISHED[name].config), dtype="bfloat16")


def num_bytes(layout: CacheLayout, rows: Rows) -> int:
    return sum(
        len(each) * len(region.layer_ids) * region.row_width * ITEM_BYTES[region.dtype]
        for each, region in zip(rows, layout.regions, strict=True)
    )


def left_for_the_last_step(layout: CacheLayout, num_tokens: int) -> Rows:
    """What was not final when the last step of `STEP_ROWS` began."""
    num_computed = (num_tokens - 1) // STEP_ROWS * STEP_ROWS
    early = final_rows(layout, num_tokens, num_computed, has_drafter_state=True)
    return rows_after(live_rows(layout, num_tokens, has_drafter_state=True), early)


def share_left(layout: CacheLayout, num_tokens: int) -> float:
    every = live_rows(layout, num_tokens, has_drafter_state=True)
    return num_bytes(layout, left_for_the_last_step(layout, num_tokens)) / num_bytes(layout, every)


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "flash-dspark"])
@pytest.mark.parametrize("num_tokens", [1, 500, 513, 600, 1024, 4000, 4095, 4096, 4097, 4224])
def test_only_rows_of_the_last_step_are_left_for_it(name: str, num_tokens: int) -> None:
    """But for the rest of a page that an earlier step began."""
    layout = layout_of(name)
    num_computed = (num_tokens - 1) // STEP_ROWS * STEP_ROWS
    for region, rows in zip(
        layout.regions, left_for_the_last_step(layout, num_tokens), strict=True
    ):
        first = num_computed // region.ratio
        assert not rows or rows.start >= first, region.name
        if region.retention is Retention.RING:
            assert len(rows) <= num_tokens - num_computed, region.name


@pytest.mark.parametrize(
    ("name", "num_tokens", "share"),
    [
        # A last step of 512 rows covers the window, which alone is a fifth of everything at this length, so that what is
        # left travels while that step samples and drafts. A longer prompt or a shorter last step leaves less to do.
        (DEFAULT_MODEL, 4096, 0.307),
        ("flash-dspark", 4096, 0.297),
        ("flash-dspark", 16384, 0.087),
        (DEFAULT_MODEL, 3600, 0.055),
        ("flash-dspark", 3600, 0.092),
    ],
)
def test_the_share_that_is_left_for_the_last_step(name: str, num_tokens: int, share: float) -> None:
    assert share_left(layout_of(name), num_tokens) == pytest.approx(share, abs=0.002)
