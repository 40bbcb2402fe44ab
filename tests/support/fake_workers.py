"""Scripted prefill and decode workers: real servers, and a "model" that is a list of tokens.

The token at position p of a request is `sequence[p - len(prompt)]`, whatever worker says it in whatever epoch, so a
test sees at once when a token is lost or comes twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from common.errors import LeaseEnded, ServingError, TransferFailed, WorkerLost
from common.rpc.server import RpcServer, build_server
from dspark.v1 import decode_service_pb2, prefill_service_pb2, types_pb2, worker_pb2
from dspark.v1.decode_service_pb2_grpc import (
    DecodeServiceServicer,
    add_DecodeServiceServicer_to_server,
)
from dspark.v1.prefill_service_pb2_grpc import (
    PrefillServiceServicer,
    add_PrefillServiceServicer_to_server,
)
from tests.support.waiting import WAIT_S

Context = grpc.aio.ServicerContext[Any, Any]
Key = tuple[str, int]

MAX_CONTEXT = 256
VOCAB = 300
MAX_UNCOMMITTED_ROUNDS = 2


class Seen:
    """Things that happened, and a wait for the next one."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, is_true: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_true():
                await self._changed.wait()


class FakeDecode(DecodeServiceServicer):
    """Runs a request once it is admitted and handed over; `round_size` tokens a round."""

    def __init__(self, sequence: list[int], *, round_size: int = 3) -> None:
        self.sequence = sequence
        self.round_size = round_size
        self.computes_prompt = False
        self.draining = False
        self.fingerprint = "model-a"
        self.generation = "decode-1"
        self.prefix = "reservation"
        """What its reservations are called, with a number behind it."""
        self.refusals: list[ServingError] = []
        """Raised by the next calls of Reserve."""
        self.admission_gate = _open_gate()
        self.reserve_gate = _open_gate()
        self.round_gate = _open_gate()
        self.info_gate = _open_gate()
        self.logprobs = False
        self.mangle: Callable[
            [decode_service_pb2.DecodeEvent], list[decode_service_pb2.DecodeEvent]
        ] = lambda event: [event]
        self.seen = Seen()
        self.reserves: list[decode_service_pb2.ReserveRequest] = []
        self.admits: list[decode_service_pb2.Admit] = []
        self.commits: list[decode_service_pb2.Commit] = []
        self.aborts: list[decode_service_pb2.Abort] = []
        self.num_rounds_sent = 0
        self.num_streams_ended = 0
        self._running: dict[Key, _Running] = {}
        self._handed_off: dict[Key, asyncio.Event] = {}
        self._catching_up: set[Key] = set()
        self._events: asyncio.Queue[decode_service_pb2.DecodeEvent | None] = asyncio.Queue()

    @property
    def live_keys(self) -> set[Key]:
        return set(self._running)

    def hand_off(self, key: Key, *, is_older: bool = False) -> None:
        """State has come; with `is_older` it is that of a lease, and this worker computes what was committed since."""
        if is_older:
            self._catching_up.add(key)
        self._handed_off.setdefault(key, asyncio.Event()).set()

    def break_stream(self) -> None:
        self._events.put_nowait(None)

    def fail(self, request_id: str, epoch: int, error: ServingError) -> None:
        """Give a request up."""
        self.send(
            failed=decode_service_pb2.Failed(
                request_id=request_id, epoch=epoch, reason=error.reason, message=error.message
            )
        )

    def send(self, **event: Any) -> None:
        for mangled in self.mangle(decode_service_pb2.DecodeEvent(**event)):
            self._events.put_nowait(mangled)

    async def Reserve(
        self, request: decode_service_pb2.ReserveRequest, context: Context
    ) -> decode_service_pb2.ReserveResponse:
        self.reserves.append(request)
        self.seen.note()
        await self.reserve_gate.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        return decode_service_pb2.ReserveResponse(
            reservation_id=f"{self.prefix}-{len(self.reserves)}",
            capability=b"secret",
            expires_s=10.0,
            computes_prompt=self.computes_prompt,
        )

    async def Decode(
        self, request_iterator: AsyncIterator[decode_service_pb2.DecodeRequest], context: Context
    ) -> AsyncIterator[decode_service_pb2.DecodeResponse]:
        self._events = asyncio.Queue()
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while (event := await self._events.get()) is not None:
                yield decode_service_pb2.DecodeResponse(events=[event])
            raise WorkerLost("scripted loss")
        finally:
            reading.cancel()
            for running in self._running.values():
                running.task.cancel()
            self._running.clear()
            self.num_streams_ended += 1
            self.seen.note()

    async def GetWorkerInfo(
        self, request: decode_service_pb2.DecodeServiceGetWorkerInfoRequest, context: Context
    ) -> decode_service_pb2.DecodeServiceGetWorkerInfoResponse:
        await self.info_gate.wait()
        info = _info("decode", self.generation, self.fingerprint, self.draining)
        info.computes_prompts = self.computes_prompt
        return decode_service_pb2.DecodeServiceGetWorkerInfoResponse(info=info)

    async def _read(self, requests: AsyncIterator[decode_service_pb2.DecodeRequest]) -> None:
        async for request in requests:
            for command in request.commands:
                match command.WhichOneof("command"):
                    case "admit":
                        self._admit(command.admit)
                    case "commit":
                        self._commit(command.commit)
                    case "abort":
                        self.aborts.append(command.abort)
                        self._end((command.abort.request_id, command.abort.epoch))
                self.seen.note()

    def _admit(self, admit: decode_service_pb2.Admit) -> None:
        self.admits.append(admit)
        running = _Running(admit)
        self._running[running.key] = running
        running.task = asyncio.create_task(self._run(running))

    def _commit(self, commit: decode_service_pb2.Commit) -> None:
        self.commits.append(commit)
        key = (commit.request_id, commit.epoch)
        if key in self._running:
            self._running[key].commit(commit.round)
        if commit.finish:
            self._end(key)

    def _end(self, key: Key) -> None:
        running = self._running.pop(key, None)
        if running is not None:
            running.task.cancel()
            self.send(finished=decode_service_pb2.Finished(request_id=key[0], epoch=key[1]))

    async def _run(self, running: _Running) -> None:
        context, key = running.admit.context, running.key
        base = len(context.prompt_token_ids) + len(context.committed_token_ids)
        num_prompt = len(context.prompt_token_ids)
        admitted = decode_service_pb2.Admitted(request_id=key[0], epoch=key[1])
        if not self.computes_prompt:
            await self._handed_off.setdefault(key, asyncio.Event()).wait()
            admitted.transfer_engine = "fake"
        computes_next = self.computes_prompt or key in self._catching_up
        if not computes_next:
            admitted.first_token_id = self.sequence[base - num_prompt]
            base += 1
        await self.admission_gate.wait()
        self.send(admitted=admitted)
        number = 0
        while True:
            await self.round_gate.wait()
            number += 1
            size = 1 if computes_next and number == 1 else self.round_size
            tokens = self.sequence[base - num_prompt : base - num_prompt + size]
            if not tokens:
                return
            verified = decode_service_pb2.Verified(
                request_id=key[0],
                epoch=key[1],
                round=number,
                base=base,
                token_ids=tokens,
                num_draft=size - 1,
                num_accepted=len(tokens) - 1,
            )
            if self.logprobs:
                verified.logprobs.extend(
                    types_pb2.TokenLogprob(token_id=token, logprob=-0.5) for token in tokens
                )
            self.send(verified=verified)
            self.num_rounds_sent += 1
            self.seen.note()
            base += len(tokens)
            await running.until_committed(number - MAX_UNCOMMITTED_ROUNDS + 1)


