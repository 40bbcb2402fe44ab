"""Matrices that stay as they are stored give what dequantised ones give, for a half or a quarter of the memory."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from common.checkpoint import held as held_matrices
from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.dequantize import e8m0_to_float
from common.checkpoint.digests import FILE_NAME as DIGESTS
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.held import HeldMatrix
from common.checkpoint.loader import load_model
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.storage import Storage
from common.checkpoint.stored_parts import StoredParts
from common.claims import MemoryKind
from common.device.cpu import CpuBackend
from common.device.staging import Staging
from common.engine.build import build_engine
from common.engine.settings import EngineSettings
from common.errors import CheckpointError, ConfigError
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel
from common.model.kernels import EightBitProducts
from common.model.kernels.eight_bits import PlainProducts, fp8_rounded
from common.model.matrices import Matrix
from common.model.quantization import Quantization
from common.model.weights import TensorPart
from common.types import SamplingParams
from tests.support.engine_bench import GREEDY, EngineBench, Wanted, random_tokens
from tests.support.target_bench import Rows, TargetBench
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


def held(
    folder: Path,
    part: TensorPart,
    dtype: torch.dtype = torch.float32,
    products: EightBitProducts | None = None,
) -> Matrix | None:
    staging = Staging(CpuBackend())
    with CheckpointReader(folder, piece_values=3000) as reader:
        return reader.held(part, dtype=dtype, device=CPU, staging=staging, products=products)


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


@pytest.mark.parametrize("to", QUANTISED)
@pytest.mark.parametrize("num_rows", [1, 50, 128, 200])
def test_a_matrix_is_multiplied_a_run_of_rows_at_a_time(
    num_rows: int,
    to: CheckpointFormat,
    folders: dict[CheckpointFormat, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = TensorPart("layers.1.ffn.experts.5.w2.weight", slice(8, 256), slice(64, 96))
    ours = held(folders[to], part)
    assert ours is not None
    x, whole = torch.eye(32), ours.values().T
    seen: list[int] = []
    values_of = HeldMatrix.values
    monkeypatch.setattr(held_matrices, "_piece_values", lambda device: num_rows * 32)

    def recorded(matrix: HeldMatrix, rows: slice) -> torch.Tensor:
        values = values_of(matrix, rows)
        seen.append(values.shape[0])
        return values

    monkeypatch.setattr(HeldMatrix, "values", recorded)
    assert torch.equal(ours.linear(x), whole)
    assert max(seen) == num_rows and sum(seen) == 248


def test_what_is_stored_as_values_is_not_held_as_codes(
    folders: dict[CheckpointFormat, Path],
) -> None:
    part = TensorPart("layers.0.ffn.experts.0.w1.weight")
    assert held(folders[CheckpointFormat.BF16], part) is None


def load(folder: Path, *, quantization: Quantization) -> DSparkModel:
    return load_model(folder, dtype=torch.float32, device=CPU, quantization=quantization)


@pytest.mark.parametrize("to", [*QUANTISED, CheckpointFormat.BF16])
def test_a_model_with_stored_matrices_generates_the_same(
    to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    seeded = SamplingParams(temperature=0.8, seed=3, logprobs=0)
    wanted = [
        Wanted(prompt=random_tokens(n, seed=n), max_length=n + 12, sampling=sampling)
        for n, sampling in ((3, GREEDY), (40, seeded), (130, GREEDY))
    ]
    native, dense = (
        EngineBench(load(folders[to], quantization=quantization), draft_length=5).run(*wanted)
        for quantization in (Quantization.NATIVE, Quantization.DEQUANTIZE)
    )
    for ours, theirs in zip(native, dense, strict=True):
        ours.require_equal(theirs)


@pytest.mark.parametrize("to", QUANTISED)
def test_with_activations_in_8_bits_drafts_are_still_verified_by_the_target(
    to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    """Every token is the target's best, or as good: another batch may move a logit by a step of an activation."""
    model = load(folders[to], quantization=Quantization.W8A8)
    wanted = [Wanted(prompt=random_tokens(n, seed=n), max_length=n + 16) for n in (3, 40, 130)]
    for request, found in zip(wanted, EngineBench(model, draft_length=5).run(*wanted), strict=True):
        tokens, begin = [*request.prompt, *found.tokens], len(request.prompt) - 1
        bench = TargetBench(model, num_slots=1, max_length=256)
        logits = bench.run(Rows(0, 0, tokens[:-1]))[0].logits[begin:]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(found.tokens).unsqueeze(1)).squeeze(1)
        assert len(found.tokens) == 16 and any(each.num_offered for each in found.rounds)
        assert (logprobs.amax(-1) - chosen).max() < 0.2
        assert (torch.tensor(found.logprobs) - chosen).abs().max() < 0.1


