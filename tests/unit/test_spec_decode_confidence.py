from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError
from common.spec_decode.confidence import (
    TEMPERATURES_FILE,
    calibrate,
    load_temperatures,
    survival,
)


def test_calibration_divides_each_position_by_its_own_temperature() -> None:
    logits = torch.tensor([[2.0, -1.0], [0.0, 3.0]])
    temperatures = torch.tensor([2.0, 0.5])
    expected = torch.tensor([[1.0, -2.0], [0.0, 6.0]]).sigmoid()
    torch.testing.assert_close(calibrate(logits, temperatures), expected)
    assert logits.tolist() == [[2.0, -1.0], [0.0, 3.0]]


def test_survival_multiplies_and_never_rises() -> None:
    result = survival(torch.tensor([[0.5, 0.5, 1.0, 0.1]]))
    torch.testing.assert_close(result, torch.tensor([[0.5, 0.25, 0.25, 0.025]]))


def test_an_uncalibrated_checkpoint_has_temperatures_of_one(tmp_path: Path) -> None:
    assert load_temperatures(tmp_path, 5).tolist() == [1.0] * 5


def test_a_shorter_draft_takes_the_first_temperatures(tmp_path: Path) -> None:
    content = {"temperatures": [0.5, 1.0, 2.0, 4.0], "fitted_on": 1000}
    (tmp_path / TEMPERATURES_FILE).write_text(json.dumps(content))
    assert load_temperatures(tmp_path, 3).tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperatures": [1.0, 1.0]}', "has 2 temperatures; a draft length of 3"),
        ('{"temperatures": [1.0, 0.0, 1.0]}', "temperature 1 is 0.0; give a positive one"),
        ('{"temperatures": [NaN, 1.0, 1.0]}', "temperature 0 is nan"),
        ('{"temperatures": ["warm", 1.0, 1.0]}', "must hold"),
        ('{"temperatures": 1.0}', "must hold"),
        ('{"t": []}', "must hold"),
        ("[1.0, 1.0, 1.0]", "must hold"),
        ("{", "must hold"),
    ],
)
def test_a_bad_file_is_refused_with_its_fault(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / TEMPERATURES_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_temperatures(tmp_path, 3)
