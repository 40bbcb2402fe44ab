"""Raw bytes over a client-streaming call: framing and both ends. Knows pieces of memory as numbers; never whose they are.

There is no proto for it: protobuf copies a `bytes` field once more on each side, which halves the rate. A message is a
sequence of pieces, each `region u16, offset u64, length u32` (little endian) and then `length` bytes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import grpc
import grpc.aio

from common.errors import InvalidRequest
from common.rpc.status import error_of_call

SERVICE_NAME = "dspark.v1.TransferStream"
METHOD_NAME = "Write"
KEY_METADATA = "dspark-handoff-bin"
CAPABILITY_METADATA = "dspark-capability-bin"

MESSAGE_BYTES = 1024 * 1024
"""Payload of a message, about: smaller ones cost calls, larger ones cost copies."""
MAX_MESSAGE_BYTES = 2 * MESSAGE_BYTES
"""Of a message with its headers; a longer one is refused."""

_HEADER = struct.Struct("<HQI")
_COUNT = struct.Struct("<Q")

Write = Callable[[int, int, memoryview], None]
"""Writes a payload at (region, offset). Raises ServingError when that is not allowed."""
Authorize = Callable[[bytes, bytes], Write]
"""What writes for the hand-off of (key, capability). Raises ServingError when there is none."""

Refusing = Callable[[], AbstractContextManager[None]]
"""Sees what is refused inside it."""


class Piece(NamedTuple):
    """Bytes for one place."""

    region: int
    offset: int
    payload: memoryview


def pack(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Messages of about `MESSAGE_BYTES`. Pieces must not be longer than that; they are read when a message is made."""
    parts: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        length = len(piece.payload)
        if parts and size + length > MESSAGE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts += [_HEADER.pack(piece.region, piece.offset, length), piece.payload]
        size += _HEADER.size + length
    if parts:
        yield b"".join(parts)


def unpack(message: bytes) -> Iterator[Piece]:
    """The pieces of a message. Raises InvalidRequest when it is too long or ends inside a piece."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"a transfer message has {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are read"
        )
    view, position = memoryview(message), 0
    while position < len(view):
        if len(view) - position < _HEADER.size:
            raise InvalidRequest("a transfer message ends inside a header")
        region, offset, length = _HEADER.unpack_from(view, position)
        position += _HEADER.size
        if len(view) - position < length:
            raise InvalidRequest(
                f"a transfer message ends inside a piece: {length} bytes announced, {len(view) - position} left"
            )
        yield Piece(region, offset, view[position : position + length])
        position += length


async def send(
    channel: grpc.aio.Channel,
    messages: Iterator[bytes],
    *,
    peer: str,
    key: bytes,
    capability: bytes,
    timeout_s: float,
) -> int:
    """Send messages and return the bytes that the peer wrote. Nothing is read from `messages` after this has ended.

    Raises the peer's ServingError, or WorkerLost or DeadlinePassed that name `peer`.
    """
    write: Any = channel.stream_unary(f"/{SERVICE_NAME}/{METHOD_NAME}")
    call: Any = write(
        metadata=((KEY_METADATA, key), (CAPABILITY_METADATA, capability)), timeout=timeout_s
    )
    writer = asyncio.create_task(_write_all(call, messages))
    # A peer may end the call before it has read everything. gRPC would then put the failure of the write that came too
    # late in the place of the peer's answer, so the writer does not get to hear of it.
    call.add_done_callback(lambda _: writer.cancel())
    try:
        await asyncio.wait([writer])
        if not writer.cancelled():
            writer.result()
        count: bytes = await call
    except grpc.aio.AioRpcError as error:
        raise error_of_call(error, peer=peer) from error
    finally:
        call.cancel()
        writer.cancel()
        await asyncio.wait([writer])
    return int(_COUNT.unpack(count)[0])


async def _write_all(call: Any, messages: Iterator[bytes]) -> None:
    """Ends early when the call ends, whose answer says why."""
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        pass


def handler(authorize: Authorize, refusing: Refusing = nullcontext) -> grpc.GenericRpcHandler:
    """The receiving end, for the server of the process that owns the memory."""

    async def receive(messages: AsyncIterator[bytes], context: Any) -> bytes:
        metadata = dict(context.invocation_metadata() or ())
        key, capability = (
            _as_bytes(metadata.get(name)) for name in (KEY_METADATA, CAPABILITY_METADATA)
        )
        with refusing():
            write = authorize(key, capability)
        count = 0
        async for message in messages:
            with refusing():
                for region, offset, payload in unpack(message):
                    write(region, offset, payload)
                    count += len(payload)
        return _COUNT.pack(count)

    method: Any = grpc.stream_unary_rpc_method_handler(receive)  # bytes in, bytes out
    return grpc.method_handlers_generic_handler(SERVICE_NAME, {METHOD_NAME: method})


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b""
