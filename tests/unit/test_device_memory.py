"""Values reach a device through a few host buffers, and every long-lived buffer there has one owner."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable

import pytest
import torch

from common.claims import Claim, MemoryKind, RankMemory
from common.device.cpu import CpuBackend
from common.device.ledger import Ledger
from common.device.staging import Staging
from common.engine.build import build_engine
from common.engine.device_memory import HOST_COPY, enter_cache
from common.engine.settings import EngineSettings
from common.errors import CheckpointError
from common.kv_cache.layout import Retention
from common.model.config import ModelConfig
from tests.support.small_cache import small_layout, small_pool
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

CPU = torch.device("cpu")


class LateDevice(CpuBackend):
    """A device whose copies happen only when they are waited for, at the latest possible moment."""

    def __init__(self) -> None:
        super().__init__()
        self.num_buffers = 0
        self.under_way: list[Callable[[], None]] = []
        self.most_under_way = 0

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_buffers += 1
        return super().host_buffer(num_bytes)

    def start_copy(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        def end() -> None:
            if end in self.under_way:
                self.under_way.remove(end)
                into.copy_(source)

        self.under_way.append(end)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return end


# Staging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_bytes", [64, 100, 4096, 1 << 20])
def test_whatever_passes_arrives_through_two_buffers(buffer_bytes: int) -> None:
    device = LateDevice()
    staging = Staging(device, buffer_bytes=buffer_bytes)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed, shape in enumerate([(40, 24), (3,), (7, 1), (2, 3, 50), (0, 8), (1, 500)]):
        source = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        into = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        staging.stage(source, into)
        pairs.append((source.clone(), into))
        source.fill_(-1)  # it may change once the call is over
    staging.wait()
    for source, into in pairs:
        assert torch.equal(into, source.bfloat16())
    assert device.num_buffers == 2
    assert device.most_under_way == 2, "nothing ran beside the filling of the next buffer"
    assert staging.held_bytes == 2 * buffer_bytes


def test_transposed_and_cut_values_arrive_as_well() -> None:
    device = LateDevice()
    staging = Staging(device, buffer_bytes=128)
    source = torch.randn(24, 40)
    room = torch.zeros(40, 24)
    staging.stage(source, room.T)
    part = torch.zeros(24, 7)
    staging.stage(source[:, 3:10], part)
    staging.wait()
    assert torch.equal(room, source.T) and torch.equal(part, source[:, 3:10])


def test_on_the_host_no_buffer_is_needed() -> None:
    staging = Staging(LateDevice())
    room = torch.zeros(4, 6)
    source = torch.randn(6, 4)
    staging.copy(source, room.T)
    assert torch.equal(room, source.T) and staging.held_bytes == 0


def test_jobs_run_beside_one_another_and_are_done_after_the_wait() -> None:
    meeting = threading.Barrier(2)
    done: list[int] = []

    def job(number: int) -> None:
        meeting.wait(10)  # two of them must be at work for either to go on
        done.append(number)

    with Staging(CpuBackend(), num_threads=2) as staging:
        for number in range(8):
            staging.later(functools.partial(job, number))
        staging.wait()
        assert sorted(done) == list(range(8))


def test_without_threads_a_job_is_done_at_once() -> None:
    done: list[int] = []
    Staging(CpuBackend()).later(lambda: done.append(1))
    assert done == [1]


def test_a_failed_job_is_told_and_the_rest_is_dropped() -> None:
    def fail() -> None:
        raise CheckpointError("damaged")

    with (
        pytest.raises(CheckpointError, match="damaged"),
        Staging(CpuBackend(), num_threads=1) as staging,
    ):
        for _ in range(50):
            staging.later(fail)


# The ledger ------------------------------------------------------------------------------------------------------


def test_views_count_once_and_kinds_add_up() -> None:
    ledger = Ledger(CPU)
    weights, rows = torch.zeros(10), torch.zeros(4, 4)
    ledger.claim("target", MemoryKind.WEIGHTS, [weights, weights[2:4]])
    ledger.claim("window", MemoryKind.RINGS, [rows[1]])
    assert ledger.by_kind()[MemoryKind.WEIGHTS] == 40
    assert ledger.by_kind()[MemoryKind.RINGS] == 64
    assert ledger.num_bytes == 104
    assert ledger.owns(weights[5:]) and not ledger.owns(torch.zeros(3))
    assert ledger.of_rank(3) == RankMemory(
        rank=3,
        device="cpu",
        claims=(
            Claim(owner="target", kind=MemoryKind.WEIGHTS, num_bytes=40),
            Claim(owner="window", kind=MemoryKind.RINGS, num_bytes=64),
        ),
    )


def test_a_buffer_with_two_owners_is_our_mistake() -> None:
    ledger = Ledger(CPU)
    shared = torch.zeros(8)
    ledger.claim("csa", MemoryKind.PAGES, [shared])
    with pytest.raises(
        AssertionError, match="32 bytes of drafter are claimed by drafter and by csa"
    ):
        ledger.claim("drafter", MemoryKind.DRAFTER, [shared[2:]])


def test_a_part_has_an_owner_of_its_own_and_nothing_counts_twice() -> None:
    ledger = Ledger(CPU)
    whole = torch.zeros(4, 8)
    ledger.claim("all groups", MemoryKind.HOST, [whole])
    ledger.claim_part("window", MemoryKind.RINGS, whole.chunk(4, dim=1)[1])
    assert ledger.by_kind()[MemoryKind.HOST] == 96
    assert ledger.by_kind()[MemoryKind.RINGS] == 32
    assert ledger.num_bytes == whole.nbytes
    with pytest.raises(AssertionError, match="drafter claims another part of all groups"):
        ledger.claim_part("drafter", MemoryKind.DRAFTER, whole.chunk(4, dim=1)[2])


def test_only_a_copy_in_host_memory_may_be_elsewhere_than_on_the_device() -> None:
    ledger = Ledger(torch.device("meta"))
    ledger.claim("all groups", MemoryKind.HOST, [torch.zeros(8)])
    with pytest.raises(AssertionError, match="target claims memory of cpu"):
        ledger.claim("target", MemoryKind.WEIGHTS, [torch.zeros(8)])


def test_what_a_rank_holds_reaches_the_first_one_as_it_is() -> None:
    ledger = Ledger(CPU)
    ledger.claim("window", MemoryKind.RINGS, [torch.zeros(4)])
    ledger.claim("target", MemoryKind.WEIGHTS, [torch.zeros(9)])
    memory = ledger.of_rank(5)
    assert RankMemory.from_json(memory.to_json()) == memory
    assert memory.by_kind() == ledger.by_kind()


@pytest.mark.parametrize("shares_memory", [True, False])
def test_the_first_ranks_copy_of_all_groups_is_entered_without_what_it_runs_on(
    shares_memory: bool,
) -> None:
    """On a CPU the rank's own cache is a part of the copy; an accelerator, which other memory stands for here, has its own."""
    layout = small_layout()
    whole = small_pool(layout, num_pages=12, num_slots=4)
    own = whole.part(0, 2) if shares_memory else small_pool(layout, num_pages=6, num_slots=2)
    own.device = CPU if shares_memory else torch.device("cuda")
    ledger = Ledger(CPU)
    enter_cache(ledger, own, whole)
    held = ledger.by_kind()
    on_device = held[MemoryKind.PAGES] + held[MemoryKind.RINGS] + held[MemoryKind.DRAFTER]
    assert on_device == own.num_bytes == whole.num_bytes // 2
    assert held[MemoryKind.HOST] == whole.num_bytes - (on_device if shares_memory else 0)
    assert {claim.owner for claim in ledger.claims()} == {HOST_COPY, *whole.buffers}


