"""What `dspark checkpoint plan` works out is what engines and ranks then hold, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.loader import load_model
from common.checkpoint.plan import CacheFormat, MemoryPlan, PlanRequest, make_plan
from common.checkpoint.rehearsal import asked_parts
from common.checkpoint.stored_parts import StoredParts
from common.checkpoint.tensors import model_tensors
from common.checkpoint.weight_bytes import WeightsHeld
from common.claims import MemoryKind
from common.engine.build import build_engine
from common.engine.settings import EngineSettings
from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.memory import held_tensors
from common.model.quantization import Quantization
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from tests.support.tiny_checkpoint import (
    config_json,
    random_tensors,
    save_checkpoint,
    without_drafter,
)

VALUES = config_json(
    hidden_size=64, moe_intermediate_size=64, vocab_size=67, dspark_noise_token_id=66
)
CONFIG = ModelConfig.from_json(VALUES)
FORMATS = tuple(CheckpointFormat)
MESHES = (MeshShape(tp=2), MeshShape(tp=2, ep=2), MeshShape(dp=2, tp=2, ep=4), MeshShape(dp=2))
NUM_SLOTS, CONTEXT = 3, 512


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[CheckpointFormat, Path]:
    """The same model in every format."""
    parent = tmp_path_factory.mktemp("plans")
    source = save_checkpoint(parent / "source", VALUES, random_tensors(CONFIG, seed=5))
    for to in FORMATS:
        convert_checkpoint(source, parent / to.value, to)
    return {to: parent / to.value for to in FORMATS}


def plan(
    folder: Path, of: CheckpointFormat, weights: WeightsHeld, mesh: MeshShape | None = None
) -> MemoryPlan:
    is_wide = weights is WeightsHeld.FP32
    request = PlanRequest(
        mesh=mesh or MeshShape(),
        device_bytes=1 << 30,
        cache=CacheFormat.FP32 if is_wide else CacheFormat.BF16,
        weights=weights,
        context_length=CONTEXT,
    )
    return make_plan(ModelConfig.load(folder), read_headers(folder), of, request)


def require_held(settings: EngineSettings, expected: MemoryPlan) -> None:
    """Build the engine and compare its ledger, kind by kind and owner by owner."""
    loaded = build_engine(settings)
    held = loaded.ledger.by_kind()
    assert held[MemoryKind.PAGES] == loaded.num_pages * expected.page_bytes
    assert held[MemoryKind.RINGS] == NUM_SLOTS * expected.ring_bytes
    assert held[MemoryKind.DRAFTER] == NUM_SLOTS * expected.drafter_bytes
    owned = {(claim.owner, claim.kind): claim.num_bytes for claim in loaded.ledger.claims()}
    target, drafter = (owned.get((o, MemoryKind.WEIGHTS), 0) for o in ("target", "drafter"))
    assert drafter == expected.drafter_weight_bytes
    assert target + drafter == expected.weight_bytes
    assert owned["rotations", MemoryKind.WORKSPACE] == expected.table_bytes


@pytest.mark.parametrize(
    ("of", "dtype", "quantization", "weights"),
    [
        (CheckpointFormat.BF16, "float32", "dequantize", WeightsHeld.FP32),
        (CheckpointFormat.FP8_FP4, "bfloat16", "dequantize", WeightsHeld.BF16),
        *((of, "bfloat16", "native", WeightsHeld.NATIVE) for of in FORMATS),
    ],
)
def test_an_engine_holds_what_was_planned(
    of: CheckpointFormat,
    dtype: str,
    quantization: str,
    weights: WeightsHeld,
    folders: dict[CheckpointFormat, Path],
) -> None:
    settings = EngineSettings(
        checkpoint_dir=folders[of],
        dtype=dtype,
        quantization=quantization,
        num_slots=NUM_SLOTS,
        max_context_length=CONTEXT,
    )
    require_held(settings, plan(folders[of], of, weights))


def test_an_engine_without_drafter_holds_what_was_planned(tmp_path: Path) -> None:
    values = without_drafter(VALUES)
    tensors = random_tensors(ModelConfig.from_json(values), seed=5)
    folder = save_checkpoint(tmp_path / "base", values, tensors)
    settings = EngineSettings(
        checkpoint_dir=folder, num_slots=NUM_SLOTS, max_context_length=CONTEXT
    )
    found = plan(folder, CheckpointFormat.FP32, WeightsHeld.FP32)
    assert found.drafter_bytes == found.drafter_weight_bytes == 0
    require_held(settings, found)


def test_a_drafters_own_embedding_and_head_are_planned(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG, seed=5)
    own = {
        f"mtp.{i}.{name}": tensors[name].clone()
        for i, name in ((0, "embed.weight"), (2, "head.weight"))
    }
    folders = [
        save_checkpoint(tmp_path / name, VALUES, held)
        for name, held in (("shared", tensors), ("own", tensors | own))
    ]
    shared, found = (plan(f, CheckpointFormat.FP32, WeightsHeld.FP32) for f in folders)
    extra = sum(tensor.nbytes for tensor in own.values())
    assert found.drafter_weight_bytes - shared.drafter_weight_bytes == extra
    settings = EngineSettings(
        checkpoint_dir=folders[1], num_slots=NUM_SLOTS, max_context_length=CONTEXT
    )
    require_held(settings, found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("weights", "quantization"),
    [(WeightsHeld.BF16, Quantization.DEQUANTIZE), (WeightsHeld.NATIVE, Quantization.NATIVE)],
)
@pytest.mark.parametrize("of", [f for f in FORMATS if f.plain_dtype is None])
def test_the_first_rank_holds_what_was_planned(
    of: CheckpointFormat,
    weights: WeightsHeld,
    quantization: Quantization,
    mesh: MeshShape,
    folders: dict[CheckpointFormat, Path],
) -> None:
    model = load_model(
        folders[of],
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        comm=Communicator(Shard(mesh=mesh)),
        quantization=quantization,
    )
    held, found = held_tensors(model), plan(folders[of], of, weights, mesh)
    assert sum(tensor.nbytes for tensor in held.drafter) == found.drafter_weight_bytes
    assert sum(tensor.nbytes for tensor in (*held.target, *held.drafter)) == found.weight_bytes


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("of", FORMATS)
def test_the_first_rank_reads_what_was_planned(
    of: CheckpointFormat, mesh: MeshShape, folders: dict[CheckpointFormat, Path]
) -> None:
    headers = read_headers(folders[of])
    asked = asked_parts(CONFIG, headers, Shard(mesh=mesh))
    read = sum(map(StoredParts(headers).num_bytes, asked))
    assert read == plan(folders[of], of, WeightsHeld.STORED, mesh).weight_bytes


def test_the_table_of_tensors_knows_which_are_cut_by_columns(
    folders: dict[CheckpointFormat, Path],
) -> None:
    headers = read_headers(folders[CheckpointFormat.BF16])
    asked = asked_parts(CONFIG, headers, Shard(mesh=MeshShape(tp=2), rank=1))
    by_columns = {part.name for part in asked if part.columns is not None}
    assert by_columns == {t.name for t in model_tensors(CONFIG) if t.shares_columns}


@pytest.mark.parametrize("quantization", Quantization)
def test_a_rank_that_would_cut_a_group_of_fp4_is_refused_before_it_reads(
    quantization: Quantization, tmp_path: Path
) -> None:
    """With codes that stay stored, the first step used to find out."""
    values = config_json(moe_intermediate_size=96, dspark_noise_token_id=66, vocab_size=67)
    tensors = random_tensors(ModelConfig.from_json(values), seed=5)
    source = save_checkpoint(tmp_path / "source", values, tensors)
    convert_checkpoint(source, tmp_path / "q", CheckpointFormat.FP8_FP4)

    def load(mesh: MeshShape) -> None:
        load_model(
            tmp_path / "q",
            dtype=torch.float32,
            device=torch.device("cpu"),
            comm=Communicator(Shard(mesh=mesh)),
            quantization=quantization,
            on_progress=lambda done, _: read.append(done),
        )

    read: list[int] = []
    with pytest.raises(
        ConfigError,
        match=r"tp \(2\) cuts the 96 columns of layers\.0\.ffn\.experts\.0\.w2\.weight into parts of 48, .*"
        r"32 columns share a scale .* use ep = dp x tp \(2\)",
    ):
        load(MeshShape(tp=2))
    assert not read
    load(MeshShape(tp=2, ep=2))
    assert read
