"""Bytes between the first rank of a mesh and the others, beside the collectives of the model. Knows no messages.

Over the process group of all ranks, which is gloo's on every device. All waits end with the group's timeout, or at once
when a peer's process is gone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

FRAME_BYTES = 4096
"""What one broadcast carries; a longer message takes a second one."""

LENGTH_BYTES = 8
MAX_MESSAGE_BYTES = 256 << 20


class Link:
    """One rank's end."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def tell_all(self, payload: bytes) -> None:
        """From the first rank to all others, each of which must call `hear`."""
        assert self._rank == 0 and len(payload) <= MAX_MESSAGE_BYTES, f"{len(payload)=}"
        room = FRAME_BYTES - LENGTH_BYTES
        frame = len(payload).to_bytes(LENGTH_BYTES, "little") + payload[:room]
        dist.broadcast(_tensor(frame.ljust(FRAME_BYTES, b"\0")), src=0)
        if len(payload) > room:
            dist.broadcast(_tensor(payload[room:]), src=0)

    def hear(self) -> bytes:
        """What the first rank tells all."""
        room = FRAME_BYTES - LENGTH_BYTES
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        dist.broadcast(frame, src=0)
        data = frame.numpy().tobytes()
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        payload = data[LENGTH_BYTES : LENGTH_BYTES + length]
        if length > room:
            rest = torch.empty(length - room, dtype=torch.uint8)
            dist.broadcast(rest, src=0)
            payload += rest.numpy().tobytes()
        return payload

    def send(self, rank: int, payload: bytes) -> None:
        """To one rank, which must call `receive`."""
        dist.send(torch.tensor([len(payload)]), rank)
        if payload:
            dist.send(_tensor(payload), rank)

    def receive(self, rank: int) -> bytes:
        """What one rank sends."""
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, rank)
        size = int(length)
        assert 0 <= size <= MAX_MESSAGE_BYTES, f"{size=} from rank {rank}"
        payload = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(payload, rank)
        return payload.numpy().tobytes()

    def close(self) -> None:
        """Leave the group of all ranks, and every group within it."""
        dist.destroy_process_group()


def _tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
