"""`dspark checkpoint`: what a person sees, what a script gets, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.checkpoint.headers import read_headers
from common.model.config import ModelConfig
from services.cli.main import main
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
TENSORS = random_tensors(ModelConfig.from_json(VALUES), seed=6)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(save_checkpoint(tmp_path / "m", VALUES, TENSORS))


@pytest.mark.usefixtures("shipped_checkpoint")
def test_the_shipped_checkpoint_is_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", "dspark-tiny"]) == 0
    shown = capsys.readouterr().out
    assert "3 stages, block of 7, taps on layers 3, 4, 5" in shown
    assert main(["checkpoint", "validate", "dspark-tiny", "--deep"]) == 0
    assert "tensors are there" in capsys.readouterr().out


def test_figures_come_as_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", folder, "--output", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    size = sum(tensor.nbytes for tensor in TENSORS.values())
    num_integers = sum(not tensor.is_floating_point() for tensor in TENSORS.values())
    integers = sum(t.nbytes for t in TENSORS.values() if not t.is_floating_point())
    assert found | {"folder": ""} == {
        "folder": "",
        "format": "fp32",
        "tensors": len(TENSORS),
        "files": 1,
        "size_bytes": size,
        "types": {
            "F32": {"tensors": len(TENSORS) - num_integers, "size_bytes": size - integers},
            "I64": {"tensors": num_integers, "size_bytes": integers},
        },
        "layers": 4,
        "layers_by_kind": {"window only": 1, "CSA": 2, "HCA": 1},
        "experts": 8,
        "experts_per_token": 2,
        "drafter": {
            "tensors": sum(name.startswith("mtp.") for name in TENSORS),
            "stages": 3,
            "block_size": 5,
            "tapped_layers": [1, 2, 3],
            "has_short_confidence_name": False,
        },
        "classic_mtp_tensors": 0,
        "digests": 0,
    }
    assert main(["checkpoint", "plan", folder, "--tp", "2", "--output", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["tp"] == 2 and planned["is_contract_met"] is True
    per_rank = sum(planned[f"batch_{kind}_bytes"] for kind in ("page", "ring", "drafter"))
    assert planned["host_bytes"] == per_rank > 0


def test_a_plan_shows_the_largest_batch_by_kind_and_where_it_is_copied(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "plan", folder, "--device-gib", "1"]) == 0
    alone = capsys.readouterr().out
    assert ": 1 rank of 1.00 GiB" in alone and "host memory" not in alone
    assert main(["checkpoint", "plan", folder, "--device-gib", "1", "--dp", "2"]) == 0
    both = capsys.readouterr().out
    assert ": 2 ranks of 1.00 GiB" in both
    pages, rings, drafter, host = (
        float(found[1])
        for label in ("pages", "rings", "drafter rings", "host memory")
        if (found := re.search(rf"^  {label} +([\d.]+) [GM]iB", both, re.MULTILINE))
    )
    cache = pages + (rings + drafter) / 1024
    assert cache == pytest.approx(0.9, abs=0.02)
    assert host == pytest.approx(2 * cache, abs=0.05)


def test_a_plan_says_when_the_checkpoint_is_not_all_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the experts used to give a plan of all of them, and no word."""
    fewer = {
        name: tensor
        for name, tensor in TENSORS.items()
        if not any(f".experts.{e}." in name for e in range(4, 8))
    }
    num_missing = len(TENSORS) - len(fewer)
    folder = str(save_checkpoint(tmp_path / "m", VALUES, fewer))
    assert main(["checkpoint", "plan", folder]) == 0
    expected = f"cannot be served: {num_missing} of {len(TENSORS)} tensors missing"
    assert expected in capsys.readouterr().out
    assert main(["checkpoint", "plan", folder, "--output", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["is_contract_met"] is False
    assert planned["contract_summary"] == f"{num_missing} of {len(TENSORS)} tensors missing"


@pytest.mark.parametrize("output", ["text", "json"])
def test_tensors_that_nothing_takes_are_shown_by_group(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strays = {f"layers.0.ffn.experts.{e}.w1.weight": torch.ones(1) for e in range(300, 600)}
    more = {"vision.a": torch.ones(1), "vision.b": torch.ones(1)}
    folder = str(save_checkpoint(tmp_path / "m", VALUES, TENSORS | strays | more))
    assert main(["checkpoint", "validate", folder, "--output", output]) == 0
    shown = capsys.readouterr().out
    if output == "json":
        found = json.loads(shown)
        assert found["extra_groups"] == {"layers.0 experts": 300, "vision": 2}
        assert set(found["extra"]) == {*strays, *more}
    else:
        assert "302 tensors that nothing takes:" in shown
        assert "layers.0 experts: 300 (experts 300-599): " in shown
        assert "vision: 2: vision.a, vision.b" in shown


@pytest.mark.parametrize(
    "name", ["layers.1.ffn.experts.2.w2.weight", "layers.1.ffn.experts.2.w2.scale"]
)
def test_a_matrix_or_scale_that_was_never_written_is_found_by_reading(
    name: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a file whose size was reserved before its content came. Zeros are good codes and E8M0 scales, one by one."""
    target = tmp_path / "q"
    assert main(["checkpoint", "convert", folder, str(target), "--to", "fp8-fp4"]) == 0
    (target / "tensor_digests.json").unlink()
    tensor = read_headers(target)[name]
    with tensor.path.open("r+b") as file:
        file.seek(tensor.begin)
        file.write(bytes(tensor.num_bytes - 1))
    assert main(["checkpoint", "validate", str(target), "--deep"]) == 0
    with tensor.path.open("r+b") as file:
        file.seek(tensor.end - 1)
        file.write(b"\0")
    assert main(["checkpoint", "validate", str(target)]) == 0
    capsys.readouterr()
    for flag in ("--deep", "--record-digests"):
        assert main(["checkpoint", "validate", str(target), flag]) == 3
        error = capsys.readouterr().err
        assert f"tensor {name} in " in error and "nothing but zeros" in error
    assert not (target / "tensor_digests.json").exists()


def test_lists_and_offsets_may_be_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Biases may be, and published offsets are."""
    name = "layers.2.ffn.gate.bias"
    source = save_checkpoint(
        tmp_path / "m", VALUES, TENSORS | {name: torch.zeros_like(TENSORS[name])}
    )
    target = str(tmp_path / "q")
    assert main(["checkpoint", "convert", str(source), target, "--to", "w8a8-modelslim"]) == 0
    assert main(["checkpoint", "validate", target, "--deep"]) == 0
    assert "no matrix is empty" in capsys.readouterr().out


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(unbuffered: str, folder: str) -> None:
    """As `dspark checkpoint inspect DIR | head -1` does."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from services.cli.main import main; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", code, "checkpoint", "inspect", folder],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (128 + 13, b"")


def test_converting_validating_and_recording_follow_on_one_another(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "q")
    convert = ["checkpoint", "convert", folder, target, "--to", "fp8-fp4", "--output", "json"]
    assert main(convert) == 0
    written = json.loads(capsys.readouterr().out)
    size = sum(tensor.num_bytes for tensor in read_headers(Path(target)).values())
    assert (written["format"], written["size_bytes"]) == ("fp8-fp4", size)
    assert main(["checkpoint", "validate", target, "--deep"]) == 0
    num = len(json.loads((tmp_path / "q" / "tensor_digests.json").read_text())["tensors"])
    assert f"{num} of {num} tensors were compared with a digest" in capsys.readouterr().out
    assert main(["checkpoint", "validate", folder, "--record-digests"]) == 0
    assert (Path(folder) / "tensor_digests.json").exists()
    assert main(["checkpoint", "convert", folder, target, "--to", "bf16"]) == 3
    assert "exists" in capsys.readouterr().err


def test_a_fault_ends_in_exit_code_3_and_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = {name: t for name, t in TENSORS.items() if name != "norm.weight"}
    folder = str(save_checkpoint(tmp_path / "m", VALUES, fewer))
    assert main(["checkpoint", "validate", folder]) == 3
    assert "embedding and head: 1 of 6 missing: norm.weight" in capsys.readouterr().out
    assert main(["checkpoint", "convert", folder, str(tmp_path / "q"), "--to", "bf16"]) == 3
    assert "norm.weight" in capsys.readouterr().err


def test_a_mesh_that_cannot_be_ends_in_exit_code_2(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "plan", folder, "--tp", "3"]) == 2
    assert capsys.readouterr().err == (
        "dspark checkpoint plan: num_attention_heads (4) is not divisible by tp (3)\n"
    )


def test_no_checkpoint_ends_in_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", "/nowhere"]) == 3
    assert "there is no checkpoint '/nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize("rest", [[], ["inspct"]])
def test_half_a_command_is_told_the_other_half(
    rest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", *rest]) == 2
    assert capsys.readouterr().err == (
        "dspark: checkpoint needs one of inspect, validate, convert, plan\n"
    )


def test_headers_are_looked_at_without_torch(folder: str) -> None:
    """So that a machine without the engine can check a download."""
    code = (
        "import sys; from services.cli.main import main; "
        f"[main(['checkpoint', c, {folder!r}]) for c in ('inspect', 'validate', 'plan')]; "
        "print({'torch', 'safetensors', 'numba'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.splitlines()[-1] == "set()"
