"""What a router is told about its requests. Knows facts; not how they travel."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.request import RoundResult
from common.errors import ServingError
from common.types import RequestId, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The request's state is complete and it runs."""

    request_id: RequestId
    epoch: int
    first_token_id: int | None
    """None when this worker computes the prompt."""
    first_logprob: TokenLogprob | None
    drafter_fallback: str
    """Why drafting begins without the prompt's drafter state; empty when it does not."""
    transfer_engine: str
    """What carried the hand-off; empty when there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One round's result."""

    request_id: RequestId
    epoch: int
    result: RoundResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The request ended as told and its memory is free."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request ended with an error and its memory is free."""

    request_id: RequestId
    epoch: int
    error: ServingError


Event = Admitted | Verified | Finished | Failed
