"""The target against transformers: the same logits and taps for any way of cutting a sequence into steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from common.model.config import ModelConfig
from common.model.dspark import DSparkModel, build_model
from tests.support.peer import Peer
from tests.support.target_bench import Rows, TargetBench
from tests.support.tiny_checkpoint import config_json, random_tensors

PATTERNS = {
    "window": [0, 0],
    "csa": [4, 4],
    "hca": [128, 128],
    "mixed": [0, 4, 128, 4, 0],
}
LENGTH = 300
TOLERANCE = 1e-4
"""Largest difference of a logit at logit scale 5."""


@dataclass(frozen=True, slots=True)
class Case:
    """A pattern's weights here, and what the peer says about two sequences."""

    model: DSparkModel
    sequences: tuple[list[int], list[int]]
    logits: tuple[torch.Tensor, torch.Tensor]
    taps: tuple[torch.Tensor, torch.Tensor]

    def check(self, which: int, start: int, logits: torch.Tensor, taps: torch.Tensor) -> None:
        end = start + len(logits)
        assert end <= LENGTH
        torch.testing.assert_close(logits, self.logits[which][start:end], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(taps, self.taps[which][start:end], atol=TOLERANCE, rtol=0)


@cache
def build_case(pattern: str) -> Case:
    values = config_json(
        compress_ratios=PATTERNS[pattern],
        num_hash_layers=1,
        # The wide window meets its border inside the prompt as well, as all shipped models have it.
        sliding_window=128 if pattern == "hca" else 16,
    )
    config = ModelConfig.from_json(values)
    tensors = random_tensors(config, seed=1)
    rng = random.Random(2)
    sequences = tuple([rng.randrange(256) for _ in range(LENGTH)] for _ in range(2))
    peer = Peer(values, config, tensors)
    outputs = [peer.run(sequence) for sequence in sequences]
    model = build_model(config, tensors, dtype=torch.float32, device=torch.device("cpu"))
    return Case(
        model,
        (sequences[0], sequences[1]),
        (outputs[0].logits, outputs[1].logits),
        (outputs[0].taps, outputs[1].taps),
    )


@pytest.fixture(params=sorted(PATTERNS))
def case(request: pytest.FixtureRequest) -> Case:
    return build_case(request.param)


def test_the_tolerance_is_meant_for_logits_of_this_scale(case: Case) -> None:
    assert 3.0 < case.logits[0].abs().max() < 8.0


def test_a_whole_prompt_gives_the_peers_logits_and_taps(case: Case) -> None:
    bench = TargetBench(case.model)
    output = bench.run(Rows(0, 0, case.sequences[0]))[0]
    case.check(0, 0, output.logits, output.taps)


@pytest.mark.parametrize("chunk", [5, 7, 64, 127, 128, 129])
def test_chunks_of_any_size_give_the_same(case: Case, chunk: int) -> None:
    bench = TargetBench(case.model)
    output = bench.run_chunked(1, case.sequences[0], chunk)
    case.check(0, 0, output.logits, output.taps)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_single_rows_and_small_chunks_give_the_same_around_every_border(
    case: Case, chunk: int
) -> None:
    bench = TargetBench(case.model)
    for start, end in ((0, 20), (120, 136), (248, 264)):
        bench.run(Rows(0, 0, case.sequences[0][:start])) if start else None
        for begin in range(start, end, chunk):
            output = bench.run(Rows(0, begin, case.sequences[0][begin : begin + chunk]))[0]
            case.check(0, begin, output.logits, output.taps)


def test_ragged_requests_of_one_step_do_not_see_each_other(case: Case) -> None:
    """Each step mixes long chunks, short runs and single rows of requests at unrelated positions."""
    bench = TargetBench(case.model, num_slots=6)
    rng = random.Random(3)
    done = dict.fromkeys(range(6), 0)
    while any(count < LENGTH for count in done.values()):
        rows = []
        for slot in rng.sample(sorted(done), k=rng.randint(2, 6)):
            size = min(rng.choice([1, 2, 6, 8, 16, 17, 40, 150]), LENGTH - done[slot])
            if size:
                start = done[slot]
                rows.append(Rows(slot, start, case.sequences[slot % 2][start : start + size]))
                done[slot] += size
        if not rows:
            continue
        for row, output in zip(rows, bench.run(*rows), strict=True):
            case.check(row.slot % 2, row.start, output.logits, output.taps)


def test_rejected_rows_leave_no_trace(case: Case) -> None:
    """Verify blocks of eight with a wrong tail, cut after every number of rows, in two requests at different phases.

    A group that closes among the rejected rows is the trap: its compressed row and the tails are overwritten.
    """
    bench = TargetBench(case.model, max_step_rows=8)
    rng = random.Random(4)
    done = [100, 101]
    bench.run(*(Rows(slot, 0, case.sequences[slot][: done[slot]]) for slot in (0, 1)))
    for turn in range(48):
        rows = []
        kept = [1 + (turn + slot * 3) % 8 for slot in (0, 1)]
        for slot in (0, 1):
            start = done[slot]
            right = case.sequences[slot][start : start + kept[slot]]
            wrong = [rng.randrange(256) for _ in range(8 - len(right))]
            rows.append(Rows(slot, start, right + wrong))
        for slot, output in enumerate(bench.run(*rows)):
            count = min(kept[slot], LENGTH - done[slot])
            case.check(slot, done[slot], output.logits[:count], output.taps[:count])
            done[slot] += count
        if min(done) > LENGTH - 8:
            return
    raise AssertionError(f"the walk ended early at {done}")


def test_bfloat16_stays_within_its_own_rounding(case: Case) -> None:
    config = case.model.config
    model = build_model(
        config, random_tensors(config, seed=1), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    bench = TargetBench(model)
    logits = bench.run(Rows(0, 0, case.sequences[0][:200]))[0].logits
    difference = (logits - case.logits[0][:200]).abs()
    # 8 bits of mantissa over a few layers; a wrong tensor would move every logit by its whole scale.
    assert difference.mean() < 0.1
    assert logits.dtype == torch.float32
