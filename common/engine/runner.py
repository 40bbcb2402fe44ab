"""Runs one step: target forward, verification, drafter. Knows tensors and the model; decides nothing.

Everything between the forward and the last line stays on the device; the step's only wait for it is the copy of the
accepted tokens at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.clock import PhaseClock
from common.engine.outputs import DraftTensors, LogprobTensors, RequestOutput, to_host
from common.engine.request import Role
from common.engine.scheduler import ScheduledRequest
from common.engine.verify_block import VerifyBlock, uses_rejection
from common.kv_cache.layout import Retention
from common.kv_cache.pool import CachePool
from common.model.dspark import DSparkModel
from common.model.plan import PlanSpec, RowRun, StepPlan, build_plan
from common.sampling.logprobs import token_logprobs
from common.sampling.params import SamplingRows
from common.spec_decode.confidence import calibrate
from common.spec_decode.draft_sampling import markov_draft
from common.spec_decode.verify import VerificationResult

DRAFTER_WARMUP_ROWS = 32
"""Own rows that a drafter window needs before drafting resumes when a hand-off came without drafter state."""


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
        if not step:
            return []
        with clock.phase("forward"):
            plan, logit_rows = self._plan(step)
            token_ids = [token for scheduled in step for token in _row_tokens(scheduled)]
            output = self.model.target.forward(
                self._ints(token_ids), plan, self.pool, self._ints(logit_rows)
            )
            if self.model.drafter is not None:
                self.model.drafter.write_context(output.taps, plan, self.pool)
        sampling = [scheduled for scheduled in step if scheduled.is_sampling]
        if not sampling:
            return [None] * len(step)
        with clock.phase("verify"):
            block = VerifyBlock(sampling, self.model.device)
            logits = output.logits if block.is_uniform else output.logits[block.row_index]
            logits = logits.view(len(sampling), block.width, -1)
            verified = block.verify(logits)
            logprobs = self._logprobs(block, logits, verified)
        with clock.phase("draft"):
            drafts = self._draft(block, verified)
        with clock.phase("copy"):
            outputs = iter(to_host(block, verified, logprobs, drafts))
        return [next(outputs) if scheduled.is_sampling else None for scheduled in step]

    def _plan(self, step: Sequence[ScheduledRequest]) -> tuple[StepPlan, list[int]]:
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
        return build_plan(runs, self._plan_spec), logit_rows

    def _draft(self, block: VerifyBlock, verified: VerificationResult) -> DraftTensors | None:
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
            uses_rejection(request.sampling) and request.role is Role.GENERATE
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
        return DraftTensors(
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
        block: VerifyBlock, logits: torch.Tensor, verified: VerificationResult
    ) -> LogprobTensors | None:
        wanted = [scheduled.request.sampling.logprobs for scheduled in block.step]
        if all(count is None for count in wanted):
            return None
        ids = verified.token_ids.clamp(min=0).flatten()
        values = token_logprobs(logits.flatten(0, 1), ids, max(count or 0 for count in wanted))
        shape = (len(block.step), block.width)
        return LogprobTensors(
            values.logprobs.view(shape),
            values.top_ids.view(*shape, -1),
            values.top_logprobs.view(*shape, -1),
        )

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.model.device, non_blocking=True)


def _row_tokens(scheduled: ScheduledRequest) -> list[int]:
    request = scheduled.request
    begin = request.num_computed
    tokens = request.tokens[begin : begin + scheduled.num_tokens]
    if scheduled.num_draft:
        assert request.draft is not None
        tokens += request.draft.proposal.token_ids[: scheduled.num_draft]
    return tokens
