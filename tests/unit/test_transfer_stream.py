from __future__ import annotations

import struct

import pytest

from common.errors import InvalidRequest
from common.rpc.transfer_stream import MAX_MESSAGE_BYTES, MESSAGE_BYTES, Piece, pack, unpack


def piece(region: int, offset: int, payload: bytes) -> Piece:
    return Piece(region, offset, memoryview(payload))


def test_pieces_come_back_as_they_were_packed() -> None:
    pieces = [piece(0, 0, b"a"), piece(65535, 2**63, b""), piece(3, 7, b"xyz" * 100)]
    (message,) = pack(pieces)
    assert list(unpack(message)) == pieces


def test_messages_are_about_a_mebibyte() -> None:
    pieces = [piece(1, i, bytes(300_000)) for i in range(10)] + [piece(2, 0, bytes(MESSAGE_BYTES))]
    messages = list(pack(pieces))
    assert all(len(message) <= MAX_MESSAGE_BYTES for message in messages)
    assert [len(list(unpack(message))) for message in messages] == [3, 3, 3, 1, 1]


def test_source_bytes_are_read_when_their_message_is_made() -> None:
    source = bytearray(b"old")
    messages = pack([piece(0, 0, bytes(MESSAGE_BYTES)), Piece(0, 0, memoryview(source))])
    next(messages)
    source[:] = b"new"
    assert [bytes(p.payload) for p in unpack(next(messages))] == [b"new"]


def test_malformed_messages_are_refused_by_what_is_wrong_with_them() -> None:
    (good,) = pack([piece(0, 0, b"payload")])
    with pytest.raises(InvalidRequest, match="ends inside a header"):
        list(unpack(good + b"\0"))
    with pytest.raises(InvalidRequest, match="7 bytes announced, 6 left"):
        list(unpack(good[:-1]))
    with pytest.raises(InvalidRequest, match="4294967295 bytes announced, 0 left"):
        list(unpack(struct.pack("<HQI", 0, 0, 2**32 - 1)))
    with pytest.raises(InvalidRequest, match=f"at most {MAX_MESSAGE_BYTES} are read"):
        list(unpack(bytes(MAX_MESSAGE_BYTES + 1)))
