"""Device backends: what each is called, what it says when something is missing, and how ranks find their devices."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from common.device.accelerator import Accelerator, Event
from common.device.cpu import CpuBackend
from common.device.select import open_backend
from common.errors import ConfigError

GIB = 2**30


def fails_with(error: Exception) -> Callable[[str], Any]:
    def import_module(name: str) -> Any:
        if name == "torch_npu":
            raise error
        return importlib.__import__(name)

    return import_module


class FakeEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeLibrary:
    """Two devices of 8 GiB, as `torch.cuda` and `torch.npu` would tell of them."""

    def __init__(self) -> None:
        self.current: list[torch.device] = []
        self.Event: Callable[[], Event] = FakeEvent

    def device_count(self) -> int:
        return 2

    def set_device(self, device: torch.device, /) -> None:
        self.current.append(device)

    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]:
        return 6 * GIB, 8 * GIB

    def synchronize(self, device: torch.device, /) -> None:
        pass


# Names -----------------------------------------------------------------------------------------------------------


def test_a_cpu_has_gloo_and_as_many_ranks_as_one_likes() -> None:
    backend = open_backend("cpu")
    assert (backend.name, backend.collectives, backend.num_devices) == ("cpu", "gloo", None)
    assert backend.device(15) == torch.device("cpu")
    assert backend.default_fraction is None


@pytest.mark.parametrize("name", ["tpu", "", "cuda:", "cuda:x", "CPU", "cpu:"])
def test_an_unknown_device_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{name}'; give one of cpu, cuda, npu"):
        open_backend(name)


# What is missing -------------------------------------------------------------------------------------------------


def test_torch_without_cuda_is_told_with_the_wheel_to_install() -> None:
    with (
        mock.patch.object(torch.version, "cuda", None),
        pytest.raises(ConfigError, match=r"built without CUDA; install a torch wheel for CUDA"),
    ):
        open_backend("cuda")


def test_a_missing_driver_is_told_with_what_torch_wants() -> None:
    with (
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(ConfigError, match=r"built for CUDA 13\.0, which needs an NVIDIA driver"),
    ):
        open_backend("cuda:1")


def test_missing_torch_npu_is_told_with_the_version_that_fits_torch() -> None:
    missing = ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu")
    version = torch.__version__.partition("+")[0]
    with (
        mock.patch("importlib.import_module", fails_with(missing)),
        pytest.raises(ConfigError, match=rf"pip install torch-npu=={version}"),
    ):
        open_backend("npu")


def test_missing_cann_is_told_with_the_library_and_the_script() -> None:
    missing = ImportError("libhccl.so: cannot open shared object file: No such file or directory")
    with (
        mock.patch("importlib.import_module", fails_with(missing)),
        pytest.raises(ConfigError, match=r"CANN \(libhccl\.so.*set_env\.sh"),
    ):
        open_backend("npu")


def test_a_fault_of_another_package_is_not_blamed_on_torch_npu() -> None:
    other = ModuleNotFoundError("No module named 'yaml'", name="yaml")
    with (
        mock.patch("importlib.import_module", fails_with(other)),
        pytest.raises(ModuleNotFoundError, match="yaml"),
    ):
        open_backend("npu")


def test_no_npu_is_told_with_the_tool_that_shows_them() -> None:
    empty = mock.Mock(device_count=lambda: 0)
    with (
        mock.patch("importlib.import_module"),
        mock.patch.object(torch, "npu", empty, create=True),
        pytest.raises(ConfigError, match=r"torch-npu finds none.*npu-smi info"),
    ):
        open_backend("npu")


def test_torch_npu_is_imported_only_when_it_is_chosen() -> None:
    with mock.patch("importlib.import_module") as import_module:
        open_backend("cpu")
        import_module.assert_not_called()


# Accelerators ----------------------------------------------------------------------------------------------------


def test_ranks_of_a_machine_have_a_device_each_from_the_first_one_on() -> None:
    library = FakeLibrary()
    backend = Accelerator("cuda", "nccl", library, first_index=1)
    assert backend.num_devices == 1
    assert backend.device(0) == torch.device("cuda:1") == library.current[-1]
    with pytest.raises(ConfigError, match=r"rank 1 of this machine needs cuda:2, .* only 2 cuda"):
        backend.device(1)


def test_memory_is_what_the_device_says() -> None:
    backend = Accelerator("npu", "hccl", FakeLibrary())
    memory = backend.memory(torch.device("cpu"))
    assert (memory.total_bytes, memory.free_bytes, memory.used_bytes) == (
        8 * GIB,
        6 * GIB,
        2 * GIB,
    )


def test_host_memory_that_cannot_be_pinned_is_used_as_it_is() -> None:
    backend = Accelerator("cuda", "nccl", FakeLibrary())
    with mock.patch.object(torch.Tensor, "pin_memory", side_effect=RuntimeError("limit")):
        assert backend.host_buffer(64).nbytes == 64


# The memory of a CPU ---------------------------------------------------------------------------------------------


def cpu(tmp_path: Path, *, available_kib: int, limit: str = "max", used: int = 0) -> CpuBackend:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nfile 7\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    return CpuBackend(cgroup=tmp_path, meminfo=meminfo)


def test_a_machine_without_a_limit_has_what_is_available(tmp_path: Path) -> None:
    memory = cpu(tmp_path, available_kib=1 << 20).memory(torch.device("cpu"))
    assert memory.free_bytes == GIB < memory.total_bytes


def test_a_container_has_its_limit_and_file_caches_count_as_free(tmp_path: Path) -> None:
    backend = cpu(tmp_path, available_kib=1 << 19, limit=str(GIB // 2), used=GIB // 4)
    memory = backend.memory(torch.device("cpu"))
    assert memory.total_bytes == GIB // 2
    assert memory.free_bytes == GIB // 2

    (tmp_path / "memory.stat").write_text("inactive_file 1024\n")
    assert backend.memory(torch.device("cpu")).free_bytes == GIB // 4 + 1024


def test_a_system_without_these_files_counts_everything_as_free(tmp_path: Path) -> None:
    backend = CpuBackend(cgroup=tmp_path / "none", meminfo=tmp_path / "none")
    memory = backend.memory(torch.device("cpu"))
    assert memory.free_bytes == memory.total_bytes > 0
