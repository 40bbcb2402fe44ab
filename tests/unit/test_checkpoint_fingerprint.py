"""A checkpoint's fingerprint is that of the model in it: the same in every lossless format, another for other weights."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.checkpoint import fingerprint as fingerprints
from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.digests import FILE_NAME as DIGESTS
from common.checkpoint.fingerprint import Fingerprint, fingerprint
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.mapped import MappedFile
from common.checkpoint.spans import Span
from common.errors import CheckpointError
from common.model.config import ModelConfig
from tests.support.tiny_checkpoint import (
    Tensors,
    config_json,
    random_tensors,
    save_checkpoint,
    without_drafter,
)

VALUES = config_json(hidden_size=64, head_dim=64, moe_intermediate_size=64)
TENSORS = random_tensors(ModelConfig.from_json(VALUES), seed=9)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("fingerprint")
    source = save_checkpoint(parent / "source", VALUES, TENSORS)
    convert_checkpoint(source, parent / "official", CheckpointFormat.FP8_FP4)
    return parent / "official"


def saved(folder: Path, tensors: Tensors) -> Fingerprint:
    return fingerprint(save_checkpoint(folder, VALUES, tensors))


@pytest.mark.parametrize("to", [CheckpointFormat.BF16, CheckpointFormat.FP32])
def test_a_conversion_without_loss_is_the_same_model(
    to: CheckpointFormat, official: Path, tmp_path: Path
) -> None:
    convert_checkpoint(official, tmp_path / "m", to, shard_bytes=1 << 18)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert fingerprint(tmp_path / "m") == fingerprint(official)


def test_a_conversion_with_loss_is_another_model(official: Path, tmp_path: Path) -> None:
    convert_checkpoint(official, tmp_path / "m", CheckpointFormat.W8A8_COMPRESSED)
    assert fingerprint(tmp_path / "m") != fingerprint(official)


def test_digests_beside_the_weights_change_nothing(official: Path, tmp_path: Path) -> None:
    first = fingerprint(official)
    text = (official / DIGESTS).read_text()
    (official / DIGESTS).unlink()
    assert fingerprint(official) == first
    (official / DIGESTS).write_text(text)


def test_tensors_that_nothing_takes_change_nothing(tmp_path: Path) -> None:
    extra = {**TENSORS, "layers.0.attn.unknown.weight": torch.ones(3, 3)}
    assert saved(tmp_path / "a", extra) == saved(tmp_path / "b", TENSORS)


@pytest.mark.parametrize("name", sorted(TENSORS)[::23])
def test_another_tensor_anywhere_is_another_model(name: str, tmp_path: Path) -> None:
    changed = TENSORS[name] * 1.01 if TENSORS[name].is_floating_point() else TENSORS[name] ^ 1
    assert saved(tmp_path / "m", {**TENSORS, name: changed}) != saved(tmp_path / "n", TENSORS)


@pytest.mark.parametrize("name", sorted(TENSORS)[::23])
def test_another_tensor_of_the_drafter_is_another_drafter_and_the_same_model(
    name: str, tmp_path: Path
) -> None:
    changed = TENSORS[name] * 1.01 if TENSORS[name].is_floating_point() else TENSORS[name] ^ 1
    one, other = saved(tmp_path / "m", {**TENSORS, name: changed}), saved(tmp_path / "n", TENSORS)
    is_drafters = name.startswith("mtp.")
    assert (one.target == other.target) is is_drafters
    assert (one.drafter == other.drafter) is not is_drafters


def test_a_checkpoint_without_its_drafter_is_the_same_model(tmp_path: Path) -> None:
    """Its configuration has fewer keys and a shorter list of ratios, its tensors are those of the target."""
    whole = fingerprint(save_checkpoint(tmp_path / "m", VALUES, TENSORS))
    bare = {name: t for name, t in TENSORS.items() if not name.startswith("mtp.")}
    for index, values in enumerate(
        (
            without_drafter(VALUES),
            {key: v for key, v in VALUES.items() if not key.startswith(("dspark_", "n_mtp"))},
        )
    ):
        found = fingerprint(save_checkpoint(tmp_path / f"n{index}", values, bare))
        assert (found.target, found.drafter) == (whole.target, "")
    assert whole.drafter


def test_ratios_of_the_drafters_layers_are_none_of_the_targets(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", VALUES, TENSORS)
    first = fingerprint(folder)
    longer = VALUES | {"compress_ratios": [*VALUES["compress_ratios"], 0, 0, 0]}
    (folder / "config.json").write_text(json.dumps(longer))
    assert fingerprint(folder).target == first.target


def test_experts_in_another_order_are_another_model(tmp_path: Path) -> None:
    """With more experts than are looked at, all changes but those of a few matrices are found still."""

    def swapped(name: str) -> str:
        for one, other in ((".experts.1.", ".experts.2."), (".experts.2.", ".experts.1.")):
            if one in name:
                return name.replace(one, other)
        return name

    other = {name: TENSORS[swapped(name)] for name in TENSORS}
    with mock.patch.object(fingerprints, "MAX_EXPERT_TENSORS", 40):
        assert saved(tmp_path / "m", other) != saved(tmp_path / "n", TENSORS)


def test_few_bytes_are_read_and_fewer_than_experts_would_ask_for(official: Path) -> None:
    read: list[int] = []

    def fetch(_: MappedFile, span: Span) -> None:
        read.append(span.num_bytes)

    with mock.patch.object(MappedFile, "fetch", fetch):
        fingerprint(official)
        all_experts = len(read)
        with mock.patch.object(fingerprints, "MAX_EXPERT_TENSORS", 10):
            fingerprint(official)
    assert max(read) <= 64 * 8
    assert len(read) - all_experts < all_experts / 2


def test_keys_about_the_model_count_and_those_about_storage_do_not(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", VALUES, TENSORS)
    first = fingerprint(folder)
    for change, is_same in (
        ({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, True),
        ({"routed_scaling_factor": 1.25}, False),
        ({"a_key_of_later": 1}, False),
    ):
        (folder / "config.json").write_text(json.dumps(VALUES | change))
        assert (fingerprint(folder) == first) is is_same, change


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    fewer = {name: t for name, t in TENSORS.items() if name != "norm.weight"}
    with pytest.raises(CheckpointError, match=r"lacks tensor norm\.weight"):
        saved(tmp_path / "m", fewer)
