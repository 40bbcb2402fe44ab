"""What the engine says of rows before it samples from them, and of tokens before it drafts behind them."""

from __future__ import annotations

from common.engine.request import Request, Role
from common.transfer.digest import digest_rows
from common.transfer.memory import PoolMemory
from common.transfer.plan import live_rows
from common.types import SamplingParams, TokenLogprob
from tests.support.engine_bench import EngineBench, Wanted, random_tokens, small_model

MODEL = small_model(drafter=True)


def test_rows_and_then_tokens_are_announced_as_soon_as_they_are_final() -> None:
    """Sampling and drafting write none of them: whoever sends them meanwhile sends what there is in the end."""
    bench = EngineBench(MODEL, draft_length=5, max_step_rows=120)
    memory = PoolMemory(bench.pool)
    requests = [
        bench.add(
            Wanted(
                prompt=random_tokens(length, seed=length),
                max_length=300,
                role=Role.UNTIL_FIRST_TOKEN,
                sampling=SamplingParams(temperature=0.0, logprobs=1),
            )
        )
        for length in (133, 90)
    ]
    heard: dict[str, list[tuple[int, int]]] = {r.request_id: [] for r in requests}
    digests: dict[str, tuple[bytes, ...]] = {}
    sampled: dict[str, tuple[int, TokenLogprob | None]] = {}

    def digest(request: Request, num_computed: int) -> tuple[bytes, ...]:
        placement = memory.placement(page_ids=tuple(request.block_table), slot=request.slot)
        rows = live_rows(memory.layout, num_computed, has_drafter_state=True)
        return digest_rows(memory, placement, rows)

    class Listener:
        def computed(self, request: Request, num_computed: int) -> None:
            heard[request.request_id].append((num_computed, request.round))
            digests[request.request_id] = digest(request, num_computed)

        def sampled(self, request: Request, token_id: int, logprob: TokenLogprob | None) -> None:
            assert request.round == 0 and request.draft is None
            sampled[request.request_id] = token_id, logprob

    while bench.engine.has_work:
        bench.engine.step(Listener())

    assert [heard[r.request_id] for r in requests] == [
        [(120, 0), (133, 0)],
        [(90, 0)],
    ]
    for request, length in zip(requests, (133, 90), strict=True):
        assert request.round == 1 and request.draft is not None
        assert digests[request.request_id] == digest(request, length)
        token_id, logprob = sampled[request.request_id]
        assert token_id == request.tokens[-1]
        assert logprob is not None and logprob.token_id == token_id
