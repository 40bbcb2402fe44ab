"""What a router is told about a prefill. Knows facts; not how they travel."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first token was sampled; sent before the proposal behind it is drafted."""

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
    num_late_bytes: int
    """Of these, what had not arrived when the first proposal was drafted."""
    handoff_s: float
    """From the first proposal, or a lease's hand-off's beginning, to the acknowledgement."""
    wire_s: float
    """Of that, when a write was under way."""
    total_wire_s: float
    """When a write was under way, before that too."""
    digest_s: float
    """Of `handoff_s`, when one side or the other only digested."""
    transfer_engine: str


Event = FirstToken | HandoffDone
