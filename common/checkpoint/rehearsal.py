"""What a rank will ask a checkpoint for, found by building its model from shapes alone. Knows headers; reads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from common.checkpoint.headers import Headers
from common.checkpoint.scales import require_whole_groups
from common.checkpoint.stored_parts import StoredParts
from common.model.config import ModelConfig
from common.model.dspark import build_model
from common.model.weights import TensorPart
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from common.parallel.shard import WHOLE, Shard


def asked_parts(config: ModelConfig, headers: Headers, shard: Shard = WHOLE) -> list[TensorPart]:
    """Every part of a tensor that the modules of a rank take, in their order.

    The modules themselves say so, hence nothing can be read that nobody takes. Raises ConfigError when the mesh does not
    divide the model, or cuts what is stored as one.
    """
    script = _Script(headers)
    # A type is needed but does not matter: on the meta device there are shapes and no values.
    build_model(
        config,
        script,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        comm=Communicator(shard),
    )
    for part in script.asked:
        script.require_whole_groups(part, shard.mesh)
    return script.asked


class _Script(Mapping[str, torch.Tensor]):
    """A source of tensors that have shapes only, and of a record of what was asked for."""

    def __init__(self, headers: Headers) -> None:
        self._parts = StoredParts(headers)
        self.asked: list[TensorPart] = []

    def read_into(self, part: TensorPart, room: torch.Tensor) -> bool:
        return False

    def pieces(self, part: TensorPart) -> Iterator[torch.Tensor]:
        self.asked.append(part)
        window = self._parts.window(part)
        shape = (window.num_rows, window.num_columns_taken)
        num_dims = len(self.shape(part.name))
        yield torch.empty(shape[:num_dims], device="meta")

    def require_whole_groups(self, part: TensorPart, mesh: MeshShape) -> None:
        stored, window = self._parts.stored(part.name), self._parts.window(part)
        columns = range(window.first_column, window.end_column)
        require_whole_groups(
            part.name, self._parts.storage(stored), columns, window.num_columns, mesh
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts.shape(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.empty(self.shape(name), device="meta")

    def __contains__(self, name: object) -> bool:
        return name in self._parts.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts.names)

    def __len__(self) -> int:
        return len(self._parts.names)
