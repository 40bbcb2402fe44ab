"""What workers report of one request, in the words of the router. Knows facts; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ServingError
from common.types import TokenLogprob
from services.router.commits import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The prefill worker sampled the first token; the hand-off goes on."""

    token_id: int
    logprob: TokenLogprob | None
    queue_s: float
    """From arrival at the worker to the first chunk's start, by the worker's clock."""
    compute_s: float
    """From there to the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOff:
    """The decode worker has acknowledged the state."""

    lease_id: str
    """Names the state that the prefill worker keeps."""
    lease_s: float
    """How long it does so unless the lease is renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The decode worker runs the request."""

    first_token_id: int | None
    """None when decode computes the prompt; the first round brings the token then."""
    first_logprob: TokenLogprob | None
    drafter_fallback: str
    transfer_engine: str
    """What carried the hand-off; empty when there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A worker gave the request up, or is gone."""

    error: ServingError
    worker: str
    """Address of the worker that failed."""
    role: str
    """ "prefill" or "decode"; one address may have both."""


Event = FirstToken | HandedOff | Admitted | Round | Failed
