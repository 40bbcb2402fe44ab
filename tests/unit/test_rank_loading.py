"""A rank reads the bytes of its own parts and no others, in every format, and gets what a cut of the whole would give."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.digests import FILE_NAME as DIGESTS
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.loader import load_model
from common.checkpoint.mapped import MappedFile
from common.checkpoint.read_options import ReadOptions
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.rehearsal import asked_parts
from common.checkpoint.spans import Span
from common.checkpoint.stored_parts import StoredParts
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel
from common.model.memory import held_tensors
from common.model.weights import TensorPart
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(
    compress_ratios=[4, 128],
    hidden_size=256,
    head_dim=64,
    moe_intermediate_size=128,
    vocab_size=67,
    dspark_noise_token_id=66,
    dspark_target_layer_ids=[0, 1],
    n_mtp_layers=1,
)
CONFIG = ModelConfig.from_json(VALUES)
CPU = torch.device("cpu")
FORMATS = tuple(CheckpointFormat)
MESHES = (MeshShape(dp=2, tp=2, ep=4), MeshShape(tp=2), MeshShape(dp=2, ep=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[CheckpointFormat, Path]:
    """The same model in every format; the files are split, and their digests are there."""
    parent = tmp_path_factory.mktemp("ranks")
    source = save_checkpoint(parent / "source", VALUES, random_tensors(CONFIG, seed=4))
    for to in FORMATS:
        convert_checkpoint(source, parent / to.value, to, shard_bytes=1 << 20)
    return {to: parent / to.value for to in FORMATS}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("piece_values", [1, 1000, 1 << 20])
def test_a_part_is_a_cut_of_the_whole(
    to: CheckpointFormat, piece_values: int, folders: dict[CheckpointFormat, Path]
) -> None:
    parts = [
        TensorPart("layers.0.attn.wq_b.weight", rows=slice(64, 192)),
        TensorPart("layers.1.attn.wo_b.weight", columns=slice(16, 32)),
        TensorPart("layers.0.ffn.shared_experts.w1.weight", rows=slice(64, 128)),
        TensorPart("layers.0.ffn.shared_experts.w2.weight", columns=slice(64, 128)),
        TensorPart("layers.1.ffn.experts.3.w1.weight", rows=slice(96, 128)),
        TensorPart("layers.1.ffn.experts.3.w2.weight", columns=slice(32, 96)),
        TensorPart("mtp.0.main_proj.weight", rows=slice(130, 256), columns=slice(256, 512)),
        TensorPart("head.weight", rows=slice(34, 67)),
        TensorPart("head.weight", rows=slice(67, 67)),
        TensorPart("layers.0.attn.attn_sink", rows=slice(2, 4)),
    ]
    with CheckpointReader(folders[to], piece_values=piece_values) as reader:
        for part in parts:
            found = [piece.clone() for piece in reader.pieces(part)]
            whole = reader[part.name]
            expected = whole if part.rows is None else whole[part.rows]
            expected = expected if part.columns is None else expected[:, part.columns]
            together = torch.cat(found) if found else expected.new_empty(expected.shape)
            assert torch.equal(together, expected), part


def load(
    folder: Path,
    shard: Shard,
    told: list[tuple[int, int]] | None = None,
    options: ReadOptions | None = None,
) -> DSparkModel:
    def on_progress(done: int, total: int) -> None:
        if told is not None:
            told.append((done, total))

    return load_model(
        folder,
        dtype=torch.float32,
        device=CPU,
        comm=Communicator(shard),
        on_progress=on_progress,
        options=options,
    )


def ranks(mesh: MeshShape) -> Iterator[Shard]:
    return (Shard(mesh=mesh, rank=rank) for rank in range(mesh.num_ranks))


def pages_of(places: Iterable[tuple[Path, Span]]) -> set[tuple[Path, int]]:
    """Every page that has a byte of theirs."""
    return {
        (path, page)
        for path, span in places
        for page in range(span.begin // mmap.PAGESIZE, -(-span.end // mmap.PAGESIZE))
    }


def tensors_of(model: DSparkModel) -> list[torch.Tensor]:
    held = held_tensors(model)
    return [*held.target, *held.drafter]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("to", [CheckpointFormat.FP8_FP4, CheckpointFormat.W8A8_MODELSLIM])
def test_exactly_the_pages_of_the_ranks_parts_are_read(
    to: CheckpointFormat, mesh: MeshShape, folders: dict[CheckpointFormat, Path]
) -> None:
    """Without digests; to compare a scale with one takes all of the scale."""
    headers = read_headers(folders[to])
    parts, unguarded = StoredParts(headers), ReadOptions(verify_digests=False)
    for shard in ranks(mesh):
        read: list[Span] = []

        def fetch(_: MappedFile, span: Span, read: list[Span] = read) -> None:
            read.append(span)

        def copy(file: MappedFile, span: Span, room: memoryview, read: list[Span] = read) -> None:
            read.append(span)
            room[:] = file.bytes_of(span)

        told: list[tuple[int, int]] = []
        with (
            mock.patch.object(MappedFile, "fetch", fetch),
            mock.patch.object(MappedFile, "read", copy),
        ):
            load(folders[to], shard, told, unguarded)
        asked = asked_parts(CONFIG, headers, shard)
        wanted = sum(map(parts.num_bytes, asked))
        assert told[-1] == (wanted, wanted)
        assert sorted(read, key=str) == sorted(
            (span for part in asked for _, span in parts.touched(part)), key=str
        )
        for part in asked:
            exact = list(parts.spans(part))
            assert sum(span.num_bytes for _, span in exact) == parts.num_bytes(part)
            assert pages_of(parts.touched(part)) == pages_of(exact)


@pytest.mark.parametrize(
    ("to", "name"),
    [
        (CheckpointFormat.FP8_FP4, "layers.0.attn.wq_b.scale"),
        (CheckpointFormat.FP8_FP4, "layers.1.attn.wo_b.scale"),
        (CheckpointFormat.FP8_FP4, "layers.0.ffn.shared_experts.w1.scale"),
        (CheckpointFormat.W8A8_MODELSLIM, "layers.1.attn.wq_b.weight_scale"),
        (CheckpointFormat.W8A8_MODELSLIM, "layers.0.ffn.shared_experts.w3.weight_offset"),
    ],
)
def test_every_rank_refuses_a_flipped_bit_of_a_scale_that_ranks_share(
    to: CheckpointFormat, name: str, tmp_path: Path, folders: dict[CheckpointFormat, Path]
) -> None:
    """Of 16 ranks none used to notice: each had only a part. Its last bits are none of the first rank's own."""
    damaged = tmp_path / "damaged"
    shutil.copytree(folders[to], damaged)
    tensor = read_headers(damaged)[name]
    with tensor.path.open("r+b") as file:
        file.seek(tensor.end - 4 if tensor.dtype == "F32" else tensor.end - 1)
        (value,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))
    for shard in ranks(MeshShape(dp=2, tp=2, ep=4)):
        with pytest.raises(CheckpointError, match="its bytes do not match") as caught:
            load(damaged, shard)
        assert caught.value.metadata == {"tensor": name}


