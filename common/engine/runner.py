"""Runs one step: target forward, verification, drafter. Knows tensors and the model; decides nothing.

Everything between the forward and the last line stays on the device; the step's only wait for it is the copy of the
accepted tokens at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from common.engine.request import Draft, Role
from common.engine.scheduler import ScheduledRequest
from common.kv_cache.layout import Retention
from common.kv_cache.pool import CachePool
from common.model.dspark import DSparkModel
from common.model.plan import PlanSpec, RowRun, StepPlan, build_plan
from common.sampling.logprobs import token_logprobs
from common.sampling.params import SamplingRows
from common.spec_decode.confidence import calibrate
from common.spec_decode.draft_sampling import DraftResult, markov_draft
from common.spec_decode.verify import VerificationResult, verify
from common.types import Proposal, SamplingParams, TokenLogprob, Verification

DRAFTER_WARMUP_ROWS = 32
"""Own rows that a drafter window needs before drafting resumes when a hand-off came without drafter state."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What a step gave one request that reached its newest token."""

    token_ids: tuple[int, ...]
    """Accepted drafts and the target's own token behind them."""
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...]
    draft: Draft | None
    """The next proposal; None when the request does not speculate."""


@dataclass(slots=True)
class PhaseClock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


class Runner:
    """Owns model and cache pool; used by the engine thread only."""

    def __init__(
        self,
        model: DSparkModel,
        pool: CachePool,
        *,
        draft_length: int,
        confidence_temperatures: torch.Tensor,
    ) -> None:
        self.model = model
        self.pool = pool
        self._draft_length = draft_length if model.drafter is not None else 0
        self._confidence_temperatures = confidence_temperatures
        config = model.config
        self._plan_spec = PlanSpec(
            window=config.sliding_window,
            ratios=tuple(sorted(set(config.compress_ratios) - {0})),
            num_heads=config.num_attention_heads,
            ring_rows={
                region.name: pool.buffers[region.name].rows_per_block
                for region in pool.layout.regions
                if region.retention is Retention.RING
            },
            dtype=model.dtype,
            device=model.device,
        )

    @torch.inference_mode()
    def run(
        self, step: Sequence[ScheduledRequest], clock: PhaseClock
    ) -> list[RequestOutput | None]:
        """One output per scheduled request; None for those that only computed a chunk."""
        with clock.phase("forward"):
            plan, rows = self._plan(step)
            token_ids = [token for scheduled in step for token in _row_tokens(scheduled)]
            output = self.model.target.forward(
                self._ints(token_ids), plan, self.pool, self._ints(rows.logit_rows)
            )
            if self.model.drafter is not None:
                self.model.drafter.write_context(output.taps, plan, self.pool)
        sampling = [scheduled for scheduled in step if scheduled.is_sampling]
        if not sampling:
            return [None] * len(step)
        with clock.phase("verify"):
            block = _VerifyBlock(sampling, self.model.device)
            logits = output.logits if block.is_uniform else output.logits[block.row_index]
            logits = logits.view(len(sampling), block.width, -1)
            verified = block.verify(logits)
            logprobs = self._logprobs(block, logits, verified)
        with clock.phase("draft"):
            drafts = self._draft(block, verified)
        with clock.phase("copy"):
            outputs = iter(_to_host(block, verified, logprobs, drafts))
        return [next(outputs) if scheduled.is_sampling else None for scheduled in step]

    def _plan(self, step: Sequence[ScheduledRequest]) -> tuple[StepPlan, _StepRows]:
        runs, logit_rows, begin = [], [], 0
        for scheduled in step:
            request = scheduled.request
            runs.append(
                RowRun(
                    slot=request.slot,
                    start=request.num_computed,
                    num_rows=scheduled.num_rows,
                    block_table=request.block_table,
                )
            )
            end = begin + scheduled.num_rows
            if scheduled.is_sampling:
                logit_rows += range(begin + scheduled.num_tokens - 1, end)
            begin = end
        return build_plan(runs, self._plan_spec), _StepRows(logit_rows)

    def _draft(self, block: _VerifyBlock, verified: VerificationResult) -> _Drafts | None:
        """Draft for every request of the block that may speculate."""
        drafter = self.model.drafter
        members = [i for i, scheduled in enumerate(block.step) if self._may_draft(scheduled)]
        if drafter is None or not members:
            return None
        requests = [block.step[i].request for i in members]
        index = self._ints(members)
        num_accepted = verified.num_accepted[index]
        anchor_ids = verified.token_ids[index].gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        anchor_positions = self._ints([len(request.tokens) for request in requests]) + num_accepted
        valid_from = self._ints([request.drafter_valid_from for request in requests])
        slots = self._ints([request.slot for request in requests])
        hidden = drafter.draft_block(
            anchor_ids, anchor_positions, valid_from, slots, self.pool, self._draft_length
        )
        offsets = torch.arange(1, self._draft_length + 1, device=self.model.device)
        positions = (anchor_positions.unsqueeze(1) + offsets).flatten()
        params = [request.sampling for request in requests]
        rows = SamplingRows.of(params, anchor_positions, self.model.device)
        by_rejection = [
            _uses_rejection(request.sampling) and request.role is Role.GENERATE
            for request in requests
        ]
        result = markov_draft(
            base_logits=hidden.base_logits,
            anchor_ids=anchor_ids,
            markov_bias=drafter.markov,
            rows=rows.repeat(self._draft_length).at(positions),
            coupled=~torch.tensor(by_rejection, device=self.model.device),
            want_probs=any(by_rejection),
        )
        logits = drafter.confidence_logits(hidden.hidden, result.embeddings)
        return _Drafts(
            members, by_rejection, result, calibrate(logits, self._confidence_temperatures)
        )

    def _may_draft(self, scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        own_rows = len(request.tokens) - request.drafter_valid_from
        return (
            self._draft_length > 0
            and request.room > 2
            and (request.drafter_valid_from == 0 or own_rows >= DRAFTER_WARMUP_ROWS)
        )

    @staticmethod
    def _logprobs(
        block: _VerifyBlock, logits: torch.Tensor, verified: VerificationResult
    ) -> _Logprobs | None:
        wanted = [scheduled.request.sampling.logprobs for scheduled in block.step]
        if all(count is None for count in wanted):
            return None
        ids = verified.token_ids.clamp(min=0).flatten()
        values = token_logprobs(logits.flatten(0, 1), ids, max(count or 0 for count in wanted))
        shape = (len(block.step), block.width)
        return _Logprobs(
            values.logprobs.view(shape),
            values.top_ids.view(*shape, -1),
            values.top_logprobs.view(*shape, -1),
        )

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.model.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _StepRows:
    logit_rows: list[int]


@dataclass(frozen=True, slots=True)
class _Drafts:
    members: list[int]
    """Which requests of the verify block drafted."""
    by_rejection: list[bool]
    result: DraftResult
    confidences: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Logprobs:
    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


class _VerifyBlock:
    """The rows of all sampling requests, padded to the widest proposal."""

    def __init__(self, step: list[ScheduledRequest], device: torch.device) -> None:
        self.step = step
        num_draft = [scheduled.num_draft for scheduled in step]
        self.width = max(num_draft) + 1
        self.is_uniform = min(num_draft) == max(num_draft)
        self._device = device
        self._num_draft = torch.tensor(num_draft, device=device)
        begins = (
            torch.tensor([0, *(n + 1 for n in num_draft[:-1])]).cumsum(0).to(device).unsqueeze(1)
        )
        columns = torch.arange(self.width, device=device)
        self.row_index = (begins + torch.minimum(columns, self._num_draft.unsqueeze(1))).flatten()

    def verify(self, logits: torch.Tensor) -> VerificationResult:
        requests = [scheduled.request for scheduled in self.step]
        columns = torch.arange(self.width, device=self._device)
        starts = torch.tensor([len(request.tokens) for request in requests], device=self._device)
        rows = SamplingRows.of([request.sampling for request in requests], starts, self._device)
        rejection = [self._is_rejection(scheduled) for scheduled in self.step]
        return verify(
            logits=logits,
            draft_ids=self._draft_ids(),
            num_draft=self._num_draft,
            rows=rows.repeat(self.width).at((starts.unsqueeze(1) + columns).flatten()),
            rejection=torch.tensor(rejection, device=self._device),
            draft_probs=self._draft_probs(rejection),
        )

    @staticmethod
    def _is_rejection(scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        if not _uses_rejection(request.sampling):
            return False
        # A proposal that came without distributions (first round after a hand-off) is verified coupled.
        return scheduled.num_draft == 0 or (
            request.draft is not None and request.draft.probs is not None
        )

    def _draft_ids(self) -> torch.Tensor:
        ids = []
        for scheduled in self.step:
            draft = scheduled.request.draft
            chosen = draft.proposal.token_ids[: scheduled.num_draft] if draft is not None else ()
            ids.append([*chosen, *[0] * (self.width - 1 - len(chosen))])
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def _draft_probs(self, rejection: list[bool]) -> torch.Tensor | None:
        """`[R, width - 1, vocab]`, zero for requests that are not verified by rejection."""
        probs = None
        for i, scheduled in enumerate(self.step):
            draft = scheduled.request.draft
            if not rejection[i] or not scheduled.num_draft or draft is None or draft.probs is None:
                continue
            if probs is None:
                shape = (len(self.step), self.width - 1, draft.probs.shape[-1])
                probs = torch.zeros(shape, device=self._device)
            probs[i, : scheduled.num_draft] = draft.probs[: scheduled.num_draft]
        return probs


def _row_tokens(scheduled: ScheduledRequest) -> list[int]:
    request = scheduled.request
    begin = request.num_computed
    tokens = request.tokens[begin : begin + scheduled.num_tokens]
    if scheduled.num_draft:
        assert request.draft is not None
        tokens += request.draft.proposal.token_ids[: scheduled.num_draft]
    return tokens


def _uses_rejection(sampling: SamplingParams) -> bool:
    return not sampling.is_greedy and sampling.verification is Verification.REJECTION


def _to_host(
    block: _VerifyBlock,
    verified: VerificationResult,
    logprobs: _Logprobs | None,
    drafts: _Drafts | None,
) -> list[RequestOutput]:
    token_ids, num_accepted = verified.token_ids.tolist(), verified.num_accepted.tolist()
    next_drafts = dict(_drafts_to_host(drafts)) if drafts is not None else {}
    return [
        RequestOutput(
            token_ids=tuple(token_ids[i][: num_accepted[i] + 1]),
            num_accepted=num_accepted[i],
            logprobs=_logprobs_to_host(logprobs, i, token_ids[i][: num_accepted[i] + 1], scheduled),
            draft=next_drafts.get(i),
        )
        for i, scheduled in enumerate(block.step)
    ]


def _drafts_to_host(drafts: _Drafts) -> Iterator[tuple[int, Draft]]:
    token_ids, confidences = drafts.result.token_ids.tolist(), drafts.confidences.tolist()
    for j, member in enumerate(drafts.members):
        probs = None
        if drafts.by_rejection[j] and drafts.result.probs is not None:
            probs = drafts.result.probs[j]
        proposal = Proposal(token_ids=tuple(token_ids[j]), confidences=tuple(confidences[j]))
        yield member, Draft(proposal=proposal, probs=probs)


def _logprobs_to_host(
    logprobs: _Logprobs | None, index: int, token_ids: list[int], scheduled: ScheduledRequest
) -> tuple[TokenLogprob, ...]:
    num_top = scheduled.request.sampling.logprobs
    if logprobs is None or num_top is None:
        return ()
    chosen = logprobs.chosen[index].tolist()
    top_ids, top = logprobs.top_ids[index].tolist(), logprobs.top[index].tolist()
    return tuple(
        TokenLogprob(
            token_id=token_id,
            logprob=chosen[j],
            top=tuple(zip(top_ids[j][:num_top], top[j][:num_top], strict=True)),
        )
        for j, token_id in enumerate(token_ids)
    )
