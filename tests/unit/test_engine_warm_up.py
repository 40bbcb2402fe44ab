"""Warming up an engine before it serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from common.engine.build import LoadedEngine, build_engine
from common.engine.request import Request, Role
from common.engine.settings import EngineSettings
from common.engine.warm_up import warm_up
from common.types import RequestId, SamplingParams

PROMPT = list(range(100, 140))
ENDS_AT = 60


def tokens_of(loaded: LoadedEngine) -> list[int]:
    """Greedy tokens of one request in the slot and page that a warm-up uses."""
    request = Request(
        request_id=RequestId("r"),
        epoch=0,
        role=Role.GENERATE,
        tokens=[*PROMPT],
        max_length=ENDS_AT,
        sampling=SamplingParams(temperature=0.0),
        slot=0,
        block_table=[0],
    )
    loaded.engine.add(request)
    while loaded.engine.has_work:
        loaded.engine.step()
        loaded.engine.commit(request.request_id, request.round)
    loaded.engine.remove(request.request_id)
    return request.tokens


def test_a_warm_engine_is_empty_and_answers_like_a_cold_one(shipped_checkpoint: Path) -> None:
    settings = EngineSettings(checkpoint_dir=shipped_checkpoint, num_slots=2)
    cold, warm = build_engine(settings), build_engine(settings)
    warm_up(warm)
    assert warm.engine.num_requests == 0
    assert tokens_of(warm) == tokens_of(cold)


@pytest.mark.parametrize(
    "smallest",
    [
        EngineSettings(checkpoint_dir=Path(), num_slots=1, num_pages=1),
        EngineSettings(checkpoint_dir=Path(), num_slots=1, max_context_length=128),
        EngineSettings(checkpoint_dir=Path(), num_slots=1, speculate=False),
    ],
)
def test_the_smallest_engines_can_be_warmed_up(
    smallest: EngineSettings, shipped_checkpoint: Path
) -> None:
    loaded = build_engine(dataclasses.replace(smallest, checkpoint_dir=shipped_checkpoint))
    warm_up(loaded)
    assert loaded.engine.num_requests == 0
