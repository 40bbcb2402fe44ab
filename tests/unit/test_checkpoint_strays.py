"""Tensors that nothing takes are told by group, and change nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from common.checkpoint.contract import check_contract
from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.loader import load_model
from common.checkpoint.reader import CheckpointReader
from common.model.config import ModelConfig
from tests.support.damage import edit
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
CONFIG = ModelConfig.from_json(VALUES)
TENSORS = random_tensors(CONFIG, seed=9)


def load(folder: Path) -> None:
    load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "plain", VALUES, TENSORS)


def test_tensors_that_nothing_takes_are_told_and_loaded_around(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(plain, lambda tensors: tensors.update({"layers.9.norm.weight": torch.zeros(2)}))
    with caplog.at_level(logging.WARNING):
        load(plain)
    assert "1 tensors that nothing takes: layers.9: 1: layers.9.norm.weight" in caplog.text


def test_tensors_that_nothing_takes_are_counted_by_what_they_would_belong_to(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when another model's shard was copied into the folder: 300 experts too many, and a few more."""
    strays = {
        f"layers.1.ffn.experts.{e}.{matrix}.weight": torch.zeros(1, 1)
        for e in range(8, 308)
        for matrix in ("w1", "w2", "w3")
    }
    strays |= dict.fromkeys(("layers.1.attn.wkv_b.weight", "visual.a", "visual.b"), torch.zeros(1))
    edit(plain, lambda tensors: tensors.update({n: t.clone() for n, t in strays.items()}))
    report = check_contract(CONFIG, read_headers(plain))
    assert report.is_met and len(report.extra) == 903
    assert sorted(str(group) for group in report.extra_groups()) == [
        "layers.1 experts: 900 (experts 8-307): layers.1.ffn.experts.10.w1.weight, "
        "layers.1.ffn.experts.10.w2.weight, layers.1.ffn.experts.10.w3.weight, "
        "layers.1.ffn.experts.100.w1.weight and 896 more",
        "layers.1: 1: layers.1.attn.wkv_b.weight",
        "visual: 2: visual.a, visual.b",
    ]
    with caplog.at_level(logging.WARNING):
        load(plain)
    assert "has 903 tensors that nothing takes: " in caplog.text
    assert "layers.1 experts: 900 (experts 8-307)" in caplog.text


@pytest.mark.parametrize(
    ("to", "stray", "dtype"),
    [
        (CheckpointFormat.FP8_FP4, "layers.0.attn.wq_b.weight_scale", torch.float32),
        (CheckpointFormat.FP8_FP4, "layers.1.ffn.experts.3.w2.weight_scale", torch.float32),
        (CheckpointFormat.W8A8_COMPRESSED, "layers.0.attn.wq_b.weight_scale", torch.float32),
        (CheckpointFormat.W8A8_MODELSLIM, "layers.0.attn.wq_b.scale", torch.float32),
        (CheckpointFormat.W8A8_MODELSLIM, "layers.0.attn.wq_b.scale", torch.float8_e8m0fnu),
    ],
)
def test_a_stray_scale_does_not_make_another_format(
    to: CheckpointFormat, stray: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A single `weight_scale` used to make an official checkpoint one of ModelSlim that lacks nearly everything."""
    source = save_checkpoint(tmp_path / "source", VALUES, TENSORS)
    convert_checkpoint(source, tmp_path / "q", to)
    matrix = stray.removesuffix("_scale").removesuffix(".scale").removesuffix(".weight") + ".weight"
    with CheckpointReader(tmp_path / "q") as reader:
        values = reader[matrix].clone()
    edit(tmp_path / "q", lambda tensors: tensors.update({stray: torch.ones(3, 1).to(dtype)}))
    report = check_contract(CONFIG, read_headers(tmp_path / "q"))
    assert report.contract == f"served ({to.value})"
    assert report.is_met and report.extra == (stray,)
    load(tmp_path / "q")
    with CheckpointReader(tmp_path / "q") as reader:
        assert torch.equal(reader[matrix], values)
