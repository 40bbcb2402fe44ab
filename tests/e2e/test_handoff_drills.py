"""Workers that die in the middle of a transfer and come back on the same port: a pause, and not one token.

Processes are real, and so are their deaths; the moment is chosen by a fault in the prefill worker's transfer engine.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from dspark.v1 import decode_service_pb2, prefill_service_pb2, types_pb2, worker_pb2
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from tests.support.processes import process, wait_all_known, wait_serving

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
PROMPT = [0, *((37 * i * i + 11 * i) % 1900 + 100 for i in range(1, 300))]
"""Two pages close and travel before its last chunk is computed."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A router in front of three worker processes; the first prefill worker has faults."""

    stub: InferenceServiceStub
    checkpoint: Path
    addresses: dict[str, list[str]]
    workers: dict[str, contextlib.ExitStack]
    """By address; closing one kills it."""
    at_rest: dict[str, tuple[int, int]]

    def ask(self) -> Iterator[pb.GenerateResponse]:
        """A sampled answer that is a function of its seed."""
        request = pb.GenerateRequest(
            tokens=pb.TokenPrompt(token_ids=PROMPT),
            sampling=types_pb2.SamplingParams(temperature=0.8, seed=11),
            stop=types_pb2.StopParams(max_tokens=24, ignore_eos=True),
        )
        return self.stub.Generate(request, timeout=TIMEOUT_S)

    def answer(self) -> list[int]:
        return [token for message in self.ask() for token in message.token_ids]

    def kill(self, address: str) -> None:
        self.workers[address].close()

    def restart(self, role: str, address: str) -> None:
        """The same worker without faults, on its port."""
        port = int(address.rpartition(":")[2])
        stack = self.workers[address] = contextlib.ExitStack()
        stack.enter_context(process(role, self.checkpoint, "--threads", "1", port=port))
        wait_serving(address)
        wait_all_known(self.stub)

    def info(self, address: str) -> worker_pb2.WorkerInfo:
        with grpc.insecure_channel(address) as channel:
            if address in self.addresses["prefill"]:
                question = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
                return PrefillServiceStub(channel).GetWorkerInfo(question, timeout=TIMEOUT_S).info
            request = decode_service_pb2.DecodeServiceGetWorkerInfoRequest()
            return DecodeServiceStub(channel).GetWorkerInfo(request, timeout=TIMEOUT_S).info

    def free(self, address: str) -> tuple[int, int]:
        info = self.info(address)
        assert info.num_quarantined_pages <= info.num_pages - info.num_free_pages
        return info.num_free_pages, info.num_free_slots

    def wait_at_rest(self) -> None:
        """Return once every worker has free what it had in the beginning; quarantine included."""
        deadline = time.monotonic() + TIMEOUT_S
        while (now := {a: self.free(a) for a in self.at_rest}) != self.at_rest:
            assert time.monotonic() < deadline, f"not freed: {now}, at rest {self.at_rest}"
            time.sleep(0.05)


@contextlib.contextmanager
def fleet(checkpoint: Path, faults: str, *, num_prefills: int, num_decodes: int) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        workers: dict[str, contextlib.ExitStack] = {}
        for role, flags in (
            ("prefill", ("--faults", faults)),
            *[("prefill", ())] * (num_prefills - 1),
            *[("decode", ())] * num_decodes,
        ):
            worker = stack.enter_context(contextlib.ExitStack())
            # Chunks of a page, so that pages travel before the prompt is computed.
            rows = ("--max-step-rows", "128") if role == "prefill" else ()
            address, _ = worker.enter_context(
                process(role, checkpoint, "--threads", "1", *rows, *flags)
            )
            addresses[role].append(address)
            workers[address] = worker
        lists = (
            flag
            for role, names in addresses.items()
            for flag in (f"--router.{role}-workers", json.dumps(names))
        )
        router, _ = stack.enter_context(process("router", checkpoint, *lists))
        for each in (*workers, router):
            wait_serving(each)
        stub = InferenceServiceStub(stack.enter_context(grpc.insecure_channel(router)))
        wait_all_known(stub)
        running = Fleet(
            stub=stub,
            checkpoint=checkpoint,
            addresses=addresses,
            workers=workers,
            at_rest={},
        )
        running.at_rest = {address: running.free(address) for address in workers}
        yield running
        for worker in workers.values():
            worker.close()


def test_a_prefill_worker_that_dies_in_the_middle_of_a_transfer_and_comes_back(
    shipped_checkpoint: Path,
) -> None:
    with fleet(shipped_checkpoint, "die:2", num_prefills=2, num_decodes=1) as it:
        dying = it.addresses["prefill"][0]
        *_, last = messages = list(it.ask())
        tokens = [token for message in messages for token in message.token_ids]
        assert last.completion.route.replacements >= 1
        it.restart("prefill", dying)
        for _ in range(4):
            assert it.answer() == tokens
        it.wait_at_rest()


def test_a_decode_worker_that_dies_in_the_middle_of_a_transfer_and_comes_back(
    shipped_checkpoint: Path,
) -> None:
    """The first token does not wait for the transfer, and the transfer waits for the fault."""
    with fleet(shipped_checkpoint, "delay:2:60", num_prefills=1, num_decodes=2) as it:
        messages = [next(stream := it.ask())]
        busy = [
            worker.address
            for worker in it.stub.ListWorkers(pb.ListWorkersRequest(), timeout=TIMEOUT_S).workers
            if worker.running_requests and worker.address in it.addresses["decode"]
        ]
        it.kill(busy[0])
        messages += stream
        tokens = [token for message in messages for token in message.token_ids]
        assert messages[-1].completion.route.replacements >= 1
        it.restart("decode", busy[0])
        for _ in range(4):
            assert it.answer() == tokens
        it.wait_at_rest()
