"""The small model of the engine's tests, with and without its drafter, and what it gives a request that is alone."""

from __future__ import annotations

from functools import cache

from common.types import SamplingParams
from tests.support.engine_bench import EngineBench, Generated, Wanted, small_model

MODEL = small_model(drafter=True)
TARGET_ONLY = small_model(drafter=False)
SEEDED = SamplingParams(temperature=0.8, seed=1234, logprobs=0)


@cache
def alone(wanted: Wanted) -> Generated:
    return EngineBench(MODEL, draft_length=5, num_slots=1).run(wanted)[0]
