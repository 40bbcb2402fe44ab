"""Which scales belong to a part of a matrix. Arithmetic only; reads nothing and needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from common.checkpoint.spans import Window
from common.checkpoint.storage import FP4_GROUP, FP8_BLOCK, Storage
from common.errors import ConfigError
from common.parallel.mesh import MeshShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePart:
    """Rows and columns of a scale, and where in the matrix the first of its values applies from."""

    window: Window
    first_row: int
    first_column: int


def require_whole_groups(
    name: str, storage: Storage, columns: range, num_columns: int, mesh: MeshShape
) -> None:
    """Raise ConfigError when a rank's columns of a matrix cut a group that is stored as one; blocks of FP8 may be cut."""
    is_whole = len(columns) == num_columns
    if storage is not Storage.FP4 or is_whole:
        return
    if columns.start % FP4_GROUP or len(columns) % FP4_GROUP:
        raise ConfigError(
            f"tp ({mesh.tp}) cuts the {num_columns} columns of {name} into parts of {len(columns)}, but of an FP4 matrix "
            f"{FP4_GROUP} columns share a scale and stay together; use ep = dp x tp ({mesh.num_ranks}), which leaves "
            "experts whole"
        )


def scale_part(storage: Storage, shape: tuple[int, ...], window: Window) -> ScalePart:
    """The part of a scale of this shape that the window of its matrix needs."""
    num_columns = shape[1] if len(shape) > 1 else 1
    match storage:
        case Storage.FP8:
            rows, columns = FP8_BLOCK, FP8_BLOCK
        case Storage.FP4:
            rows, columns = 1, FP4_GROUP
        case _:
            # One for a whole row, whatever is taken of it.
            rows, columns = 1, window.num_columns
    part = Window(
        first_row=window.first_row // rows,
        end_row=-(-window.end_row // rows),
        first_column=window.first_column // columns,
        end_column=-(-window.end_column // columns),
        num_columns=num_columns,
    )
    return ScalePart(
        window=part, first_row=part.first_row * rows, first_column=part.first_column * columns
    )
