"""Models whose quantised matrices all stay as stored say what dequantised ones say, alone and spread over ranks."""

from __future__ import annotations

import random
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from common.checkpoint import held
from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.loader import load_model
from common.checkpoint.rehearsal import asked_parts
from common.checkpoint.storage import Storage
from common.checkpoint.stored_parts import StoredParts
from common.model import dspark
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel
from common.model.kernels.eight_bits import PlainProducts, fp8_rounded
from common.model.memory import held_tensors
from common.model.quantization import Quantization
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from tests.support.target_bench import Rows, TargetBench
from tests.support.thread_ranks import run_ranks, thread_communicators
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(
    compress_ratios=[4, 128, 4],
    num_attention_heads=8,
    head_dim=64,
    o_groups=4,
    hidden_size=256,
    # A quarter of it is a group of FP4; the parts of FP8 matrices begin within blocks.
    moe_intermediate_size=128,
    vocab_size=64,
    dspark_noise_token_id=63,
    dspark_target_layer_ids=[0, 1, 2],
    n_mtp_layers=2,
)
CPU = torch.device("cpu")
FP8, INT8, MODELSLIM = (
    CheckpointFormat.FP8_FP4,
    CheckpointFormat.W8A8_COMPRESSED,
    CheckpointFormat.W8A8_MODELSLIM,
)
FORMATS = (FP8, INT8, MODELSLIM)
MESHES = (MeshShape(tp=2), MeshShape(tp=4, ep=4))
TOKENS = [random.Random(7).randrange(64) for _ in range(153)]

SAME = 2e-6
"""Relative: another order of float32 sums."""
BOUND = {FP8: 0.12, INT8: 0.06, MODELSLIM: 0.06}
"""Relative error of logits that activations in 8 bits make: about twice what is found. Dequantised weights themselves are
off by 0.16 for FP8 with FP4 and by 0.04 for INT8."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[CheckpointFormat, Path]:
    parent = tmp_path_factory.mktemp("models")
    tensors = random_tensors(ModelConfig.from_json(VALUES), seed=4)
    source = save_checkpoint(parent / "source", VALUES, tensors)
    for to in FORMATS:
        convert_checkpoint(source, parent / to.value, to)
    return {to: parent / to.value for to in FORMATS}


@torch.inference_mode()
def said(model: DSparkModel) -> torch.Tensor:
    """Logits of a prompt and a step after it, taps, and the drafter's hidden rows and logits on what it wrote."""
    bench = TargetBench(model, num_slots=1, max_length=256)
    outputs = [bench.run(Rows(0, 0, TOKENS[:150]))[0], bench.run(Rows(0, 150, TOKENS[150:]))[0]]
    assert model.drafter is not None
    anchor, position, zero = torch.tensor([7]), torch.tensor([153]), torch.tensor([0])
    block = model.drafter.draft_block(anchor, position, zero, zero, bench.pool, 5, (5,))
    whole = model.vocabulary.whole
    logits = torch.cat([output.logits for output in outputs])
    return torch.cat((whole(logits), whole(block.base_logits[0])))


def load(folder: Path, quantization: Quantization, comm: Communicator | None = None) -> DSparkModel:
    return load_model(folder, dtype=torch.float32, device=CPU, quantization=quantization, comm=comm)


@cache
def alone(folder: Path, quantization: Quantization) -> torch.Tensor:
    return said(load(folder, quantization))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("to", FORMATS)
