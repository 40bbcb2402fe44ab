"""Which decode workers this worker has met, and how each is written to. Knows engines and generations; no requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

import grpc.aio

from common.errors import ContractMismatch, ServingError, TransferFailed
from common.kv_cache.layout import CacheLayout
from common.rpc.status import error_of_call
from common.telemetry.metrics import TransferMetrics
from common.telemetry.tracing import apart
from common.transfer import convert
from common.transfer.config import TransferConfig
from common.transfer.engine import TransferEngine
from common.transfer.engines import Engines
from common.transfer.handoff import CacheContract
from common.transfer.meeting import Acquaintance, Introduction
from common.transfer.memory import PoolMemory
from common.transfer.peer_memory import require_addressable
from common.transfer.plan import RegionMemory
from services.prefill.peers import Peers

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""After a fallback because the wanted engine did not reach a peer, until it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """This worker and a decode worker, as they met."""

    address: str
    generation: str
    """The decode worker's."""
    engine: TransferEngine
    reason: str
    """Why this engine, for people."""
    layout: CacheLayout
    """Of what travels: ours, without the drafter's region when drafters differ."""
    memory: tuple[RegionMemory, ...]
    """The decode worker's, in the order of that layout."""
    drafter_difference: str
    """Why the drafter's rows stay behind; empty when they travel."""


