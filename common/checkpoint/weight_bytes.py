"""What the weights of one rank take, by how a device holds them. Arithmetic only; needs no torch."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from common.checkpoint.contract import wanted_parts, wanted_storage
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import ITEM_BYTES, Headers
from common.checkpoint.model_tensor import ModelTensor, Sharing
from common.checkpoint.scales import require_whole_groups, scale_part
from common.checkpoint.spans import Window, window_of
from common.checkpoint.storage import Storage
from common.checkpoint.tensors import model_tensors
from common.model.config import ModelConfig
from common.parallel.mesh import MeshShape


class WeightsHeld(enum.Enum):
    """How a device holds the weights."""

    STORED = "stored"
    """Every tensor as the checkpoint has it: the bytes of its files."""
    NATIVE = "native"
    """Quantised matrices as stored, the rest as BF16 does; this engine's `quantization: native` and `w8a8`."""
    BF16 = "bfloat16"
    """Dequantised on load, float32 where the model computes in it; this engine's default."""
    FP32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Of the first rank, which has no less than another, but for scales of a block that its part only touches."""

    target: int
    drafter: int
    """Without what it shares with the target."""
    experts: int
    """The routed experts' part of both."""


def weight_bytes(
    config: ModelConfig,
    headers: Headers,
    checkpoint_format: CheckpointFormat,
    held: WeightsHeld,
    mesh: MeshShape,
) -> WeightBytes:
    """Without headers tensors are taken to be stored as is usual. Raises ConfigError when the mesh cuts a group of FP4."""
    rank = _FirstRank(headers, checkpoint_format, held, mesh)
    experts, others = Counter[bool](), Counter[bool]()
    for tensor in model_tensors(config):
        if tensor.is_optional and tensor.name not in headers:
            continue
        counted = experts if tensor.sharing is Sharing.EXPERTS else others
        counted[_is_drafter(tensor)] += rank.bytes_of(tensor)
    if held is not WeightsHeld.STORED:
        # Queries are scaled by a vector in each layer and stage.
        vector = config.head_dim * (4 if held is WeightsHeld.FP32 else 2)
        others[False] += config.num_hidden_layers * vector
        others[True] += config.num_drafter_layers * vector if config.has_drafter else 0
    # Experts are alike; spread over all ranks, every one has as many.
    of_target, of_drafter = (experts[each] // mesh.ep for each in (False, True))
    return WeightBytes(
        target=others[False] + of_target,
        drafter=others[True] + of_drafter,
        experts=of_target + of_drafter,
    )


class _FirstRank:
    """What the first rank of a mesh has of single tensors."""

    def __init__(
        self,
        headers: Headers,
        checkpoint_format: CheckpointFormat,
        held: WeightsHeld,
        mesh: MeshShape,
    ) -> None:
        self._headers = headers
        self._format = checkpoint_format
        self._held = held
        self._mesh = mesh

    def bytes_of(self, tensor: ModelTensor) -> int:
        """Of experts that are spread over ranks, as of those that it has."""
        storage = wanted_storage(tensor, self._format, self._headers)
        window = self._part(tensor)
        columns = range(window.first_column, window.end_column)
        require_whole_groups(tensor.name, storage, columns, window.num_columns, self._mesh)
        if self._held is WeightsHeld.STORED:
            return self._stored(tensor, storage, window)
        if self._held is WeightsHeld.NATIVE and storage is not Storage.PLAIN:
            return self._stored(tensor, storage, window)
        return window.num_values * self._value_bytes(tensor) * _num_copies(tensor)

    def _part(self, tensor: ModelTensor) -> Window:
        is_spread = tensor.sharing is Sharing.EXPERTS and self._mesh.ep > 1
        if is_spread or tensor.sharing is Sharing.REPLICATED:
            return window_of(tensor.shape, None, None)
        size = tensor.shape[1 if tensor.shares_columns else 0]
        # Only the vocabulary's last parts are shorter than the first; the rest divides.
        part = slice(0, -(-size // self._mesh.tp))
        rows, columns = (None, part) if tensor.shares_columns else (part, None)
        return window_of(tensor.shape, rows, columns)

    def _stored(self, tensor: ModelTensor, storage: Storage, window: Window) -> int:
        matrix, *scales = wanted_parts(tensor, self._format, self._headers)
        found = self._headers.get(matrix.name)
        # Plain tensors may be of any floating type.
        item_bytes = ITEM_BYTES[matrix.dtype if found is None else found.dtype]
        size = window.num_values * item_bytes // (2 if storage is Storage.FP4 else 1)
        for scale in scales:
            taken = scale_part(storage, scale.shape, window).window
            size += taken.num_values * ITEM_BYTES[scale.dtype]
        return size

    def _value_bytes(self, tensor: ModelTensor) -> int:
        if tensor.dtype == "I64":
            return 8
        return 4 if tensor.is_float32 or self._held is WeightsHeld.FP32 else 2


def _num_copies(tensor: ModelTensor) -> int:
    """How often a model has room for a tensor's values."""
    # The latent projections of all stages lie side by side besides, for one product; places of groups lie beside as
    # many zeros, so that keys and gates are added to at once.
    is_stage_latent = _is_drafter(tensor) and tensor.name.endswith(".attn.wkv.weight")
    return 2 if is_stage_latent or tensor.name.endswith(".ape") else 1


def _is_drafter(tensor: ModelTensor) -> bool:
    return tensor.name.startswith("mtp.")
