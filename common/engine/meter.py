"""From what a step did to the figures of a worker. Knows reports and metrics; runs on the event loop, never in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from common.engine.memory import Memory
from common.engine.request import RoundResult, StepReport
from common.kv_cache.layout import PAGE_TOKENS
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.metrics.spec_decode import ROUNDS_SINCE_HANDOFF, rounds_since_handoff
from common.telemetry.metrics.worker import STEP_PHASES, EngineMetrics

PHASES = {"forward": "verify", "verify": "sample"}
"""What the engine's clock calls otherwise than the metrics do."""


class EngineHealth(Protocol):
    """What an engine thread tells of itself, to any thread."""

    @property
    def has_crashed(self) -> bool: ...
    @property
    def busy_s(self) -> float: ...


class StepMeter:
    """Counts steps. Sums up over a step's rounds first: a counter costs as much as twenty additions."""

    def __init__(
        self,
        metrics: WorkerMetrics,
        *,
        draft_length: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = metrics.engine
        self._spec = metrics.spec_decode
        self._wall_clock = wall_clock
        self._phases = metrics.engine.step_phase.children("phase", STEP_PHASES)
        self._skipped = metrics.spec_decode.draft_skipped
        self._lengths = metrics.spec_decode.accepted_length.children(
            "rounds_since_handoff", ROUNDS_SINCE_HANDOFF
        )
        metrics.spec_decode.know_draft_length(draft_length)
        positions = [str(position) for position in range(1, draft_length + 1)]
        self._verified_at, self._accepted_at, self._predicted_at = (
            list(counters.children("position", positions).values())
            for counters in (
                metrics.spec_decode.draft_tokens_per_position,
                metrics.spec_decode.accepted_tokens_per_position,
                metrics.spec_decode.predicted_tokens_per_position,
            )
        )

    def count(self, report: StepReport) -> None:
        """A step has ended. Its requests may have gone on changing meanwhile, and are not looked at."""
        engine = self._engine
        engine.step_duration.observe(report.seconds)
        engine.step_rows.observe(report.num_rows)
        engine.step_batch_size.observe(len(report.rounds) + len(report.progressed))
        engine.last_step_timestamp.set(self._wall_clock())
        for name, seconds in report.phase_seconds.items():
            phase = PHASES.get(name, name)
            if phase not in self._phases:
                self._phases[phase] = engine.step_phase.labels(phase=phase)
            self._phases[phase].inc(seconds)
        if report.num_prompt_tokens:
            engine.prompt_tokens_computed.inc(report.num_prompt_tokens)
        if report.rounds:
            engine.tokens_sampled.inc(sum(len(result.token_ids) for result in report.rounds))
            self._count_rounds([result for result in report.rounds if not result.ends_prompt])

    def _count_rounds(self, rounds: list[RoundResult]) -> None:
        for result in rounds:
            length = len(result.token_ids)
            self._lengths[rounds_since_handoff(result.round)].observe(length)
            self._spec.verify_window.observe(1 + result.num_draft)
            if not result.num_draft:
                reason = "not_scheduled" if result.num_offered else "no_proposal"
                self._skipped.labels(reason=reason).inc()
        drafted = [result for result in rounds if result.num_draft]
        num_cut = sum(result.num_offered - result.num_draft for result in rounds)
        if num_cut:
            self._spec.cut_tokens.inc(num_cut)
        if drafted:
            self._spec.drafts.inc(len(drafted))
            self._spec.draft_tokens.inc(sum(result.num_draft for result in drafted))
            self._spec.accepted_tokens.inc(sum(result.num_accepted for result in drafted))
            self._count_positions(drafted)

    def _count_positions(self, drafted: Iterable[RoundResult]) -> None:
        num_positions = len(self._verified_at)
        verified, accepted, predicted = (
            [0] * num_positions,
            [0] * num_positions,
            [0.0] * num_positions,
        )
        for result in drafted:
            survival = 1.0
            for position, confidence in enumerate(result.confidences):
                survival *= confidence
                verified[position] += 1
                predicted[position] += survival
            for position in range(result.num_accepted):
                accepted[position] += 1
        for position in range(num_positions):
            if verified[position]:
                self._verified_at[position].inc(verified[position])
                self._accepted_at[position].inc(accepted[position])
                self._predicted_at[position].inc(predicted[position])


def follow_engine(metrics: EngineMetrics, engine: EngineHealth, memory: Memory) -> None:
    """From now on the engine's health and the memory's use are read whenever metrics are."""

    def used_tokens() -> int:
        return (memory.num_pages - memory.num_free_pages) * PAGE_TOKENS

    metrics.kv_cache_capacity_tokens.set(memory.num_pages * PAGE_TOKENS)
    metrics.kv_cache_used_tokens.set_function(used_tokens)
    metrics.kv_cache_usage_ratio.set_function(
        lambda: used_tokens() / (memory.num_pages * PAGE_TOKENS)
    )
    metrics.request_slots.labels(state="free").set_function(lambda: memory.num_free_slots)
    metrics.request_slots.labels(state="used").set_function(
        lambda: memory.num_slots - memory.num_free_slots
    )
    metrics.engine_busy.set_function(lambda: engine.busy_s)
    metrics.engine_failed.set_function(lambda: float(engine.has_crashed))
