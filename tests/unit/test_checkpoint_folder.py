"""Where checkpoints are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint.folder import checkpoint_folder, model_name, tokenizer_folder
from common.errors import CheckpointError


def test_the_default_checkpoint_is_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (checkpoint_folder("dspark-tiny") / "tokenizer.json").is_file()


def test_a_checkpoint_is_found_by_path(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model-1.safetensors"):
        (tmp_path / name).touch()
    assert checkpoint_folder(str(tmp_path)) == tmp_path


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"lacks tokenizer.json, \*.safetensors"):
        checkpoint_folder(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no checkpoint 'dspark-huge'.*dspark-tiny"):
        checkpoint_folder("dspark-huge")


def test_a_router_needs_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"lacks tokenizer\.json"):
        tokenizer_folder(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(str(folder)) == folder
    assert model_name(str(folder)) == "served"
    with pytest.raises(CheckpointError, match=r"lacks \*\.safetensors"):
        checkpoint_folder(str(folder))
