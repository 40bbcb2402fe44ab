"""One hand-off on its way into a worker. Knows its terms and how far it is; checks nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.transfer.engine import TransferEngine
from common.transfer.handoff import HandoffKey, HandoffResult, HandoffTerms
from common.transfer.plan import Placement
from services.decode.arrivals import Arrivals


@dataclass(slots=True, kw_only=True)
class Incoming:
    """A hand-off from its negotiation on."""

    key: HandoffKey
    terms: HandoffTerms
    destination: Placement
    engine: TransferEngine
    num_tokens: int
    """Positions that come; the request computes the others itself."""
    sender_address: str
    stop_receiving: Callable[[], None]
    """Told to the engine once, when nothing more can come in."""
    arrivals: Arrivals
    may_be_written: bool = True
    """False once the sender has said that it has stopped, which a Complete says too."""
    result: HandoffResult | None = None
    """Set once everything has arrived whole."""
    digest_s: float = 0.0
    """Of the last check: how long the sender waited for our digest."""
    negotiated_at: float = field(default_factory=time.monotonic)
    num_mismatches: int = 0
    check: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One digest at a time: a repeated Complete must not count as a second mismatch."""
