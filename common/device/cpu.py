"""The CPU as a device: ranks are processes that share the machine's memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from common.device.backend import DeviceMemory

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


class CpuBackend:
    """Nothing is asynchronous and nothing pinned."""

    name = "cpu"
    collectives = "gloo"
    default_fraction: float | None = None
    num_devices: int | None = None

    def __init__(self, *, cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> None:
        self._cgroup = cgroup
        self._meminfo = meminfo

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def memory(self, device: torch.device) -> DeviceMemory:
        """The machine's, or what a container may have of it. Memory that only caches files counts as free."""
        machine = self._machine()
        limit, used = (_number(self._cgroup / f"memory.{name}") for name in ("max", "current"))
        if limit is None or used is None or limit >= machine.total_bytes:
            return machine
        cached = _statistic(self._cgroup / "memory.stat", "inactive_file")
        free = min(limit - used + cached, machine.free_bytes)
        return DeviceMemory(total_bytes=limit, free_bytes=max(0, free))

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start_copy(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        into.copy_(source)
        return _nothing

    def synchronize(self, device: torch.device) -> None:
        return

    def _machine(self) -> DeviceMemory:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = _statistic(self._meminfo, "MemAvailable:") * 1024
        # Other systems than Linux do not tell.
        return DeviceMemory(total_bytes=total, free_bytes=min(available, total) or total)


def _number(path: Path) -> int | None:
    """A file with one number; None where there is no file or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    """The number behind a name in a file of such lines; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _nothing() -> None:
    return
