"""Workers that die in the middle of a transfer and come back on the same port: a pause, and not one token.

Processes are real, and so are their deaths; the moment is chosen by a fault in the prefill worker's transfer engine.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
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
from tests.support.transfer_engines import available

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
PROMPT = [0, *((37 * i * i + 11 * i) % 1900 + 100 for i in range(1, 500))]
"""Three pages close and travel before its last chunk is computed."""
DECODE = ("--threads", "1")
PREFILL = (*DECODE, "--max-step-rows", "128", "--transfer.connect-timeout-s", str(TIMEOUT_S))
"""Chunks of a page, so that pages travel before the prompt is computed; a busy machine is no reason for a slower engine."""
ENGINES = available("nixl", "grpc")


def with_fault(fault: str, engine: str) -> tuple[str, ...]:
    return ("--faults", fault, "--transfer.engine", engine)


def tokens_of(messages: Iterable[pb.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A router in front of worker processes; the first prefill worker has a fault."""

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

    def answered(self) -> tuple[list[int], pb.Route]:
        messages = list(self.ask())
        return tokens_of(messages), messages[-1].completion.route

    def busy_decode(self) -> str:
        """Where a request runs now."""
        (busy,) = [
            worker.address
            for worker in self.stub.ListWorkers(pb.ListWorkersRequest(), timeout=TIMEOUT_S).workers
            if worker.running_requests and worker.address in self.addresses["decode"]
        ]
        return busy

    def kill(self, address: str) -> None:
        self.workers[address].close()

    def restart(self, address: str, *flags: str) -> None:
        """Another process on the port of a dead one; returns when the router can use it."""
        is_prefill = address in self.addresses["prefill"]
        role, own = ("prefill", PREFILL) if is_prefill else ("decode", DECODE)
        port = int(address.rpartition(":")[2])
        stack = self.workers[address] = contextlib.ExitStack()
        stack.enter_context(process(role, self.checkpoint, *own, *flags, port=port))
        wait_serving(address)
        wait_all_known(self.stub)

    def engines_from(self, prefill: str) -> set[str]:
        """To all decode workers; returns once it has met them."""
        deadline = time.monotonic() + TIMEOUT_S
        ways = [f"transfer_engine {decode}" for decode in self.addresses["decode"]]
        while not all(details := [self.info(prefill).details[way] for way in ways]):
            assert time.monotonic() < deadline, f"{prefill} has not met everybody: {details}"
            time.sleep(0.05)
        return {how.partition(" ")[0] for how in details}

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
def fleet(checkpoint: Path, *flags: str, num_prefills: int, num_decodes: int) -> Iterator[Fleet]:
    """`flags` are the first prefill worker's."""
    with contextlib.ExitStack() as stack:
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        workers: dict[str, contextlib.ExitStack] = {}
        for role, its_flags in (
            ("prefill", (*PREFILL, *flags)),
            *[("prefill", PREFILL)] * (num_prefills - 1),
            *[("decode", DECODE)] * num_decodes,
        ):
            worker = stack.enter_context(contextlib.ExitStack())
            address, _ = worker.enter_context(process(role, checkpoint, *its_flags))
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
    """It dies once with every engine, and is well in the end."""
    first = with_fault("die:2", ENGINES[0])
    with fleet(shipped_checkpoint, *first, num_prefills=2, num_decodes=1) as it:
        dying, other = it.addresses["prefill"]
        answers = []
        for engine, following in zip(ENGINES, [*ENGINES[1:], ""], strict=True):
            assert it.engines_from(dying) == {engine}
            # On a busy machine all of a request may go in one write; the second one is the next request's then.
            two = [it.answered(), it.answered()]
            assert two[-1][1].prefill_worker == other
            assert sum(route.replacements for _, route in two) >= 1, engine
            answers += two
            it.restart(dying, *(with_fault("die:2", following) if following else ()))
        healed = [it.answered() for _ in range(4)]
        assert dying in {route.prefill_worker for _, route in healed}
        assert all(text == answers[0][0] for text, _ in (*answers, *healed))
        it.wait_at_rest()


def test_a_decode_worker_that_dies_in_the_middle_of_a_transfer_and_comes_back(
    shipped_checkpoint: Path,
) -> None:
    """The first token does not wait for the transfer, and the transfer waits for the fault."""
    first = with_fault("delay:2:60", ENGINES[0])
    with fleet(shipped_checkpoint, *first, num_prefills=1, num_decodes=2) as it:
        (prefill,) = it.addresses["prefill"]
        texts = []
        for engine in ENGINES:
            if engine != ENGINES[0]:
                it.kill(prefill)
                it.restart(prefill, *with_fault("delay:2:60", engine))
            assert it.engines_from(prefill) == {engine}
            messages = [next(stream := it.ask())]
            dying = it.busy_decode()
            it.kill(dying)
            messages += stream
            route = messages[-1].completion.route
            assert route.transfer_engine == engine
            assert route.replacements >= 1
            it.restart(dying)
            answers = [it.answered() for _ in range(4)]
            assert dying in {route.decode_worker for _, route in answers}, engine
            texts += [tokens_of(messages), *(text for text, _ in answers)]
        assert all(text == texts[0] for text in texts)
        it.wait_at_rest()
