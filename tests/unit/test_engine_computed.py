"""What the engine says of rows before it samples from them."""

from __future__ import annotations

from common.engine.request import Request, Role
from common.transfer.digest import digest_rows
from common.transfer.memory import PoolMemory
from common.transfer.plan import live_rows
from tests.support.engine_bench import EngineBench, Wanted, random_tokens, small_model

MODEL = small_model(drafter=True)


def test_rows_are_announced_when_they_are_final_and_before_the_first_token_is_there() -> None:
    """Sampling and drafting write none of them: whoever sends them meanwhile sends what there is in the end."""
    bench = EngineBench(MODEL, draft_length=5, max_step_rows=120)
    memory = PoolMemory(bench.pool)
    requests = [
        bench.add(
            Wanted(
                prompt=random_tokens(length, seed=length),
                max_length=300,
                role=Role.UNTIL_FIRST_TOKEN,
            )
        )
        for length in (133, 90)
    ]
    heard: dict[str, list[tuple[int, int]]] = {r.request_id: [] for r in requests}
    digests: dict[str, tuple[bytes, ...]] = {}

    def digest(request: Request, num_computed: int) -> tuple[bytes, ...]:
        placement = memory.placement(page_ids=tuple(request.block_table), slot=request.slot)
        rows = live_rows(memory.layout, num_computed, has_drafter_state=True)
        return digest_rows(memory, placement, rows)

    def on_computed(request: Request, num_computed: int) -> None:
        heard[request.request_id].append((num_computed, request.round))
        digests[request.request_id] = digest(request, num_computed)

    while bench.engine.has_work:
        bench.engine.step(on_computed)

    assert [heard[r.request_id] for r in requests] == [
        [(120, 0), (133, 0)],
        [(90, 0)],
    ]
    for request, length in zip(requests, (133, 90), strict=True):
        assert request.round == 1 and request.draft is not None
        assert digests[request.request_id] == digest(request, length)
