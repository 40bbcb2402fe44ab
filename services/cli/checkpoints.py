"""What the `checkpoint` commands share: opening a checkpoint by its headers, and showing figures. Needs no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.folder import find_checkpoint
from common.checkpoint.formats import CheckpointFormat, detect_format
from common.checkpoint.headers import Headers, read_headers
from common.errors import CheckpointError, ConfigError
from common.model.config import ModelConfig
from services.cli.failures import failure_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint without its weights."""

    folder: Path
    config: ModelConfig
    headers: Headers
    format: CheckpointFormat


def open_checkpoint(name: str) -> OpenCheckpoint:
    """Raises Failure that names what cannot be read."""
    with checkpoint_failures():
        folder = find_checkpoint(name)
        config, headers = ModelConfig.load(folder), read_headers(folder)
        return OpenCheckpoint(
            folder=folder, config=config, headers=headers, format=detect_format(headers)
        )


@contextmanager
def checkpoint_failures() -> Iterator[None]:
    """Turn what a checkpoint or a number can be wrong about into an exit code and a sentence."""
    try:
        yield
    except (CheckpointError, ConfigError, ModuleNotFoundError, OSError) as error:
        raise failure_of(error) from None


def show(figures: Mapping[str, object], output: str) -> None:
    """Figures by label, one a line, or as one JSON object with the same names."""
    if output == "json":
        print(json.dumps({label.replace(" ", "_"): value for label, value in figures.items()}))
        return
    width = max(map(len, figures))
    for label, value in figures.items():
        print(f"{label:<{width}}  {value}")


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
