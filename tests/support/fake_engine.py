"""An engine without a model: prompts become recognisable rows, tokens are a function of request and position."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

from common.device.ledger import Ledger
from common.engine.build import LoadedEngine
from common.engine.config import EngineConfig
from common.engine.device_memory import enter_cache
from common.engine.engine import Engine
from common.engine.request import Draft, Request, Role, RoundResult, StepListener, StepReport
from common.kv_cache.layout import CacheLayout, Retention
from common.model.config import ModelConfig
from common.transfer.memory import PoolMemory
from common.transfer.plan import live_rows
from common.types import Proposal, RequestId
from tests.support.small_cache import expected_rows, read_rows, small_pool, write_rows

FINGERPRINT = "fingerprint-of-the-fake-model"
MAX_CONTEXT = 1024
TOKENS_PER_ROUND = 2


def token_at(request: Request, position: int) -> int:
    """The token that the fake model puts at a position."""
    return token_after(request.tokens[0], position)


def token_after(first: int, position: int) -> int:
    """The same, of every request that begins with `first`."""
    return (first * 31 + position * 7) % 997


class FakeEngine:
    """One chunk of one prompt and one round of every generating request a step.

    With `permits` set, a step waits for one: tests then decide how far a prompt gets.
    """

    num_groups = 1

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_pages: int = 16,
        num_slots: int = 4,
        draft_length: int = 5,
        chunk: int = 64,
        max_uncommitted_rounds: int = 2,
    ) -> None:
        self.pool = small_pool(
            layout, num_pages=num_pages, num_slots=num_slots, draft_length=draft_length
        )
        self.config = EngineConfig(
            draft_length=draft_length,
            max_step_rows=512,
            max_context_length=MAX_CONTEXT,
            max_uncommitted_rounds=max_uncommitted_rounds,
        )
        self.memory = PoolMemory(self.pool)
        self.chunk = chunk
        self.permits: threading.Semaphore | None = None
        self.sampling_permits: threading.Semaphore | None = None
        """With these, a first token waits for one when its prompt's rows are written."""
        self.drafting_permits: threading.Semaphore | None = None
        """With these, the first proposal waits for one when the first token was told."""
        self.tells_first_tokens = True
        """Before the step ends, as one rank does; a mesh does not."""
        self.num_computed = 0
        """Prompts that have come to wait for one."""
        self.num_gated = 0
        """Steps that have come to the gate, the one that is held by it included."""
        self.crash: Exception | None = None
        self.requests: dict[RequestId, Request] = {}
        self.block_tables: list[tuple[int, ...]] = []
        """Of all requests that came."""
        self.adopted: list[Request] = []
        """Requests that came with state; added to on the engine's thread, once their rows were looked at."""
        self.num_drafts: list[int] = []
        """Of each adopted request's proposal."""
        self.wrong_rows: list[str] = []

    @property
    def has_work(self) -> bool:
        return any(self._is_runnable(request) for request in self.requests.values())

    def add(self, request: Request) -> None:
        assert request.request_id not in self.requests
        self.block_tables.append(tuple(request.block_table))
        if request.num_computed:
            self._check_rows(request)
            self.num_drafts.append(len(request.draft.proposal.token_ids) if request.draft else 0)
            self.adopted.append(request)
        self.requests[request.request_id] = request

    def remove(self, request_id: RequestId) -> Request | None:
        return self.requests.pop(request_id, None)

    def keep_alive(self) -> None:
        """One rank needs none."""

    def close(self) -> None:
        """Nothing is held."""

    def commit(self, request_id: RequestId, round_number: int) -> None:
        if request_id in self.requests:
            request = self.requests[request_id]
            request.acknowledged_round = max(request.acknowledged_round, round_number)

    def step(self, listener: StepListener | None = None) -> StepReport:
        permits = self.permits  # read once: a test may open the gate at any moment
        if permits is not None:
            self.num_gated += 1
            permits.acquire()
        if self.crash is not None:
            raise self.crash
        rounds, progressed, num_prompt_tokens = [], [], 0
        for request in list(self.requests.values()):
            if not self._is_runnable(request):
                continue
            if request.round == 0 and request not in self.adopted:
                num_tokens = min(self.chunk, request.num_uncomputed)
                self._compute(request, num_tokens)
                num_prompt_tokens += num_tokens
                if listener is not None:
                    listener.computed(request, request.num_computed)
                if request.num_uncomputed:
                    progressed.append(request)
                    continue
                if self.sampling_permits is not None:
                    self.num_computed += 1
                    self.sampling_permits.acquire()
                if listener is not None and self.tells_first_tokens:
                    listener.sampled(request, token_at(request, len(request.tokens)), None)
                if self.drafting_permits is not None:
                    self.drafting_permits.acquire()
            rounds.append(self._round(request))
        return StepReport(
            rounds=tuple(rounds),
            progressed=tuple(progressed),
            num_prompt_tokens=num_prompt_tokens,
            num_rows=1,
            seconds=0.0,
            phase_seconds={},
        )

    def _compute(self, request: Request, num_tokens: int) -> None:
        before, after = request.num_computed, request.num_computed + num_tokens
        placement = self.memory.placement(page_ids=tuple(request.block_table), slot=request.slot)
        rows = tuple(
            range(before // region.ratio, after // region.ratio)
            if region.retention is Retention.PAGED
            else range(max(0, after - described.rows_per_block), after)
            for region, described in zip(self.pool.layout.regions, self.memory.regions, strict=True)
        )
        write_rows(self.memory, placement, rows, salt=request.tokens[0])
        request.num_computed = after

    def _round(self, request: Request) -> RoundResult:
        base = len(request.tokens)
        is_prompt_round = request.num_computed == base
        num_draft = 0 if is_prompt_round else self.config.draft_length
        num_tokens = 1 if is_prompt_round else min(TOKENS_PER_ROUND, request.room)
        token_ids = tuple(token_at(request, base + i) for i in range(num_tokens))
        request.tokens += token_ids
        request.num_computed = len(request.tokens) - 1
        request.round += 1
        request.timings.first_token = request.timings.first_token or time.monotonic()
        if self.config.draft_length:
            drafts = tuple(
                token_at(request, len(request.tokens) + i) for i in range(self.config.draft_length)
            )
            request.draft = Draft(
                proposal=Proposal(token_ids=drafts, confidences=(0.5,) * len(drafts))
            )
        return RoundResult(
            request=request,
            round=request.round,
            base=base,
            token_ids=token_ids,
            num_draft=num_draft,
            num_accepted=num_tokens - 1,
            confidences=(0.5,) * num_draft,
            num_offered=num_draft,
            ends_prompt=is_prompt_round,
        )

    def _is_runnable(self, request: Request) -> bool:
        if request.room <= 0:
            return False
        if request.role is Role.UNTIL_FIRST_TOKEN:
            return request.round == 0
        return request.round - request.acknowledged_round < self.config.max_uncommitted_rounds

    def _check_rows(self, request: Request) -> None:
        """Every row that a hand-off should have brought has the bytes that a prefill writes."""
        placement = self.memory.placement(page_ids=tuple(request.block_table), slot=request.slot)
        rows = live_rows(
            self.pool.layout,
            request.num_computed,
            has_drafter_state=request.drafter_valid_from == 0,
        )
        found = read_rows(self.memory, placement, rows)
        for have, want in zip(
            found, expected_rows(self.memory, rows, salt=request.tokens[0]), strict=True
        ):
            if have != want:
                self.wrong_rows.append(
                    f"{request.request_id}: region {have[0]} layer {have[1]} row {have[2]}"
                )


def loaded(
    engine: FakeEngine, *, fingerprint: str = FINGERPRINT, drafter_fingerprint: str = "drafter"
) -> LoadedEngine:
    """The fake as a worker's app wants it."""
    ledger = Ledger(engine.pool.device)
    enter_cache(ledger, engine.pool)
    return LoadedEngine(
        engine=cast(Engine, engine),
        model_config=cast(ModelConfig, SimpleNamespace(vocab_size=1000)),
        layout=engine.pool.layout,
        fingerprint=fingerprint,
        num_pages=engine.pool.num_pages,
        num_slots=engine.pool.num_slots,
        ledger=ledger,
        memory=(ledger.of_rank(0),),
        drafter_fingerprint=drafter_fingerprint,
    )
