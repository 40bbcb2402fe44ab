"""Which rows a request's state consists of, against a reference that goes through the positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.errors import ContractMismatch
from common.kv_cache.layout import CacheLayout, Region, Retention, num_pages_for
from common.model.cache_layout import cache_layout
from common.model.config import ModelConfig
from tests.support.tiny_checkpoint import config_json, without_drafter

CONFIG = ModelConfig.from_json(config_json(sliding_window=128))
LAYOUT = cache_layout(CONFIG, dtype="float32")
LENGTHS = (0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 126, 127, 128, 129, 130, 131, 132, 255, 256, 257, 1000)


def needed_positions(region: Region, num_tokens: int) -> set[int]:
    """Rows that some later position, from `num_tokens` on, reads: the definition, term by term."""
    if region.name in ("csa", "index", "hca"):
        return set(range(num_tokens // region.ratio))
    if region.name in ("window", "drafter"):
        # The target's next row looks back on 127 positions; a drafter block on all 128 before its anchor.
        return {p for p in range(num_tokens) if num_tokens - p <= 128}
    group = 128 if region.name == "hca_tail" else 4
    overlap = 0 if region.name == "hca_tail" else 4
    open_group = num_tokens // group
    return {p for p in range(num_tokens) if p >= open_group * group - overlap}


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_live_rows_are_those_that_later_positions_read(num_tokens: int) -> None:
    for region in LAYOUT.regions:
        assert set(region.live_rows(num_tokens)) == needed_positions(region, num_tokens), (
            region.name
        )


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_closed_rows_are_the_paged_rows_of_whole_pages(num_tokens: int) -> None:
    for region in LAYOUT.regions:
        expected = set()
        if region.retention is Retention.PAGED:
            whole_pages = num_tokens // 128
            expected = {w for w in range(num_tokens) if (w + 1) * region.ratio <= whole_pages * 128}
        assert set(region.closed_rows(num_tokens)) == expected
        assert expected <= set(region.live_rows(num_tokens))


@pytest.mark.parametrize("draft_length", [1, 5, 7, 15])
def test_a_ring_keeps_what_is_read_after_a_whole_step_was_rolled_back(draft_length: int) -> None:
    """Everything live before a step survives it, although the step wrote as many rows as may be rejected."""
    step = draft_length + 1
    for region in LAYOUT.regions:
        if region.retention is not Retention.RING:
            continue
        ring = region.ring_rows(step)
        for num_tokens in range(120, 270):
            overwritten = {p % ring for p in range(num_tokens, num_tokens + step)}
            kept = {p % ring for p in region.live_rows(num_tokens)}
            assert not overwritten & kept, f"{region.name} at {num_tokens}"


def test_the_layout_names_the_regions_that_the_configuration_asks_for() -> None:
    def names(config: ModelConfig) -> list[str]:
        return [region.name for region in cache_layout(config, dtype="float32").regions]

    csa = ["csa", "index", "csa_tail", "index_tail"]
    hca = ["hca", "hca_tail"]
    for ratios, expected in (
        ([0, 0], ["window"]),
        ([0, 4], ["window", *csa]),
        ([128, 0], ["window", *hca]),
        ([0, 4, 128], ["window", *csa, *hca]),
    ):
        values = config_json(compress_ratios=ratios)
        assert names(ModelConfig.from_json(values)) == [*expected, "drafter"]
        assert names(ModelConfig.from_json(without_drafter(values))) == expected


def test_row_widths_and_layers_are_the_models() -> None:
    d, index = CONFIG.head_dim, CONFIG.index_head_dim
    facts = {
        region.name: (region.layer_ids, region.ratio, region.row_width, region.dtype)
        for region in cache_layout(CONFIG, dtype="bfloat16").regions
    }
    assert facts == {
        "window": ((0, 1, 2, 3), 1, d, "bfloat16"),
        "csa": ((1, 3), 4, d, "bfloat16"),
        "index": ((1, 3), 4, index, "bfloat16"),
        "csa_tail": ((1, 3), 1, 4 * d, "float32"),
        "index_tail": ((1, 3), 1, 4 * index, "float32"),
        "hca": ((2,), 128, d, "bfloat16"),
        "hca_tail": ((2,), 1, 2 * d, "float32"),
        "drafter": ((0, 1, 2), 1, d, "bfloat16"),
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_ids", (0, 1)),
        ("ratio", 2),
        ("row_width", 48),
        ("dtype", "bfloat16"),
        ("retention", Retention.PAGED),
        ("window_rows", 64),
        ("tail_group", 8),
    ],
)
def test_a_difference_is_refused_with_region_field_and_both_values(field: str, value: Any) -> None:
    for index, region in enumerate(LAYOUT.regions):
        if getattr(region, field) == value:
            continue
        other = dataclasses.replace(region, **{field: value})
        regions = (*LAYOUT.regions[:index], other, *LAYOUT.regions[index + 1 :])
        with pytest.raises(ContractMismatch) as caught:
            LAYOUT.require_equal(CacheLayout(regions=regions), ours="prefill", theirs="decode")
        message = caught.value.message
        assert region.name in message and field in message
        assert str(getattr(region, field)) in message and str(value) in message
        assert caught.value.metadata["field"] == field
        assert caught.value.metadata["region"] == region.name


def test_a_missing_region_is_refused_and_named() -> None:
    fewer = CacheLayout(regions=LAYOUT.regions[:-1])
    with pytest.raises(ContractMismatch, match="drafter"):
        LAYOUT.require_equal(fewer, ours="prefill", theirs="decode")


def test_equal_layouts_agree_whatever_their_storage() -> None:
    LAYOUT.require_equal(cache_layout(CONFIG, dtype="float32"), ours="a", theirs="b")


def test_pages_are_counted_up() -> None:
    assert [num_pages_for(n) for n in (0, 1, 128, 129, 256)] == [0, 1, 1, 2, 2]
