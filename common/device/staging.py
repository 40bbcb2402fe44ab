"""The way of values from host memory to a device: through a few host buffers that are used again and again.

Knows tensors; not where their values come from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from common.device.backend import Backend

BUFFER_BYTES = 16 << 20
NUM_BUFFERS = 2
"""One is filled while the other is copied from."""


class Staging:
    """Host memory of at most `num_buffers` x `buffer_bytes`, whatever passes through. Any thread may use it.

    As a context manager it has threads for jobs that nobody waits for one by one; without, such a job is done at once.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
        num_threads: int = 0,
    ) -> None:
        self._backend = backend
        self._buffer_bytes = buffer_bytes
        self._num_buffers = num_buffers
        self._num_threads = num_threads
        self._buffers: list[tuple[torch.Tensor, Callable[[], None]]] = []
        """Least recently used first, each with the wait for its last copy."""
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def __enter__(self) -> Staging:
        if self._num_threads:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="staging")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Jobs that have not begun are dropped; whoever wants them done calls `wait` first."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    @property
    def held_bytes(self) -> int:
        """Host memory in buffers; it goes with this object."""
        return sum(buffer.nbytes for buffer, _ in self._buffers)

    def later(self, job: Callable[[], None]) -> None:
        """Do something by the next `wait`, beside what the caller does. Waits while many jobs are ahead.

        Raises what an earlier job has raised.
        """
        if self._threads is None:
            job()
            return
        # A few jobs ahead: enough to keep threads busy, and their sources are read about in order.
        while len(self._jobs) >= 2 * self._num_threads:
            self._jobs.pop(0).result()
        self._jobs.append(self._threads.submit(job))

    def wait(self) -> None:
        """Until every job and copy has ended. Raises what the first of them has raised."""
        while self._jobs:
            self._jobs.pop(0).result()
        with self._lock:
            for _, ended in self._buffers:
                ended()

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copy host values into memory of the same shape, cast to its type.

        `source` may change once this returns; on a device `into` has its values for everything that is started later.
        """
        if into.device.type in ("cpu", "meta"):
            into.copy_(source)
        else:
            self.stage(source, into)

    def stage(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """The same by way of the buffers, wherever `into` is."""
        with self._lock:
            for part, room in _parts(source, into, self._buffer_bytes // into.element_size()):
                buffer = self._free_buffer()
                filled = buffer[: room.nbytes].view(room.dtype).view(room.shape)
                filled.copy_(part)
                self._buffers.append((buffer, self._backend.start_copy(filled, room)))

    def _free_buffer(self) -> torch.Tensor:
        if len(self._buffers) < self._num_buffers:
            return self._backend.host_buffer(self._buffer_bytes)
        buffer, ended = self._buffers.pop(0)
        ended()
        return buffer


def _parts(
    source: torch.Tensor, into: torch.Tensor, largest: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both, cut alike into parts of at most `largest` elements."""
    if into.numel() <= largest:
        if into.numel():
            yield source, into
        return
    rows = max(1, largest // max(1, into[0].numel()))
    for begin in range(0, into.shape[0], rows):
        part, room = source[begin : begin + rows], into[begin : begin + rows]
        if room.numel() > largest:
            yield from _parts(part[0], room[0], largest)
        else:
            yield part, room
