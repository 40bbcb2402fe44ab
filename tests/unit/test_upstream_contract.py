"""The reference system's check of drafter weights: 123 names, and what it does not see."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.contract import check_contract
from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.other_contracts import check_upstream_123, upstream_names
from common.model.config import ModelConfig
from tests.support.damage import edit, without
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
CONFIG = ModelConfig.from_json(VALUES)
TENSORS = random_tensors(CONFIG, seed=9)


def test_the_upstream_contract_has_123_names() -> None:
    names = [name for _, name in upstream_names(256)]
    assert len(names) == len(set(names)) == 123
    assert sum(name.startswith("mtp.1.") for name in names) == 38
    assert (
        "mtp.1.ffn.experts.255.w2.scale" in names and "mtp.1.ffn.experts.254.w2.scale" not in names
    )


def test_the_upstream_contract_knows_the_confidence_head_under_both_names(tmp_path: Path) -> None:
    """The reference system says `confidence_head.weight`, published checkpoints `confidence_head.proj.weight`."""
    source = save_checkpoint(tmp_path / "source", VALUES, TENSORS)
    folder = tmp_path / "q"
    convert_checkpoint(source, folder, CheckpointFormat.W8A8_COMPRESSED)
    published, short = "mtp.2.confidence_head.proj.weight", "mtp.2.confidence_head.weight"
    assert published in read_headers(folder)
    edit(folder, lambda tensors: tensors.update({short: tensors.pop(published)}))
    assert check_upstream_123(CONFIG, read_headers(folder)).is_met
    edit(folder, lambda tensors: tensors.__delitem__(short))
    report = check_upstream_123(CONFIG, read_headers(folder))
    assert [fault.name for fault in report.faults] == [published]


def test_the_upstream_contract_accepts_a_truncated_checkpoint_and_ours_does_not(
    tmp_path: Path,
) -> None:
    source = save_checkpoint(tmp_path / "source", VALUES, TENSORS)
    folder = tmp_path / "q"
    convert_checkpoint(source, folder, CheckpointFormat.W8A8_COMPRESSED)
    edit(folder, lambda tensors: without(tensors, ".ffn.experts.4."))
    headers = read_headers(folder)
    assert check_upstream_123(CONFIG, headers).is_met
    assert not check_contract(CONFIG, headers).is_met
