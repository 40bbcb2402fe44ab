"""Drives an engine without a service: requests in, tokens out, every round committed at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.ranks import OneRank
from common.engine.request import Draft, Request, Role, RoundResult, StepReport
from common.engine.runner import Runner
from common.kv_cache.layout import PAGE_TOKENS, Retention, num_pages_for
from common.kv_cache.pool import CachePool, RegionBuffer
from common.model.cache_layout import cache_layout
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel, build_model
from common.parallel.collectives import Communicator
from common.types import RequestId, SamplingParams
from tests.support.tiny_checkpoint import config_json, random_tensors, without_drafter

GREEDY = SamplingParams(temperature=0.0, logprobs=0)
LOGPROB_TOLERANCE = 2e-4
"""Another way of batching moves a logit by rounding only; a wrong cache row moves it by far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request as a test states it."""

    prompt: tuple[int, ...]
    max_length: int
    sampling: SamplingParams = GREEDY
    role: Role = Role.GENERATE


@dataclass(slots=True)
class Generated:
    """What came out of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rounds: list[RoundResult] = field(default_factory=list)

    def take(self, result: RoundResult) -> None:
        self.tokens += result.token_ids
        self.logprobs += [logprob.logprob for logprob in result.logprobs]
        self.rounds.append(result)

    def require_equal(self, other: Generated) -> None:
        assert self.tokens == other.tokens
        torch.testing.assert_close(
            torch.tensor(self.logprobs),
            torch.tensor(other.logprobs),
            atol=LOGPROB_TOLERANCE,
            rtol=0,
        )


class EngineBench:
    """An engine on a small model, with slots and shuffled pages for every request."""

    def __init__(
        self,
        model: DSparkModel,
        *,
        draft_length: int,
        num_slots: int = 16,
        max_length: int = 384,
        max_step_rows: int = 4096,
        max_uncommitted_rounds: int = 2,
        garbage: bool = False,
    ) -> None:
        self._pages_each = num_pages_for(max_length)
        num_pages = num_slots * self._pages_each
        self.pool = CachePool(
            cache_layout(model.config, dtype=str(model.dtype).removeprefix("torch.")),
            num_pages=num_pages,
            num_slots=num_slots,
            max_step_rows=draft_length + 1,
            device=model.device,
        )
        if garbage:
            # Finite, as memory that was in use is: a row that must not be read would be noticed at once.
            for buffer in self.pool.buffers.values():
                buffer.tensor.fill_(50.0)
        runner = Runner(
            model,
            self.pool,
            draft_length=draft_length,
            confidence_temperatures=torch.ones(draft_length),
        )
        self.engine = Engine(
            OneRank(runner),
            EngineConfig(
                draft_length=draft_length,
                max_step_rows=max_step_rows,
                max_context_length=max_length,
                max_uncommitted_rounds=max_uncommitted_rounds,
            ),
        )
        pages = list(range(num_pages))
        random.Random(0).shuffle(pages)
        self._block_tables = [
            pages[i * self._pages_each : (i + 1) * self._pages_each] for i in range(num_slots)
        ]
        self._free_slots = list(range(num_slots))
        self._num_added = 0
        self.generated: dict[RequestId, Generated] = {}

    def add(self, wanted: Wanted) -> Request:
        """Schedule a new prompt in the lowest free slot."""
        return self.adopt(
            Request(
                request_id=RequestId(f"r{self._num_added}"),
                epoch=1,
                role=wanted.role,
                tokens=list(wanted.prompt),
                max_length=wanted.max_length,
                sampling=wanted.sampling,
                slot=self._free_slots.pop(0),
                block_table=[],
            )
        )

    def take_slot(self) -> int:
        return self._free_slots.pop(0)

    def adopt(self, request: Request) -> Request:
        """Schedule a request whose slot is taken already; its pages follow from the slot."""
        self._num_added += 1
        request.block_table = self._block_tables[request.slot]
        self.generated[request.request_id] = Generated()
        self.engine.add(request)
        return request

    def block_table(self, slot: int) -> list[int]:
        return self._block_tables[slot]

    def step(self) -> StepReport:
        """One step; rounds are committed, requests that are full are removed."""
        report = self.engine.step()
        for result in report.rounds:
            request = result.request
            self.generated[request.request_id].take(result)
            self.engine.commit(request.request_id, result.round)
            if request.room == 0:
                self.remove(request)
        return report

    def remove(self, request: Request) -> None:
        assert self.engine.remove(request.request_id) is request
        self._free_slots.append(request.slot)
        self._free_slots.sort()

    def run(
        self, *wanted: Wanted, each_step: Callable[[StepReport], None] | None = None
    ) -> list[Generated]:
        """Everything that the requests generate together, in their order."""
        requests = [self.add(w) for w in wanted]
        self.drain(each_step)
        return [self.generated[request.request_id] for request in requests]

    def drain(self, each_step: Callable[[StepReport], None] | None = None) -> None:
        while self.engine.has_work:
            report = self.step()
            if each_step is not None:
                each_step(report)