class _Running:
    def __init__(self, admit: decode_service_pb2.Admit) -> None:
        self.admit = admit
        self.key: Key = (admit.request_id, admit.epoch)
        self.task: asyncio.Task[None]
        self._commits = Seen()
        self._committed_round = 0

    def commit(self, round_number: int) -> None:
        self._committed_round = round_number
        self._commits.note()

    async def until_committed(self, round_number: int) -> None:
        await self._commits.until(lambda: self._committed_round >= round_number)


class FakePrefill(PrefillServiceServicer):
    """Says the first token and hands over to whichever fake decode worker the ticket names."""

    def __init__(self, sequence: list[int]) -> None:
        self.sequence = sequence
        self.decodes: dict[str, FakeDecode] = {}
        """By address."""
        self.fingerprint = "model-a"
        self.generation = "prefill-1"
        self.details: dict[str, str] = {}
        """What it says of itself besides."""
        self.draining = False
        self.failures: list[ServingError] = []
        """Raised by the next calls of Prefill before the first token."""
        self.unreachable: set[str] = set()
        """Addresses of decode workers to which no hand-off succeeds."""
        self.why_unreachable: ServingError = TransferFailed("connection refused")
        self.info_gate = _open_gate()
        self.start_gate = _open_gate()
        self.handoff_gate = _open_gate()
        self.done_gate = _open_gate()
        self.renew_gate = _open_gate()
        self.says_first_token = True
        self.seen = Seen()
        self.prefills: list[prefill_service_pb2.PrefillRequest] = []
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.renewed: list[str] = []
        self.handoffs: list[prefill_service_pb2.HandOffRequest] = []
        self.leases: dict[str, int] = {}
        """Tokens whose state is kept."""
        self.lease_s = 30.0
        self.connects: list[prefill_service_pb2.ConnectRequest] = []
        self.connect_failures: list[ServingError] = []
        """Raised by the next calls of Connect."""
        self.refuses_to_connect: ServingError | None = None
        """Raised by every call of Connect while it is set."""

    async def Connect(
        self, request: prefill_service_pb2.ConnectRequest, context: Context
    ) -> prefill_service_pb2.ConnectResponse:
        self.connects.append(request)
        self.seen.note()
        if self.connect_failures:
            raise self.connect_failures.pop(0)
        if self.refuses_to_connect is not None:
            raise self.refuses_to_connect
        if request.decode_address in self.unreachable:
            raise self.why_unreachable
        return prefill_service_pb2.ConnectResponse(transfer_engine="fake", reason="scripted")

    async def Prefill(
        self, request: prefill_service_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_service_pb2.PrefillResponse]:
        self.prefills.append(request)
        self.seen.note()
        try:
            await self.start_gate.wait()
            if self.failures:
                raise self.failures.pop(0)
            if request.ticket.decode_address in self.unreachable:
                raise self.why_unreachable
            if self.says_first_token:
                token_id = self.sequence[len(request.context.committed_token_ids)]
                first = prefill_service_pb2.FirstToken(token_id=token_id)
                yield prefill_service_pb2.PrefillResponse(first_token=first)
            await self.handoff_gate.wait()
            decode = self.decodes[request.ticket.decode_address]
            decode.hand_off((request.context.request_id, request.context.epoch))
            await self.done_gate.wait()
            lease_id = request.ticket.reservation_id
            self.leases[lease_id] = _length(request.context)
            yield prefill_service_pb2.PrefillResponse(handoff_done=self._done(lease_id))
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.context.request_id)
            self.seen.note()
            raise

    async def HandOff(
        self, request: prefill_service_pb2.HandOffRequest, context: Context
    ) -> prefill_service_pb2.HandOffResponse:
        self.handoffs.append(request)
        self.seen.note()
        if self.failures:
            raise self.failures.pop(0)
        if request.ticket.decode_address in self.unreachable:
            raise self.why_unreachable
        if request.lease_id not in self.leases:
            raise LeaseEnded("scripted end")
        decode = self.decodes[request.ticket.decode_address]
        decode.hand_off(
            (request.context.request_id, request.context.epoch),
            is_older=self.leases[request.lease_id] < _length(request.context),
        )
        return prefill_service_pb2.HandOffResponse(done=self._done(request.lease_id))

    async def RenewLeases(
        self, request: prefill_service_pb2.RenewLeasesRequest, context: Context
    ) -> prefill_service_pb2.RenewLeasesResponse:
        self.renewed += request.lease_ids
        self.seen.note()
        await self.renew_gate.wait()
        ended = [lease_id for lease_id in request.lease_ids if lease_id not in self.leases]
        return prefill_service_pb2.RenewLeasesResponse(ended_lease_ids=ended)

    async def StopHandoff(
        self, request: prefill_service_pb2.StopHandoffRequest, context: Context
    ) -> prefill_service_pb2.StopHandoffResponse:
        return prefill_service_pb2.StopHandoffResponse(stopped=True, generation=self.generation)

    async def ReleaseLease(
        self, request: prefill_service_pb2.ReleaseLeaseRequest, context: Context
    ) -> prefill_service_pb2.ReleaseLeaseResponse:
        self.released.append(request.lease_id)
        self.leases.pop(request.lease_id, None)
        self.seen.note()
        return prefill_service_pb2.ReleaseLeaseResponse(found=True)

    async def GetWorkerInfo(
        self, request: prefill_service_pb2.PrefillServiceGetWorkerInfoRequest, context: Context
    ) -> prefill_service_pb2.PrefillServiceGetWorkerInfoResponse:
        await self.info_gate.wait()
        info = _info("prefill", self.generation, self.fingerprint, self.draining)
        info.details.update(self.details)
        return prefill_service_pb2.PrefillServiceGetWorkerInfoResponse(info=info)

    def _done(self, lease_id: str) -> prefill_service_pb2.HandoffDone:
        return prefill_service_pb2.HandoffDone(
            lease_id=lease_id, lease_s=self.lease_s, transfer_engine="fake"
        )


@contextlib.asynccontextmanager
async def serving(
    worker: FakeDecode | FakePrefill, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[RpcServer]:
    """The worker behind a real port."""

    def register(server: grpc.aio.Server) -> None:
        if isinstance(worker, FakeDecode):
            add_DecodeServiceServicer_to_server(worker, server)
        else:
            add_PrefillServiceServicer_to_server(worker, server)

    server = build_server(host=host, port=port, service_names=(), register=register)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


def _info(role: str, generation: str, fingerprint: str, draining: bool) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        role=role,
        generation=generation,
        model_fingerprint=fingerprint,
        model="tiny",
        max_context_length=MAX_CONTEXT,
        vocab_size=VOCAB,
        draft_length=7,
        draining=draining,
        mesh=worker_pb2.WorkerMesh(dp=2, tp=4, ep=8, num_ranks=8, device="cuda"),
        memory=[
            worker_pb2.RankMemory(
                rank=3,
                device="cuda:3",
                claims=[worker_pb2.MemoryClaim(owner="target", kind="weights", num_bytes=5)],
            )
        ],
    )


def _length(context: types_pb2.RequestContext) -> int:
    return len(context.prompt_token_ids) + len(context.committed_token_ids)


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate
