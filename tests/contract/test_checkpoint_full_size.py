"""The published checkpoints at full size, without a weight: true headers in sparse files through every check."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.checkpoint.contract import check_contract
from common.checkpoint.formats import CheckpointFormat, detect_format
from common.checkpoint.headers import ITEM_BYTES, read_headers
from common.checkpoint.other_contracts import check_dspark, check_upstream_123
from common.checkpoint.plan import PlanRequest, make_plan
from common.checkpoint.rehearsal import asked_parts
from common.checkpoint.stored_parts import StoredParts
from common.checkpoint.weight_bytes import WeightsHeld
from common.model.config import ModelConfig
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from services.cli.main import main
from tools.make_sparse_checkpoint import PUBLISHED, make_sparse_checkpoint, stored_parts

GIB = 2**30


Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A published checkpoint by name, written once."""
    root = tmp_path_factory.mktemp("sparse")

    @functools.cache
    def make(name: str) -> Path:
        return make_sparse_checkpoint(PUBLISHED[name], root / name)

    return make


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_mtp", "size", "unit"),
    [
        # Totals and sizes as published; the base checkpoints' are in 2^30 bytes.
        ("flash", 69187, 1575, 148.66, GIB),
        ("flash-dspark", 72317, 4705, 167, 1e9),
        ("pro", 145116, 2343, 805.33, GIB),
        ("pro-dspark", 149782, 7009, 893, 1e9),
    ],
)
def test_the_official_tables_have_the_published_counts_and_sizes(
    name: str, num_tensors: int, num_mtp: int, size: float, unit: float
) -> None:
    parts = list(stored_parts(PUBLISHED[name]))
    assert len({part.name for part in parts}) == len(parts) == num_tensors
    assert sum(part.name.startswith("mtp.") for part in parts) == num_mtp
    num_bytes = sum(math.prod(part.shape) * ITEM_BYTES[part.dtype] for part in parts)
    assert num_bytes / unit == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(("name", "num_tensors"), [("flash-dspark", 72317), ("pro-dspark", 149782)])
def test_a_full_dspark_checkpoint_keeps_both_contracts(
    name: str, num_tensors: int, sparse: Make
) -> None:
    headers, config = read_headers(sparse(name)), ModelConfig.load(sparse(name))
    assert detect_format(headers) is CheckpointFormat.FP8_FP4
    report = check_contract(config, headers)
    assert report.is_met and not report.extra and report.num_expected == num_tensors
    upstream = check_upstream_123(config, headers)
    assert upstream.is_met and upstream.num_expected == 123


def test_a_base_checkpoint_lacks_two_stages_and_the_heads(sparse: Make) -> None:
    """The classic MTP layer passes as the first stage."""
    headers, config = read_headers(sparse("flash")), ModelConfig.load(sparse("flash"))
    report = check_contract(config, headers)
    assert report.is_met and not report.extra
    assert (report.num_expected, report.num_classic_mtp) == (69187 - 1575, 1575)
    assert check_upstream_123(config, headers).summary() == "85 of 123 tensors missing"
    full = check_dspark(config, headers)
    assert full.summary() == "3140 of 72317 tensors missing"
    assert [line.partition(" missing")[0] for line in full.by_group()] == [
        "mtp.1: 29 of 29",
        "mtp.1 experts: 1536 of 1536",
        "mtp.2: 29 of 29",
        "mtp.2 experts: 1536 of 1536",
        "drafter heads: 10 of 10",
    ]


@pytest.mark.parametrize(
    ("name", "num_tensors", "checkpoint_format"),
    [
        ("flash-dspark-w8a8", 72178, "w8a8-compressed-tensors"),
        ("flash-dspark-modelslim", 107764, "w8a8-modelslim"),
    ],
)
def test_both_w8a8_layouts_keep_the_contract(
    name: str, num_tensors: int, checkpoint_format: str, sparse: Make
) -> None:
    headers = read_headers(sparse(name))
    assert len(headers) == num_tensors
    report = check_contract(ModelConfig.load(sparse(name)), headers)
    assert report.is_met and not report.extra
    assert report.contract == f"served ({checkpoint_format})"


OFFICIAL = "format fp8-fp4"
FLASH_CACHE = "page 449,824 bytes for 128 tokens, 3,514.25 bytes per token (official)"
FULL = "drafter DSpark, {} tensors: 3 stages, block of 5, taps on layers {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Lines, or what they begin with, that a command prints of a checkpoint."""

    inspected: tuple[str, ...]
    validated: str
    planned: tuple[str, ...]