@pytest.mark.parametrize("to", [CheckpointFormat.FP8_FP4, CheckpointFormat.BF16])
def test_other_ranks_bytes_may_be_anything(
    to: CheckpointFormat, tmp_path: Path, folders: dict[CheckpointFormat, Path]
) -> None:
    """All bytes but the rank's own are overwritten; its model is the same, and another rank's is not."""
    mesh = MeshShape(dp=2, tp=2, ep=4)
    mine, other = Shard(mesh=mesh, rank=1), Shard(mesh=mesh, rank=2)
    headers = read_headers(folders[to])
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folders[to], spoilt)
    (spoilt / DIGESTS).unlink()
    parts = StoredParts(headers)
    needed: dict[str, list[Span]] = {}
    for part in asked_parts(CONFIG, headers, mine):
        for path, span in parts.spans(part):
            needed.setdefault(path.name, []).append(span)
    for path in {tensor.path for tensor in headers.values()}:
        original = path.read_bytes()
        begin = min(tensor.begin for tensor in headers.values() if tensor.path == path)
        content = bytearray(original[:begin] + b"\x01" * (len(original) - begin))
        for span in needed.get(path.name, []):
            content[span.begin : span.end] = original[span.begin : span.end]
        (spoilt / path.name).write_bytes(content)

    def is_unchanged(shard: Shard) -> bool:
        pairs = zip(
            tensors_of(load(folders[to], shard)), tensors_of(load(spoilt, shard)), strict=True
        )
        return all(torch.equal(left, right) for left, right in pairs)

    assert is_unchanged(mine)
    assert not is_unchanged(other)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_together_have_the_whole_model_and_share_what_can_be_shared(
    mesh: MeshShape, folders: dict[CheckpointFormat, Path]
) -> None:
    headers = read_headers(folders[CheckpointFormat.FP8_FP4])
    parts = StoredParts(headers)
    values: dict[str, int] = {}
    for shard in ranks(mesh):
        for part in asked_parts(CONFIG, headers, shard):
            values[part.name] = values.get(part.name, 0) + parts.window(part).num_values
    assert set(values) == set(parts.names)
    for name, count in values.items():
        size = 1
        for length in parts.shape(name):
            size *= length
        if ".ffn.experts." in name:
            copies = 1 if mesh.ep > 1 else mesh.dp
        else:
            copies = mesh.dp if is_cut(name) else mesh.num_ranks
        assert count == size * copies, name


def is_cut(name: str) -> bool:
    """Whether the ranks of a group share a tensor that is not a routed expert's."""
    cut = (".attn.wq_b", ".attn.wo_", ".attn_sink", ".shared_experts.", "markov_w2", "head.weight")
    return any(part in name for part in cut) and "confidence" not in name


def test_a_fault_in_another_ranks_part_is_refused_all_the_same(
    tmp_path: Path, folders: dict[CheckpointFormat, Path]
) -> None:
    tensors = random_tensors(CONFIG, seed=4)
    missing = "layers.0.ffn.experts.7.w3.weight"
    folder = save_checkpoint(
        tmp_path / "m", VALUES, {n: t for n, t in tensors.items() if n != missing}
    )
    with pytest.raises(CheckpointError, match=missing):
        load(folder, Shard(mesh=MeshShape(dp=2, tp=2, ep=4), rank=0))


REHEARSE = """
import sys
from pathlib import Path
from common.checkpoint.headers import read_headers
from common.checkpoint.rehearsal import asked_parts
from common.model.config import ModelConfig
before = set(sys.modules)
folder = Path(sys.argv[1])
assert asked_parts(ModelConfig.load(folder), read_headers(folder))
print(sorted({name.split(".")[1] for name in set(sys.modules) - before if name.startswith("torch.")}))
"""


def test_finding_out_what_to_read_imports_no_compiler(
    folders: dict[CheckpointFormat, Path],
) -> None:
    """Some operations on the meta device are written in Python, and the first one takes seconds of every start."""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", REHEARSE, str(folders[CheckpointFormat.BF16])],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=root,
    )
    assert result.stdout.strip() == "[]"
