"""From a checkpoint folder and sizes to an engine that runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.checkpoint.fingerprint import fingerprint
from common.checkpoint.loader import load_model
from common.checkpoint.reader import Progress, ReadOptions
from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.runner import Runner
from common.errors import ConfigError
from common.kv_cache.layout import PAGE_TOKENS, CacheLayout, num_pages_for
from common.kv_cache.pool import CachePool
from common.model.cache_layout import cache_layout
from common.model.config import ModelConfig
from common.spec_decode.confidence import load_temperatures

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What a worker's configuration says about its engine."""

    checkpoint_dir: Path
    dtype: str = "float32"
    device: str = "cpu"
    num_slots: int = 16
    """Requests that may hold state at once."""
    num_pages: int | None = None
    """Pages of 128 positions; None: enough for every slot at the longest context."""
    draft_length: int | None = None
    """Drafts per proposal; None: the checkpoint's dspark_block_size."""
    speculate: bool = True
    max_context_length: int | None = None
    """None: the checkpoint's max_position_embeddings."""
    max_step_rows: int = 512
    max_uncommitted_rounds: int = 2
    slow_storage_mb_per_s: float = 500.0
    """Loading warns when storage is slower; 0 never warns."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with what its worker tells others about it."""

    engine: Engine
    model_config: ModelConfig
    layout: CacheLayout
    fingerprint: str
    num_pages: int
    num_slots: int


def build_engine(settings: EngineSettings, *, on_progress: Progress | None = None) -> LoadedEngine:
    """Load the checkpoint and allocate the cache. Raises CheckpointError or ConfigError that says what to change."""
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype is {settings.dtype!r}; give one of {sorted(DTYPES)}")
    device = torch.device(settings.device)
    model = load_model(
        settings.checkpoint_dir,
        dtype=DTYPES[settings.dtype],
        device=device,
        on_progress=on_progress,
        options=ReadOptions(slow_mb_per_s=settings.slow_storage_mb_per_s),
    )
    config = model.config
    draft_length = _draft_length(settings, config)
    max_context = _max_context(settings, config)
    engine_config = EngineConfig(
        draft_length=draft_length,
        max_step_rows=settings.max_step_rows,
        max_context_length=max_context,
        max_uncommitted_rounds=settings.max_uncommitted_rounds,
    )
    layout = cache_layout(config, dtype=settings.dtype)
    num_pages = settings.num_pages or settings.num_slots * num_pages_for(max_context)
    pool = CachePool(
        layout,
        num_pages=num_pages,
        num_slots=settings.num_slots,
        max_step_rows=draft_length + 1,
        device=device,
    )
    temperatures = load_temperatures(settings.checkpoint_dir, draft_length, device)
    runner = Runner(model, pool, draft_length=draft_length, confidence_temperatures=temperatures)
    return LoadedEngine(
        Engine(runner, engine_config),
        config,
        layout,
        fingerprint(settings.checkpoint_dir),
        num_pages,
        settings.num_slots,
    )


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
