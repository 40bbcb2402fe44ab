"""A checkpoint that cannot be served is refused by the name of what is wrong; one that can is known by its contents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoint.fingerprint import fingerprint
from common.checkpoint.loader import load_model
from common.checkpoint.reader import CheckpointReader
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel, build_model
from common.model.weights import Weights
from tests.support.tiny_checkpoint import (
    config_json,
    random_tensors,
    save_checkpoint,
    tensor_shapes,
    without_drafter,
)

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
CONFIG = ModelConfig.from_json(VALUES)
TENSORS = random_tensors(CONFIG, seed=12)
CPU = torch.device("cpu")


def load(folder: Path) -> DSparkModel:
    return load_model(folder, dtype=torch.float32, device=CPU)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", VALUES, TENSORS)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "sharded", VALUES, TENSORS, num_shards=3)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((folder / "config.json").read_text())
    edit(values)
    (folder / "config.json").write_text(json.dumps(values))


# What is right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_checkpoint_loads_from_any_number_of_files(tmp_path: Path, num_shards: int) -> None:
    folder = save_checkpoint(tmp_path / "m", VALUES, TENSORS, num_shards=num_shards)
    model = load(folder)
    assert torch.equal(model.target.embed, TENSORS["embed.weight"])
    assert model.drafter is not None
    assert torch.equal(model.drafter.main_proj.values(), TENSORS["mtp.0.main_proj.weight"])
    with CheckpointReader(folder) as reader:
        assert set(reader) == set(TENSORS) and len(reader) == len(TENSORS)


def test_every_official_tensor_is_used_and_no_other_is_asked_for() -> None:
    asked: set[str] = set()

    class Recording(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.add(name)
            return super().__getitem__(name)

    build_model(CONFIG, Recording(TENSORS), dtype=torch.float32, device=CPU)
    assert asked == set(TENSORS)


def test_a_checkpoint_without_drafter_loads_without_one(tmp_path: Path) -> None:
    values = without_drafter(VALUES)
    tensors = {name: t for name, t in TENSORS.items() if not name.startswith("mtp.")}
    assert load(save_checkpoint(tmp_path / "m", values, tensors)).drafter is None


@pytest.mark.parametrize("num_shards", [1, 3])
def test_loading_reports_growing_bytes_that_end_at_the_whole(
    tmp_path: Path, num_shards: int
) -> None:
    folder = save_checkpoint(tmp_path / "m", VALUES, TENSORS, num_shards=num_shards)
    calls: list[tuple[int, int]] = []
    load_model(
        folder, dtype=torch.float32, device=CPU, on_progress=lambda *call: calls.append(call)
    )
    read = [count for count, _ in calls]
    whole = sum(t.numel() * t.element_size() for t in TENSORS.values())
    assert read == sorted(read) and len(calls) == len(TENSORS)
    assert {total for _, total in calls} == {whole} and read[-1] == whole


def test_matrices_are_cast_and_what_must_stay_exact_is_not() -> None:
    model = build_model(CONFIG, TENSORS, dtype=torch.bfloat16, device=CPU)
    assert model.target.embed.dtype == torch.bfloat16
    assert model.target.head.dtype == torch.float32
    assert model.drafter is not None
    assert model.drafter.markov_w1.dtype == model.drafter.confidence.dtype == torch.float32


# What is wrong ---------------------------------------------------------------------------------------------------


def test_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint folder at .*nowhere"):
        load(tmp_path / "nowhere")


def test_no_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load(folder)


def test_an_unreadable_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load(folder)


@pytest.mark.parametrize("key", ["hidden_size", "model_type", "compress_ratios", "eos_token_id"])
def test_a_missing_key_is_named(folder: Path, key: str) -> None:
    edit_config(folder, lambda values: values.pop(key))
    with pytest.raises(CheckpointError, match=f"config.json lacks '{key}'"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"compress_ratios": [0, 4, 64, 4]}, r"compress_ratios has \[64\]"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 4 layers"),
        ({"dspark_target_layer_ids": [2, 3, 4]}, "dspark_target_layer_ids"),
        ({"o_groups": 3}, r"num_attention_heads \(4\) must be a multiple of o_groups \(3\)"),
    ],
)
def test_an_unsupported_value_is_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, lambda values: values.update(changes))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "name", sorted(name for name, _ in tensor_shapes(CONFIG) if ".experts." not in name)[::7]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    fewer = {key: tensor for key, tensor in TENSORS.items() if key != name}
    folder = save_checkpoint(tmp_path / "m", VALUES, fewer)
    with pytest.raises(CheckpointError, match=rf"1 of \d+ tensors missing: .*{name};") as caught:
        load(folder)
    assert caught.value.metadata == {"tensor": name, "faults": "1"}


def test_any_missing_expert_is_named_and_not_only_the_edges(tmp_path: Path) -> None:
    """The upstream system looks at the first and last expert only, and accepts a truncated checkpoint."""
    name = "mtp.1.ffn.experts.4.w2.weight"
    fewer = {key: tensor for key, tensor in TENSORS.items() if key != name}
    with pytest.raises(CheckpointError, match=name):
        load(save_checkpoint(tmp_path / "m", VALUES, fewer))


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    name = "layers.1.attn.indexer.wq_b.weight"
    wrong = {**TENSORS, name: TENSORS[name][:-1].contiguous()}
    with pytest.raises(CheckpointError) as caught:
        load(save_checkpoint(tmp_path / "m", VALUES, wrong))
    message = caught.value.message
    assert name in message and "[255, 32]" in message and "[256, 32]" in message


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable"):
        load(folder)


def test_no_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        load(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_named(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(sharded)


# Fingerprints ----------------------------------------------------------------------------------------------------


def test_a_copy_has_the_same_fingerprint_whatever_its_formatting(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(values.items())), indent=4))
    assert fingerprint(copy) == fingerprint(folder)


def test_another_weight_or_another_key_has_another_fingerprint(folder: Path) -> None:
    first = fingerprint(folder)
    edit_config(folder, lambda values: values.update(rms_norm_eps=1e-5))
    second = fingerprint(folder)
    edit_config(folder, lambda values: values.update(rms_norm_eps=1e-6))
    assert fingerprint(folder) == first != second
    changed = {**TENSORS, "norm.weight": TENSORS["norm.weight"] * 1.5}
    save_file(changed, folder / "model.safetensors")
    assert fingerprint(folder) not in (first, second)


def test_the_fingerprint_of_an_incomplete_checkpoint_is_refused(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00003"):
        fingerprint(sharded)


def test_weights_know_what_was_taken() -> None:
    weights = Weights(TENSORS, dtype=torch.float32, device=CPU)
    weights.under("layers.0").under("attn").floats("attn_sink", CONFIG.num_attention_heads)
    assert weights.taken == {"layers.0.attn.attn_sink"}


def test_the_shipped_checkpoint_loads(shipped_checkpoint: Path) -> None:
    model = load(shipped_checkpoint)
    assert model.drafter is not None
    assert set(model.config.compress_ratios) == {0, 4, 128}
    assert 0 < model.config.num_hash_layers < model.config.num_hidden_layers
    assert model.config.num_drafter_layers == 3 and model.config.dspark_block_size == 7
