"""What a hand-off needs beside the request: the worker's means, and the receiver's leave. Knows no state of either."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from common.telemetry.metrics import TransferMetrics
from common.transfer.memory import PoolMemory
from services.prefill.config import HandoffConfig
from services.prefill.link import LinkMeter
from services.prefill.pairs import Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTicket:
    """Proof of a reservation on a decode worker."""

    address: str
    reservation_id: str
    capability: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """What all hand-offs of a worker share."""

    memory: PoolMemory
    pairs: Pairs
    config: HandoffConfig
    metrics: TransferMetrics
    link: LinkMeter
    clock: Callable[[], float] = time.monotonic
    """The one that the engine reads too."""
