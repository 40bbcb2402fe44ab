"""A machine that has torch-npu but not CANN: torch would load the one at once and fail for want of the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import CALL_S, ROOT, process, wait_serving

NPU_ALONE = """
raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
"""
ENTRY_POINTS = """
[torch.backends]
torch_npu = torch_npu:_autoload
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with torch-npu as it is installed: torch finds it by its entry point."""
    # Commands that tests run in this process have set it.
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(NPU_ALONE, encoding="utf-8")
    facts = tmp_path / "torch_npu-2.13.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return tmp_path


def python(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "sdk", packages))),
        },
        capture_output=True,
        text=True,
        timeout=CALL_S,
        check=False,
    )


def test_torch_by_itself_fails_there(packages: Path) -> None:
    """The tests below can fail: this is what happens to whoever imports torch without having said anything."""
    result = python(packages, "-c", "import torch")
    assert "Failed to load the backend extension: torch_npu" in result.stderr


def test_a_worker_on_the_cpu_starts(packages: Path, shipped_checkpoint: Path) -> None:
    """Guards a former bug: torch loaded torch-npu before anybody had chosen a device."""
    flags = ("--device", "cpu", "--num-slots", "1", "--max-context-length", "256")
    with process("decode", shipped_checkpoint, *flags, packages=packages) as (address, _):
        wait_serving(address)


def test_a_worker_on_an_npu_names_cann(packages: Path, shipped_checkpoint: Path) -> None:
    """Guards a former bug: torch's own error was told, which names the package that is there."""
    result = python(
        packages,
        *("-m", "services.cli", "decode", "--model", str(shipped_checkpoint)),
        *("--device", "npu", "--port", "0"),
    )
    *_, last = result.stderr.splitlines()
    assert result.returncode == 2
    assert last.startswith(
        "dspark decode: device is npu, but torch-npu cannot load Ascend's CANN (libhccl.so: cannot open shared object"
    )
    assert "Traceback" not in result.stderr


def test_a_checkpoint_is_looked_at_deeply(packages: Path, shipped_checkpoint: Path) -> None:
    result = python(
        packages,
        *("-m", "services.cli", "checkpoint", "validate", str(shipped_checkpoint), "--deep"),
    )
    assert result.returncode == 0, result.stderr