class Pairs:
    """Introductions to decode workers. Routers ask for them ahead of time; a request that comes first makes its own."""

    def __init__(
        self,
        *,
        peers: Peers,
        engines: Engines,
        memory: PoolMemory,
        contract: CacheContract,
        generation: str,
        config: TransferConfig,
        metrics: TransferMetrics,
        meet_timeout_s: float,
    ) -> None:
        self.engines = engines
        self.own_address = ""
        """Where this worker serves, once it does."""
        self._peers = peers
        self._memory = memory
        self._contract = contract
        self._generation = generation
        self._config = config
        self._metrics = metrics
        self._meet_timeout_s = meet_timeout_s
        self._pairs: dict[str, Pair] = {}
        self._meetings: dict[str, asyncio.Task[Pair]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._pairs)

    def details(self) -> dict[str, str]:
        """Engine and reason for every decode worker, and whose drafter differs, for people."""
        engines = {
            f"transfer_engine {pair.address}": f"{pair.engine.name} ({pair.reason})"
            for pair in self._pairs.values()
        }
        drafters = {
            f"drafter_state {pair.address}": f"not sent: {pair.drafter_difference}"
            for pair in self._pairs.values()
            if pair.drafter_difference
        }
        return engines | drafters

    async def connect(self, address: str, generation: str) -> Pair:
        """Meet a decode worker before a request needs it; nothing happens when it is known in that generation.

        Raises ContractMismatch, or TransferFailed or another ServingError when it does not answer.
        """
        known = self._pairs.get(address)
        if known is not None and known.generation == generation:
            return known
        await self._peers.wait_connected(address)
        return await self._meet(address, "warm")

    async def get(self, address: str) -> Pair:
        """For a hand-off. A worker that was not met is met now, which is counted. Raises as `connect`."""
        await self._peers.wait_connected(address)
        return self._pairs.get(address) or await self._meet(address, "cold")

    async def meet_again(self, stale: Pair) -> Pair:
        """The decode worker does not know this pair any more. Raises as `connect`."""
        if self._pairs.get(stale.address) is stale:
            self._drop(stale)
        return self._pairs.get(stale.address) or await self._meet(stale.address, "again")

    def distrust(self, pair: Pair) -> None:
        """A write to it failed: it is met anew, at once and in the background."""
        if self._pairs.get(pair.address) is pair:
            self._drop(pair)
            self._begin_meeting(pair.address, "again")

    async def close(self) -> None:
        self._is_closed = True
        meetings = list(self._meetings.values())
        for meeting in meetings:
            meeting.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)
        await self.engines.close()

    def _drop(self, pair: Pair) -> None:
        del self._pairs[pair.address]
        self._metrics.forget_peer(pair.address)

    async def _meet(self, address: str, kind: str) -> Pair:
        """One meeting at a time with one worker: whoever comes meanwhile shares it."""
        # A request that is cancelled leaves the meeting to the others.
        return await asyncio.shield(self._begin_meeting(address, kind))

    def _begin_meeting(self, address: str, kind: str) -> asyncio.Task[Pair]:
        meeting = self._meetings.get(address)
        if meeting is None:
            self._metrics.meetings.labels(kind=kind).inc()
            with apart():
                meeting = asyncio.create_task(self._introduce(address))
            self._meetings[address] = meeting
            meeting.add_done_callback(lambda ended: self._end_meeting(address, ended))
        return meeting

    def _end_meeting(self, address: str, meeting: asyncio.Task[Pair]) -> None:
        del self._meetings[address]
        if not meeting.cancelled() and (error := meeting.exception()) is not None:
            logger.info("%s was not met: %s", address, error)  # whoever waited hears it too
            if isinstance(error, ServingError):
                self._metrics.count_refusal(error)

    async def _introduce(self, address: str) -> Pair:
        """Try the engines that both have from the best to the slowest, until bytes arrive through one."""
        failed = dict(self.engines.missing)
        while True:
            offered = [name for name in self.engines.names if name not in failed]
            answer = await self._ask(address, offered)
            name = answer.engine.name
            if name not in offered:
                raise ContractMismatch(
                    f"{address} chose transfer engine {name!r}, which was not among {offered}",
                    metadata={"field": "transfer_engine"},
                )
            answer, layout = self._fitted(answer)
            ours = self._memory.regions[: len(layout.regions)]
            require_addressable(layout, ours, answer.memory, peer=address)
            engine = self.engines.by_name[name]
            try:
                await engine.connect(
                    address, answer.engine, timeout_s=self._config.connect_timeout_s
                )
            except TransferFailed as error:
                failed[name] = error.message
                logger.warning(
                    "transfer engine %s cannot be used with %s: %s", name, address, error
                )
                if len(offered) == 1:
                    raise
                continue
            return self._acquainted(address, answer, layout, engine, failed)

    def _fitted(self, answer: Acquaintance) -> tuple[Acquaintance, CacheLayout]:
        """What travels, and the peer's memory as if it had our regions; its drafter's is not written to when ours differs."""
        layout = self._memory.layout
        if not answer.drafter_difference:
            return answer, layout
        num_regions, num_shared = len(layout.regions), len(layout.target.regions)
        addresses = answer.engine.region_addresses
        if len(addresses) >= num_shared:
            addresses = addresses[:num_shared] + (0,) * (num_regions - num_shared)
        engine = replace(answer.engine, region_addresses=addresses)
        return replace(answer, memory=answer.memory[:num_shared], engine=engine), layout.target

    async def _ask(self, address: str, offered: list[str]) -> Acquaintance:
        introduction = Introduction(
            generation=self._generation,
            address=self.own_address,
            contract=self._contract,
            transfer_engines=tuple(offered),
        )
        stub = self._peers.handoff_stub(address)
        try:
            answer = await stub.Meet(
                convert.introduction_to_pb(introduction), timeout=self._meet_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error, peer=address) from error
        return convert.acquaintance_from_pb(answer)

    def _acquainted(
        self,
        address: str,
        answer: Acquaintance,
        layout: CacheLayout,
        engine: TransferEngine,
        failed: dict[str, str],
    ) -> Pair:
        reason = self._why(engine.name, address, answer, failed)
        pair = Pair(
            address=address,
            generation=answer.generation,
            engine=engine,
            reason=reason,
            layout=layout,
            memory=answer.memory,
            drafter_difference=answer.drafter_difference,
        )
        self._pairs[address] = pair
        self._metrics.chose_engine(peer=address, engine=engine.name, reason=reason)
        if self._is_fallback(engine.name, failed):
            self._metrics.fallbacks.labels(wanted=self.engines.wanted).inc()
            logger.warning("state goes to %s only by %s: %s", address, engine.name, reason)
        else:
            logger.info("state goes to %s by %s: %s", address, engine.name, reason)
        if pair.drafter_difference:
            logger.warning("no drafter state goes to %s: %s", address, pair.drafter_difference)
        if self.engines.wanted in failed and self.engines.wanted in self.engines.by_name:
            asyncio.get_running_loop().call_later(RETRY_S, self._try_better, pair)
        return pair

    def _is_fallback(self, name: str, failed: dict[str, str]) -> bool:
        """Whether an engine is slower than was asked for, or than what both sides have."""
        wanted = self.engines.wanted
        return name != wanted and (self.engines.choice != "auto" or wanted in failed)

    def _try_better(self, pair: Pair) -> None:
        """The wanted engine did not reach a peer that has it; meanwhile it may."""
        if self._pairs.get(pair.address) is pair and not self._is_closed:
            self._begin_meeting(pair.address, "again")

    def _why(self, name: str, address: str, answer: Acquaintance, failed: dict[str, str]) -> str:
        wanted = self.engines.wanted
        if name == wanted:
            is_configured = self.engines.choice == wanted
            return "configured" if is_configured else "the fastest that both sides have"
        if wanted in failed:
            return f"no {wanted}: {failed[wanted]}"
        return f"no {wanted}: {address} has {', '.join(answer.transfer_engines)}"