def small_model(
    *,
    drafter: bool,
    seed: int = 11,
    dtype: torch.dtype = torch.float32,
    comm: Communicator | None = None,
    **changes: object,
) -> DSparkModel:
    """A model with one layer of each kind that an engine runs in about a millisecond a row, or a rank's parts of it."""
    values = config_json(
        **{
            "compress_ratios": [0, 4, 128],
            "hidden_size": 32,
            "vocab_size": 64,
            "dspark_noise_token_id": 63,
            "num_attention_heads": 2,
            "head_dim": 16,
            "index_topk": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            **changes,
        }
    )
    config = ModelConfig.from_json(values if drafter else without_drafter(values))
    return build_model(
        config, random_tensors(config, seed), dtype=dtype, device=torch.device("cpu"), comm=comm
    )


def random_tokens(count: int, seed: int, vocab_size: int = 64) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(vocab_size) for _ in range(count))


def moved_request(request: Request, slot: int, *, with_drafter: bool) -> Request:
    """The same request for another engine, which has its rows in this slot, the drafter's too or not."""
    proposal = request.draft.proposal if request.draft is not None and with_drafter else None
    return Request(
        request_id=request.request_id,
        epoch=request.epoch,
        role=Role.GENERATE,
        tokens=list(request.tokens),
        num_computed=request.num_computed,
        max_length=request.max_length,
        sampling=request.sampling,
        slot=slot,
        block_table=[],
        draft=None if proposal is None else Draft(proposal=proposal),
        round=request.round,
        acknowledged_round=request.round,
        drafter_valid_from=0 if with_drafter else request.num_computed,
    )


def copy_state(
    source: EngineBench,
    request: Request,
    destination: EngineBench,
    slot: int,
    *,
    regions: Sequence[str] | None = None,
) -> None:
    """Move the live rows of a request by position, region by region, as a hand-off does."""
    for region in source.pool.layout.regions:
        if regions is not None and region.name not in regions:
            continue
        ours, theirs = source.pool.buffers[region.name], destination.pool.buffers[region.name]
        for row in region.live_rows(request.num_computed):
            from_block, from_row = _address(ours, row, request.slot, request.block_table)
            to_block, to_row = _address(theirs, row, slot, destination.block_table(slot))
            theirs.tensor[:, to_block, to_row] = ours.tensor[:, from_block, from_row]


def _address(
    buffer: RegionBuffer, row: int, slot: int, block_table: Sequence[int]
) -> tuple[int, int]:
    if buffer.region.retention is Retention.RING:
        return slot, row % buffer.rows_per_block
    assert buffer.rows_per_block == PAGE_TOKENS // buffer.region.ratio
    return block_table[row // buffer.rows_per_block], row % buffer.rows_per_block
