"""A decode worker that dies or stalls in the middle of a sampled answer costs a pause, and not one token.

Workers are real processes and get real signals; the answer is compared with one that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import prefill_service_pb2, types_pb2
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.cli.ports import free_ports

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
START_S = 120.0
NUM_TOKENS = 96
DISTURBED_AFTER = 24
"""Tokens that have arrived when a worker is hit."""


@dataclass(slots=True, kw_only=True)
class Deployment:
    """A router in front of one prefill and two decode processes."""

    stub: InferenceServiceStub
    prefill: PrefillServiceStub
    decodes: dict[str, subprocess.Popen[bytes]]
    """By address."""

    def ask(self) -> Iterator[pb.GenerateResponse]:
        """A sampled answer that is a function of its seed, long enough to be disturbed."""
        message = pb.ChatMessage(role="user", content="How do I reverse a list in Python?")
        request = pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[message]),
            sampling=types_pb2.SamplingParams(temperature=0.8, seed=11),
            stop=types_pb2.StopParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        return self.stub.Generate(request, timeout=START_S)

    def num_lease_handoffs(self) -> int:
        """Times that the prefill worker handed over what it had instead of computing it."""
        question = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
        info = self.prefill.GetWorkerInfo(question, timeout=10).info
        return int(info.details["lease_handoffs"])

    def busy(self) -> subprocess.Popen[bytes]:
        """The decode process that has the request."""
        workers = self.stub.ListWorkers(pb.ListWorkersRequest(), timeout=10).workers
        (address,) = [
            w.address for w in workers if w.running_requests and w.address in self.decodes
        ]
        return self.decodes[address]


@pytest.fixture
def deployment(shipped_checkpoint: Path) -> Iterator[Deployment]:
    with contextlib.ExitStack() as stack:
        prefill, *decodes = (
            stack.enter_context(process(role, shipped_checkpoint, "--threads", "1"))
            for role in ("prefill", "decode", "decode")
        )
        lists = {"prefill": [prefill[0]], "decode": [address for address, _ in decodes]}
        flags = [
            flag
            for role, addresses in lists.items()
            for flag in (f"--router.{role}-workers", json.dumps(addresses))
        ]
        address, _ = stack.enter_context(process("router", shipped_checkpoint, *flags))
        for each in (prefill[0], *lists["decode"], address):
            wait_serving(each)
        stub = InferenceServiceStub(stack.enter_context(grpc.insecure_channel(address)))
        wait_all_known(stub)
        prefill_channel = stack.enter_context(grpc.insecure_channel(prefill[0]))
        yield Deployment(
            stub=stub, prefill=PrefillServiceStub(prefill_channel), decodes=dict(decodes)
        )


@pytest.mark.parametrize("hit", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
def test_a_lost_decode_worker_costs_no_token(
    deployment: Deployment, hit: signal.Signals, figure: Callable[[str], None]
) -> None:
    undisturbed = [token for message in deployment.ask() for token in message.token_ids]
    tokens: list[int] = []
    victim = None
    arrivals = []
    for message in deployment.ask():
        arrivals.append(time.monotonic())
        tokens += message.token_ids
        if victim is None and len(tokens) >= DISTURBED_AFTER:
            victim = deployment.busy()
            victim.send_signal(hit)
    assert tokens == undisturbed
    assert message.completion.route.replacements == 1
    assert deployment.num_lease_handoffs() == 1
    pauses = [after - before for before, after in itertools.pairwise(arrivals)]
    figure(f"longest pause when a decode worker gets {hit.name}: {max(pauses):.2f} s")


@contextlib.contextmanager
def process(
    role: str, checkpoint: Path, *flags: str, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A service on a port of its own unless one is given, killed at the end whatever state it is in."""
    if port is None:
        (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-m", "services.cli", role, "--model", str(checkpoint)]
    command += ["--port", str(port), *flags]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "sdk")))
    running = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"127.0.0.1:{port}", running
    finally:
        running.kill()
        running.wait()


def wait_serving(address: str) -> None:
    """Return once the service says that it is ready."""
    with grpc.insecure_channel(address) as channel:
        statuses = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="readiness"),
            timeout=START_S,
            wait_for_ready=True,
        )
        for status in statuses:
            if status.status == health_pb2.HealthCheckResponse.SERVING:
                return
    raise AssertionError(f"{address} never became ready")


def wait_all_known(stub: InferenceServiceStub) -> None:
    """Return once the router has heard of the last worker, which is a matter of half a second."""
    deadline = time.monotonic() + START_S
    while True:
        workers = stub.ListWorkers(pb.ListWorkersRequest(), timeout=10).workers
        if all(worker.state == pb.WORKER_STATE_READY for worker in workers):
            return
        assert time.monotonic() < deadline, f"workers are not ready: {workers}"
