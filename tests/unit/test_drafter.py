"""The drafter against a slow reference that has no cache.

Text never shows a wrong drafter: verification replaces its mistakes. So this is where its mistakes must show.
"""

from __future__ import annotations

import random

import pytest
import torch

from common.model.config import ModelConfig
from common.model.dspark import build_model
from tests.support.drafter_bench import Drafts, draft
from tests.support.slow_drafter import SlowDrafter
from tests.support.target_bench import Rows, TargetBench
from tests.support.tiny_checkpoint import config_json, random_tensors

CONFIG = ModelConfig.from_json(config_json(sliding_window=128, max_position_embeddings=512))
TENSORS = random_tensors(CONFIG, seed=8)
MODEL = build_model(CONFIG, TENSORS, dtype=torch.float32, device=torch.device("cpu"))
_RNG = random.Random(9)
TOKENS = [_RNG.randrange(256) for _ in range(320)]
TOLERANCE = 1e-4
SLOW = SlowDrafter(CONFIG, TENSORS)


def check(ours: Drafts, row: int, taps: torch.Tensor, anchor: int, valid_from: int = 0) -> None:
    expected = SLOW.draft(taps, anchor, ours.hidden.shape[1], valid_from=valid_from)
    ours.require_equal(row, expected, tolerance=TOLERANCE)


@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 137, 300])
def test_a_prompt_of_any_length_gives_the_references_drafts(length: int) -> None:
    bench = TargetBench(MODEL)
    taps = bench.run(Rows(2, 0, TOKENS[:length]))[0].taps
    ours = draft(bench, [2], [length], [TOKENS[length]], 5)
    check(ours, 0, taps, TOKENS[length])


@pytest.mark.parametrize("num_drafts", [1, 7])
def test_any_number_of_drafts_gives_the_references_drafts(num_drafts: int) -> None:
    bench = TargetBench(MODEL)
    taps = bench.run(Rows(0, 0, TOKENS[:150]))[0].taps
    check(draft(bench, [0], [150], [33], num_drafts), 0, taps, 33)


def test_requests_of_one_batch_draft_as_they_would_alone() -> None:
    bench = TargetBench(MODEL)
    lengths, slots, anchors = [3, 140, 128], [3, 0, 1], [9, 9, 200]
    outputs = bench.run(
        *(Rows(slot, 0, TOKENS[:length]) for slot, length in zip(slots, lengths, strict=True))
    )
    ours = draft(bench, slots, lengths, anchors, 5)
    for row, output in enumerate(outputs):
        check(ours, row, output.taps, anchors[row])


@pytest.mark.parametrize("chunk", [1, 7, 100, 135, 136])
def test_context_written_in_chunks_equals_context_written_at_once(chunk: int) -> None:
    """Ring rows 136 = 128 + 8: a chunk may be as long as the ring or one more."""
    length = 290
    whole, chunked = TargetBench(MODEL), TargetBench(MODEL)
    whole.run(Rows(1, 0, TOKENS[:length]))
    chunked.run_chunked(1, TOKENS[:length], chunk)
    expected = draft(whole, [1], [length], [4], 5)
    found = draft(chunked, [1], [length], [4], 5)
    torch.testing.assert_close(found.base_logits, expected.base_logits, atol=TOLERANCE, rtol=0)


def test_rejected_rows_leave_no_trace_in_the_context() -> None:
    """After every verify block with a wrong tail, the next draft equals that of a context that never saw it."""
    bench = TargetBench(MODEL, max_step_rows=8)
    taps = bench.run(Rows(0, 0, TOKENS[:120]))[0].taps
    length = 120
    for kept in (1, 8, 3, 2, 5):
        wrong = [(token + 1) % 256 for token in TOKENS[length + kept : length + 8]]
        output = bench.run(Rows(0, length, TOKENS[length : length + kept] + wrong))[0]
        taps = torch.cat((taps, output.taps[:kept]))
        length += kept
        check(draft(bench, [0], [length], [TOKENS[length]], 5), 0, taps, TOKENS[length])


@pytest.mark.parametrize("valid_from", [50, 100, 149])
def test_rows_before_valid_from_are_not_looked_at(valid_from: int) -> None:
    bench = TargetBench(MODEL)
    taps = bench.run(Rows(0, 0, TOKENS[:150]))[0].taps
    buffer = bench.pool.buffers["drafter"]
    for position in range(150 - buffer.rows_per_block, valid_from):
        buffer.tensor[:, 0, position % buffer.rows_per_block] = 1e3
    ours = draft(bench, [0], [150], [7], 5, valid_from=[valid_from])
    check(ours, 0, taps, 7, valid_from)


def test_the_previous_owner_of_a_ring_slot_is_not_seen() -> None:
    bench = TargetBench(MODEL)
    bench.run(Rows(0, 0, TOKENS[20:320]))
    taps = bench.run(Rows(0, 0, TOKENS[:40]))[0].taps
    check(draft(bench, [0], [40], [7], 5), 0, taps, 7)


def test_drafts_may_reach_past_the_last_position_of_the_context() -> None:
    """They are cut before they are verified, but the block that makes them must not fail."""
    bench = TargetBench(MODEL)
    limit = CONFIG.max_position_embeddings
    for num_drafts in (5, 7, 15):
        draft(bench, [0], [limit - 1], [7], num_drafts)
