"""One request's state on its way to a decode worker. Knows rows and the peer; never computes and never frees."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from common.errors import (
    ContractMismatch,
    DeadlinePassed,
    PairUnknown,
    ServingError,
    TransferFailed,
    WorkerLost,
)
from common.kv_cache.layout import num_pages_for
from common.rpc.status import error_of_call
from common.telemetry.metrics import TransferMetrics
from common.transfer import convert
from common.transfer.digest import RowDigest
from common.transfer.engine import TransferId, WriteTarget
from common.transfer.handoff import HandoffKey, HandoffOffer, HandoffResult, HandoffTerms
from common.transfer.manifest import manifest_of
from common.transfer.memory import PoolMemory
from common.transfer.plan import (
    Placement,
    Rows,
    closed_rows,
    live_rows,
    plan_writes,
    rows_after,
)
from dspark.v1 import handoff_service_pb2 as pb
from services.prefill.config import HandoffConfig
from services.prefill.loop import FirstTokenSampled
from services.prefill.pairs import Pair, Pairs

if TYPE_CHECKING:
    # The generated module has the typed stub for type checkers only.
    from dspark.v1.handoff_service_pb2_grpc import HandoffServiceAsyncStub

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


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


class Handoff:
    """Negotiate, then `send_closed` any number of times, then `finish`; `stop` and `abort` at any time.

    The rows of `source` must stay in place until `finish` has returned or `stop` has returned True.
    """

    def __init__(
        self,
        sender: Sender,
        key: HandoffKey,
        ticket: DecodeTicket,
        stub: HandoffServiceAsyncStub,
        *,
        source: Placement,
        num_tokens: int,
    ) -> None:
        self.key = key
        self.source = source
        self.num_bytes = 0
        self.engine_name = ""
        self.receiver_generation = ""
        """The decode worker's process as it was negotiated with; empty before."""
        self._sender = sender
        self._ticket = ticket
        self._stub = stub
        self._num_tokens = num_tokens
        self._layout = sender.memory.layout
        self._sent: Rows = tuple(range(0) for _ in self._layout.regions)
        self._digest = RowDigest(sender.memory, source)
        self._transfer: TransferId | None = None
        self._pair: Pair
        self._destination: Placement

    @property
    def peer(self) -> str:
        """Address of the decode worker."""
        return self._ticket.address

    async def negotiate(self) -> None:
        """Agree with the decode worker, which was met before, on memory. Raises what it refuses with."""
        pairs = self._sender.pairs
        with self._failures_named():
            pair = await pairs.get(self._ticket.address)
            try:
                terms = await self._negotiate_with(pair)
            except PairUnknown as unknown:
                logger.info("%s is met again: %s", pair.address, unknown.message)
                pair = await pairs.meet_again(pair)
                terms = await self._negotiate_with(pair)
            except ServingError:
                self._sender.metrics.failures.labels(reason="refused").inc()
                raise
        num_pages = num_pages_for(self._num_tokens)
        if len(terms.page_ids) != num_pages:
            raise ContractMismatch(
                f"{self._ticket.address} granted {len(terms.page_ids)} pages; "
                f"{self._num_tokens} tokens have {num_pages}",
                metadata={"field": "page_ids"},
            )
        self._pair = pair
        self.receiver_generation = pair.generation
        self._destination = Placement(memory=pair.memory, page_ids=terms.page_ids, slot=terms.slot)
        self.engine_name = pair.engine.name

    async def send_closed(self, num_computed: int) -> None:
        """Send whole pages among the first `num_computed` positions that were not sent yet."""
        rows = closed_rows(self._layout, min(num_computed, self._num_tokens))
        new, self._sent = rows_after(rows, self._sent), rows
        if any(new):
            await self._send_and_digest(new)

    async def finish(self, first: FirstTokenSampled) -> None:
        """Send what is left and have the decode worker check it. Raises TransferFailed after the second mismatch."""
        has_drafter_state = self._sender.config.sends_drafter_state
        rows = live_rows(self._layout, self._num_tokens, has_drafter_state=has_drafter_state)
        await self._send_and_digest(rows_after(rows, self._sent))
        result = HandoffResult(
            manifest=manifest_of(self._layout, self.source.memory, rows),
            digests=self._digest.digests(),
            first_token_id=first.token_id,
            first_logprob=first.logprob,
            proposal=first.proposal,
            has_drafter_state=has_drafter_state,
        )
        if (await self._complete(result)).resend:
            logger.warning(
                "request %s: %s saw other digests; everything is sent once more",
                self.key.request_id,
                self._ticket.address,
            )
            await self._send(rows)
            if not (await self._complete(result)).accepted:
                self._sender.metrics.failures.labels(reason="digest").inc()
                raise TransferFailed(f"{self._ticket.address} did not accept the state")

    async def stop(self, *, timeout_s: float) -> bool:
        """End a write that is under way; True when nothing reads the source or writes to the peer any more."""
        if self._transfer is not None:
            if not await self._pair.engine.cancel(self._transfer, timeout_s=timeout_s):
                return False
            self._transfer = None
        return True

    async def abort(self, reason: str) -> None:
        """Tell the decode worker that nothing more will come; to be called after `stop`. A lost peer is no error."""
        request = pb.AbortHandoffRequest(
            key=convert.key_to_pb(self.key), capability=self._ticket.capability, reason=reason
        )
        timeout_s = self._sender.config.abort_timeout_s
        with contextlib.suppress(ServingError):
            await self._ask(self._stub.AbortHandoff(request, timeout=timeout_s))

    async def _negotiate_with(self, pair: Pair) -> HandoffTerms:
        offer = HandoffOffer(
            num_tokens=self._num_tokens,
            decode_generation=pair.generation,
            transfer_engine=pair.engine.name,
            sender_address=self._sender.pairs.own_address,
        )
        request = convert.offer_to_pb(offer, self.key, self._ticket.capability)
        timeout_s = self._sender.config.negotiate_timeout_s
        return convert.terms_from_pb(
            await self._ask(self._stub.Negotiate(request, timeout=timeout_s))
        )

    async def _send_and_digest(self, rows: Rows) -> None:
        """The digest is taken while the bytes travel."""
        digest = asyncio.create_task(self._digest.update_beside(rows))
        try:
            await self._send(rows)
        finally:
            # A thread cannot be stopped, and reads the source until it ends.
            await digest

    async def _send(self, rows: Rows) -> None:
        ranges = plan_writes(self._layout, self.source, self._destination, rows)
        if not ranges:
            return
        engine, metrics = self._pair.engine, self._sender.metrics
        target = WriteTarget(
            address=self._ticket.address, key=self.key, capability=self._ticket.capability
        )
        num_bytes = sum(r.length for r in ranges)
        timeout_s = self._sender.config.transfer_timeout_s
        with metrics.duration.labels(engine=engine.name).time(), self._failures_named():
            self._transfer = engine.write(target, ranges)
            try:
                is_done = await engine.poll(self._transfer, timeout_s=timeout_s)
            except ServingError:
                # Failed is not stopped: `stop` finds out.
                if engine.is_one_sided:
                    self._sender.pairs.distrust(self._pair)
                metrics.failures.labels(reason="write_failed").inc()
                raise
        if not is_done:
            self._sender.pairs.distrust(self._pair)
            metrics.failures.labels(reason="timeout").inc()
            raise TransferFailed(
                f"{num_bytes} bytes did not reach {self._ticket.address} in {timeout_s} s"
            )
        self._transfer = None
        self.num_bytes += num_bytes
        metrics.bytes.labels(engine=engine.name).inc(num_bytes)

    async def _complete(self, result: HandoffResult) -> pb.CompleteResponse:
        request = convert.result_to_pb(result, self.key, self._ticket.capability)
        timeout_s = self._sender.config.complete_timeout_s
        return await self._ask(self._stub.Complete(request, timeout=timeout_s))

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        with self._failures_named():
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                raise error_of_call(error, peer=self._ticket.address) from error

    @contextlib.contextmanager
    def _failures_named(self) -> Iterator[None]:
        """A peer that is gone or slow is, to whoever asked us, a hand-off that failed; refusals keep their names."""
        try:
            yield
        except (WorkerLost, DeadlinePassed) as error:
            self._sender.metrics.failures.labels(reason="peer_lost").inc()
            raise TransferFailed(f"hand-off to {self._ticket.address}: {error.message}") from error
