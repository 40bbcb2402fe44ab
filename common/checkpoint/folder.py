"""Where a checkpoint is. Knows names, folders and the files that must be there; reads none of them."""

from __future__ import annotations

from pathlib import Path

from common.errors import CheckpointError

DEFAULT_MODEL = "dspark-tiny"


def checkpoint_folder(model: str) -> Path:
    """The folder of a checkpoint that can be served, as `find_checkpoint` finds it.

    Raises CheckpointError that names what is missing.
    """
    return _complete(find_checkpoint(model), has_weights=True)


def tokenizer_folder(model: str) -> Path:
    """The folder of a checkpoint for whoever reads no weights, which need not be there.

    Raises CheckpointError that names what is missing.
    """
    return _complete(find_checkpoint(model), has_weights=False)


def find_checkpoint(model: str) -> Path:
    """The folder of a checkpoint given as a path or by the name of one that ships with the package, whatever is in it.

    Raises CheckpointError when there is none.
    """
    root = Path(__file__).resolve().parents[2]
    # A clone keeps it under checkpoints/, a wheel inside the package; see pyproject.toml.
    shipped = (root / "checkpoints" / model, root / "services" / "_checkpoints" / model)
    candidates: tuple[Path, ...] = (
        Path(model).expanduser(),
        *(shipped if Path(model).name == model else ()),
    )
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise CheckpointError(
        f"there is no checkpoint {model!r}: give the path of a folder with config.json, tokenizer.json and "
        f"*.safetensors, or {DEFAULT_MODEL!r} for the one that ships with this package"
    )


def model_name(model: str) -> str:
    """The name under which a checkpoint is served: its folder's."""
    return find_checkpoint(model).name


def _complete(folder: Path, *, has_weights: bool) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if has_weights and not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise CheckpointError(f"the checkpoint folder {folder} lacks {', '.join(missing)}")
    return folder
