"""Whatever a model takes from a checkpoint reaches its device through the staging buffers, codes and scales as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.loader import load_model
from common.checkpoint.part_reader import PartReader
from common.checkpoint.reader import CheckpointReader
from common.device.cpu import CpuBackend
from common.device.staging import Staging
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel, build_model
from common.model.memory import held_tensors
from common.model.quantization import Quantization
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(vocab_size=64, dspark_noise_token_id=63)
CONFIG = ModelConfig.from_json(VALUES)
TENSORS = random_tensors(CONFIG, seed=3)
CPU = torch.device("cpu")
BUFFER_BYTES = 4096


class CountingDevice(CpuBackend):
    """Does copies at once, and knows how much came."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def start_copy(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        self.num_bytes += source.nbytes
        into.copy_(source)
        return lambda: None


class ToDevice(Staging):
    """Takes all memory for a device's, as this machine has none."""

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        self.stage(source, into)


def tensors_of(model: DSparkModel) -> list[torch.Tensor]:
    held = held_tensors(model)
    return [*held.target, *held.drafter]


def made_there(*, has_stored_latents: bool) -> int:
    """Bytes of what is worked out on the device from what came: stages' projections side by side, halves of zeros beside
    positions of groups, and a vector of scales for the queries of every layer and stage."""
    num_stages, d = CONFIG.num_drafter_layers, CONFIG.head_dim
    side_by_side = 0 if has_stored_latents else num_stages * d * CONFIG.hidden_size * 4
    zeros = sum(tensor.nbytes for name, tensor in TENSORS.items() if name.endswith(".ape"))
    return side_by_side + zeros + (CONFIG.num_hidden_layers + num_stages) * d * 4


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("of", CheckpointFormat)
def test_all_that_a_model_takes_passes_through_the_buffers(
    of: CheckpointFormat,
    quantization: Quantization,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = save_checkpoint(tmp_path / "source", VALUES, TENSORS)
    convert_checkpoint(source, tmp_path / "q", of)
    expected = load_model(
        tmp_path / "q", dtype=torch.float32, device=CPU, quantization=quantization
    )
    # Only host memory can be read into.
    monkeypatch.setattr(PartReader, "read_into", lambda *_: False)
    device = CountingDevice()
    with (
        CheckpointReader(tmp_path / "q", piece_values=1000) as reader,
        ToDevice(device, buffer_bytes=BUFFER_BYTES, num_threads=2) as staging,
    ):
        model = build_model(
            CONFIG,
            reader,
            dtype=torch.float32,
            device=CPU,
            staging=staging,
            quantization=quantization,
        )
        staging.wait()
        assert staging.held_bytes == 2 * BUFFER_BYTES
    found = tensors_of(model)
    assert all(torch.equal(*pair) for pair in zip(found, tensors_of(expected), strict=True))
    is_stored = quantization.keeps_stored and of is CheckpointFormat.FP8_FP4
    worked_out = made_there(has_stored_latents=is_stored)
    assert device.num_bytes == sum(tensor.nbytes for tensor in found) - worked_out
