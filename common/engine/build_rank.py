"""One rank's model, cache and runner from a checkpoint folder and sizes. Knows no other rank but by its communicator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from common.checkpoint.loader import load_model
from common.checkpoint.read_options import Progress, ReadOptions
from common.claims import MemoryKind
from common.device.ledger import Ledger
from common.device.select import open_backend
from common.engine.budget import Budget, CacheNeed
from common.engine.config import EngineConfig
from common.engine.device_memory import budget_of, enter_cache, ledger_of, num_pages_for_ranks
from common.engine.runner import Runner
from common.engine.settings import EngineSettings
from common.errors import ConfigError
from common.kv_cache.layout import PAGE_TOKENS, CacheLayout, num_pages_for
from common.kv_cache.pool import CachePool
from common.model.cache_layout import cache_layout
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel
from common.model.quantization import Quantization
from common.parallel.collectives import Communicator
from common.spec_decode.confidence import load_temperatures

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What settings and checkpoint come to. Pages and slots are of all data parallel groups together."""

    engine_config: EngineConfig
    num_pages: int
    num_slots: int

    @classmethod
    def of(cls, settings: EngineSettings, config: ModelConfig) -> Sizes:
        """Raises ConfigError that says what to change."""
        max_context = _max_context(settings, config)
        num_groups = settings.mesh.dp
        num_pages = settings.num_pages or settings.num_slots * num_pages_for(max_context)
        for name, value in (("num_slots", settings.num_slots), ("num_pages", num_pages)):
            if value % num_groups:
                raise ConfigError(
                    f"{name} ({value}) is not divisible by dp ({num_groups}); "
                    f"give {value // num_groups * num_groups or num_groups}"
                )
        return cls(
            engine_config=EngineConfig(
                draft_length=_draft_length(settings, config),
                max_step_rows=settings.max_step_rows,
                max_context_length=max_context,
                max_uncommitted_rounds=settings.max_uncommitted_rounds,
            ),
            num_pages=num_pages,
            num_slots=settings.num_slots,
        )

    def within(
        self, budget: Budget, settings: EngineSettings, ledger: Ledger, model: DSparkModel
    ) -> Sizes:
        """With pages that fit beside what the ledger has; no more than all slots could use. Raises ConfigError."""
        num_groups = settings.mesh.dp
        need = CacheNeed.of(
            cache_layout(model.config, dtype=settings.dtype),
            num_slots=self.num_slots // num_groups,
            max_step_rows=self.engine_config.draft_length + 1,
            max_context_length=self.engine_config.max_context_length,
            num_groups=num_groups,
        )
        if model.device.type == "cpu" and _holds_all_groups(model.comm):
            need = need.of_all_groups()
        wanted = None if settings.num_pages is None else self.num_pages // num_groups
        fits = num_pages_for_ranks(budget, need, ledger, model.comm, wanted=wanted)
        return replace(self, num_pages=min(self.num_pages, fits * num_groups))

    def pool(self, layout: CacheLayout, *, num_groups: int, device: torch.device) -> CachePool:
        """Cache for one of `num_groups` equal parts."""
        return CachePool(
            layout,
            num_pages=self.num_pages // num_groups,
            num_slots=self.num_slots // num_groups,
            max_step_rows=self.engine_config.draft_length + 1,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """One rank, ready to run; `whole` is the cache of all groups in host memory, on the first rank of a mesh only."""

    runner: Runner
    sizes: Sizes
    ledger: Ledger
    whole: CachePool | None = None


def build_rank(
    settings: EngineSettings,
    comm: Communicator | None = None,
    *,
    local_rank: int = 0,
    on_progress: Progress | None = None,
    on_loaded: Callable[[], None] = lambda: None,
) -> BuiltRank:
    """Load this rank's part and allocate its cache. Raises CheckpointError and ConfigError.

    `on_loaded` is called between the two; ranks agree on sizes afterwards.
    """
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype is {settings.dtype!r}; give one of {sorted(DTYPES)}")
    quantizations = {each.value: each for each in Quantization}
    if settings.quantization not in quantizations:
        raise ConfigError(
            f"quantization is {settings.quantization!r}; give one of {', '.join(quantizations)}"
        )
    comm = comm or Communicator()
    backend = open_backend(settings.device)
    device = backend.device(local_rank)
    budget = budget_of(settings, backend, device, backend.memory(device))
    model = load_model(
        settings.checkpoint_dir,
        dtype=DTYPES[settings.dtype],
        device=device,
        comm=comm,
        backend=backend,
        quantization=quantizations[settings.quantization],
        on_progress=on_progress,
        options=ReadOptions(slow_mb_per_s=settings.slow_storage_mb_per_s),
    )
    on_loaded()
    ledger = ledger_of(model)
    sizes = Sizes.of(settings, model.config)
    if budget is not None:
        sizes = sizes.within(budget, settings, ledger, model)
    pool, whole = _pools(settings, sizes, model, comm)
    enter_cache(ledger, pool, whole)
    draft_length = sizes.engine_config.draft_length
    temperatures = load_temperatures(settings.checkpoint_dir, draft_length, device)
    ledger.claim("confidence temperatures", MemoryKind.WORKSPACE, [temperatures])
    runner = Runner(model, pool, draft_length=draft_length, confidence_temperatures=temperatures)
    return BuiltRank(runner, sizes, ledger, whole)


def _pools(
    settings: EngineSettings, sizes: Sizes, model: DSparkModel, comm: Communicator
) -> tuple[CachePool, CachePool | None]:
    """The rank's own cache and, on the first rank of a mesh, that of all groups, of which a CPU's own is a part."""
    layout = cache_layout(model.config, dtype=settings.dtype)
    mesh = comm.shard.mesh
    if not _holds_all_groups(comm):
        return sizes.pool(layout, num_groups=mesh.dp, device=model.device), None
    whole = sizes.pool(layout, num_groups=1, device=torch.device("cpu"))
    if model.device.type == "cpu":
        return whole.part(0, mesh.dp), whole
    return sizes.pool(layout, num_groups=mesh.dp, device=model.device), whole


def _holds_all_groups(comm: Communicator) -> bool:
    """Whether a rank has the cache of all groups in host memory; on a CPU that is where its own part is, too."""
    return comm.shard.mesh.num_ranks > 1 and comm.shard.rank == 0


def _draft_length(settings: EngineSettings, config: ModelConfig) -> int:
    if not settings.speculate or not config.has_drafter:
        return 0
    if settings.draft_length is None:
        return config.dspark_block_size
    if settings.draft_length < 1:
        raise ConfigError(
            f"draft_length is {settings.draft_length}; give at least 1 or turn speculation off"
        )
    return settings.draft_length


def _max_context(settings: EngineSettings, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    wanted = settings.max_context_length or limit
    if not PAGE_TOKENS <= wanted <= limit:
        raise ConfigError(
            f"max_context_length is {wanted}; give {PAGE_TOKENS} to {limit}, the model's max_position_embeddings"
        )
    return wanted
