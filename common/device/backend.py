"""The interface of a kind of device. Knows torch and memory; no model and no request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device, whoever uses them."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


class Backend(Protocol):
    """One kind of device. `cpu`, `cuda` and `npu` are there."""

    name: str
    """torch's name of the device type."""
    collectives: str
    """torch.distributed's backend between such devices: gloo, nccl or hccl."""
    default_fraction: float | None
    """Share of a device's memory to use when nobody says; None: memory is not budgeted unless somebody does."""

    @property
    def num_devices(self) -> int | None:
        """Devices of this machine; None where ranks are processes that share one."""
        ...

    def device(self, local_rank: int) -> torch.device:
        """The device of this machine's rank `local_rank`, made the process's current one.

        Raises ConfigError when there are not so many.
        """
        ...

    def memory(self, device: torch.device) -> DeviceMemory:
        """What the device has, and what nobody on it uses now."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Bytes of host memory that the device copies from best: pinned where there is such a thing."""
        ...

    def start_copy(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        """Begin copying a host buffer to the device, in order with the device's other work.

        Until the returned function has returned, the caller must not write to `source`.
        """
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait for everything that the device was given."""
        ...
