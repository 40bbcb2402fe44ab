"""From a checkpoint folder and sizes to an engine that runs, on one rank or on a mesh of them."""

from __future__ import annotations

from dataclasses import dataclass

from common.checkpoint.fingerprint import fingerprint
from common.checkpoint.read_options import Progress
from common.claims import RankMemory
from common.device.ledger import Ledger
from common.engine.build_rank import build_rank
from common.engine.engine import Engine
from common.engine.mesh_start import start_mesh
from common.engine.ranks import OneRank, Ranks
from common.engine.settings import EngineSettings
from common.kv_cache.layout import PAGE_TOKENS, CacheLayout
from common.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with what its worker tells others about it."""

    engine: Engine
    model_config: ModelConfig
    layout: CacheLayout
    fingerprint: str
    """Of the target, which is what the served model is known by."""
    num_pages: int
    num_slots: int
    ledger: Ledger
    """Of this process, which is the first rank."""
    memory: tuple[RankMemory, ...]
    """What every rank holds, in their order."""
    drafter_fingerprint: str = ""
    """Empty without a drafter."""

    @property
    def max_context_length(self) -> int:
        """Tokens of the longest request that an empty worker has room for: it lives in one data parallel group."""
        pages = self.num_pages // self.engine.num_groups
        return min(self.engine.config.max_context_length, pages * PAGE_TOKENS)


def build_engine(settings: EngineSettings, *, on_progress: Progress | None = None) -> LoadedEngine:
    """Load the checkpoint and allocate the cache. Raises CheckpointError or ConfigError that says what to change.

    With a mesh of several ranks the others' processes are started, or waited for on other nodes; this one is the first.
    """
    ranks: Ranks
    memory: tuple[RankMemory, ...]
    if settings.mesh.num_ranks == 1:
        built = build_rank(settings, on_progress=on_progress)
        ranks, memory = OneRank(built.runner), (built.ledger.of_rank(0),)
    else:
        started = start_mesh(settings, on_progress=on_progress)
        ranks, built, memory = started.ranks, started.first, started.memory
    found = fingerprint(settings.checkpoint_dir)
    return LoadedEngine(
        Engine(ranks, built.sizes.engine_config),
        built.runner.model.config,
        built.runner.pool.layout,
        found.target,
        built.sizes.num_pages,
        built.sizes.num_slots,
        built.ledger,
        memory,
        found.drafter,
    )
