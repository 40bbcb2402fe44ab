"""One request's state on its way to a decode worker. Knows rows and the peer; never computes and never frees."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from common.errors import (
    DeadlinePassed,
    InvalidRequest,
    PairUnknown,
    ServingError,
    TransferFailed,
    WorkerLost,
)
from common.rpc.status import error_of_call
from common.telemetry.tracing import part
from common.transfer import convert
from common.transfer.digest import RowDigest
from common.transfer.engine import WriteTarget
from common.transfer.handoff import HandoffKey, HandoffOffer, HandoffResult, HandoffTerms
from common.transfer.manifest import manifest_of
from common.transfer.peer_memory import require_placeable
from common.transfer.plan import (
    Placement,
    Rows,
    final_rows,
    plan_writes,
    rows_after,
)
from dspark.v1 import handoff_service_pb2 as pb
from services.prefill.loop import PromptFinished
from services.prefill.pairs import Pair
from services.prefill.sender import DecodeTicket, Sender
from services.prefill.spans import Span, Spans
from services.prefill.wire import Wire

if TYPE_CHECKING:
    # The generated module has the typed stub for type checkers only.
    from dspark.v1.handoff_service_pb2_grpc import HandoffServiceAsyncStub

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Handoff:
    """Negotiate, then `send_computed` any number of times, then `finish`; `stop` and `abort` at any time.

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
        self.waits = Spans()
        """For digests: ours when the bytes had arrived, the receiver's when it had everything."""
        self.engine_name = ""
        self.receiver_generation = ""
        """The decode worker's process as it was negotiated with; empty before."""
        self._sender = sender
        self._ticket = ticket
        self._stub = stub
        self._num_tokens = num_tokens
        self._layout = sender.memory.layout
        self._sent: Rows = tuple(range(0) for _ in self._layout.regions)
        self._announced = self._sent
        self._num_unannounced = 0
        """Bytes that have arrived since."""
        self._digest = RowDigest(sender.memory, source)
        self._announcements: list[asyncio.Task[None]] = []
        self._announcing = asyncio.Lock()
        """One after the other, as the receiver takes rows in order."""
        self._sends_drafter_state = sender.config.sends_drafter_state
        """Known from the negotiation on: the peer may have another drafter."""
        self._wire: Wire | None = None
        """There is one from the negotiation on."""
        self._destination: Placement

    @property
    def writes(self) -> Spans:
        """What was written, and when."""
        return Spans() if self._wire is None else self._wire.writes

    @property
    def peer(self) -> str:
        """Address of the decode worker."""
        return self._ticket.address

    async def negotiate(self) -> None:
        """Agree with the decode worker, which was met before, on memory. Raises what either side refuses with."""
        pairs = self._sender.pairs
        with self._failures_named():
            pair = await pairs.get(self._ticket.address)
        try:
            try:
                terms = await self._negotiate_with(pair)
            except PairUnknown as unknown:
                logger.info("%s is met again: %s", pair.address, unknown.message)
                with self._failures_named():
                    pair = await pairs.meet_again(pair)
                terms = await self._negotiate_with(pair)
        except PairUnknown as still:  # it restarts faster than we meet it
            raise self._failed(still) from still
        except TransferFailed:
            # Whoever asks next whether the two can meet is to be told what is true now.
            pairs.distrust(pair)
            raise
        with self._sender.metrics.counting_refusals(), self._failures_named():
            require_placeable(
                pair.layout, pair.memory, terms, self._num_tokens, peer=self._ticket.address
            )
        self._sends_drafter_state &= not pair.drafter_difference
        self._wire = Wire(
            self._sender,
            pair,
            WriteTarget(
                address=self._ticket.address, key=self.key, capability=self._ticket.capability
            ),
        )
        self.receiver_generation = pair.generation
        self._destination = Placement(memory=pair.memory, page_ids=terms.page_ids, slot=terms.slot)
        self.engine_name = pair.engine.name

    async def send_computed(self, num_computed: int) -> None:
        """Send what nothing rewrites when so many positions are computed, and was not sent yet; in the end all."""
        self._num_unannounced += await self._send_final(num_computed)
        if self._num_unannounced >= self._sender.config.announced_bytes:
            rows = rows_after(self._sent, self._announced)
            self._announced, self._num_unannounced = self._sent, 0
            self._announcements.append(asyncio.create_task(self._announce(rows)))
        if num_computed >= self._num_tokens:
            self._digest.digests()  # now, and not when the receiver waits for them

    async def finish(self, finished: PromptFinished) -> None:
        """Send what is left and have the decode worker check it. Raises TransferFailed after the second mismatch."""
        await self._send_final(self._num_tokens)
        rows = self._final_rows(self._num_tokens)
        result = HandoffResult(
            manifest=manifest_of(self._layout, self.source.memory, rows),
            digests=self._digest.digests(),
            first_token_id=finished.first.token_id,
            first_logprob=finished.first.logprob,
            proposal=finished.proposal,
            has_drafter_state=self._sends_drafter_state,
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
        for announcement in self._announcements:
            announcement.cancel()
        return self._wire is None or await self._wire.stop(timeout_s=timeout_s)

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

    async def _send_final(self, num_computed: int) -> int:
        """The bytes that were sent."""
        final = self._final_rows(num_computed)
        new, self._sent = rows_after(final, self._sent), final
        return await self._send_and_digest(new) if any(new) else 0

    async def _send_and_digest(self, rows: Rows) -> int:
        """The digest is taken while the bytes travel."""
        digest = asyncio.create_task(self._digest.update_beside(rows))
        try:
            num_bytes = await self._send(rows)
        finally:
            # A thread cannot be stopped, and reads the source until it ends.
            began = self._sender.clock()
            await digest
            self.waits.add(Span(began=began, ended=self._sender.clock()))
        return num_bytes

    async def _announce(self, rows: Rows) -> None:
        """What arrived can be digested before all has; a receiver that does not do so digests it in the end."""
        request = pb.ArrivedRequest(
            key=convert.key_to_pb(self.key),
            capability=self._ticket.capability,
            rows=convert.entries_to_pb(manifest_of(self._layout, self.source.memory, rows)),
        )
        timeout_s = self._sender.config.complete_timeout_s
        async with self._announcing:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.Arrived(request, timeout=timeout_s)

    async def _send(self, rows: Rows) -> int:
        assert self._wire is not None, "nothing was negotiated"
        ranges = plan_writes(self._layout, self.source, self._destination, rows)
        try:
            return await self._wire.send(ranges)  # counts its failures itself
        except (WorkerLost, DeadlinePassed, InvalidRequest) as error:
            raise self._failed(error) from error

    def _final_rows(self, num_computed: int) -> Rows:
        return final_rows(
            self._layout,
            self._num_tokens,
            num_computed,
            has_drafter_state=self._sends_drafter_state,
        )

    async def _complete(self, result: HandoffResult) -> pb.CompleteResponse:
        request = convert.result_to_pb(result, self.key, self._ticket.capability)
        timeout_s = self._sender.config.complete_timeout_s
        with part("kv_transfer.complete"):
            response = await self._ask(self._stub.Complete(request, timeout=timeout_s))
        now = self._sender.clock()
        self.waits.add(Span(began=now - response.digest_s, ended=now))
        return response

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        with self._failures_named():
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                raise error_of_call(error, peer=self._ticket.address) from error

    @contextlib.contextmanager
    def _failures_named(self) -> Iterator[None]:
        """A peer that is gone or slow is, to whoever asked us, a hand-off that failed; refusals keep their names, but what we
        said wrongly is no mistake of whoever asked us."""
        failures = self._sender.metrics.failures
        try:
            yield
        except (WorkerLost, DeadlinePassed) as error:
            failures.labels(reason="peer_lost").inc()
            raise self._failed(error) from error
        except (PairUnknown, TransferFailed):
            raise
        except ServingError as error:
            failures.labels(reason="refused").inc()
            if isinstance(error, InvalidRequest):
                raise self._failed(error) from error
            raise

    def _failed(self, error: ServingError) -> TransferFailed:
        return TransferFailed(f"hand-off to {self._ticket.address}: {error.message}")
