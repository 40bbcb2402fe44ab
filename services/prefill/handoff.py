"""One request's state on its way to a decode worker. Knows rows and the peer; never computes and never frees."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from common.errors import (
    ContractMismatch,
    DeadlinePassed,
    ServingError,
    TransferFailed,
    WorkerLost,
)
from common.kv_cache.layout import num_pages_for
from common.rpc.status import error_of_call
from common.transfer import convert
from common.transfer.digest import digest_rows
from common.transfer.engine import TransferEngine, TransferId, WriteTarget
from common.transfer.handoff import (
    CacheContract,
    HandoffKey,
    HandoffOffer,
    HandoffResult,
    HandoffTerms,
)
from common.transfer.manifest import manifest_of
from common.transfer.memory import PoolMemory
from common.transfer.plan import (
    Placement,
    Rows,
    closed_rows,
    live_rows,
    plan_writes,
    require_addressable,
    rows_after,
)
from dspark.v1 import handoff_service_pb2 as pb
from services.prefill.config import HandoffConfig
from services.prefill.loop import FirstTokenSampled

if TYPE_CHECKING:
    # The generated module has the typed stub for type checkers only.
    from dspark.v1.handoff_service_pb2_grpc import HandoffServiceAsyncStub

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 5.0
"""A cancelled write that goes on for so long is worth a line in the log; its source stays out of use."""

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
    contract: CacheContract
    draft_length: int
    engines: Mapping[str, TransferEngine]
    """By name, best first."""
    config: HandoffConfig


class Handoff:
    """Negotiate, then `send_closed` any number of times, then `finish`; `stop` and `abort` at any time.

    The rows of `source` must stay in place until `finish` or `stop` has returned.
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
        self.num_bytes = 0
        self.engine_name = ""
        self._sender = sender
        self._key = key
        self._ticket = ticket
        self._stub = stub
        self._source = source
        self._num_tokens = num_tokens
        self._layout = sender.memory.layout
        self._sent: Rows = tuple(range(0) for _ in self._layout.regions)
        self._transfer: TransferId | None = None
        self._terms: HandoffTerms

    async def negotiate(self) -> None:
        """Agree with the decode worker on contract, engine and memory. Raises what it refuses with."""
        sender = self._sender
        offer = HandoffOffer(
            contract=sender.contract,
            num_tokens=self._num_tokens,
            transfer_engines=tuple(sender.engines),
            draft_length=sender.draft_length,
        )
        request = convert.offer_to_pb(offer, self._key, self._ticket.capability)
        timeout_s = sender.config.negotiate_timeout_s
        answer = await self._ask(self._stub.Negotiate(request, timeout=timeout_s))
        self._terms = convert.terms_from_pb(answer)
        if self._terms.transfer_engine not in sender.engines:
            raise ContractMismatch(
                f"{self._ticket.address} chose transfer engine {self._terms.transfer_engine!r}, "
                f"which was not among {sorted(sender.engines)}",
                metadata={"field": "transfer_engine"},
            )
        require_addressable(
            self._layout,
            self._source.memory,
            self._terms.destination.memory,
            peer=self._ticket.address,
        )
        num_pages = num_pages_for(self._num_tokens)
        if len(self._terms.destination.page_ids) != num_pages:
            raise ContractMismatch(
                f"{self._ticket.address} granted {len(self._terms.destination.page_ids)} pages; "
                f"{self._num_tokens} tokens have {num_pages}",
                metadata={"field": "page_ids"},
            )
        self.engine_name = self._terms.transfer_engine

    async def send_closed(self, num_computed: int) -> None:
        """Send whole pages among the first `num_computed` positions that were not sent yet."""
        rows = closed_rows(self._layout, min(num_computed, self._num_tokens))
        await self._send(rows_after(rows, self._sent))
        self._sent = rows

    async def finish(self, first: FirstTokenSampled) -> None:
        """Send what is left and have the decode worker check it. Raises TransferFailed after the second mismatch."""
        has_drafter_state = self._sender.config.sends_drafter_state
        rows = live_rows(self._layout, self._num_tokens, has_drafter_state=has_drafter_state)
        digest = asyncio.create_task(
            asyncio.to_thread(digest_rows, self._sender.memory, self._source, rows)
        )
        await self._send(rows_after(rows, self._sent))
        result = HandoffResult(
            manifest=manifest_of(self._layout, self._source.memory, rows),
            digest=await digest,
            first_token_id=first.token_id,
            first_logprob=first.logprob,
            proposal=first.proposal,
            has_drafter_state=has_drafter_state,
        )
        if (await self._complete(result)).resend:
            logger.warning(
                "request %s: %s saw another digest; everything is sent once more",
                self._key.request_id,
                self._ticket.address,
            )
            await self._send(rows)
            if not (await self._complete(result)).accepted:
                raise TransferFailed(f"{self._ticket.address} did not accept the state")

    async def stop(self) -> None:
        """End a write that is under way; when this returns nothing reads the source any more."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            engine = self._sender.engines[self._terms.transfer_engine]
            while not await engine.cancel(transfer, timeout_s=CANCEL_TIMEOUT_S):
                logger.error(
                    "request %s: a write to %s does not stop; its pages stay out of use",
                    self._key.request_id,
                    self._ticket.address,
                )

    async def abort(self, reason: str) -> None:
        """Tell the decode worker that nothing more will come; to be called after `stop`. A lost peer is no error."""
        request = pb.AbortHandoffRequest(
            key=convert.key_to_pb(self._key), capability=self._ticket.capability, reason=reason
        )
        timeout_s = self._sender.config.abort_timeout_s
        with contextlib.suppress(ServingError):
            await self._ask(self._stub.AbortHandoff(request, timeout=timeout_s))

    async def _send(self, rows: Rows) -> None:
        ranges = plan_writes(self._layout, self._source, self._terms.destination, rows)
        if not ranges:
            return
        engine = self._sender.engines[self._terms.transfer_engine]
        target = WriteTarget(
            address=self._ticket.address,
            descriptor=self._terms.engine_descriptor,
            key=self._key,
            capability=self._ticket.capability,
        )
        self._transfer = engine.write(target, ranges)
        timeout_s = self._sender.config.transfer_timeout_s
        try:
            is_done = await engine.poll(self._transfer, timeout_s=timeout_s)
        except ServingError as error:
            self._transfer = None
            raise self._as_transfer_error(error) from error
        if not is_done:
            raise TransferFailed(
                f"{sum(r.length for r in ranges)} bytes did not reach {self._ticket.address} in {timeout_s} s"
            )
        self._transfer = None
        self.num_bytes += sum(r.length for r in ranges)

    async def _complete(self, result: HandoffResult) -> pb.CompleteResponse:
        request = convert.result_to_pb(result, self._key, self._ticket.capability)
        timeout_s = self._sender.config.complete_timeout_s
        return await self._ask(self._stub.Complete(request, timeout=timeout_s))

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            known = error_of_call(error, peer=self._ticket.address)
            raise self._as_transfer_error(known) from error

    def _as_transfer_error(self, error: ServingError) -> ServingError:
        """A peer that is gone or slow is, to whoever asked us, a hand-off that failed; refusals keep their names."""
        if isinstance(error, (WorkerLost, DeadlinePassed)):
            return TransferFailed(f"hand-off to {self._ticket.address}: {error.message}")
        return error
