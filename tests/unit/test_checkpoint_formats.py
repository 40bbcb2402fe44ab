"""One model in every format: the logits differ by what the format rounds away and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.contract import check_contract
from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.formats import CheckpointFormat, detect_format, stored_as
from common.checkpoint.headers import read_headers
from common.checkpoint.loader import load_model
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.storage import Storage
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel, build_model
from common.model.weights import Weights
from tests.support.drafter_bench import draft
from tests.support.slow_dequantize import through
from tests.support.target_bench import Rows, TargetBench
from tests.support.tiny_checkpoint import Tensors, config_json, random_tensors, save_checkpoint

CPU = torch.device("cpu")
VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
CONFIG = ModelConfig.from_json(VALUES)
TENSORS = random_tensors(CONFIG, seed=4)

RELATIVE_ERROR = {
    CheckpointFormat.FP8_FP4: 0.15,
    CheckpointFormat.W8A8_COMPRESSED: 0.05,
    CheckpointFormat.W8A8_MODELSLIM: 0.05,
    CheckpointFormat.BF16: 0.0,
    CheckpointFormat.FP32: 0.0,
}
"""Root mean square of the logits' change on the shipped model, whose weights are BF16; some times what is measured."""


def load(folder: Path) -> DSparkModel:
    return load_model(folder, dtype=torch.float32, device=CPU)


def logits(model: DSparkModel, num_tokens: int = 150) -> torch.Tensor:
    text = [7 * i % model.config.vocab_size for i in range(num_tokens)]
    return TargetBench(model).run(Rows(0, 0, text))[0].logits


def base_logits(model: DSparkModel) -> torch.Tensor:
    """The drafter's own, after a prompt of 40 tokens."""
    bench = TargetBench(model)
    bench.run(Rows(0, 0, list(range(40))))
    return draft(bench, [0], [40], [7], 5).base_logits


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "source", VALUES, TENSORS)


@pytest.fixture(scope="module")
def shipped(shipped_checkpoint: Path) -> DSparkModel:
    return load(shipped_checkpoint)


@pytest.fixture(scope="module")
def shipped_tensors(shipped_checkpoint: Path) -> Tensors:
    return load_file(shipped_checkpoint / "model.safetensors")


