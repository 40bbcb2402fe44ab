"""What a router is told about a prefill. Knows facts; not how they travel."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first token was sampled; sent before the hand-off ends."""

    token_id: int
    logprob: TokenLogprob | None
    queue_s: float
    """From arrival to the first chunk's start."""
    compute_s: float
    """From there to the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffDone:
    """The decode worker has everything; the last event."""

    lease_id: str
    lease_s: float
    num_bytes: int
    handoff_s: float
    """From the first token to the acknowledgement."""
    transfer_engine: str


Event = FirstToken | HandoffDone
