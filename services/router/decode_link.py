"""The one stream to a decode worker, which carries all requests of this router.

Knows commands, events and whom they are for; never decides what is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio

from common.errors import WorkerLost
from common.rpc import convert
from common.rpc.status import error_of_call, error_of_reason
from dspark.v1 import decode_service_pb2 as pb
from services.router.commits import Round
from services.router.events import Admitted, Event, Failed

if TYPE_CHECKING:
    # Generated stubs are typed apart from how they run.
    from dspark.v1.decode_service_pb2_grpc import DecodeServiceAsyncStub

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Request id and epoch."""

MAX_BATCH_BYTES = 16 * 1024 * 1024
"""Of the commands in one message; far below the message limit, far above a long prompt."""

MAX_REOPEN_DELAY_S = 2.0
_FIRST_REOPEN_DELAY_S = 0.1


class DecodeLink:
    """Sends commands in order, a batch per message, and hands each event to the session it names.

    While it is closed it takes no sessions. When the stream ends, `on_closed` is called and every session gets `Failed`.
    """

    def __init__(
        self,
        address: str,
        stub: DecodeServiceAsyncStub,
        *,
        on_closed: Callable[[str], None],
        on_room: Callable[[], None],
    ) -> None:
        self.address = address
        self._stub = stub
        self._on_closed = on_closed
        self._on_room = on_room
        self._sessions: dict[Key, DecodeSession] = {}
        self._commands: list[pb.DecodeCommand] = []
        self._has_commands = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_useless_streams = 0
        self._reopen_at = 0.0
        self._is_closing = False

    @property
    def is_open(self) -> bool:
        return self._task is not None

    def ensure_open(self) -> None:
        """Open the stream unless it is open, or ended so often without an event that it should rest."""
        if self._task is None and asyncio.get_running_loop().time() >= self._reopen_at:
            self._task = asyncio.create_task(self._run_stream(), name=f"decode {self.address}")

    def drop(self) -> None:
        """Give the stream up, as when the worker does not answer any more."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Give the stream up for good and wait until it is gone; `on_closed` is not called any more."""
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def admit(self, admit: pb.Admit, inbox: asyncio.Queue[Event]) -> DecodeSession:
        """Begin to listen for a request, then tell the worker to run it.

        The caller closes the session. When the stream is closed already, `Failed` is in the inbox at once.
        """
        session = DecodeSession(self, admit, inbox)
        if self._task is None:
            inbox.put_nowait(self._lost("it is closed"))
            return session
        assert session.key not in self._sessions, f"{session.key} has a session already"
        self._sessions[session.key] = session
        self.send(pb.DecodeCommand(admit=admit))
        return session

    def send(self, command: pb.DecodeCommand) -> None:
        """Queue a command; dropped with the stream, whose end frees everything on the worker's side."""
        if self._task is not None:
            self._commands.append(command)
            self._has_commands.set()

    def forget(self, key: Key) -> None:
        self._sessions.pop(key, None)

    async def _run_stream(self) -> None:
        call = self._stub.Decode()
        writer = asyncio.create_task(self._write(call))
        why = "the worker ended it"
        has_events = False
        try:
            async for response in call:
                has_events = True
                for event in response.events:
                    self._dispatch(event)
        except grpc.aio.AioRpcError as error:
            why = error_of_call(error, peer=self.address).message
        except asyncio.CancelledError:
            why = "the router gave it up"
            raise
        finally:
            writer.cancel()
            call.cancel()
            self._ended(why, has_events)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[pb.DecodeRequest, pb.DecodeResponse]
    ) -> None:
        while True:
            await self._has_commands.wait()
            batch = self._next_batch()
            try:
                await call.write(pb.DecodeRequest(commands=batch))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader sees the same end, with its reason

    def _next_batch(self) -> list[pb.DecodeCommand]:
        num_bytes, num_taken = 0, 0
        while num_taken < len(self._commands) and num_bytes < MAX_BATCH_BYTES:
            num_bytes += self._commands[num_taken].ByteSize()
            num_taken += 1
        batch, self._commands = self._commands[:num_taken], self._commands[num_taken:]
        if not self._commands:
            self._has_commands.clear()
        return batch

    def _dispatch(self, event: pb.DecodeEvent) -> None:
        match event.WhichOneof("event"):
            case "admitted":
                self._deliver(event.admitted, _admitted_from_pb(event.admitted))
            case "verified":
                self._deliver(event.verified, _round_from_pb(event.verified))
            case "failed":
                error = error_of_reason(event.failed.reason, event.failed.message)
                self._deliver(event.failed, Failed(error=error, worker=self.address, role="decode"))
                self._on_room()
            case "finished":
                # A session that waits for more did not ask for its end.
                error = WorkerLost(f"decode worker {self.address} ended the request by itself")
                self._deliver(
                    event.finished, Failed(error=error, worker=self.address, role="decode")
                )
                self._on_room()
            case unknown:
                logger.warning("decode worker %s sent an unknown event: %s", self.address, unknown)

    def _deliver(
        self, message: pb.Admitted | pb.Verified | pb.Finished | pb.Failed, event: Event
    ) -> None:
        """To the session it names; for one that ended, or lives in a newer epoch, it comes too late and is void."""
        session = self._sessions.get((message.request_id, message.epoch))
        if session is not None:
            session.inbox.put_nowait(event)

    def _ended(self, why: str, has_events: bool) -> None:
        self._task = None
        self._commands.clear()
        self._has_commands.clear()
        self._num_useless_streams = 0 if has_events else self._num_useless_streams + 1
        self._reopen_at = asyncio.get_running_loop().time() + self._reopen_delay_s()
        for session in self._sessions.values():
            session.inbox.put_nowait(self._lost(why))
        self._sessions.clear()
        if not self._is_closing:
            self._on_closed(why)

    def _lost(self, why: str) -> Failed:
        error = WorkerLost(
            f"the stream to decode worker {self.address} ended: {why}",
            metadata={"worker": self.address},
        )
        return Failed(error=error, worker=self.address, role="decode")

    def _reopen_delay_s(self) -> float:
        if self._num_useless_streams < 2:
            return 0.0
        return min(
            MAX_REOPEN_DELAY_S, _FIRST_REOPEN_DELAY_S * 2.0 ** (self._num_useless_streams - 2)
        )


