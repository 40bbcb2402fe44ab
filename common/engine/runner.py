"""Runs one data parallel group's part of a step: target forward, verification, drafter. Knows tensors; decides nothing.

Everything between the forward and the last line stays on the device; the step's only wait for it is the copy of the
accepted tokens at the end, and one behind the forward where somebody asks when the rows are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.clock import PhaseClock
from common.engine.outputs import RequestOutput, add_drafts, reported_logprobs, to_host
from common.engine.proposals import DraftTensors, Proposer
from common.engine.request import Request, StepListener
from common.engine.scheduler import ScheduledRequest
from common.engine.tensors import ints
from common.engine.verification import verify_rows
from common.engine.verify_block import VerifyBlock
from common.kv_cache.layout import Retention
from common.kv_cache.pool import CachePool
from common.model.dspark import DSparkModel
from common.model.plan import PlanSpec, RowRun, StepPlan, build_plan
from common.spec_decode.verify import VerificationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Rows that each data parallel group brings to the two passes of a step; experts are shared by all of them."""

    target: tuple[int, ...]
    drafts: tuple[int, ...]

    @classmethod
    def of(cls, steps: Sequence[Sequence[ScheduledRequest]], draft_length: int) -> StepRows:
        """The rows of a step, which has a part for each group."""
        return cls(
            target=tuple(sum(scheduled.num_rows for scheduled in step) for step in steps),
            drafts=tuple(
                draft_length * sum(scheduled.may_draft for scheduled in step) for step in steps
            ),
        )


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
        self.draft_length = draft_length if model.drafter is not None else 0
        config = model.config
        self._plan_spec = PlanSpec(
            window=config.sliding_window,
            ratios=tuple(sorted(set(config.compress_ratios) - {0})),
            num_heads=model.num_heads,
            ring_rows={
                region.name: pool.buffers[region.name].rows_per_block
                for region in pool.layout.regions
                if region.retention is Retention.RING
            },
            dtype=model.dtype,
            device=model.device,
        )
        self._proposer = (
            Proposer(
                model.drafter,
                pool,
                model.vocabulary,
                draft_length=self.draft_length,
                confidence_temperatures=confidence_temperatures,
                device=model.device,
            )
            if model.drafter is not None and self.draft_length
            else None
        )

    @torch.inference_mode()
    def adopt(self, request: Request) -> None:
        """A slot is this request's from now on: what earlier owners left in it is wiped, what was handed over stays."""
        self.pool.scrub(request.slot, request.num_computed, drafter_from=request.drafter_valid_from)

    @torch.inference_mode()
    def run(
        self,
        step: Sequence[ScheduledRequest],
        rows: StepRows,
        clock: PhaseClock,
        listener: StepListener | None = None,
    ) -> list[RequestOutput | None]:
        """One output per scheduled request; None for those that only computed a chunk.

        `listener` is told of every request's rows between forward and sampling, and of tokens between sampling and drafting;
        the device is waited for before.
        """
        if not any(rows.target):
            return []
        sampling = [scheduled for scheduled in step if scheduled.is_sampling]
        verified = None
        with clock.phase("forward"):
            if step:
                logits = self._forward(step, rows)
            else:
                self.model.target.join(rows.target)
        if listener is not None:
            if self.model.device.type != "cpu":
                torch.accelerator.synchronize()
            for scheduled in step:
                num_computed = scheduled.request.num_computed + scheduled.num_tokens
                listener.computed(scheduled.request, num_computed)
        outputs: list[RequestOutput] = []
        if sampling:
            with clock.phase("verify"):
                block = VerifyBlock(sampling, self.model.device)
                checked = verify_rows(block, logits, self.model.vocabulary)
                verified = checked.result
                logprobs = reported_logprobs(block, checked)
            if listener is not None:
                with clock.phase("copy"):
                    outputs = to_host(block, verified, logprobs)
                _tell(listener, sampling, outputs)
        with clock.phase("draft"):
            drafts = self._draft(sampling, verified, rows)
        if verified is None:
            return [None] * len(step)
        with clock.phase("copy"):
            outputs = outputs or to_host(block, verified, logprobs)
            if drafts is not None:
                add_drafts(outputs, drafts)
        by_order = iter(outputs)
        return [next(by_order) if scheduled.is_sampling else None for scheduled in step]

    def _forward(self, step: Sequence[ScheduledRequest], rows: StepRows) -> torch.Tensor:
        """Logits of the rows that are sampled from; the drafter's context rows are written on the way."""
        plan, logit_rows = self._plan(step, rows)
        token_ids = [token for scheduled in step for token in _row_tokens(scheduled)]
        device = self.model.device
        output = self.model.target.forward(
            ints(token_ids, device), plan, self.pool, ints(logit_rows, device)
        )
        if self.model.drafter is not None:
            self.model.drafter.write_context(output.taps, plan, self.pool)
        return output.logits

    def _plan(self, step: Sequence[ScheduledRequest], rows: StepRows) -> tuple[StepPlan, list[int]]:
        runs: list[RowRun] = []
        logit_rows: list[int] = []
        begin = 0
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
        return build_plan(runs, self._plan_spec, rows.target), logit_rows

    def _draft(
        self,
        sampling: list[ScheduledRequest],
        verified: VerificationResult | None,
        rows: StepRows,
    ) -> DraftTensors | None:
        """Draft for every request that may speculate, and take part where others draft."""
        if self._proposer is None or not any(rows.drafts):
            return None
        members = [i for i, scheduled in enumerate(sampling) if scheduled.may_draft]
        if verified is None or not members:
            self._proposer.join(rows.drafts)
            return None
        requests = [sampling[i].request for i in members]
        return self._proposer.propose(members, requests, verified, rows.drafts)


def _tell(
    listener: StepListener,
    sampling: Sequence[ScheduledRequest],
    outputs: Sequence[RequestOutput],
) -> None:
    for scheduled, output in zip(sampling, outputs, strict=True):
        logprob = output.logprobs[0] if output.logprobs else None
        listener.sampled(scheduled.request, output.token_ids[0], logprob)


def _row_tokens(scheduled: ScheduledRequest) -> list[int]:
    request = scheduled.request
    begin = request.num_computed
    tokens = request.tokens[begin : begin + scheduled.num_tokens]
    if scheduled.num_draft:
        assert request.draft is not None
        tokens += request.draft.proposal.token_ids[: scheduled.num_draft]
    return tokens
