"""Which prefill workers have introduced themselves. Knows generations and engines; no requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Sender:
    """A prefill process that introduced itself."""

    address: str
    drafter_difference: str


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
        self._engines = engines
        self._metrics = metrics
        self._known: dict[str, _Sender] = {}
        """By the prefill worker's generation, oldest first."""

    def meet(self, introduction: Introduction) -> Acquaintance:
        """Compare contracts, choose the first engine of the sender's list that is here, and say where memory is.

        Another drafter than ours leaves its rows behind, and an engine that is slower than this worker was told to use is
        counted; both are warnings. Raises ContractMismatch that names the field and both values.
        """
        difference = self._contract.require_continuable(
            introduction.contract, ours="decode", theirs="prefill"
        )
        engine = self._choose(introduction.transfer_engines)
        self._known.pop(introduction.generation, None)
        self._known[introduction.generation] = _Sender(introduction.address, difference)
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._metrics.know_regions(
            peer=introduction.address, regions=(r.name for r in self._memory.layout.regions)
        )
        self._tell_of(engine.name, introduction)
        if difference:
            logger.warning(
                "prefill worker %s sends no drafter state: %s", introduction.address, difference
            )
        asyncio.get_running_loop().call_later(PROBE_WINDOW_S, engine.receive())
        return Acquaintance(
            generation=self.generation,
            engine=engine.descriptor,
            memory=self._memory.regions,
            transfer_engines=self._engines.names,
            drafter_difference=difference,
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
        engine = self._engines.by_name.get(offer.transfer_engine)
        if engine is None:
            raise PairUnknown(
                f"transfer_engines are {sorted(self._engines.names)} at decode but the sender would use {offer.transfer_engine!r}"
            )
        return engine

    def address_of(self, key: HandoffKey) -> str:
        """Where a hand-off's sender serves; its generation when that is not known."""
        known = self._known.get(key.prefill_generation)
        return (known.address if known is not None else "") or key.prefill_generation

    def drafter_difference(self, key: HandoffKey) -> str:
        """Why a hand-off brings no drafter state; empty when nothing here speaks against it."""
        known = self._known.get(key.prefill_generation)
        return known.drafter_difference if known is not None else ""

    def details(self) -> dict[str, str]:
        """Senders whose drafter state stays behind, and why, for people."""
        newest = {sender.address: sender for sender in self._known.values()}
        return {
            f"drafter_state {address}": f"not received: {sender.drafter_difference}"
            for address, sender in newest.items()
            if sender.drafter_difference
        }

    def _choose(self, offered: tuple[str, ...]) -> TransferEngine:
        for name in offered:
            if name in self._engines.by_name:
                return self._engines.by_name[name]
        raise ContractMismatch(
            f"transfer_engines are {sorted(self._engines.names)} at decode but {sorted(offered)} at prefill",
            metadata={"field": "transfer_engines"},
        )

    def _tell_of(self, name: str, introduction: Introduction) -> None:
        """The engine and why, for people; what is less than this worker was told to use is never silent."""
        wanted, peer = self._engines.wanted, introduction.address
        is_fallback = self._engines.choice != "auto" and name != wanted
        reason = "the sender's first that is here"
        if is_fallback:
            offered = ", ".join(introduction.transfer_engines)
            why = self._engines.missing.get(wanted, f"{peer} offers {offered}")
            reason = f"no {wanted}: {why}"
            self._metrics.fallbacks.labels(wanted=wanted).inc()
        self._metrics.chose_engine(peer=peer, engine=name, reason=reason)
        logger.log(
            logging.WARNING if is_fallback else logging.INFO,
            "prefill worker %s (%s) writes here%s by %s: %s",
            peer,
            introduction.generation,
            " only" if is_fallback else "",
            name,
            reason,
        )
