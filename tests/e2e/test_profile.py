"""`dspark profile` of real engines at work."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspark
from services.cli import main
from tests.support.system import System

pytestmark = pytest.mark.e2e

STEPS = 4


@contextlib.contextmanager
def asking(address: str) -> Iterator[None]:
    """One request after the other until the block ends."""
    is_over = threading.Event()

    def ask() -> None:
        with dspark.Client(address, timeout=60.0) as client:
            while not is_over.is_set():
                client.generate("def add(a, b):", stop=dspark.StopParams(max_tokens=32))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_profile_shows_the_models_work(
    role: str,
    traced: System,
    admin_key_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = traced.prefill_address if role == "prefill" else traced.decode_address
    path = tmp_path / "trace.json.gz"
    flags = ("--key-file", str(admin_key_file), "--seconds", "30", "--trace", str(path))
    with asking(traced.address):
        assert main(["profile", worker, "--steps", str(STEPS), *flags]) == 0
    said = re.search(rf"{path}: (\d+) steps in \d+\.\d+ s", capsys.readouterr().err)
    assert said is not None and int(said[1]) >= STEPS
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    num_products = sum(event["name"] in ("aten::mm", "aten::bmm") for event in events)
    assert num_products >= STEPS * 4, "a step multiplies matrices in every layer"


def test_without_the_key_the_command_ends_with_the_reason(
    traced: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "key"
    wrong.write_text("wrong")
    arguments = ["profile", traced.decode_address, "--trace", str(tmp_path / "trace")]
    assert main(arguments) == 2
    assert "admin.key_file is not given" in capsys.readouterr().err
    assert main([*arguments, "--admin.key-file", str(wrong)]) == 2
    assert "this needs the admin key" in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()
