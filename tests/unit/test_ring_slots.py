"""A reused ring slot never shows its previous owner's rows.

Every row that an owner leaves behind is turned into NaN before the slot is used again. NaN gets through masks: a hidden
row has weight 0, and 0 times NaN is NaN. So it is not enough that such rows are masked; nothing may be left of them.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from common.kv_cache.layout import DRAFTER_REGION, Retention
from common.kv_cache.pool import CachePool
from common.types import SamplingParams
from tests.support.engine_bench import (
    GREEDY,
    EngineBench,
    Generated,
    Wanted,
    copy_state,
    moved_request,
    random_tokens,
    small_model,
)

MODEL = small_model(drafter=True)
RINGS = ("window", "csa_tail", "index_tail", "hca_tail", "drafter")
DRAFT_LENGTH = 5
SEEDED = SamplingParams(temperature=0.8, seed=3, logprobs=0)


def one_slot() -> EngineBench:
    return EngineBench(MODEL, draft_length=DRAFT_LENGTH, num_slots=1)


def wanted(length: int, sampling: SamplingParams = GREEDY) -> Wanted:
    return Wanted(
        prompt=random_tokens(length, seed=length), max_length=length + 24, sampling=sampling
    )


def poison(bench: EngineBench, *regions: str) -> None:
    for name in regions:
        bench.pool.buffers[name].tensor.fill_(torch.nan)


def require_same_course(found: Generated, expected: Generated) -> None:
    """The same tokens and log-probabilities, and drafts of the same fate with the same confidences."""
    found.require_equal(expected)
    for ours, theirs in zip(found.rounds, expected.rounds, strict=True):
        assert (ours.token_ids, ours.num_accepted) == (theirs.token_ids, theirs.num_accepted)
        assert ours.confidences == pytest.approx(theirs.confidences, abs=1e-4)


def test_every_ring_is_poisoned_here() -> None:
    layout = one_slot().pool.layout
    assert {r.name for r in layout.regions if r.retention is Retention.RING} == set(RINGS)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 5, 40, 130])
def test_the_next_owner_sees_nothing_of_the_last(length: int, sampling: SamplingParams) -> None:
    """Prompts shorter and longer than a compression group, the window and a page."""
    bench = one_slot()
    bench.run(wanted(200))
    poison(bench, *RINGS)
    second = bench.run(wanted(length, sampling))[0]
    require_same_course(second, one_slot().run(wanted(length, sampling))[0])
    assert any(result.confidences for result in second.rounds), "nothing was drafted"


@pytest.mark.parametrize("region", ["window", "drafter"])
def test_masks_alone_would_not_do(region: str) -> None:
    """The test above can fail: rows of these kinds are gathered before they are masked."""
    bench = one_slot()
    bench.run(wanted(200))
    poison(bench, region)
    with mock.patch.object(CachePool, "scrub"):
        second = bench.run(wanted(3))[0]
    fresh = one_slot().run(wanted(3))[0]
    with pytest.raises(AssertionError):
        require_same_course(second, fresh)


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("length", [3, 14, 40])
def test_state_that_is_handed_over_stays_and_all_else_goes(length: int, with_drafter: bool) -> None:
    """Rows arrive in a slot before its engine hears of the request."""
    source, destination = one_slot(), one_slot()
    request = source.add(wanted(length))
    source.step()
    destination.run(wanted(200))
    poison(destination, *RINGS)
    slot = destination.take_slot()
    moved = [name for name in destination.pool.buffers if with_drafter or name != DRAFTER_REGION]
    copy_state(source, request, destination, slot, regions=moved)
    adopted = destination.adopt(moved_request(request, slot, with_drafter=with_drafter))
    assert rows_of(destination, slot).isfinite().all()
    destination.drain()
    source.drain()
    theirs = source.generated[request.request_id]
    ours = destination.generated[adopted.request_id]
    assert ours.tokens == theirs.tokens[1:]
    assert torch.tensor(ours.logprobs).isfinite().all()


def rows_of(bench: EngineBench, slot: int) -> torch.Tensor:
    return torch.cat([bench.pool.buffers[name].tensor[:, slot].flatten() for name in RINGS])
