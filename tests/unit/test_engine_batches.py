"""The engine gives a request the same tokens alone and in a batch, in whatever chunks, company and slot."""

from __future__ import annotations

import pytest

from common.engine.request import StepReport
from common.types import SamplingParams, Verification
from tests.support.engine_bench import GREEDY, EngineBench, Generated, Wanted, random_tokens
from tests.support.small_engine import MODEL, SEEDED, alone


def sixteen_requests() -> list[Wanted]:
    """Lengths at both sides of every border, and every kind of sampling."""
    lengths = (1, 2, 3, 4, 5, 17, 40, 126, 127, 128, 129, 130, 255, 256, 257, 300)
    samplings = (
        GREEDY,
        SEEDED,
        SamplingParams(temperature=1.0, seed=5, top_k=8, logprobs=2),
        SamplingParams(temperature=1.3, seed=6, top_p=0.8, logprobs=0),
        SamplingParams(temperature=0.7, seed=7, verification=Verification.REJECTION, logprobs=0),
    )
    return [
        Wanted(
            prompt=random_tokens(length, seed=100 + i),
            max_length=length + 9 + i % 4,
            sampling=samplings[i % len(samplings)],
        )
        for i, length in enumerate(lengths)
    ]


def accepted(outputs: list[Generated]) -> int:
    return sum(result.num_accepted for output in outputs for result in output.rounds)


def test_sixteen_different_requests_equal_their_solo_runs() -> None:
    wanted = sixteen_requests()
    together = EngineBench(MODEL, draft_length=5, garbage=True).run(*wanted)
    assert accepted(together) > 0, "no draft was ever accepted, so nothing was shown"
    for w, output in zip(wanted, together, strict=True):
        output.require_equal(alone(w))
        assert len(output.tokens) == w.max_length - len(w.prompt)


@pytest.mark.parametrize("max_step_rows", [6, 50, 128])
def test_any_row_budget_gives_the_same_tokens(max_step_rows: int) -> None:
    """Small budgets cut prompts into odd chunks and drafts to odd widths; only rejection may notice the latter."""
    wanted = [w for w in sixteen_requests() if w.sampling.verification is Verification.COUPLED]
    wanted = wanted[::2] if max_step_rows == 6 else wanted
    expected = EngineBench(MODEL, draft_length=5).run(*wanted)

    def within_budget(report: StepReport) -> None:
        assert 0 < report.num_rows <= max_step_rows

    found = EngineBench(MODEL, draft_length=5, max_step_rows=max_step_rows).run(
        *wanted, each_step=within_budget
    )
    for ours, theirs in zip(found, expected, strict=True):
        ours.require_equal(theirs)


def test_late_arrivals_join_a_running_batch_without_changing_it() -> None:
    wanted = sixteen_requests()[4:12]
    bench = EngineBench(MODEL, draft_length=5)
    requests = []
    for w in wanted:
        requests.append(bench.add(w))
        bench.step()
    bench.drain()
    for w, request in zip(wanted, requests, strict=True):
        bench.generated[request.request_id].require_equal(alone(w))


def test_a_used_slot_tells_its_next_owner_nothing() -> None:
    bench = EngineBench(MODEL, draft_length=5, num_slots=1)
    for length in (300, 4, 129, 20):
        wanted = Wanted(
            prompt=random_tokens(length, seed=length), max_length=length + 20, sampling=SEEDED
        )
        again = bench.run(wanted)[0]
        fresh = alone(wanted)
        again.require_equal(fresh)
        assert [r.num_accepted for r in again.rounds] == [r.num_accepted for r in fresh.rounds]