SHOWN = {
    "flash-dspark": Shown(
        inspected=(
            OFFICIAL,
            FULL.format(4705, "40, 41, 42"),
            "layers 43 (2 window only, 21 CSA, 20 HCA)",
        ),
        validated="contract served (fp8-fp4): all 72317 tensors are there",
        planned=(
            FLASH_CACHE,
            "weights 41.29 GiB per rank, bfloat16",
            "experts 34.50 GiB of it",
            "drafter 2.74 GiB of it",
        ),
    ),
    "flash": Shown(
        inspected=(OFFICIAL, "drafter none (1575 tensors of a classic MTP layer, not used)"),
        validated="contract served (fp8-fp4): all 67612 tensors are there",
        planned=(
            FLASH_CACHE,
            "weights 38.55 GiB per rank, bfloat16",
            "drafter 0.00 GiB of it",
        ),
    ),
    "pro-dspark": Shown(
        inspected=(OFFICIAL, FULL.format(7009, "58, 59, 60"), "experts 384, 6 per token"),
        validated="contract served (fp8-fp4): all 149782 tensors are there",
        planned=(
            "page 644,024 bytes for 128 tokens, 5,031.44 bytes per token (official)",
            "experts 189.00 GiB of it",
            "longest context none: the weights leave no room; more ranks share them",
        ),
    ),
    "flash-dspark-w8a8": Shown(
        inspected=("format w8a8-compressed-tensors", FULL.format(4695, "40, 41, 42")),
        validated="contract served (w8a8-compressed-tensors): all 72178 tensors are there",
        planned=(FLASH_CACHE, "weights 41.29 GiB per rank, bfloat16", "experts 34.50 GiB of it"),
    ),
    "flash-dspark-modelslim": Shown(
        inspected=("format w8a8-modelslim", FULL.format(7021, "40, 41, 42")),
        validated="contract served (w8a8-modelslim): all 107764 tensors are there",
        # With an embedding and a head of its own.
        planned=(
            FLASH_CACHE,
            "weights 42.77 GiB per rank, bfloat16",
            "drafter 4.22 GiB of it",
        ),
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_commands_run_at_full_size(
    name: str, sparse: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> str:
        """What a command prints, its columns one space apart."""
        assert main(["checkpoint", *arguments]) == 0
        return "\n".join(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())

    folder, expected = str(sparse(name)), SHOWN[name]
    lines = shown("inspect", folder)
    assert [line for line in expected.inspected if line not in lines] == []
    assert expected.validated in shown("validate", folder)
    mesh = ("--dp", "4", "--tp", "4", "--ep", "16")
    lines = shown("plan", folder, *mesh, "--cache", "official")
    assert [line for line in expected.planned if line not in lines] == []
    assert "mesh dp 4 x tp 4, ep 16: 16 ranks of 64.00 GiB" in lines and "note" not in lines


def test_the_base_checkpoint_is_refused_where_the_full_one_is_asked_for(
    sparse: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(sparse("flash"))
    assert main(["checkpoint", "validate", folder]) == 0
    assert "serves without speculation" in capsys.readouterr().out
    assert main(["checkpoint", "validate", folder, "--contract", "upstream-123"]) == 3
    assert "85 of 123 tensors missing" in capsys.readouterr().out


# What a rank reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    [MeshShape(dp=4, tp=4, ep=16), MeshShape(dp=2, tp=4, ep=8), MeshShape(tp=4, ep=4)],
    ids=str,
)
def test_a_rank_of_a_mesh_reads_what_arithmetic_says(mesh: MeshShape, sparse: Make) -> None:
    """Of Flash-DSpark in the official format: codes are a byte, or half of one for experts, scales a byte each."""
    headers = read_headers(folder := sparse("flash-dspark"))
    config = ModelConfig.load(folder)
    layers, hidden, width, heads = 43 + 3, 4096, 2048, 64 * 512
    expert = 3 * hidden * width // 2 * 17 // 16
    query = heads * 1024 * 16385 // 16384
    outputs = 2 * 8192 * 4096 * 16385 // 16384
    shared = 3 * hidden * width * 16385 // 16384
    vocabulary = 129280 * (hidden + 256) * 2
    whole = sum(tensor.num_bytes for tensor in headers.values())
    experts = layers * 256 * expert
    in_group = layers * (query + outputs + shared + 64 * 4) + vocabulary
    expected = whole - experts - in_group + experts // mesh.ep + in_group // mesh.tp
    parts = StoredParts(headers)
    for rank in (0, mesh.num_ranks - 1):
        asked = asked_parts(config, headers, Shard(mesh=mesh, rank=rank))
        assert sum(map(parts.num_bytes, asked)) == expected
    plan = make_plan(
        config,
        headers,
        detect_format(headers),
        PlanRequest(mesh=mesh, device_bytes=0, weights=WeightsHeld.STORED),
    )
    assert plan.weight_bytes == expected
