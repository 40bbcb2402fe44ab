"""The first steps of an engine, taken before anyone waits for them. Knows requests; keeps nothing."""

from __future__ import annotations

from common.engine.build import LoadedEngine
from common.engine.request import Request, Role
from common.kv_cache.layout import PAGE_TOKENS, num_pages_for
from common.types import RequestId, SamplingParams

NUM_ROUNDS = 3
"""The prompt, and two verified blocks."""


def warm_up(loaded: LoadedEngine) -> None:
    """Run throwaway requests, so that kernels are compiled and libraries initialised when the first real one comes.

    Called before the engine thread starts. What it leaves in the first slots and pages is overwritten like any ended
    request's rows.
    """
    num_pages = loaded.num_pages // loaded.engine.num_groups
    room = min(num_pages * PAGE_TOKENS, loaded.engine.config.max_context_length)
    # Greedy and sampled rounds, a prompt that closes a page and one that is shorter than any ratio.
    for group in range(loaded.engine.num_groups):
        greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
        _run(loaded, group, greedy, num_prompt_tokens=PAGE_TOKENS + 1, room=room)
        _run(loaded, group, sampled, num_prompt_tokens=2, room=room)


def _run(
    loaded: LoadedEngine,
    group: int,
    sampling: SamplingParams,
    *,
    num_prompt_tokens: int,
    room: int,
) -> None:
    engine = loaded.engine
    first_page = group * (loaded.num_pages // engine.num_groups)
    max_length = min(room, num_prompt_tokens + NUM_ROUNDS * (engine.config.draft_length + 1))
    request = Request(
        request_id=RequestId("warm-up"),
        epoch=0,
        role=Role.GENERATE,
        tokens=[0] * min(num_prompt_tokens, max_length - 1),
        max_length=max_length,
        sampling=sampling,
        slot=group * (loaded.num_slots // engine.num_groups),
        block_table=[first_page + page for page in range(num_pages_for(max_length))],
        group=group,
    )
    engine.add(request)
    while engine.has_work and request.round < NUM_ROUNDS:
        engine.step()
        engine.commit(request.request_id, request.round)
    engine.remove(request.request_id)
