"""Experts that stay as they are stored give what dequantised ones give, for a half or a quarter of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.digests import FILE_NAME as DIGESTS
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.loader import load_model
from common.checkpoint.reader import CheckpointReader
from common.device.cpu import CpuBackend
from common.device.ledger import MemoryKind
from common.device.staging import Staging
from common.engine.build import build_engine
from common.engine.settings import EngineSettings
from common.errors import CheckpointError, ConfigError
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel
from common.model.matrices import Matrix
from common.model.weights import TensorPart
from common.types import SamplingParams
from tests.support.engine_bench import GREEDY, EngineBench, Wanted, random_tokens
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(
    compress_ratios=[4, 128],
    hidden_size=256,
    head_dim=64,
    moe_intermediate_size=128,
    vocab_size=64,
    dspark_noise_token_id=63,
    dspark_target_layer_ids=[0, 1],
    n_mtp_layers=1,
)
CPU = torch.device("cpu")
QUANTISED = (
    CheckpointFormat.FP8_FP4,
    CheckpointFormat.W8A8_COMPRESSED,
    CheckpointFormat.W8A8_MODELSLIM,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[CheckpointFormat, Path]:
    parent = tmp_path_factory.mktemp("quantised")
    tensors = random_tensors(ModelConfig.from_json(VALUES), seed=4)
    source = save_checkpoint(parent / "source", VALUES, tensors)
    for to in (*QUANTISED, CheckpointFormat.BF16):
        convert_checkpoint(source, parent / to.value, to)
    return {to: parent / to.value for to in (*QUANTISED, CheckpointFormat.BF16)}


def held(folder: Path, part: TensorPart, dtype: torch.dtype = torch.float32) -> Matrix | None:
    with CheckpointReader(folder, piece_values=3000) as reader:
        return reader.held(part, dtype=dtype, device=CPU, staging=Staging(CpuBackend()))


@pytest.mark.parametrize("to", QUANTISED)
@pytest.mark.parametrize(
    ("matrix", "rows", "columns"),
    [
        ("w1", None, None),
        ("w1", slice(64, 128), None),
        ("w2", None, slice(32, 96)),
        ("w2", slice(128, 256), slice(64, 128)),
    ],
)
def test_a_product_is_that_of_the_dequantised_matrix(
    to: CheckpointFormat,
    matrix: str,
    rows: slice | None,
    columns: slice | None,
    folders: dict[CheckpointFormat, Path],
) -> None:
    part = TensorPart(f"layers.1.ffn.experts.5.{matrix}.weight", rows, columns)
    with CheckpointReader(folders[to]) as reader:
        values = reader[part.name].clone()
    values = values if rows is None else values[rows]
    values = values if columns is None else values[:, columns]
    x = torch.randn(3, values.shape[1], generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        ours = held(folders[to], part, dtype)
        assert ours is not None
        assert torch.equal(ours.linear(x.to(dtype)), F.linear(x.to(dtype), values.to(dtype)))


def test_fp8_blocks_that_a_part_begins_within_keep_their_scales(
    folders: dict[CheckpointFormat, Path],
) -> None:
    part = TensorPart("mtp.0.main_proj.weight", slice(130, 250), slice(72, 400))
    ours = held(folders[CheckpointFormat.FP8_FP4], part)
    with CheckpointReader(folders[CheckpointFormat.FP8_FP4]) as reader:
        values = reader[part.name][130:250, 72:400].clone()
    assert ours is not None
    assert torch.equal(ours.linear(torch.eye(328)), values.T)


def test_what_is_stored_as_values_is_not_held_as_codes(
    folders: dict[CheckpointFormat, Path],
) -> None:
    part = TensorPart("layers.0.ffn.experts.0.w1.weight")
    assert held(folders[CheckpointFormat.BF16], part) is None


def load(folder: Path, *, keeps_stored: bool) -> DSparkModel:
    return load_model(folder, dtype=torch.float32, device=CPU, keeps_stored=keeps_stored)


@pytest.mark.parametrize("to", [*QUANTISED, CheckpointFormat.BF16])
def test_a_model_with_stored_experts_says_the_same(
    to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    seeded = SamplingParams(temperature=0.8, seed=3, logprobs=0)
    wanted = [
        Wanted(prompt=random_tokens(n, seed=n), max_length=n + 12, sampling=sampling)
        for n, sampling in ((3, GREEDY), (40, seeded), (130, GREEDY))
    ]
    native, dense = (
        EngineBench(load(folders[to], keeps_stored=stored), draft_length=5).run(*wanted)
        for stored in (True, False)
    )
    for ours, theirs in zip(native, dense, strict=True):
        ours.require_equal(theirs)


@pytest.mark.parametrize("to", QUANTISED)
def test_experts_take_the_memory_of_their_files(
    to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    stored = sum(
        t.num_bytes for t in read_headers(folders[to]).values() if ".ffn.experts." in t.name
    )
    values = 3 * 8 * 3 * 128 * 256 * 4
    weights = {
        quantization: build_engine(
            EngineSettings(
                checkpoint_dir=folders[to],
                num_slots=1,
                max_context_length=128,
                quantization=quantization,
            )
        ).ledger.by_kind()[MemoryKind.WEIGHTS]
        for quantization in ("native", "dequantize")
    }
    assert weights["dequantize"] - weights["native"] == values - stored > values // 2


def test_damage_is_found_in_codes_that_stay_codes(
    tmp_path: Path, folders: dict[CheckpointFormat, Path]
) -> None:
    source = folders[CheckpointFormat.FP8_FP4]
    assert (source / DIGESTS).exists()
    name = "layers.0.ffn.experts.2.w2.weight"
    stored = read_headers(source)[name]
    for path in source.iterdir():
        content = bytearray(path.read_bytes())
        if path.name == stored.path.name:
            content[stored.begin + 5] ^= 1
        (tmp_path / path.name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"tensor {name} .* is damaged"):
        load(tmp_path, keeps_stored=True)


def test_an_unknown_way_is_refused(folders: dict[CheckpointFormat, Path]) -> None:
    folder = folders[CheckpointFormat.BF16]
    with pytest.raises(ConfigError, match="quantization is 'int4'; give one of dequantize, native"):
        build_engine(EngineSettings(checkpoint_dir=folder, quantization="int4"))
