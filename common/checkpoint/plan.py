"""What a checkpoint needs of a device's memory on a given mesh, and what then fits. Arithmetic only; needs no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import Headers
from common.checkpoint.weight_bytes import WeightsHeld, weight_bytes
from common.errors import ConfigError
from common.kv_cache.layout import PAGE_TOKENS, Region, Retention, num_pages_for
from common.model.cache_layout import cache_layout
from common.model.config import ModelConfig
from common.model.divisible import divisible
from common.parallel.mesh import MeshShape


class CacheFormat(enum.Enum):
    """How cache rows are kept."""

    OFFICIAL = "official"
    """Rows of 448 FP8, 64 BF16 and 7 scales, padded to 584 bytes; indexer keys as FP4 with a scale per 32."""
    BF16 = "bfloat16"
    FP32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked."""

    mesh: MeshShape = field(default_factory=MeshShape)
    device_bytes: int
    utilization: float = 0.9
    """Share of the device's memory that may be used; the rest is for activations and the driver."""
    cache: CacheFormat = CacheFormat.BF16
    weights: WeightsHeld = WeightsHeld.BF16
    draft_length: int | None = None
    """None: the checkpoint's dspark_block_size."""
    context_length: int | None = None
    """Context of the largest batch; None: the model's longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank, and what fits. Ranks of a tensor parallel group hold the same cache."""

    request: PlanRequest
    weight_bytes: int
    """Target and drafter together."""
    expert_bytes: int
    """The routed experts' part of them."""
    drafter_weight_bytes: int
    """The drafter's part of them."""
    table_bytes: int
    """Rotations of every position."""
    token_bytes: float
    """Growth of a request per token of context."""
    page_bytes: int
    ring_bytes: int
    """Window rings and open compression groups of one request."""
    drafter_bytes: int
    """Drafter rings of one request."""
    usable_bytes: int
    longest_context: int
    """Tokens of a single request that fit; 0 when not even a page does."""
    batch_context: int
    largest_batch: int
    """Requests of `batch_context` tokens that fit in all data parallel groups together."""

    @property
    def group_batch(self) -> int:
        """Of the largest batch, the requests of one data parallel group, which every rank of it holds."""
        return self.largest_batch // self.request.mesh.dp

    @property
    def batch_page_bytes(self) -> int:
        """What a rank needs for the largest batch."""
        return self.group_batch * num_pages_for(self.batch_context) * self.page_bytes

    @property
    def batch_ring_bytes(self) -> int:
        return self.group_batch * self.ring_bytes

    @property
    def batch_drafter_bytes(self) -> int:
        return self.group_batch * self.drafter_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of the first node for the largest batch: the first of several ranks has a copy of all groups' cache."""
        if self.request.mesh.num_ranks == 1:
            return 0
        group = self.batch_page_bytes + self.batch_ring_bytes + self.batch_drafter_bytes
        return self.request.mesh.dp * group

    @property
    def request_bytes(self) -> int:
        """What a request takes whatever its length."""
        return self.ring_bytes + self.drafter_bytes

    @property
    def free_bytes(self) -> int:
        """Left for requests; negative when the weights do not fit."""
        return self.usable_bytes - self.weight_bytes - self.table_bytes


def make_plan(
    config: ModelConfig,
    headers: Headers,
    checkpoint_format: CheckpointFormat,
    request: PlanRequest,
) -> MemoryPlan:
    """Work out a rank's memory. Raises ConfigError when the mesh or the context does not go with the checkpoint."""
    mesh = request.mesh
    divisible(config).require_divided_by(mesh)
    context = request.context_length or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise ConfigError(
            f"context_length is {context}; the model's max_position_embeddings is {config.max_position_embeddings}"
        )
    weights = weight_bytes(config, headers, checkpoint_format, request.weights, mesh)
    draft_length = (
        config.dspark_block_size if request.draft_length is None else request.draft_length
    )
    regions = cache_layout(config, dtype="float32").regions
    paged = [r for r in regions if r.retention is Retention.PAGED]
    rings = [r for r in regions if r.retention is Retention.RING]
    page_bytes = sum(
        len(r.layer_ids) * r.rows_per_page * row_bytes(r, config, request.cache) for r in paged
    )
    sizes = {r.name: _ring_bytes(r, config, request.cache, draft_length) for r in rings}
    drafter_bytes = sizes.pop("drafter", 0)
    ring_bytes = sum(sizes.values())
    usable = int(request.device_bytes * request.utilization)
    table_bytes = _table_bytes(config)
    held = weights.target + weights.drafter
    free = usable - held - table_bytes
    per_request = ring_bytes + drafter_bytes
    num_pages = max(0, (free - per_request) // page_bytes) if page_bytes else 0
    one = per_request + num_pages_for(context) * page_bytes
    return MemoryPlan(
        request=request,
        weight_bytes=held,
        expert_bytes=weights.experts,
        drafter_weight_bytes=weights.drafter,
        table_bytes=table_bytes,
        token_bytes=page_bytes / PAGE_TOKENS,
        page_bytes=page_bytes,
        ring_bytes=ring_bytes,
        drafter_bytes=drafter_bytes,
        usable_bytes=usable,
        longest_context=min(num_pages * PAGE_TOKENS, config.max_position_embeddings),
        batch_context=context,
        largest_batch=max(0, free // one) * mesh.dp,
    )


def row_bytes(region: Region, config: ModelConfig, cache: CacheFormat) -> int:
    """One row of one layer. Tails are sums in float32 in every format."""
    width = region.row_width
    if region.tail_group or cache is CacheFormat.FP32:
        return width * 4
    if cache is CacheFormat.BF16:
        return width * 2
    if region.name == "index":
        return width // 2 + -(-width // 32)
    exact = config.qk_rope_head_dim
    coded = width - exact
    size = coded + 2 * exact + -(-coded // 64)
    return -(-size // 8) * 8


def _table_bytes(config: ModelConfig) -> int:
    """A complex number for every position and pair: for plain layers, for compressed ones and for the drafter."""
    num_tables = 3 if config.has_drafter else 2
    return num_tables * config.max_position_embeddings * (config.qk_rope_head_dim // 2) * 8


def _ring_bytes(region: Region, config: ModelConfig, cache: CacheFormat, draft_length: int) -> int:
    rows = region.ring_rows(draft_length + 1)
    return len(region.layer_ids) * rows * row_bytes(region, config, cache)