# An engine's ledger ----------------------------------------------------------------------------------------------

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
TENSORS = random_tensors(ModelConfig.from_json(VALUES), seed=1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = save_checkpoint(tmp_path_factory.mktemp("memory") / "model", VALUES, TENSORS)
    return EngineSettings(checkpoint_dir=folder, num_slots=2, max_context_length=512)


def live_storages() -> dict[int, torch.Tensor]:
    gc.collect()
    # Not isinstance, which wakes objects that pretend to be of another class.
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def test_every_tensor_that_stays_has_an_owner(settings: EngineSettings) -> None:
    """By what the interpreter has alive, and not by what the engine says of itself."""
    before = set(live_storages())
    loaded = build_engine(settings)
    stays = {
        address: tensor for address, tensor in live_storages().items() if address not in before
    }
    without = [tuple(t.shape) for t in stays.values() if t.nbytes and not loaded.ledger.owns(t)]
    assert len(stays) > 100 and without == []


def test_the_ledger_says_what_is_held(settings: EngineSettings) -> None:
    loaded = build_engine(settings)
    held = loaded.ledger.by_kind()
    pool = loaded.engine.pool
    sizes = {name: buffer.tensor.nbytes for name, buffer in pool.buffers.items()}
    paged = [r.name for r in loaded.layout.regions if r.retention is Retention.PAGED]
    assert held[MemoryKind.PAGES] == sum(sizes[name] for name in paged)
    assert held[MemoryKind.DRAFTER] == sizes["drafter"]
    assert held[MemoryKind.RINGS] == sum(sizes.values()) - held[MemoryKind.PAGES] - sizes["drafter"]
    # The parts of main_proj's twin for the context are the drafter's own, beside the checkpoint's tensors.
    stored = sum(tensor.nbytes for tensor in TENSORS.values())
    context = 3 * VALUES["head_dim"] * VALUES["hidden_size"] * 4
    ape = sum(t.nbytes for name, t in TENSORS.items() if name.endswith(".ape"))
    scales = (len(VALUES["compress_ratios"]) + 3) * VALUES["head_dim"] * 4
    assert held[MemoryKind.WEIGHTS] == stored + context + ape + scales
    owners = {claim.owner for claim in loaded.ledger.claims()}
    assert owners == {"target", "drafter", "rotations", "confidence temperatures", *sizes}
    assert loaded.memory == (loaded.ledger.of_rank(0),)