@pytest.mark.parametrize("to", CheckpointFormat)
def test_the_shipped_model_gives_its_logits_in_every_format(
    to: CheckpointFormat,
    shipped: DSparkModel,
    shipped_tensors: Tensors,
    shipped_checkpoint: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / to.value
    convert_checkpoint(shipped_checkpoint, folder, to, shard_bytes=3 << 20)
    headers = read_headers(folder)
    assert detect_format(headers) is to
    assert check_contract(shipped.config, headers).is_met
    assert len({tensor.path for tensor in headers.values()}) > 2
    model = load(folder)
    expected, found = logits(shipped), logits(model)
    error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error <= RELATIVE_ERROR[to]
    rounded = through(to, shipped.config, shipped_tensors)
    twin = build_model(shipped.config, rounded, dtype=torch.float32, device=CPU)
    assert torch.equal(found, logits(twin))
    assert model.drafter is not None and twin.drafter is not None
    assert torch.equal(model.drafter.main_proj.values(), twin.drafter.main_proj.values())
    assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("by_way_of", [f for f in CheckpointFormat if f.plain_dtype is None])
def test_a_quantised_checkpoint_becomes_a_plain_one_without_loss(
    by_way_of: CheckpointFormat, source: Path, tmp_path: Path
) -> None:
    convert_checkpoint(source, tmp_path / "q", by_way_of)
    convert_checkpoint(tmp_path / "q", tmp_path / "plain", CheckpointFormat.FP32)
    assert torch.equal(logits(load(tmp_path / "q"), 40), logits(load(tmp_path / "plain"), 40))


def test_official_weights_fit_bf16_exactly(source: Path, tmp_path: Path) -> None:
    """FP8 and FP4 have fewer digits and their scales are powers of two."""
    convert_checkpoint(source, tmp_path / "q", CheckpointFormat.FP8_FP4)
    with CheckpointReader(tmp_path / "q") as reader:
        for name in ("layers.0.attn.wq_b.weight", "mtp.1.ffn.experts.3.w2.weight"):
            value = reader[name]
            assert value.dtype == torch.float32
            assert torch.equal(value.bfloat16().float(), value)


def test_modelslim_leaves_what_the_published_one_leaves(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "q", CheckpointFormat.W8A8_MODELSLIM)
    headers = read_headers(tmp_path / "q")
    assert stored_as(headers, "layers.0.attn.wo_a.weight") is Storage.PLAIN
    assert stored_as(headers, "mtp.0.attn.wo_a.weight") is Storage.FP8
    assert stored_as(headers, "layers.0.attn.wq_a.weight") is Storage.PLAIN
    assert stored_as(headers, "mtp.0.main_proj.weight") is Storage.INT8_OFFSET
    assert headers["layers.0.attn.wq_b.weight_scale"].shape == (CONFIG.num_attention_heads * 32, 1)
    description = json.loads((tmp_path / "q" / "quant_model_description.json").read_text())
    assert description.keys() == headers.keys()
    assert description["layers.1.ffn.experts.2.w1.weight"] == "W8A8_DYNAMIC"


def test_scales_by_row_may_be_lists_or_columns(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "q"
    convert_checkpoint(source, folder, CheckpointFormat.W8A8_MODELSLIM)
    before = logits(load(folder), 30)
    (path,) = folder.glob("*.safetensors")
    flat = {
        name: tensor.flatten()
        if name.endswith(("_scale", "_offset")) and tensor.shape[1:] == (1,)
        else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(flat, path)
    assert torch.equal(logits(load(folder), 30), before)


def test_offsets_are_taken_into_account(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "q"
    convert_checkpoint(source, folder, CheckpointFormat.W8A8_MODELSLIM)
    (path,) = folder.glob("*.safetensors")
    (folder / "tensor_digests.json").unlink()
    tensors = load_file(path)
    stem = "layers.0.attn.wq_b.weight"
    shifted = tensors | {f"{stem}_offset": torch.full_like(tensors[f"{stem}_offset"], 2.0)}
    save_file(shifted, path)
    with CheckpointReader(folder) as reader:
        expected = (tensors[stem].float() - 2) * tensors[f"{stem}_scale"]
        assert torch.equal(reader[stem], expected)


def test_a_drafter_with_its_own_embedding_and_head_uses_them(tmp_path: Path) -> None:
    """Twice the head gives twice the drafter's logits and the same of the target; another embedding, other logits."""
    shared = load(save_checkpoint(tmp_path / "shared", VALUES, TENSORS))
    own = {"mtp.2.head.weight": TENSORS["head.weight"] * 2}
    embed = {"mtp.0.embed.weight": TENSORS["embed.weight"] + 1}
    with_head = save_checkpoint(tmp_path / "head", VALUES, TENSORS | own)
    with_both = save_checkpoint(tmp_path / "both", VALUES, TENSORS | own | embed)
    assert torch.equal(logits(load(with_both)), logits(shared))
    doubled, moved = base_logits(load(with_head)), base_logits(load(with_both))
    assert torch.equal(doubled, base_logits(shared) * 2)
    assert not torch.allclose(moved, doubled, atol=0.1)
    convert_checkpoint(with_both, tmp_path / "q", CheckpointFormat.W8A8_MODELSLIM)
    assert (own | embed).keys() <= read_headers(tmp_path / "q").keys()
    error = (base_logits(load(tmp_path / "q")) - moved).pow(2).mean().sqrt()
    assert error < 0.1 * moved.pow(2).mean().sqrt()


def test_the_confidence_head_is_known_under_both_names(tmp_path: Path) -> None:
    name = "mtp.2.confidence_head.proj.weight"
    renamed = {key.replace(".proj.", "."): tensor for key, tensor in TENSORS.items()}
    assert "mtp.2.confidence_head.weight" in renamed
    folder = save_checkpoint(tmp_path / "m", VALUES, renamed)
    model = load(folder)
    assert model.drafter is not None
    assert torch.equal(model.drafter.confidence, TENSORS[name])
    with CheckpointReader(folder) as reader:
        assert name in reader and set(reader) == set(TENSORS)


@pytest.mark.parametrize("to", CheckpointFormat)
def test_a_rank_can_ask_for_a_part_of_a_tensor(
    to: CheckpointFormat, source: Path, tmp_path: Path
) -> None:
    convert_checkpoint(source, tmp_path / "q", to)
    name, shape = "layers.0.attn.wo_a.weight", (32, 64)
    with CheckpointReader(tmp_path / "q") as reader:
        weights = Weights(reader, dtype=torch.float32, device=CPU)
        whole = weights.matrix(name, *shape)
        assert torch.equal(weights.matrix(name, *shape, rows=slice(16, 32)), whole[16:])
        expert, shape = "layers.1.ffn.experts.2.w2.weight", (32, 32)
        whole = weights.matrix(expert, *shape)
        assert torch.equal(weights.matrix(expert, *shape, rows=slice(3, 9)), whole[3:9])
        output, shape = "layers.0.attn.wo_b.weight", (32, 32)
        whole = weights.matrix(output, *shape)
        assert torch.equal(weights.matrix(output, *shape, columns=slice(16, 32)), whole[:, 16:])


def test_parts_of_tensors_in_memory_are_the_same() -> None:
    weights = Weights(TENSORS, dtype=torch.float32, device=CPU)
    whole = TENSORS["head.weight"]
    part = weights.floats("head.weight", 64, 32, rows=slice(8, 16), columns=slice(4, 8))
    assert torch.equal(part, whole[8:16, 4:8])


def test_weights_are_copies_that_outlive_the_file(source: Path) -> None:
    model = load(source)
    expected = TENSORS["embed.weight"].clone()
    path = source / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(model.target.embed, expected)


def test_a_matrix_that_does_not_fit_fp4_groups_is_named(tmp_path: Path) -> None:
    values = config_json(hidden_size=32, moe_intermediate_size=24, vocab_size=64)
    source = save_checkpoint(
        tmp_path / "m", values, random_tensors(ModelConfig.from_json(values), 1)
    )
    with pytest.raises(CheckpointError, match=r"experts\.0\.w2\.weight has 24 columns"):
        convert_checkpoint(source, tmp_path / "q", CheckpointFormat.FP8_FP4)
    assert not (tmp_path / "q").exists()


def test_nothing_is_written_over(source: Path, tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        convert_checkpoint(source, tmp_path / "q", CheckpointFormat.BF16)
