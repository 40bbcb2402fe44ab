"""Which prefill workers have introduced themselves. Knows generations and engines; no requests."""

from __future__ import annotations

import asyncio
import logging

from common.errors import ContractMismatch, PairUnknown
from common.telemetry.metrics import TransferMetrics
from common.transfer.engine import TransferEngine
from common.transfer.engines import Engines
from common.transfer.handoff import CacheContract, HandoffKey, HandoffOffer
from common.transfer.meeting import Acquaintance, Introduction
from common.transfer.memory import PoolMemory

logger = logging.getLogger(__name__)

MAX_KNOWN = 4096
"""Prefill processes that are remembered; the oldest is forgotten first and introduces itself again."""

PROBE_WINDOW_S = 5.0
"""After a meeting the sender writes a few bytes, for which some engines need our help."""


class Meetings:
    """Introductions of prefill workers to this decode worker."""

    def __init__(
        self,
        *,
        memory: PoolMemory,
        contract: CacheContract,
        engines: Engines,
        generation: str,
        metrics: TransferMetrics,
    ) -> None:
        self.generation = generation
        self._memory = memory
        self._contract = contract
        self._engines = engines.by_name
        self._metrics = metrics
        self._known: dict[str, Introduction] = {}
        """By the prefill worker's generation, oldest first."""

    def meet(self, introduction: Introduction) -> Acquaintance:
        """Compare contracts, choose the first engine of the sender's list that is here, and say where memory is.

        Raises ContractMismatch that names the field and both values.
        """
        self._contract.require_equal(introduction.contract, ours="decode", theirs="prefill")
        engine = self._choose(introduction.transfer_engines)
        self._known.pop(introduction.generation, None)
        self._known[introduction.generation] = introduction
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._metrics.know_regions(
            peer=introduction.address, regions=(r.name for r in self._memory.layout.regions)
        )
        self._metrics.chose_engine(
            peer=introduction.address, engine=engine.name, reason="the sender's first that is here"
        )
        logger.info(
            "prefill worker %s (%s) writes here by %s",
            introduction.address,
            introduction.generation,
            engine.name,
        )
        asyncio.get_running_loop().call_later(PROBE_WINDOW_S, engine.receive())
        return Acquaintance(
            generation=self.generation,
            engine=engine.descriptor,
            memory=self._memory.regions,
            transfer_engines=tuple(self._engines),
        )

    def require_met(self, key: HandoffKey, offer: HandoffOffer) -> TransferEngine:
        """The engine of a hand-off. Raises PairUnknown when its sender must introduce itself first."""
        if key.prefill_generation not in self._known:
            raise PairUnknown(
                f"prefill generation {key.prefill_generation!r} has not introduced itself here"
            )
        if offer.decode_generation != self.generation:
            raise PairUnknown(
                f"the sender met decode generation {offer.decode_generation!r}; this is {self.generation!r}"
            )
        engine = self._engines.get(offer.transfer_engine)
        if engine is None:
            raise PairUnknown(
                f"transfer_engines are {sorted(self._engines)} at decode but the sender would use {offer.transfer_engine!r}"
            )
        return engine

    def address_of(self, key: HandoffKey) -> str:
        """Where a hand-off's sender serves; its generation when that is not known."""
        known = self._known.get(key.prefill_generation)
        return (known.address if known is not None else "") or key.prefill_generation

    def _choose(self, offered: tuple[str, ...]) -> TransferEngine:
        for name in offered:
            if name in self._engines:
                return self._engines[name]
        raise ContractMismatch(
            f"transfer_engines are {sorted(self._engines)} at decode but {sorted(offered)} at prefill",
            metadata={"field": "transfer_engines"},
        )
