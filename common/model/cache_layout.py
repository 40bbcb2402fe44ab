"""Which cache rows a model needs. Knows the configuration; hands the cache a `CacheLayout` and nothing else."""

from __future__ import annotations

from common.kv_cache.layout import CacheLayout, Region, Retention
from common.model.config import ModelConfig


def cache_layout(config: ModelConfig, *, dtype: str) -> CacheLayout:
    """The cache contract of a model whose rows are kept in `dtype`; tails are float32, as sums are taken over them."""
    all_layers = tuple(range(config.num_hidden_layers))
    csa, hca = config.layers_with_ratio(4), config.layers_with_ratio(128)
    regions = [
        _ring("window", all_layers, config.head_dim, dtype, config.sliding_window),
    ]
    if csa:
        regions += [
            _paged("csa", csa, 4, config.head_dim, dtype),
            _paged("index", csa, 4, config.index_head_dim, dtype),
            _tail("csa_tail", csa, 4 * config.head_dim, window_rows=8, group=4),
            _tail("index_tail", csa, 4 * config.index_head_dim, window_rows=8, group=4),
        ]
    if hca:
        regions += [
            _paged("hca", hca, 128, config.head_dim, dtype),
            _tail("hca_tail", hca, 2 * config.head_dim, window_rows=128, group=128),
        ]
    if config.has_drafter:
        stages = tuple(range(config.num_drafter_layers))
        regions.append(_ring("drafter", stages, config.head_dim, dtype, config.sliding_window))
    return CacheLayout(regions=tuple(regions))


def _ring(name: str, layers: tuple[int, ...], width: int, dtype: str, window: int) -> Region:
    return Region(
        name=name,
        layer_ids=layers,
        ratio=1,
        row_width=width,
        dtype=dtype,
        retention=Retention.RING,
        window_rows=window,
    )


def _paged(name: str, layers: tuple[int, ...], ratio: int, width: int, dtype: str) -> Region:
    return Region(
        name=name,
        layer_ids=layers,
        ratio=ratio,
        row_width=width,
        dtype=dtype,
        retention=Retention.PAGED,
    )


def _tail(
    name: str, layers: tuple[int, ...], width: int, *, window_rows: int, group: int
) -> Region:
    return Region(
        name=name,
        layer_ids=layers,
        ratio=1,
        row_width=width,
        dtype="float32",
        retention=Retention.RING,
        window_rows=window_rows,
        tail_group=group,
    )
