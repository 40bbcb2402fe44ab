"""Target and drafter spread over a mesh give what they give on one rank, whichever groups have rows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from common.errors import ConfigError
from common.kv_cache.replicas import row_digests
from common.model.config import ModelConfig
from common.model.drafter import BlockOutput
from common.model.dspark import DSparkModel, build_model
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from tests.support.target_bench import Rows, TargetBench
from tests.support.thread_ranks import run_ranks, thread_communicators
from tests.support.tiny_checkpoint import config_json, random_tensors

CONFIG = ModelConfig.from_json(
    config_json(
        # The last of four parts is shorter than the others.
        vocab_size=253,
        dspark_noise_token_id=252,
        n_routed_experts=16,
        o_groups=4,
        num_attention_heads=8,
        head_dim=16,
        hidden_size=32,
    )
)
TENSORS = random_tensors(CONFIG, seed=21)
CPU = torch.device("cpu")
TOLERANCE = 1e-5
STEPS: tuple[tuple[int, ...], ...] = (
    (150, 20, 0, 5),
    (1, 6, 9, 1),
    (8, 0, 0, 3),
    (3, 0, 0, 0),
    (0, 1, 40, 17),
)
"""Rows of each data parallel group in one step after the other: chunks beside single rows, and groups with nothing to do."""
DRAFTING: tuple[tuple[int, ...], ...] = ((5, 5, 5, 5), (5, 0, 0, 5), (0, 0, 5, 0), (0, 5, 0, 0))
"""Rows that each group drafts, in one drafting after the other."""
MESHES = ((1, 2, 1), (1, 4, 4), (2, 1, 2), (2, 2, 4), (2, 4, 1), (4, 4, 16))


def tokens_of(group: int) -> list[int]:
    rng = random.Random(group)
    return [rng.randrange(CONFIG.vocab_size) for _ in range(240)]


@dataclass(frozen=True, slots=True)
class Course:
    """What one group's requests got in all steps."""

    logits: torch.Tensor
    taps: torch.Tensor
    hidden: torch.Tensor
    """Of the drafter's blocks."""
    base_logits: torch.Tensor
    digests: dict[str, int]
    """Of the cache rows that the request would go on from."""


@torch.inference_mode()
def run_course(model: DSparkModel, group: int, groups: slice) -> Course:
    """A group's part of all steps, through which `groups` go together."""
    bench = TargetBench(model, num_slots=1, max_length=256)
    tokens, done = tokens_of(group), 0
    outputs = []
    for step in STEPS:
        if count := step[group]:
            rows = Rows(0, done, tokens[done : done + count])
            outputs += bench.run(rows, rows_by_group=step[groups])
            done += count
        elif any(step[groups]):
            model.target.join(step[groups])
    blocks = [
        block
        for drafting in DRAFTING
        if (block := draft(bench, drafting[group], done, drafting[groups])) is not None
    ]
    whole = model.vocabulary.whole
    return Course(
        logits=whole(torch.cat([output.logits for output in outputs])),
        taps=torch.cat([output.taps for output in outputs]),
        hidden=torch.cat([block.hidden for block in blocks]),
        base_logits=whole(torch.cat([block.base_logits for block in blocks])),
        digests=row_digests(bench.pool, bench.block_tables[0], 0, done),
    )


def draft(
    bench: TargetBench, num_drafts: int, length: int, rows_by_group: tuple[int, ...]
) -> BlockOutput | None:
    drafter = bench.model.drafter
    assert drafter is not None
    if not num_drafts:
        drafter.join(rows_by_group)
        return None
    anchor, position, zero = torch.tensor([7]), torch.tensor([length]), torch.tensor([0])
    return drafter.draft_block(anchor, position, zero, zero, bench.pool, num_drafts, rows_by_group)


def build(comm: Communicator | None = None) -> DSparkModel:
    return build_model(CONFIG, TENSORS, dtype=torch.float32, device=CPU, comm=comm)


@cache
def alone(group: int) -> Course:
    """What the group gets on one rank, by itself."""
    return run_course(build(), group, slice(group, group + 1))


@pytest.mark.parametrize(("dp", "tp", "ep"), MESHES)
def test_every_rank_computes_what_one_rank_computes(dp: int, tp: int, ep: int) -> None:
    mesh = MeshShape(dp=dp, tp=tp, ep=ep)
    found = run_ranks(mesh, lambda comm: run_course(build(comm), comm.shard.dp_rank, slice(dp)))
    for rank, course in enumerate(found):
        expected = alone(rank // tp)
        for name in ("logits", "taps", "hidden", "base_logits"):
            torch.testing.assert_close(
                getattr(course, name), getattr(expected, name), atol=TOLERANCE, rtol=TOLERANCE
            )
        # Replicas of a cache go on from the same bits, for all that they will ever agree on.
        assert course.digests == found[rank // tp * tp].digests


def test_the_tolerance_is_meant_for_values_of_this_scale() -> None:
    course = alone(0)
    assert 3.0 < course.logits.abs().max() < 10.0
    assert 3.0 < course.base_logits.abs().max() < 10.0


def test_a_mesh_that_does_not_divide_the_model_is_refused_before_anything_is_read() -> None:
    comm = thread_communicators(MeshShape(tp=3))[0]
    with pytest.raises(ConfigError, match=r"num_attention_heads \(8\) .* tp \(3\)"):
        build_model(CONFIG, {}, dtype=torch.float32, device=CPU, comm=comm)
