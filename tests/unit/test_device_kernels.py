"""What stands beside the plain kernels on each device equals them, on the device where there is one."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from common.checkpoint.loader import load_model
from common.device.select import open_backend
from common.model.config import ModelConfig
from common.model.kernels import Kernels, select_kernels
from common.model.kernels.npu import NpuKernels
from common.model.kernels.plain import PlainKernels
from common.model.memory import held_tensors
from tests.support.engine_bench import GREEDY, EngineBench, Wanted, random_tokens
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

CUDA, NPU = (
    pytest.param("cuda", marks=pytest.mark.device("cuda")),
    pytest.param("npu", marks=pytest.mark.device("npu")),
)
PLAIN = PlainKernels()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def require_plain(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """All functions that every step uses, against plain torch on the CPU."""
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4

    def require_close(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.dtype == expected.dtype
        torch.testing.assert_close(
            found.cpu().float(), expected.float(), atol=tolerance, rtol=tolerance
        )

    x, weight = normal(7, 96).to(dtype), normal(96, seed=1).to(dtype)
    require_close(
        kernels.rms_norm(x.to(device), weight.to(device), 1e-6), PLAIN.rms_norm(x, weight, 1e-6)
    )
    q, turns = normal(9, 3, 24).to(dtype), torch.polar(torch.ones(9, 4), normal(9, 4, seed=1))
    for inverse in (False, True):
        require_close(
            kernels.rotate(q.to(device), turns.to(device), inverse=inverse),
            PLAIN.rotate(q, turns, inverse=inverse),
        )
    h = normal(5, 4, 1100).to(dtype)
    others = (3 * normal(5, 24, seed=1), normal(24, seed=2), normal(3, seed=3))
    plain = PLAIN.read_streams(h, *others, iterations=20, hc_eps=1e-6, norm_eps=1e-6)
    found = kernels.read_streams(
        h.to(device),
        *(each.to(device) for each in others),
        iterations=20,
        hc_eps=1e-6,
        norm_eps=1e-6,
    )
    for ours, expected in zip(found, plain, strict=True):
        require_close(ours, expected)
    y = normal(5, 1100, seed=4).to(dtype)
    require_close(
        kernels.write_streams(h.to(device), found, y.to(device)), PLAIN.write_streams(h, plain, y)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [CUDA, NPU])
def test_a_devices_kernels_equal_the_plain_ones(name: str, dtype: torch.dtype) -> None:
    device = open_backend(name).device(0)
    kernels = select_kernels(device, dtype)
    assert type(kernels) is not PlainKernels
    require_plain(kernels, device, dtype)


@pytest.mark.parametrize("name", [CUDA, NPU])
def test_a_model_comes_to_a_device_whole_and_runs_there(name: str, tmp_path: Path) -> None:
    values = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
    folder = save_checkpoint(
        tmp_path / "m", values, random_tensors(ModelConfig.from_json(values), seed=1)
    )
    backend = open_backend(name)
    device = backend.device(0)
    there = load_model(folder, dtype=torch.float32, device=device, backend=backend)
    here = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    backend.synchronize(device)
    for ours, expected in zip(held_tensors(there).target, held_tensors(here).target, strict=True):
        assert torch.equal(ours.cpu(), expected)
    wanted = Wanted(prompt=random_tokens(40, seed=1), max_length=50, sampling=GREEDY)
    found, expected_output = (
        EngineBench(model, draft_length=5, num_slots=1).run(wanted)[0] for model in (there, here)
    )
    assert found.logprobs[0] == pytest.approx(expected_output.logprobs[0], abs=1e-2)


class PlainOperations:
    """torch-npu's operations by their definition."""

    def npu_rms_norm(
        self, x: torch.Tensor, gamma: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return (x.float() * scale).to(x.dtype) * gamma, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotating_without_complex_numbers_is_rotating(dtype: torch.dtype) -> None:
    require_plain(NpuKernels(PlainOperations()), torch.device("cpu"), dtype)


INTERPRETED = """
import torch
from common.model.kernels.cuda import CudaKernels
from tests.unit.test_device_kernels import require_plain
for dtype in (torch.float32, torch.bfloat16):
    require_plain(CudaKernels(), torch.device("cpu"), dtype)
"""


@pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Triton is not installed; to compare the CUDA kernel in its interpreter, without a device: "
    "pip install triton (1 GB on disk) and run this test again",
)
def test_the_stream_kernel_equals_the_plain_one_in_tritons_interpreter() -> None:
    """Its arithmetic, without a device. Triton reads the variable when it is imported, hence the process."""
    root = Path(__file__).parents[2]
    path = [str(root), str(root / "sdk"), *(each for each in sys.path if each)]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{INTERPRETED}"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"},
    )
    assert result.returncode == 0, result.stderr
