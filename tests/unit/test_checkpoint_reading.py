"""Weights are read a tensor at a time: bounded memory, bounded read-ahead, only the wanted bytes, a word on slow storage."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers
from common.checkpoint.mapped import MappedFile
from common.checkpoint.plan import PlanRequest, make_plan
from common.checkpoint.read_ahead import ReadAhead, Wanted
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.spans import Span
from common.checkpoint.weight_bytes import WeightsHeld
from common.model.config import ModelConfig
from common.model.weights import TensorPart
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint
from tools.make_sparse_checkpoint import Published, make_sparse_checkpoint

MIB = 2**20
VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
TENSORS = random_tensors(ModelConfig.from_json(VALUES), seed=2)

MEASURE = """
import json, re, resource, sys
from pathlib import Path
import torch
from common.checkpoint.loader import load_model
torch.set_num_threads(1)
def load(folder):
    return load_model(Path(folder), dtype=torch.bfloat16, device=torch.device("cpu"))
# Imports and kernels that are compiled at first use are not what is measured.
load(sys.argv[1])
resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
before = resident_pages * resource.getpagesize()
model = load(sys.argv[2])
# Not ru_maxrss: that begins at the parent's peak.
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps(peak_kib * 1024 - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's figures of a process")
@pytest.mark.parametrize("checkpoint_format", [CheckpointFormat.FP8_FP4, CheckpointFormat.BF16])
def test_loading_takes_the_model_and_a_few_tensors_of_memory(
    checkpoint_format: CheckpointFormat, tmp_path: Path
) -> None:
    """The highest resident memory of a process that loads, mapped pages included. Experts are most of the model, so that
    holding a layer's twice, or keeping what was read, would show."""
    values = config_json(
        compress_ratios=[4, 4], hidden_size=512, moe_intermediate_size=512, n_routed_experts=24
    )
    small = save_checkpoint(tmp_path / "small", VALUES, TENSORS)
    folder = tmp_path / "m"
    make_sparse_checkpoint(Published(config=values, format=checkpoint_format), folder)
    config, headers = ModelConfig.load(folder), read_headers(folder)
    stored = sum(tensor.num_bytes for tensor in headers.values())
    held = make_plan(
        config, headers, checkpoint_format, PlanRequest(device_bytes=0, weights=WeightsHeld.BF16)
    ).weight_bytes
    assert held > 180 * MIB and stored > 50 * MIB
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert json.loads(result.stdout) < held + 32 * MIB


def test_a_dropped_page_is_read_again(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", VALUES, TENSORS)
    headers = read_headers(folder)
    with CheckpointReader(folder) as reader:
        held = {name: reader[name] for name in reader}
        for name, tensor in held.items():
            assert torch.equal(tensor, TENSORS[name]), name
    assert len(headers) == len(held)


def test_only_what_is_wanted_is_counted_and_read_ahead(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", VALUES, TENSORS)
    calls: list[tuple[int, int]] = []
    wanted = ["layers.0.ffn.experts.1.w1.weight", "norm.weight"]
    parts = [TensorPart(name) for name in wanted]
    with CheckpointReader(folder, lambda *call: calls.append(call), wanted=parts) as reader:
        for name in wanted:
            reader[name]
    sizes = [TENSORS[name].nbytes for name in wanted]
    assert calls == [(sizes[0], sum(sizes)), (sum(sizes), sum(sizes))]


class RecordingFile(MappedFile):
    """Knows what was asked for, and tells when it is enough."""

    def __init__(self, enough: int) -> None:
        self.asked: list[Span] = []
        self.has_enough = threading.Event()
        self._enough = enough

    def expect(self, span: Span) -> None:
        self.asked.append(span)
        if len(self.asked) >= self._enough:
            self.has_enough.set()


def test_reading_ahead_stays_within_its_window() -> None:
    file = RecordingFile(enough=3)
    spans = [Span(i * 10, i * 10 + 10) for i in range(100)]
    ahead = ReadAhead(
        [Wanted(((file, span),), 10) for span in spans], window_bytes=30, num_threads=2
    )
    assert file.has_enough.wait(timeout=10)
    assert len(file.asked) == 3
    file.has_enough.clear()
    file._enough = 5
    ahead.used(20)
    assert file.has_enough.wait(timeout=10)
    ahead.close()
    assert sorted(file.asked, key=lambda span: span.begin) == spans[:5]


def test_reading_ahead_ends_when_all_is_asked_for() -> None:
    file = RecordingFile(enough=7)
    ahead = ReadAhead([Wanted(((file, Span(i, i + 1)),), 1) for i in range(7)])
    assert file.has_enough.wait(timeout=10)
    ahead.close()
    assert len(file.asked) == 7
