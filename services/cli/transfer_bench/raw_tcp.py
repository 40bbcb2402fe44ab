"""A bare TCP connection, as quick as plain Python makes it: what an engine over TCP is compared with. Blocks; for threads."""

from __future__ import annotations

import contextlib
import socket
import struct

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 1 << 20
IDLE_S = 600.0
"""Between two loads other engines are measured."""
CONNECT_S = 10.0

_LENGTH = struct.Struct("<Q")

Bytes = npt.NDArray[np.uint8]


class RawTcpReceiver:
    """Takes one connection and writes what comes to the beginning of a memory."""

    def __init__(self, host: str, target: Bytes) -> None:
        self._target = target.data
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(IDLE_S)
        self._connection: socket.socket | None = None
        self.port = int(self._listener.getsockname()[1])

    def run(self) -> None:
        """Until the sender leaves or `close`."""
        try:
            self._connection, _ = self._listener.accept()
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.settimeout(IDLE_S)
            while self._receive(self._connection):
                self._connection.sendall(b"\1")
        except OSError:
            return

    def close(self) -> None:
        for each in (self._listener, self._connection):
            if each is not None:
                # Closing alone does not wake the thread that waits in it.
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _receive(self, connection: socket.socket) -> bool:
        header = bytearray(_LENGTH.size)
        if not _fill(connection, memoryview(header)):
            return False
        (length,) = _LENGTH.unpack(header)
        return length <= len(self._target) and _fill(connection, self._target[:length])


class RawTcpSender:
    """The other end."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=CONNECT_S)
        self._socket.settimeout(IDLE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, source: Bytes) -> None:
        """Returns when every byte is in the receiver's memory."""
        view = source.data
        self._socket.sendall(_LENGTH.pack(len(view)))
        for start in range(0, len(view), CHUNK_BYTES):
            self._socket.sendall(view[start : start + CHUNK_BYTES])
        if self._socket.recv(1) != b"\1":
            raise ConnectionError("the receiver of the raw TCP connection is gone")

    def close(self) -> None:
        self._socket.close()


def _fill(connection: socket.socket, view: memoryview) -> bool:
    """False when the sender has left."""
    while view:
        count = connection.recv_into(view[:CHUNK_BYTES])
        if not count:
            return False
        view = view[count:]
    return True
