"""`dspark bench transfer` with real processes: what is printed, and what ends it."""

from __future__ import annotations

import json
import subprocess
import sys

TIMEOUT_S = 300.0
QUICK = ("--sizes", "1MiB", "--ranges", "1,16", "--repeats", "1")


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "bench", "transfer", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_grpc_is_measured_against_a_process_that_is_started_for_it() -> None:
    result = bench("--engines", "grpc", "--output", "json", *QUICK)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert {f"grpc.1MiB.{r}.bytes_per_s" for r in ("1_range", "16_ranges")} <= set(said["figures"])
    assert all(value >= 0 for value in said["figures"].values())
    assert "of raw TCP" in said["limits"]["grpc"]
    assert said["missing"] == {}


def test_a_receiver_serves_one_measurement_after_the_other_until_it_is_stopped() -> None:
    command = [sys.executable, "-m", "services.cli", "bench", "transfer", "--serve", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        try:
            assert receiver.stdout is not None
            address = receiver.stdout.readline().split()[-1]
            for _ in range(2):
                result = bench("--peer", address, "--engines", "grpc", *QUICK)
                assert result.returncode == 0, result.stderr
                assert "transfer between two machines" in result.stdout
            receiver.terminate()
            assert receiver.wait(TIMEOUT_S) == 0
        finally:
            receiver.kill()


def test_a_peer_that_is_not_there_is_named() -> None:
    result = bench("--peer", "127.0.0.1:1", *QUICK)
    assert result.returncode == 5
    assert "nobody answers at 127.0.0.1:1" in result.stderr
