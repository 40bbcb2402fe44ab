"""What the router counts: requests from their arrival to their end. Knows names and label values; no request."""

from __future__ import annotations

from collections.abc import Iterator

from common import errors
from common.errors import ErrorKind, ServingError
from common.telemetry.metrics.families import SECONDS, Families
from common.types import FinishReason

ENDPOINTS = ("Generate",)
"""Doors that requests come through."""

OK = "ok"
CODES = (OK, *(kind.value for kind in ErrorKind))

ERROR = "error"
CANCELLED = "cancelled"
FINISH_REASONS = (*(reason.value for reason in FinishReason), ERROR, CANCELLED)

FIRST_TOKEN_STAGES = {
    "tokenize": "from arrival until the prompt is tokenized and valid",
    "queue": "until workers have a place for it; again when a worker fails before the first token",
    "prefill_queue": "at the prefill worker, until its first chunk begins, as that worker says",
    "prefill": "from there until the first token is sampled, as that worker says; all of it where decode computes prompts",
    "prefill_rpc": "the rest until the first token is committed: calls on their way, and prefills that failed before",
}
"""Their sum is the time to the first token."""
LATER_STAGES = {
    "handoff": "from the first token until decode has the state, the first proposal too, and has admitted the request",
    "decode_wait": "from there until the first round",
    "decode": "rounds, until the workers are left",
    "client": "a client that has not taken what is there yet, which pauses its request",
    "replacement": "after the first token: from a worker's failure until the next token is committed",
}
"""With those before, their sum is the duration of the request."""
STAGES = (*FIRST_TOKEN_STAGES, *LATER_STAGES)

PLACEMENT_SOURCES = ("prefill", "lease", "decode")

_TIME_TO_FIRST_TOKEN = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# One step gives several tokens, so the time between two of them goes below what one step can take.
_BETWEEN_TOKENS = (
    *(0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0),
)
_DURATION = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(2**exponent for exponent in range(21))
_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def error_reasons() -> tuple[str, ...]:
    """The reason of every error that can cross a service border, in alphabetical order."""
    return tuple(sorted({kind.reason for kind in _all_errors(ServingError)}))


def _all_errors(root: type[ServingError]) -> Iterator[type[ServingError]]:
    if root.__module__ == errors.__name__:
        yield root
        for kind in root.__subclasses__():
            yield from _all_errors(kind)


class RequestMetrics:
    """Requests of one router."""

    def __init__(self, families: Families) -> None:
        self.requests = families.counters(
            "dspark_requests_total",
            "Requests that ended, by the door they came through and by status.",
            endpoint=ENDPOINTS,
            code=CODES,
        )
        self.errors = families.counters(
            "dspark_request_errors_total",
            "Requests that ended with an error, by its reason. Refusals are among them.",
            reason=error_reasons(),
        )
        self.finished = families.counters(
            "dspark_request_finished_total",
            "Requests that had passed validation and ended, by how they ended.",
            reason=FINISH_REASONS,
        )
        self.in_flight = families.gauge(
            "dspark_requests_in_flight", "Requests between their validation and their end."
        )
        self.time_to_first_token = families.histogram(
            "dspark_time_to_first_token_seconds",
            "From a request's arrival to the commit of its first token.",
            _TIME_TO_FIRST_TOKEN,
        )
        self.inter_token_latency = families.histogram(
            "dspark_inter_token_latency_seconds",
            "Time between two tokens. The tokens of one round share the time since the round before evenly.",
            _BETWEEN_TOKENS,
        )
        self.time_per_output_token = families.histogram(
            "dspark_time_per_output_token_seconds",
            "Mean time per token after the first one, once per request of two or more tokens.",
            _BETWEEN_TOKENS,
        )
        self.duration = families.histogram(
            "dspark_request_duration_seconds",
            "From arrival to end of every request that got a first token.",
            _DURATION,
        )
        self.stage_duration = families.histograms(
            "dspark_request_stage_duration_seconds",
            "Where the time of a request went, once per stage and request. tokenize, queue, prefill_queue, prefill and "
            "prefill_rpc add up to the time to first token; with handoff, decode_wait, decode, client and replacement "
            "they add up to the duration.",
            SECONDS,
            stage=STAGES,
        )
        self.prompt_tokens = families.counter(
            "dspark_prompt_tokens_total", "Prompt tokens of requests that got a first token."
        )
        self.generation_tokens = families.counter(
            "dspark_generation_tokens_total", "Tokens that were committed to requests."
        )
        self.request_prompt_tokens = families.histogram(
            "dspark_request_prompt_tokens", "Prompt tokens of requests that ended.", _TOKENS
        )
        self.request_generation_tokens = families.histogram(
            "dspark_request_generation_tokens", "Generated tokens of requests that ended.", _TOKENS
        )
        self.request_acceptance = families.histogram(
            "dspark_request_spec_acceptance_ratio",
            "Share of a request's drafts that became part of its answer, once per request that was drafted for. Very "
            "low tells of a drafter that lost its state, very high of an answer that repeats itself.",
            _RATIOS,
        )


class RoutingMetrics:
    """The router's queue, its choice of workers and what it thinks of them. `role` is a worker's."""

    def __init__(self, families: Families) -> None:
        self.queue_requests = families.gauge(
            "dspark_router_queue_requests", "Requests that wait for a place on workers."
        )
        self.expected_wait = families.gauge(
            "dspark_router_expected_wait_seconds",
            "How long a request that comes now will probably wait for a place.",
        )
        self.placements = families.counters(
            "dspark_router_placements_total",
            "Placements of requests, first ones and later ones, by what brings the state: a prefill worker that "
            "computes it, one that kept it under a lease, or the decode worker itself.",
            source=PLACEMENT_SOURCES,
        )
        self.retries = families.counters(
            "dspark_router_retries_total",
            "Placements that failed under a request, which was placed again or ended, by the reason of the failure.",
            reason=error_reasons(),
        )
        self.selections = families.counters(
            "dspark_router_worker_selections_total",
            "Placements by worker.",
            role=None,
            worker=None,
        )
        self.ejections = families.counters(
            "dspark_router_ejections_total",
            "Times that a worker which was there became unreachable or was restarted.",
            role=None,
            worker=None,
        )
        self.workers = families.gauges(
            "dspark_workers",
            "Configured workers by what this router can do with them.",
            role=("prefill", "decode"),
            state=("ready", "draining", "unreachable", "unknown"),
        )

    def know_worker(self, *, role: str, worker: str) -> None:
        """Begin to count a worker at zero."""
        self.selections.labels(role=role, worker=worker)
        self.ejections.labels(role=role, worker=worker)

    def forget_worker(self, *, role: str, worker: str) -> None:
        """The worker is there no more, and neither are its figures."""
        self.selections.remove(role=role, worker=worker)
        self.ejections.remove(role=role, worker=worker)
