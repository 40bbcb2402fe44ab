"""Workers of many ranks behind the real router: sixteen processes, or eight, give the tokens of one, whoever they hand off to
or get state from, and the death of any of them costs no token."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

import dspark
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from services.cli.ports import free_ports
from tests.support.asking import GREEDY, Ask, ask_all, engine_sampling, exactly
from tests.support.processes import (
    CALL_S,
    START_S,
    children,
    process,
    wait_all_known,
    wait_serving,
)
from tests.support.questions import Question
from tests.support.solo import Job, Solo

pytestmark = pytest.mark.slow

SIXTEEN = ("--mesh.dp", "4", "--mesh.tp", "4", "--mesh.ep", "16", "--mesh.check-replicas")
EIGHT = ("--mesh.dp", "2", "--mesh.tp", "4", "--mesh.ep", "8", "--mesh.check-replicas")
SLOTS = ("--num-slots", "8", "--num-pages", "64")
SEEDED = dspark.SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A prefill or decode worker, with all its ranks."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def rank_pids(self) -> list[int]:
        """Processes of all ranks but the first, which is the service itself."""
        (host,) = children(self.process.pid)
        return children(host)


@pytest.fixture(scope="module")
def start(
    shipped_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Worker]]:
    """Starts workers, which end with the module."""
    logs = tmp_path_factory.mktemp("logs")
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def started(role: str, *flags: str) -> Worker:
            log = logs / f"{role}-{next(numbers)}.log"
            address, running = stack.enter_context(
                process(role, shipped_checkpoint, *SLOTS, *flags, log=log)
            )
            return Worker(address=address, process=running, log=log)

        yield started


@pytest.fixture(scope="module")
def prefill_nodes(start: Callable[..., Worker]) -> tuple[Worker, Worker]:
    """Two nodes of eight ranks, as far as they can tell. Prompts are computed in many chunks, which travel as they come."""
    (port,) = free_ports("127.0.0.1", 1)
    meeting = ("--rendezvous.address", f"127.0.0.1:{port}", "--rendezvous.num-nodes", "2")
    flags = (*SIXTEEN, *meeting, "--max-step-rows", "96")
    second = start("prefill", *flags, "--rendezvous.node-rank", "1")
    return start("prefill", *flags), second


@pytest.fixture(scope="module")
def prefill_mesh(prefill_nodes: tuple[Worker, Worker]) -> Worker:
    """The node that has the service."""
    return prefill_nodes[0]


@pytest.fixture(scope="module")
def decode_mesh(start: Callable[..., Worker]) -> Worker:
    return start("decode", *SIXTEEN)


@pytest.fixture(scope="module")
def prefill_eight(start: Callable[..., Worker]) -> Worker:
    return start("prefill", *EIGHT, "--max-step-rows", "96")


@pytest.fixture(scope="module")
def decode_eight(start: Callable[..., Worker]) -> Worker:
    """The last test kills one of its ranks."""
    return start("decode", *EIGHT)


@pytest.fixture(scope="module")
def one_prefill(start: Callable[..., Worker]) -> Worker:
    return start("prefill", "--threads", "1")


@pytest.fixture(scope="module")
def one_decode(start: Callable[..., Worker]) -> Worker:
    return start("decode", "--threads", "1")


@pytest.fixture(scope="module")
def router(
    shipped_checkpoint: Path,
) -> Iterator[Callable[[Sequence[Worker], Sequence[Worker]], str]]:
    """Starts a router in front of workers; returns its address once all of them are ready."""
    with contextlib.ExitStack() as stack:

        def started(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> str:
            address, _ = stack.enter_context(
                process(
                    "router",
                    shipped_checkpoint,
                    "--prefill-workers",
                    ",".join(worker.address for worker in prefills),
                    "--decode-workers",
                    ",".join(worker.address for worker in decodes),
                )
            )
            for each in (*(worker.address for worker in (*prefills, *decodes)), address):
                wait_serving(each)
            with grpc.insecure_channel(address) as channel:
                wait_all_known(InferenceServiceStub(channel))
            return address

        yield started


@pytest.fixture(scope="module")
def asks(questions: tuple[Question, ...]) -> list[Ask]:
    """Prompts of all lengths with page borders, answers of different lengths, greedy and seeded."""
    by_length = sorted(questions, key=lambda question: len(question.token_ids))
    borders = [q for q in by_length if len(q.token_ids) in (127, 128, 129, 255, 256, 257)]
    chosen = [by_length[0], *borders, by_length[-1]]
    lengths = itertools.cycle((40, 9, 25))
    greedy = [Ask(prompt=q.token_ids, stop=exactly(next(lengths))) for q in chosen]
    seeded = [Ask(prompt=q.token_ids, sampling=SEEDED, stop=exactly(12)) for q in chosen[:3]]
    return [*greedy, *seeded]


@pytest.fixture(scope="module")
def expected(plain: Solo, asks: list[Ask]) -> list[tuple[int, ...]]:
    """What one process without a mesh, a hand-off and drafts gives."""
    jobs = [
        Job(
            prompt=ask.prompt,
            num_tokens=ask.stop.max_tokens or 0,
            sampling=engine_sampling(ask.sampling),
        )
        for ask in asks
    ]
    return [output.token_ids for output in plain.together(jobs)]


def test_two_workers_of_sixteen_ranks_equal_one_process(
    router: Callable[..., str],
    prefill_mesh: Worker,
    decode_mesh: Worker,
    asks: list[Ask],
    expected: list[tuple[int, ...]],
) -> None:
    address = router([prefill_mesh], [decode_mesh])
    answers = ask_all(address, asks)
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.completion.route.prefill_worker for answer in answers} == {prefill_mesh.address}
    assert not any(answer.completion.route.drafter_fallback for answer in answers)
    # Rounds of several tokens: the drafter's shards and its state came along.
    assert max(max(answer.rounds) for answer in answers) > 3

    alone = ask_all(address, asks[:1])
    assert alone[0].token_ids == expected[0], "three of four groups were idle"


def test_a_prefill_worker_of_one_rank_hands_off_to_a_mesh(
    router: Callable[..., str],
    one_prefill: Worker,
    decode_mesh: Worker,
    asks: list[Ask],
    expected: list[tuple[int, ...]],
) -> None:
    answers = ask_all(router([one_prefill], [decode_mesh]), asks)
    assert [answer.token_ids for answer in answers] == expected


def test_a_mesh_hands_off_to_a_decode_worker_of_one_rank(
    router: Callable[..., str],
    prefill_mesh: Worker,
    one_decode: Worker,
    asks: list[Ask],
    expected: list[tuple[int, ...]],
) -> None:
    answers = ask_all(router([prefill_mesh], [one_decode]), asks)
    assert [answer.token_ids for answer in answers] == expected


def test_prompts_that_lose_a_rank_on_another_node_are_computed_elsewhere(
    router: Callable[..., str],
    prefill_nodes: tuple[Worker, Worker],
    one_prefill: Worker,
    one_decode: Worker,
    asks: list[Ask],
    expected: list[tuple[int, ...]],
) -> None:
    """The rank stands still before it is killed, so that what is placed there cannot have ended. Nothing runs on these
    nodes afterwards."""
    first, second = prefill_nodes
    address = router([first, one_prefill], [one_decode])
    victim = second.rank_pids()[5]
    os.kill(victim, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        answering = threads.submit(ask_all, address, asks)
        with grpc.insecure_channel(address) as channel:
            stub = InferenceServiceStub(channel)
            while not (answering.done() or num_running(stub, first)):
                time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        answers = answering.result(timeout=START_S)
    assert [answer.token_ids for answer in answers] == expected
    routes = [answer.completion.route for answer in answers]
    assert {route.prefill_worker for route in routes} == {one_prefill.address}
    assert sum(route.replacements for route in routes) > 0
    for node in prefill_nodes:
        assert node.process.wait(timeout=START_S) == 1
        *_, last = node.log.read_text().splitlines()
        assert "rank 13 of 16 (dp 3, tp 1) was killed by SIGKILL" in last


def num_running(stub: InferenceServiceStub, worker: Worker) -> int:
    """Requests that the router has placed on a worker."""
    workers = stub.ListWorkers(pb.ListWorkersRequest(), timeout=CALL_S).workers
    return sum(each.running_requests for each in workers if each.address == worker.address)


def test_two_workers_of_eight_ranks_equal_one_process_and_say_what_they_are(
    router: Callable[..., str],
    prefill_eight: Worker,
    decode_eight: Worker,
    asks: list[Ask],
    expected: list[tuple[int, ...]],
) -> None:
    """Two groups of four, greedy and seeded requests of unlike lengths, with drafts."""
    address = router([prefill_eight], [decode_eight])
    chosen = [1, 3, 5, 7, len(asks) - 1]
    answers = ask_all(address, [asks[i] for i in chosen])
    assert [answer.token_ids for answer in answers] == [expected[i] for i in chosen]
    routes = {
        (a.completion.route.prefill_worker, a.completion.route.decode_worker) for a in answers
    }
    assert routes == {(prefill_eight.address, decode_eight.address)}
    assert not any(answer.completion.route.drafter_fallback for answer in answers)
    assert max(max(answer.rounds) for answer in answers) > 3
    (alone,) = ask_all(address, asks[1:2])
    assert alone.token_ids == expected[1], "one of two groups was idle"

    with dspark.Client(address) as client:
        workers = client.server_info().workers
    assert set(workers) == {prefill_eight.address, decode_eight.address}
    for info in workers.values():
        assert info.mesh == dspark.WorkerMesh(dp=2, tp=4, ep=8, num_ranks=8, device="cpu")
        assert [memory.rank for memory in info.memory] == list(range(8))
        kinds = [{claim.kind for claim in memory.claims} for memory in info.memory]
        on_device = {"weights", "pages", "rings", "drafter", "workspace"}
        assert kinds == [on_device | {"host"}, *[on_device] * 7]


def test_a_dead_rank_ends_its_worker_with_one_line_and_its_requests_go_on_elsewhere(
    router: Callable[..., str],
    decode_eight: Worker,
    one_prefill: Worker,
    one_decode: Worker,
    asks: list[Ask],
    expected: list[tuple[int, ...]],
) -> None:
    # Alone at first, so that the request is there; the other worker is the place to go to.
    mesh = decode_eight
    address = router([one_prefill], [mesh, one_decode])
    longest = max(range(len(asks)), key=lambda i: asks[i].stop.max_tokens or 0)
    ask = asks[longest]
    victims = mesh.rank_pids()
    assert len(victims) == 7
    with dspark.Client(address, timeout=START_S) as client:
        streams = [
            client.generate(ask.prompt, sampling=GREEDY, stop=ask.stop, stream=True)
            for _ in range(4)
        ]
        for stream in streams:
            next(stream)
        os.kill(victims[4], signal.SIGKILL)
        for stream in streams:
            for _ in stream:
                pass
    assert [stream.completion.token_ids for stream in streams] == [expected[longest]] * 4
    assert sum(stream.completion.route.replacements for stream in streams) > 0
    assert mesh.process.wait(timeout=START_S) == 1
    said = mesh.log.read_text()
    assert "Traceback" not in said
    assert "rank 5 of 8 (dp 1, tp 1) was killed by SIGKILL" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in victims), "no rank outlives its worker"
