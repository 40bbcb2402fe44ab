"""What devices do for us, by the backend's interface: copies, memory, collectives, an engine within its budget.

Skipped with the reason where there is none; a CPU is one wherever it has the thing in question.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from common.claims import MemoryKind
from common.device.accelerator import Accelerator
from common.device.select import open_backend
from common.device.staging import Staging
from common.engine.build import build_engine
from common.engine.settings import EngineSettings
from common.model.config import ModelConfig
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

CUDA, NPU = (
    pytest.param("cuda", marks=pytest.mark.device("cuda")),
    pytest.param("npu", marks=pytest.mark.device("npu")),
)
MIB = 2**20


@pytest.mark.parametrize("name", [CUDA, NPU])
def test_host_buffers_are_pinned(name: str) -> None:
    buffer = open_backend(name).host_buffer(3 * MIB)
    assert buffer.is_pinned() and buffer.nbytes == 3 * MIB


@pytest.mark.parametrize("name", ["cpu", CUDA, NPU])
@pytest.mark.parametrize("buffer_bytes", [256, MIB])
def test_values_that_are_staged_are_on_the_device_for_what_comes_after(
    name: str, buffer_bytes: int
) -> None:
    """Buffers are filled again while copies from others are under way: a wait that is missing would tear values."""
    backend = open_backend(name)
    device = backend.device(0)
    staging = Staging(backend, buffer_bytes=buffer_bytes)
    sources = [torch.randn(257, 33 + i) for i in range(12)]
    rooms = [torch.zeros(each.shape, dtype=torch.bfloat16, device=device) for each in sources]
    for source, room in zip(sources, rooms, strict=True):
        staging.stage(source, room)
    doubled = [2 * room for room in rooms]
    staging.wait()
    backend.synchronize(device)
    for source, room in zip(sources, doubled, strict=True):
        assert torch.equal(room.cpu(), 2 * source.bfloat16())
    assert staging.held_bytes == 2 * buffer_bytes


@pytest.mark.parametrize("name", [CUDA, NPU])
def test_memory_that_is_taken_is_no_longer_free(name: str) -> None:
    backend = open_backend(name)
    device = backend.device(0)
    before = backend.memory(device)
    taken = torch.zeros(512 * MIB, dtype=torch.uint8, device=device)
    after = backend.memory(device)
    assert after.total_bytes == before.total_bytes
    assert before.free_bytes - after.free_bytes >= taken.nbytes


@contextmanager
def group_of_one(backend: str) -> Iterator[dist.ProcessGroup]:
    """As a rank's axes are made, which leave groups of one rank out."""
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield dist.new_group([0], backend=backend, timeout=timeout)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["cpu", CUDA, NPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_devices_collectives_have_all_that_an_axis_uses(name: str, dtype: torch.dtype) -> None:
    """The library is there, loads, and takes these types in the device's memory; of more ranks one device says nothing."""
    backend = open_backend(name)
    device = backend.device(0)
    x = torch.arange(24).view(6, 4).to(device, dtype)
    with group_of_one(backend.collectives) as group:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        gathered = [torch.empty_like(x)]
        dist.all_gather(gathered, x, group=group)
        moved = torch.empty_like(x)
        dist.all_to_all_single(moved, x, [6], [6], group=group)
        backend.synchronize(device)
        for found in (summed, *gathered, moved):
            assert torch.equal(found, x)


@pytest.mark.parametrize("name", [CUDA, NPU])
def test_an_engine_on_a_device_keeps_within_its_share_of_the_memory(
    name: str, tmp_path: Path
) -> None:
    values = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
    tensors = random_tensors(ModelConfig.from_json(values), seed=1)
    settings = EngineSettings(
        checkpoint_dir=save_checkpoint(tmp_path / "m", values, tensors),
        device=name,
        num_slots=4,
        max_context_length=512,
    )
    free = build_engine(settings)
    assert free.num_pages == 4 * 4, "as many as all slots can use, and no more"
    page = free.ledger.by_kind()[MemoryKind.PAGES] // free.num_pages
    half = free.ledger.num_bytes - 8 * page + page // 2
    free.engine.close()
    del free

    backend = open_backend(name)
    device = backend.device(0)
    before = backend.memory(device)
    fraction = min(1.0, (before.used_bytes + half) / before.total_bytes)
    # Others on the device may come and go meanwhile.
    with mock.patch.object(Accelerator, "memory", return_value=before):
        loaded = build_engine(replace(settings, memory_fraction=fraction))
    assert loaded.num_pages == 8 and half - page < loaded.ledger.num_bytes <= half
    assert {memory.device for memory in loaded.memory} == {str(device)}
    loaded.engine.close()