class DecodeSession:
    """One request in one epoch on a decode worker. Its events go to `inbox`."""

    def __init__(self, link: DecodeLink, admit: pb.Admit, inbox: asyncio.Queue[Event]) -> None:
        self.key: Key = (admit.request_id, admit.epoch)
        self.inbox = inbox
        self._link = link
        self._reservation_id = admit.reservation_id
        self._is_finished = False

    def commit(self, *, round_number: int, length: int, finish: bool) -> None:
        """Accept the request's tokens up to `length`; with `finish` the request ends there."""
        request_id, epoch = self.key
        commit = pb.Commit(
            request_id=request_id, epoch=epoch, round=round_number, length=length, finish=finish
        )
        self._link.send(pb.DecodeCommand(commit=commit))
        self._is_finished = finish

    def close(self) -> None:
        """Stop listening; a request that was not finished is aborted."""
        self._link.forget(self.key)
        if not self._is_finished:
            self._link.send(abort_command(*self.key, self._reservation_id))


def abort_command(request_id: str, epoch: int, reservation_id: str) -> pb.DecodeCommand:
    """Ends a request or a reservation, whatever its state."""
    return pb.DecodeCommand(
        abort=pb.Abort(request_id=request_id, epoch=epoch, reservation_id=reservation_id)
    )


def _admitted_from_pb(message: pb.Admitted) -> Admitted:
    has_logprob = message.HasField("first_logprob")
    return Admitted(
        first_token_id=message.first_token_id if message.HasField("first_token_id") else None,
        first_logprob=convert.logprob_from_pb(message.first_logprob) if has_logprob else None,
        drafter_fallback=message.drafter_fallback,
        transfer_engine=message.transfer_engine,
    )


def _round_from_pb(message: pb.Verified) -> Round:
    return Round(
        epoch=message.epoch,
        number=message.round,
        base=message.base,
        token_ids=tuple(message.token_ids),
        num_draft=message.num_draft,
        num_accepted=message.num_accepted,
        logprobs=convert.logprobs_from_pb(message.logprobs),
    )
