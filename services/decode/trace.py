"""One request's part of its trace on this worker. Knows spans and rounds; never a token."""

from __future__ import annotations

from collections import Counter

from common.engine.request import RoundResult
from common.errors import ServingError
from common.telemetry.tracing import Span
from common.types import RequestContext


class RequestTrace:
    """A span from admission to release, of which waiting for the state and running are parts.

    Does nothing for a request that is not traced.
    """

    def __init__(self, span: Span | None, context: RequestContext) -> None:
        self._span = span
        if span is None:
            return
        span.set({"dspark.request_id": context.request_id, "dspark.epoch": context.epoch})
        self._part = span.child("decode.wait_for_state")
        self._counts: Counter[str] = Counter()

    def runs(self, *, transfer_engine: str) -> None:
        """The state is complete and the engine has the request."""
        if self._span is not None:
            self._span.set({"dspark.transfer_engine": transfer_engine})
            self._part.end()
            self._part = self._span.child("decode.run")

    def round(self, result: RoundResult) -> None:
        """A round was verified."""
        if self._span is None:
            return
        self._counts.update(
            rounds=1, draft_tokens=result.num_draft, accepted_tokens=result.num_accepted
        )
        self._part.event(
            "round",
            {
                "dspark.round": result.round,
                "dspark.draft_tokens": result.num_draft,
                "dspark.accepted_tokens": result.num_accepted,
                "dspark.new_tokens": len(result.token_ids),
            },
        )

    def ended(self, error: ServingError | None) -> None:
        """The request is over and its memory given back."""
        if self._span is None:
            return
        reason = "" if error is None else error.reason
        self._part.set({f"dspark.{name}": count for name, count in self._counts.items()})
        self._part.end(error=reason)
        self._span.end(error=reason)

    def ids(self) -> dict[str, str]:
        """For a line in the log."""
        return {} if self._span is None else {"trace_id": self._span.trace_id}
