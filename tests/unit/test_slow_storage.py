"""Waiting for storage is noticed wherever it happens, and told once, where storage is to blame."""

from __future__ import annotations

import errno
import logging
import mmap
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import pages
from common.checkpoint.convert import convert_checkpoint
from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.mapped import MappedFile
from common.checkpoint.meter import LoadMeter
from common.checkpoint.read_options import ReadOptions
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.spans import Span
from common.engine import build_rank
from common.engine.settings import EngineSettings
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.weights import TensorPart
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
TENSORS = random_tensors(ModelConfig.from_json(VALUES), seed=2)


def resident_bytes(path: Path) -> int:
    """Of a file's mappings, what is in this process's memory."""
    regions = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    sizes = (re.search(r"Rss: +(\d+) kB", region) for region in regions if str(path) in region)
    return sum(int(size[1]) * 1024 for size in sizes if size is not None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's figures of a process")
@pytest.mark.parametrize("number", [None, errno.EINVAL, errno.ENOSYS])
def test_what_is_fetched_is_in_memory_whatever_the_system_knows(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels before 5.14 cannot be told to read pages: then the first use waited for storage, and nobody counted that."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 16 * 64)
    if number is not None:
        monkeypatch.setattr(pages, "advise", lambda *_: number)
    file, page = MappedFile(path), mmap.PAGESIZE
    before = resident_bytes(path)
    file.fetch(Span(10 * page + 17, 30 * page + 5))
    # Systems may map more than is asked for, and large pages at that, but no less.
    assert before == 0 and resident_bytes(path) >= 21 * page
    file.fetch(Span(64 * page, 64 * page))
    file.close()


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8192))
    monkeypatch.setattr(pages, "advise", lambda *_: errno.EFAULT)
    with pytest.raises(CheckpointError, match=rf"cannot read {path}: Bad address"):
        MappedFile(path).fetch(Span(0, 100))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(meter: LoadMeter, clock: Clock, *, wait_s: float, work_s: float) -> None:
    """Ten times 10 MB."""
    for _ in range(10):
        with meter:
            clock.now += wait_s
        clock.now += work_s
        meter.add(10_000_000)


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, True),
        ({"slow_mb_per_s": 0}, False),
        ({"slow_mb_per_s": 15}, False),
        # Half a second in all: nobody minds.
        ({"wait_s": 0.04, "work_s": 0.01}, False),
        # Slow, but by arithmetic.
        ({"wait_s": 0.2, "work_s": 0.3}, False),
    ],
)
def test_slow_storage_is_told_once_and_only_where_it_is_to_blame(
    changes: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"slow_mb_per_s": 500, "wait_s": 0.45, "work_s": 0.05, **changes}
    clock = Clock()
    meter = LoadMeter(Path("/models/x"), slow_mb_per_s=values["slow_mb_per_s"], clock=clock)
    with caplog.at_level(logging.WARNING):
        simulate(meter, clock, wait_s=values["wait_s"], work_s=values["work_s"])
    assert len(caplog.records) == int(warns)
    if warns:
        assert "/models/x gives 20 MB/s and loading waits for it 90 % of the time" in caplog.text
        assert meter.mb_per_s == pytest.approx(20)


@pytest.mark.parametrize(
    ("name", "slow", "limit", "warns"),
    [
        # Dequantised through the mapping, and copied straight into place.
        ("layers.1.ffn.experts.1.w2.weight", "fetch", 500.0, True),
        ("head.weight", "read", 500.0, True),
        ("head.weight", "read", 0.0, False),
    ],
)
def test_what_a_reader_waits_for_is_storage(
    name: str,
    slow: str,
    limit: float,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a clock that only storage moves."""
    source = save_checkpoint(tmp_path / "m", VALUES, TENSORS)
    convert_checkpoint(source, tmp_path / "q", CheckpointFormat.FP8_FP4)
    clock = Clock()
    original = getattr(MappedFile, slow)

    def slowly(file: MappedFile, *arguments: Any) -> None:
        clock.now += 1.5
        original(file, *arguments)

    monkeypatch.setattr(MappedFile, slow, slowly)
    part, options = TensorPart(name), ReadOptions(slow_mb_per_s=limit)
    with (
        caplog.at_level(logging.WARNING),
        CheckpointReader(tmp_path / "q", wanted=[part], options=options, clock=clock) as reader,
    ):
        for _ in range(2):
            if slow == "read":
                room = torch.empty(reader.shape(name), dtype=torch.bfloat16)
                assert reader.read_into(part, room)
            else:
                assert len(list(reader.pieces(part))) == 1
    assert ("loading waits for it 100 % of the time" in caplog.text) == warns


def test_the_setting_for_slow_storage_reaches_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ReadOptions] = []

    class Loading(Exception):
        pass

    def load_model(*_: object, options: ReadOptions, **others: object) -> None:
        given.append(options)
        raise Loading

    monkeypatch.setattr(build_rank, "load_model", load_model)
    with pytest.raises(Loading):
        build_rank.build_rank(EngineSettings(checkpoint_dir=tmp_path, slow_storage_mb_per_s=123.0))
    assert given == [ReadOptions(slow_mb_per_s=123.0)]
