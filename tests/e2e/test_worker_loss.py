"""A decode worker that dies or stalls in the middle of a sampled answer costs a pause, and not one token.

Workers are real processes and get real signals; the answer is compared with one that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import prefill_service_pb2, types_pb2
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from tests.support.processes import CALL_S, START_S, process, wait_all_known, wait_serving

pytestmark = pytest.mark.slow

NUM_TOKENS = 320
"""So many that the answer is far from its end when a worker is hit."""
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
        info = self.prefill.GetWorkerInfo(question, timeout=CALL_S).info
        return int(info.details["lease_handoffs"])

    def busy(self) -> subprocess.Popen[bytes]:
        """The decode process that has the request, once the router knows that the prefill worker is done with it."""
        while True:
            workers = self.stub.ListWorkers(pb.ListWorkersRequest(), timeout=CALL_S).workers
            busy = [worker.address for worker in workers if worker.running_requests]
            assert busy, "the answer was over before a worker could be hit"
            if len(busy) == 1 and busy[0] in self.decodes:
                return self.decodes[busy[0]]


@pytest.fixture(scope="module")
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


# In this order: a worker that stalled comes back.
@pytest.mark.parametrize("hit", [signal.SIGSTOP, signal.SIGKILL], ids=["stalls", "dies"])
def test_a_lost_decode_worker_costs_no_token(
    deployment: Deployment, hit: signal.Signals, figure: Callable[[str], None]
) -> None:
    num_lease_handoffs = deployment.num_lease_handoffs()
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
    assert message.completion.route.replacements >= 1
    assert deployment.num_lease_handoffs() > num_lease_handoffs
    pauses = [after - before for before, after in itertools.pairwise(arrivals)]
    if hit is signal.SIGSTOP:
        assert victim is not None
        victim.send_signal(signal.SIGCONT)
        wait_all_known(deployment.stub)
    figure(f"longest pause when a decode worker gets {hit.name}: {max(pauses):.2f} s")
