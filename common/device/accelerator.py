"""Devices with memory of their own, by the interface that torch's libraries for them share. Knows no vendor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from common.device.backend import DeviceMemory
from common.errors import ConfigError


class Event(Protocol):
    """A mark in a device's work."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Library(Protocol):
    """What `torch.cuda` and `torch.npu` have in common, as far as it is used here."""

    Event: Callable[[], Event]

    def device_count(self) -> int: ...
    def set_device(self, device: torch.device, /) -> None: ...
    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]: ...
    def synchronize(self, device: torch.device, /) -> None: ...


class Accelerator:
    """CUDA or NPU devices; copies from pinned host memory run beside the host's own work."""

    default_fraction: float | None = 0.9

    def __init__(
        self, name: str, collectives: str, library: Library, *, first_index: int = 0
    ) -> None:
        """Rank 0 of the machine has the device `first_index`, further ranks those after it."""
        self.name = name
        self.collectives = collectives
        self._library = library
        self._first_index = first_index

    @property
    def num_devices(self) -> int | None:
        return max(0, self._library.device_count() - self._first_index)

    def device(self, local_rank: int) -> torch.device:
        count = self._library.device_count()
        index = self._first_index + local_rank
        if index >= count:
            raise ConfigError(
                f"rank {local_rank} of this machine needs {self.name}:{index}, but there are only {count} "
                f"{self.name} devices; use fewer ranks or more machines"
            )
        device = torch.device(self.name, index)
        self._library.set_device(device)
        return device

    def memory(self, device: torch.device) -> DeviceMemory:
        free, total = self._library.mem_get_info(device)
        return DeviceMemory(total_bytes=total, free_bytes=free)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        # A limit on locked memory makes this fail; unpinned memory is copied from just as well, only not beside other work.
        with contextlib.suppress(RuntimeError):
            buffer = buffer.pin_memory()
        return buffer

    def start_copy(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        into.copy_(source, non_blocking=True)
        event = self._library.Event()
        event.record()
        return event.synchronize

    def synchronize(self, device: torch.device) -> None:
        self._library.synchronize(device)
