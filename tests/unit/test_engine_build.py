"""From a checkpoint folder to an engine: sizes that follow from the checkpoint, and settings that are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from common.engine.build import build_engine
from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.settings import EngineSettings
from common.errors import CheckpointError, ConfigError
from common.model.config import ModelConfig
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    tensors = random_tensors(ModelConfig.from_json(VALUES), seed=1)
    folder = save_checkpoint(tmp_path_factory.mktemp("build") / "model", VALUES, tensors)
    return EngineSettings(checkpoint_dir=folder, num_slots=2)


def test_sizes_follow_from_the_checkpoint(settings: EngineSettings) -> None:
    loaded = build_engine(settings)
    assert loaded.engine.config.draft_length == 5
    assert loaded.engine.config.max_context_length == 1024
    assert loaded.num_pages == 2 * 1024 // 128
    assert loaded.engine.pool.max_step_rows == 6
    assert len(loaded.fingerprint) == 64
    assert {region.dtype for region in loaded.layout.regions} == {"float32"}


def test_settings_override_the_checkpoint(settings: EngineSettings) -> None:
    loaded = build_engine(
        replace(settings, draft_length=7, max_context_length=300, num_pages=4, dtype="bfloat16")
    )
    assert loaded.engine.config.draft_length == 7
    assert loaded.engine.config.max_context_length == 300
    assert loaded.num_pages == loaded.engine.pool.num_pages == 4
    assert loaded.layout.region("window").dtype == "bfloat16"
    assert loaded.layout.region("csa_tail").dtype == "float32"


@pytest.mark.parametrize(
    ("num_pages", "num_groups", "limit"),
    [(None, 1, 1024), (6, 1, 768), (16, 4, 512), (64, 4, 1024)],
)
def test_no_request_is_longer_than_one_group_has_pages_for(
    settings: EngineSettings, num_pages: int | None, num_groups: int, limit: int
) -> None:
    """Guards a former bug: what all groups together have room for was promised, and waited for without end."""
    loaded = build_engine(replace(settings, num_pages=num_pages))
    engine = mock.Mock(spec=Engine, config=loaded.engine.config, num_groups=num_groups)
    assert replace(loaded, engine=engine).max_context_length == limit


def test_without_speculation_nothing_is_drafted(settings: EngineSettings) -> None:
    loaded = build_engine(replace(settings, speculate=False))
    assert loaded.engine.config.draft_length == 0
    assert loaded.engine.pool.max_step_rows == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"draft_length": 0}, "draft_length is 0"),
        ({"max_context_length": 127}, "max_context_length is 127; give 128 to 1024"),
        ({"max_context_length": 1025}, "max_context_length is 1025; give 128 to 1024"),
        ({"max_step_rows": 5}, "max_step_rows is 5"),
        ({"max_uncommitted_rounds": 0}, "max_uncommitted_rounds"),
    ],
)
def test_an_impossible_setting_is_named(
    settings: EngineSettings, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(replace(settings, **changes))


def test_an_engine_needs_room_for_one_proposal() -> None:
    EngineConfig(draft_length=7, max_step_rows=8, max_context_length=128)
    with pytest.raises(ConfigError, match="draft_length is -1"):
        EngineConfig(draft_length=-1, max_step_rows=8, max_context_length=128)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        build_engine(EngineSettings(checkpoint_dir=tmp_path / "nothing"))
