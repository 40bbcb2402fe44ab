"""Services as real processes, which can be given real signals. Knows commands and health; asks nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dspark.v1 import inference_service_pb2 as pb
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from services.cli.ports import free_ports

ROOT = Path(__file__).parents[2]
START_S = 240.0
CALL_S = 60.0
"""Far above what any process needs here; only a failing test waits so long."""


@contextlib.contextmanager
def process(
    role: str,
    checkpoint: Path,
    *flags: str,
    port: int | None = None,
    log: Path | None = None,
    packages: Path | None = None,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A service on a port of its own unless one is given, killed at the end whatever state it is in.

    What it says on standard error goes to `log`, or nowhere. `packages` is a folder of which it can import, too.
    """
    if port is None:
        (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-m", "services.cli", role, "--model", str(checkpoint)]
    command += ["--port", str(port), *flags]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "sdk", *([packages] if packages else ()))))
    with contextlib.ExitStack() as files:
        running = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.DEVNULL,
            stderr=files.enter_context(log.open("wb")) if log else subprocess.DEVNULL,
        )
    try:
        yield f"127.0.0.1:{port}", running
    finally:
        running.kill()
        running.wait()


def wait_serving(address: str) -> None:
    """Return once the service says that it is ready."""
    wait_health(address, health_pb2.HealthCheckResponse.SERVING)


def wait_health(address: str, wanted: health_pb2.HealthCheckResponse.ServingStatus) -> None:
    """Return once the service's readiness is as wanted."""
    with grpc.insecure_channel(address) as channel:
        statuses = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="readiness"),
            timeout=START_S,
            wait_for_ready=True,
        )
        for status in statuses:
            if status.status == wanted:
                return
    raise AssertionError(f"the readiness of {address} was never {wanted}")


def wait_all_known(stub: InferenceServiceStub) -> None:
    """Return once the router has heard of the last worker, which is a matter of half a second."""
    deadline = time.monotonic() + START_S
    while True:
        workers = stub.ListWorkers(pb.ListWorkersRequest(), timeout=CALL_S).workers
        if all(worker.state == pb.WORKER_STATE_READY for worker in workers):
            return
        assert time.monotonic() < deadline, f"workers are not ready: {workers}"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that have not ended, oldest first."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (thread / "children").read_text().split()]
    return sorted(found)