def test_matrices_that_stay_stored_say_the_same(
    to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    values = alone(folders[to], Quantization.DEQUANTIZE)
    assert 3 < values.abs().max() < 30
    assert error(alone(folders[to], Quantization.NATIVE), values) < SAME


@pytest.mark.parametrize("quantization", [Quantization.NATIVE, Quantization.W8A8])
def test_a_checkpoint_of_values_is_held_as_ever(
    quantization: Quantization, folders: dict[CheckpointFormat, Path], tmp_path: Path
) -> None:
    convert_checkpoint(folders[INT8], tmp_path / "bf16", CheckpointFormat.BF16)
    values = alone(tmp_path / "bf16", Quantization.DEQUANTIZE)
    assert torch.equal(alone(tmp_path / "bf16", quantization), values)


@pytest.mark.parametrize("to", FORMATS)
def test_activations_in_8_bits_say_nearly_the_same(
    to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    values = alone(folders[to], Quantization.DEQUANTIZE)
    assert 100 * SAME < error(alone(folders[to], Quantization.W8A8), values) < BOUND[to]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_that_share_stored_matrices_say_what_one_rank_says(
    mesh: MeshShape, to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    folder, values = folders[to], alone(folders[to], Quantization.DEQUANTIZE)
    for quantization, bound in ((Quantization.NATIVE, SAME), (Quantization.W8A8, BOUND[to])):
        say = partial(say_on_rank, folder, quantization)
        for found in run_ranks(mesh, say):
            assert error(found, values) < bound


def say_on_rank(folder: Path, quantization: Quantization, comm: Communicator) -> torch.Tensor:
    return said(load(folder, quantization, comm))


class CoarseProducts(PlainProducts):
    """Activations lose two more bits."""

    def int8_sums(self, row_codes: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return super().int8_sums((row_codes / 4).round() * 4, codes)


def coarsely_rounded(x: torch.Tensor) -> torch.Tensor:
    step = 2.0 ** (torch.frexp(x).exponent - 2)
    return fp8_rounded((x / step).round() * step)


@pytest.mark.parametrize("to", FORMATS)
def test_the_bounds_tell_8_bits_from_6(
    to: CheckpointFormat,
    folders: dict[CheckpointFormat, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dspark, "select_products", lambda device: CoarseProducts())
    monkeypatch.setattr(held, "fp8_rounded", coarsely_rounded)
    found = said(load(folders[to], Quantization.W8A8))
    assert error(found, alone(folders[to], Quantization.DEQUANTIZE)) > BOUND[to]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("mesh", (MeshShape(), *MESHES), ids=str)
def test_no_values_of_a_stored_matrix_stay_on_any_rank(
    mesh: MeshShape, to: CheckpointFormat, folders: dict[CheckpointFormat, Path]
) -> None:
    """A rank that dequantises holds values in float32, of which key-value projections of stages are there twice."""
    folder, config = folders[to], ModelConfig.from_json(VALUES)
    parts = StoredParts(headers := read_headers(folder))
    for comm in thread_communicators(mesh):
        quantised = [
            part
            for part in asked_parts(config, headers, comm.shard)
            if parts.storage(parts.tensors(part.name)[0]) is not Storage.PLAIN
        ]
        assert any("main_proj" in part.name for part in quantised) is (to is not INT8)
        values = sum(4 * parts.window(part).num_values for part in quantised)
        values += sum(
            4 * parts.window(part).num_values
            for part in quantised
            if part.name.startswith("mtp.") and part.name.endswith("attn.wkv.weight")
        )
        stored = sum(map(parts.num_bytes, quantised))
        dense = num_held_bytes(load(folder, Quantization.DEQUANTIZE, comm))
        for quantization in (Quantization.NATIVE, Quantization.W8A8):
            model = load(folder, quantization, comm)
            assert num_held_bytes(model) == dense - values + stored
            # Nor do products leave any behind.
            if mesh.num_ranks == 1:
                said(model)
                assert num_held_bytes(model) == dense - values + stored


def num_held_bytes(model: DSparkModel) -> int:
    found = held_tensors(model)
    return sum(tensor.untyped_storage().nbytes() for tensor in (*found.target, *found.drafter))


@pytest.mark.parametrize("quantization", [Quantization.NATIVE, Quantization.W8A8])
@pytest.mark.parametrize("to", FORMATS)
def test_stored_matrices_multiply_bfloat16(
    to: CheckpointFormat, quantization: Quantization, folders: dict[CheckpointFormat, Path]
) -> None:
    found = said(
        load_model(folders[to], dtype=torch.bfloat16, device=CPU, quantization=quantization)
    )
    assert error(found, alone(folders[to], Quantization.DEQUANTIZE)) < BOUND[to] + 0.05