@pytest.mark.parametrize("to", QUANTISED)
def test_quantised_matrices_take_the_memory_of_their_files(
    to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    parts = StoredParts(read_headers(folders[to]))
    quantised = [n for n in parts.names if parts.storage(parts.tensors(n)[0]) is not Storage.PLAIN]
    experts = 3 * 8 * 3
    others = sum(".ffn.experts." not in name for name in quantised)
    # FP8 everywhere but in experts; INT8 leaves wq_a, wkv and wo_a of each block, and in one layout main_proj.
    attention, shared, index = 3 * 5, 3 * 3, 1
    assert len(quantised) - others == experts
    assert (
        others
        == attention
        + shared
        + index
        + 1
        - {
            CheckpointFormat.FP8_FP4: 0,
            CheckpointFormat.W8A8_COMPRESSED: 3 * 3 + 1,
            CheckpointFormat.W8A8_MODELSLIM: 3 * 2 + 2,
        }[to]
    )
    stored = sum(parts.num_bytes(TensorPart(name)) for name in quantised)
    values = sum(4 * math.prod(parts.shape(name)) for name in quantised)
    weights = {
        quantization: build_engine(
            EngineSettings(
                checkpoint_dir=folders[to],
                num_slots=1,
                max_context_length=128,
                quantization=quantization,
            )
        ).ledger.by_kind()[MemoryKind.WEIGHTS]
        for quantization in ("native", "w8a8", "dequantize")
    }
    # The drafter's product for context rows is of a copy where matrices are values.
    copied = 4 * 64 * 256 if "mtp.0.attn.wkv.weight" in quantised else 0
    saved = values + copied - stored
    assert weights["dequantize"] - weights["native"] == saved > values // 2
    assert weights["w8a8"] == weights["native"]


def test_bytes_with_offsets_are_multiplied_as_values_and_without_as_bytes(
    folders: dict[CheckpointFormat, Path], tmp_path: Path
) -> None:
    name = "layers.1.ffn.experts.5.w1.weight"
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    folder = folders[CheckpointFormat.W8A8_MODELSLIM]
    ours = held(folder, TensorPart(name), products=PlainProducts())
    assert ours is not None and not torch.equal(ours.linear(x), F.linear(x, ours.values()))
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / DIGESTS).unlink()
    offset = read_headers(tmp_path)[f"{name}_offset"]
    content = bytearray(offset.path.read_bytes())
    content[offset.begin : offset.begin + 4] = struct.pack("<f", 3.0)
    offset.path.write_bytes(content)
    ours = held(tmp_path, TensorPart(name), products=PlainProducts())
    assert ours is not None and torch.equal(ours.linear(x), F.linear(x, ours.values()))


class BlockProducts(PlainProducts):
    """A device with products of FP8 blocks, which answers with the scales that it was given."""

    def fp8_linear(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor | None:
        assert codes.shape[0] <= 128 * scale.shape[0] and codes.shape[1] <= 128 * scale.shape[1]
        return scale


@pytest.mark.parametrize(
    ("rows", "columns", "is_by_block"),
    [
        (None, None, True),
        (slice(128, 256), None, True),
        (slice(0, 100), slice(256, 500), True),
        (slice(64, 256), None, False),
        (None, slice(64, 512), False),
    ],
)
def test_a_devices_products_of_blocks_are_for_parts_that_begin_with_one(
    rows: slice | None,
    columns: slice | None,
    is_by_block: bool,
    folders: dict[CheckpointFormat, Path],
) -> None:
    part = TensorPart("mtp.0.main_proj.weight", rows, columns)
    ours = held(folders[CheckpointFormat.FP8_FP4], part, products=BlockProducts())
    assert ours is not None
    values = ours.values()
    x = torch.randn(3, values.shape[1], generator=torch.Generator().manual_seed(1))
    if is_by_block:
        assert torch.equal(ours.linear(x), e8m0_to_float(ours.tensors[1]))
    else:
        assert torch.equal(ours.linear(x), F.linear(fp8_rounded(x), values))


@pytest.mark.parametrize("to", QUANTISED)
def test_no_rows_have_no_products(
    to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    for products in (None, PlainProducts()):
        ours = held(folders[to], TensorPart("layers.1.attn.wq_b.weight"), products=products)
        assert ours is not None and ours.linear(torch.empty(0, 32)).shape == (0, 256)


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
        load(tmp_path, quantization=Quantization.NATIVE)


def test_an_unknown_way_is_refused(folders: dict[CheckpointFormat, Path]) -> None:
    folder = folders[CheckpointFormat.BF16]
    with pytest.raises(
        ConfigError, match="quantization is 'int4'; give one of dequantize, native, w8a8"
    ):
        build_engine(EngineSettings(checkpoint_dir=folder, quantization="int4"))
