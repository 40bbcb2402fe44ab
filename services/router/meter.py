"""From what happens to requests to the router's figures. Knows events, stages and metrics; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from common.errors import ErrorKind, ServingError
from common.telemetry.metrics import RouterMetrics
from common.telemetry.metrics.router import (
    CANCELLED,
    ERROR,
    FIRST_TOKEN_STAGES,
    LATER_STAGES,
    OK,
    STAGES,
)
from common.telemetry.tracing import current
from common.types import RequestContext
from services.router.attempt import Attempt, AttemptEvent, AttemptFailed
from services.router.commits import Commits, Committed
from services.router.events import Admitted, FirstToken
from services.router.stage_clock import StageClock


class Meters:
    """Begins the measurement of every request, and knows those that live."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self.metrics = metrics
        self.clock = clock
        self.stage_durations = metrics.requests.stage_duration.children("stage", STAGES)
        self._live: set[RequestMeter] = set()

    def begin(self) -> RequestMeter:
        """A request has arrived."""
        return RequestMeter(self)

    def live(self) -> tuple[RequestMeter, ...]:
        """Requests that passed validation and have not ended. May be asked by any thread."""
        return tuple(self._live)

    @contextlib.contextmanager
    def counting(self, endpoint: str) -> Iterator[None]:
        """Counts what comes through a door by how it ends, refused requests included."""
        requests = self.metrics.requests
        code, reason = ErrorKind.INTERNAL.value, ServingError.reason
        try:
            yield
            code, reason = OK, ""
        except ServingError as error:
            code, reason = error.kind.value, error.reason
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code, reason = CANCELLED, ""
            raise
        finally:
            requests.requests.labels(endpoint=endpoint, code=code).inc()
            if reason:
                requests.errors.labels(reason=reason).inc()

    def add(self, meter: RequestMeter) -> None:
        self._live.add(meter)

    def discard(self, meter: RequestMeter) -> None:
        self._live.discard(meter)


class RequestMeter:
    """One request, from its arrival on."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._metrics = meters.metrics.requests
        self._routing = meters.metrics.routing
        self._stages = StageClock(meters.clock)
        self._prefill_figures: tuple[float, float] | None = None
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self.context: RequestContext
        """Set once validated."""
        self.attempt: Attempt | None = None
        """Where it runs; None while it waits for a place."""
        self.waits_since = self.arrived_at

    @property
    def arrived_at(self) -> float:
        return self._stages.began_at

    @property
    def has_first_token(self) -> bool:
        return self._first_token_at is not None

    @contextlib.contextmanager
    def of(self, commits: Commits) -> Iterator[None]:
        """The request is valid and lives until the block ends."""
        self.context = commits.context
        self.waits_since = self._stages.enter("queue")
        self._meters.add(self)
        outcome = ERROR
        try:
            yield
            assert commits.finish is not None, "a request ends with a reason or an error"
            outcome = commits.finish.reason.value
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        finally:
            self._meters.discard(self)
            self._end(commits, outcome)

    def placed(self, attempt: Attempt) -> None:
        """It runs on workers."""
        self.attempt = attempt
        self._prefill_figures = None
        if not self.has_first_token:
            self._stages.enter("prefill")
        source = "decode"
        if attempt.prefill is not None:
            source = "lease" if attempt.is_from_lease else "prefill"
            self._routing.selections.labels(role="prefill", worker=attempt.prefill.address).inc()
        self._routing.selections.labels(role="decode", worker=attempt.decode.address).inc()
        self._routing.placements.labels(source=source).inc()

    def failed(self, failure: AttemptFailed) -> None:
        """Its placement failed; it is placed again or ends."""
        self.attempt = None
        self.waits_since = self._stages.enter("replacement" if self.has_first_token else "queue")
        self._routing.retries.labels(reason=failure.error.reason).inc()

    def saw(self, event: AttemptEvent) -> None:
        """A worker reported something."""
        if isinstance(event, FirstToken):
            self._prefill_figures = (event.queue_s, event.compute_s)
        elif isinstance(event, Admitted) and self._stages.current == "handoff":
            self._stages.enter("decode_wait")

    def committed(self, committed: Committed) -> None:
        """Tokens became part of the answer."""
        if not committed.token_ids:
            return
        is_first = not self.has_first_token
        now = self._stages.enter(self._next_stage(committed))
        num_tokens = len(committed.token_ids)
        self._metrics.generation_tokens.inc(num_tokens)
        if is_first:
            self._count_first_token(now)
        else:
            between_s = (now - self._last_token_at) / num_tokens
            for _ in committed.token_ids:
                self._metrics.inter_token_latency.observe(between_s)
        self._last_token_at = now

    @contextlib.contextmanager
    def client(self) -> Iterator[None]:
        """It is the client's turn until the block ends."""
        stage = self._stages.current
        self._stages.enter("client")
        yield
        self._stages.enter(stage)

    def _next_stage(self, committed: Committed) -> str:
        """What a request does after its tokens were committed."""
        if committed.round > 0:
            return "decode"
        # A prefill worker sampled this one. Its state is on its way, unless decode was the first to tell of the token.
        return "handoff" if self._prefill_figures is not None else "decode_wait"

    def _count_first_token(self, now: float) -> None:
        self._first_token_at = now
        if self._prefill_figures is not None:
            queue_s, compute_s = self._prefill_figures
            self._stages.split_prefill(queue_s=queue_s, compute_s=compute_s)
        self._metrics.time_to_first_token.observe(now - self.arrived_at, _exemplar())
        self._metrics.prompt_tokens.inc(len(self.context.prompt))
        for stage, seconds in self._stages.seconds(FIRST_TOKEN_STAGES).items():
            self._meters.stage_durations[stage].observe(seconds)

    def _end(self, commits: Commits, outcome: str) -> None:
        now = self._stages.end()
        num_tokens, counts = len(self.context.committed), commits.counts
        self._metrics.finished.labels(reason=outcome).inc()
        self._metrics.request_prompt_tokens.observe(len(self.context.prompt))
        self._metrics.request_generation_tokens.observe(num_tokens)
        if counts.draft_tokens:
            self._metrics.request_acceptance.observe(counts.accepted_tokens / counts.draft_tokens)
        if self._first_token_at is None:
            return
        self._metrics.duration.observe(now - self.arrived_at, _exemplar())
        for stage, seconds in self._stages.seconds(LATER_STAGES).items():
            self._meters.stage_durations[stage].observe(seconds)
        if num_tokens > 1:
            per_token_s = (self._last_token_at - self._first_token_at) / (num_tokens - 1)
            self._metrics.time_per_output_token.observe(per_token_s)


def _exemplar() -> dict[str, str] | None:
    """The trace of the request, so that a slow bucket leads to one that was slow."""
    span = current()
    return None if span is None else {"trace_id": span.trace_id}
