"""`dspark checkpoint`: what a person sees, what a script gets, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert json.loads(capsys.readouterr().out)["tensors"] == len(TENSORS)
    assert main(["checkpoint", "plan", folder, "--tp", "2", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["tp"] == 2


def test_converting_validating_and_recording_follow_on_one_another(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "q")
    assert main(["checkpoint", "convert", folder, target, "--to", "fp8-fp4"]) == 0
    assert "fp8-fp4" in capsys.readouterr().out
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
