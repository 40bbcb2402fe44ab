"""Where a request's time goes, and how it is counted however it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from common.errors import QueueFull, ServingError, WorkerLost
from common.telemetry.metrics import RouterMetrics
from common.telemetry.metrics.router import FIRST_TOKEN_STAGES
from common.telemetry.tracing import Span, under
from common.types import FinishReason, RequestContext, RequestId, SamplingParams, StopParams
from dspark.v1 import worker_pb2
from services.router.attempt import Attempt, AttemptFailed
from services.router.commits import Commits, Committed, Finish, RoundCounts
from services.router.events import Admitted, FirstToken
from services.router.meter import Meters, RequestMeter
from services.router.policy import WorkerState
from services.router.role_load import RoleLoad
from services.router.stage_clock import StageClock
from services.router.worker import Worker
from tests.support.figures import figure

ADMITTED = Admitted(
    first_token_id=None, first_logprob=None, drafter_fallback="", transfer_engine="grpc"
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class It:
    """One request of a router, told of step by step."""

    def __init__(self, prompt: int = 300, max_tokens: int = 20) -> None:
        self.clock = Clock()
        self.metrics = RouterMetrics(model="tiny")
        self.meters = Meters(self.metrics, self.clock)
        self.meter = self.meters.begin()
        self.commits = cast(
            Commits,
            SimpleNamespace(
                context=RequestContext(
                    request_id=RequestId("r"),
                    epoch=0,
                    prompt=(1,) * prompt,
                    sampling=SamplingParams(),
                    stop=StopParams(max_tokens=max_tokens),
                ),
                finish=None,
                counts=RoundCounts(),
            ),
        )

    def figure(self, name: str, **labels: str) -> float:
        return figure(self.metrics.registry, f"dspark_{name}", **labels)

    def stages(self) -> dict[str, float]:
        """Those that took any time."""
        name = "dspark_request_stage_duration_seconds_sum"
        return {
            sample.labels["stage"]: round(sample.value, 6)
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == name and sample.value > 0
        }

    def commit(self, round_number: int, num_tokens: int) -> None:
        self.commits.context.committed.extend([5] * num_tokens)
        self.meter.committed(
            Committed(
                round=round_number,
                length=self.commits.context.length,
                token_ids=(5,) * num_tokens,
                text="",
                logprobs=(),
                finish=None,
            )
        )

    def finish(self) -> None:
        self.commits.finish = Finish(reason=FinishReason.LENGTH)

    def first_token(self, *, queue_s: float, compute_s: float) -> None:
        event = FirstToken(token_id=5, logprob=None, queue_s=queue_s, compute_s=compute_s)
        self.meter.saw(event)
        self.commit(0, 1)


@pytest.fixture
def it() -> It:
    return It()


def attempt(*, prefill: str | None = "p:1", is_from_lease: bool = False) -> Attempt:
    at = SimpleNamespace(
        prefill=None if prefill is None else SimpleNamespace(address=prefill),
        decode=SimpleNamespace(address="d:1"),
        is_from_lease=is_from_lease,
    )
    return cast(Attempt, at)


def test_stages_add_up_whatever_order_they_come_in() -> None:
    clock = Clock()
    stages = StageClock(clock)
    for stage, seconds in (("queue", 1.0), ("decode", 2.0), ("client", 4.0), ("decode", 8.0)):
        stages.enter(stage)
        clock.wait(seconds)
    ended_at = stages.end()
    assert stages.seconds(("queue", "decode", "client")) == {"queue": 1, "decode": 10, "client": 4}
    assert sum(stages.seconds().values()) == ended_at - stages.began_at == 15


def test_a_worker_cannot_claim_more_of_a_prefill_than_it_took() -> None:
    """Its clock is another one, and says so of a prefill that was seen here for two seconds."""
    clock = Clock()
    stages = StageClock(clock)
    stages.enter("prefill")
    clock.wait(2.0)
    stages.end()
    stages.split_prefill(queue_s=1.5, compute_s=3.0)
    assert stages.seconds(("prefill_queue", "prefill", "prefill_rpc")) == {
        "prefill_queue": 1.5,
        "prefill": 0.5,
        "prefill_rpc": 0.0,
    }


def test_every_second_of_a_request_is_in_one_stage(it: It) -> None:
    it.clock.wait(0.1)
    with it.meter.of(it.commits):
        it.clock.wait(0.2)
        it.meter.placed(attempt())
        it.clock.wait(1.0)
        it.first_token(queue_s=0.25, compute_s=0.5)
        with it.meter.client():
            it.clock.wait(0.01)
        it.clock.wait(0.3)
        it.meter.saw(ADMITTED)
        it.clock.wait(0.4)
        it.commit(1, 4)
        it.clock.wait(0.5)
        it.commit(2, 2)
        it.finish()
        it.clock.wait(0.05)
    assert it.stages() == {
        "tokenize": 0.1,
        "queue": 0.2,
        "prefill_queue": 0.25,
        "prefill": 0.5,
        "prefill_rpc": 0.25,
        "client": 0.01,
        "handoff": 0.3,
        "decode_wait": 0.4,
        "decode": 0.55,
    }
    assert it.figure("time_to_first_token_seconds_sum") == pytest.approx(1.3)
    assert it.figure("request_duration_seconds_sum") == pytest.approx(2.56)
    assert it.figure("time_per_output_token_seconds_sum") == pytest.approx(1.21 / 6)


def test_the_tokens_of_a_round_share_its_time(it: It) -> None:
    with it.meter.of(it.commits):
        it.meter.placed(attempt())
        it.first_token(queue_s=0.0, compute_s=0.0)
        it.clock.wait(0.4)
        it.commit(1, 4)
        it.finish()
    assert it.figure("inter_token_latency_seconds_count") == 4
    assert it.figure("inter_token_latency_seconds_bucket", le="0.15") == 4
    assert it.figure("inter_token_latency_seconds_bucket", le="0.075") == 0
    assert it.figure("inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert it.figure("generation_tokens_total") == 5


def test_a_request_that_is_placed_again_waits_in_stages_of_its_own(it: It) -> None:
    """Before the first token it is queueing as before; after it, clients see a pause and nothing of a first token."""
    lost = AttemptFailed(WorkerLost("gone"), "d:1")
    with it.meter.of(it.commits):
        it.meter.placed(attempt())
        it.clock.wait(1.0)
        it.meter.failed(lost)
        it.clock.wait(0.5)
        it.meter.placed(attempt())
        it.clock.wait(2.0)
        it.first_token(queue_s=0.0, compute_s=2.0)
        it.meter.failed(lost)
        it.clock.wait(0.25)
        it.meter.placed(attempt(is_from_lease=True))
        it.clock.wait(0.25)
        it.meter.saw(ADMITTED)
        it.commit(1, 2)
        it.finish()
    assert it.stages() == {"queue": 0.5, "prefill": 2.0, "prefill_rpc": 1.0, "replacement": 0.5}
    before = [it.figure("request_stage_duration_seconds_sum", stage=s) for s in FIRST_TOKEN_STAGES]
    assert sum(before) == it.figure("time_to_first_token_seconds_sum") == 3.5
    assert it.figure("router_retries_total", reason="WORKER_LOST") == 2
    assert it.figure("router_placements_total", source="prefill") == 2
    assert it.figure("router_placements_total", source="lease") == 1
    assert it.figure("router_worker_selections_total", role="decode", worker="d:1") == 3


def test_decode_that_computes_the_prompt_has_no_hand_off(it: It) -> None:
    with it.meter.of(it.commits):
        it.meter.placed(attempt(prefill=None))
        it.clock.wait(1.0)
        it.meter.saw(ADMITTED)
        it.clock.wait(1.0)
        it.commit(1, 1)
        it.clock.wait(1.0)
        it.commit(2, 3)
        it.finish()
    assert it.stages() == {"prefill": 2.0, "decode": 1.0}
    assert it.figure("router_placements_total", source="decode") == 1


def test_a_first_token_that_decode_tells_first_leaves_no_hand_off_to_wait_for(it: It) -> None:
    with it.meter.of(it.commits):
        it.meter.placed(attempt())
        it.clock.wait(1.0)
        it.meter.saw(ADMITTED)
        it.commit(0, 1)
        it.clock.wait(0.5)
        it.commit(1, 3)
        it.finish()
    assert it.stages() == {"prefill": 1.0, "decode_wait": 0.5}


def test_a_request_without_a_first_token_has_no_duration(it: It) -> None:
    with pytest.raises(QueueFull), it.meter.of(it.commits):
        it.clock.wait(5.0)
        raise QueueFull("full")
    assert it.stages() == {}
    assert it.figure("request_duration_seconds_count") == 0
    assert it.figure("request_finished_total", reason="error") == 1


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (QueueFull("full"), "resource_exhausted", "QUEUE_FULL"),
        (ValueError("a bug"), "internal", "INTERNAL"),
        (asyncio.CancelledError(), "cancelled", None),
        (GeneratorExit(), "cancelled", None),
    ],
)
def test_what_comes_through_a_door_is_counted_however_it_ends(
    it: It, error: BaseException, code: str, reason: str | None
) -> None:
    with pytest.raises(type(error)), it.meters.counting("Generate"):
        raise error
    with it.meters.counting("Generate"):
        pass
    assert it.figure("requests_total", endpoint="Generate", code=code) == 1
    assert it.figure("requests_total", endpoint="Generate", code="ok") == 1
    assert it.figure("requests_total") == 2
    assert it.figure("request_errors_total") == (0 if reason is None else 1)
    if reason is not None:
        assert it.figure("request_errors_total", reason=reason) == 1


def test_an_error_of_a_kind_that_no_list_knows_is_counted_too(it: It) -> None:
    class Unheard(ServingError):
        reason = "UNHEARD_OF"

    with pytest.raises(Unheard), it.meters.counting("Generate"):
        raise Unheard("new")
    assert it.figure("request_errors_total", reason="UNHEARD_OF") == 1


class TestLoadOfARole:
    """What an autoscaler is told."""

    def roles(self, it: It) -> dict[str, list[Worker]]:
        workers = {
            role: [Worker(f"{role}:1", role, it.metrics.routing)] for role in ("prefill", "decode")
        }
        for role, of_role in workers.items():
            RoleLoad(role, of_role, it.meters).measure(it.metrics.roles, it.metrics.routing)
        return workers

    def test_a_request_without_a_place_is_work_that_waits_for_both_roles(self, it: It) -> None:
        self.roles(it)
        with pytest.raises(QueueFull), it.meter.of(it.commits):
            it.clock.wait(2.5)
            for role, num_tokens in (("prefill", 300), ("decode", 20)):
                assert it.figure("role_queued_requests", role=role) == 1
                assert it.figure("role_queued_tokens", role=role) == num_tokens
                assert it.figure("role_waiting_seconds", role=role) == 2.5
                assert it.figure("role_reserved_pages", role=role) == 0
            raise QueueFull("full")
        assert it.figure("role_queued_requests") == it.figure("role_waiting_seconds") == 0

    def test_a_placed_request_holds_pages_and_waits_for_its_first_token(self, it: It) -> None:
        workers = self.roles(it)
        with it.meter.of(it.commits):
            it.meter.placed(attempt())
            with workers["prefill"][0].carrying(300), workers["decode"][0].carrying(20):
                it.clock.wait(1.5)
                assert it.figure("role_queued_requests") == 0
                assert it.figure("role_running_tokens", role="prefill") == 300
                assert it.figure("role_running_tokens", role="decode") == 20
                assert it.figure("role_running_requests", role="decode") == 1
                assert it.figure("role_waiting_seconds", role="prefill") == 1.5
                assert it.figure("role_waiting_seconds", role="decode") == 0
                assert it.figure("role_reserved_pages", role="prefill") == 3
                assert it.figure("role_reserved_pages", role="decode") == 3
            it.first_token(queue_s=0.0, compute_s=1.0)
            assert it.figure("role_waiting_seconds", role="prefill") == 0
            it.finish()
        assert it.figure("role_reserved_pages") == 0

    def test_without_prefill_workers_nothing_waits_for_them(self, it: It) -> None:
        RoleLoad("prefill", [], it.meters).measure(it.metrics.roles, it.metrics.routing)
        with it.meter.of(it.commits):
            it.clock.wait(1.0)
            it.meter.placed(attempt(prefill=None))
            for name in ("queued_requests", "queued_tokens", "waiting_seconds", "reserved_pages"):
                assert it.figure(f"role_{name}", role="prefill") == 0
            it.commit(1, 1)
            it.finish()

    def test_only_ready_workers_are_capacity_and_every_worker_is_in_one_state(self, it: It) -> None:
        workers = self.roles(it)["prefill"]
        workers.append(Worker("prefill:2", "prefill", it.metrics.routing))
        for worker in workers:
            worker.heard(worker_pb2.WorkerInfo(num_pages=64, generation="g"))
        assert it.figure("role_capacity_pages", role="prefill") == 128
        workers[1].missed("silence")
        assert it.figure("role_capacity_pages", role="prefill") == 64
        states = {
            state.value: it.figure("workers", role="prefill", state=state.value)
            for state in WorkerState
        }
        assert states == {"ready": 1, "unreachable": 1, "draining": 0, "unknown": 0}
        ejected = it.figure("router_ejections_total", role="prefill", worker="prefill:2")
        assert ejected == 1

    def test_a_worker_that_is_dropped_takes_its_figures_along(self, it: It) -> None:
        worker = Worker("prefill:1", "prefill", it.metrics.routing)
        assert it.figure("router_ejections_total", worker="prefill:1") == 0
        worker.forget()
        with pytest.raises(KeyError):
            it.figure("router_ejections_total", worker="prefill:1")


def test_a_traced_request_is_named_beside_its_times(it: It) -> None:
    traced = cast(Span, SimpleNamespace(trace_id="4bf92f3577b34da6a3ce929d0e0e4736"))
    with under(traced), it.meter.of(it.commits):
        it.meter.placed(attempt())
        it.first_token(queue_s=0.0, compute_s=0.0)
        it.finish()
    named = {
        sample.name.removesuffix("_bucket")
        for metric in it.metrics.registry.collect()
        for sample in metric.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": traced.trace_id}
    }
    assert named == {"dspark_time_to_first_token_seconds", "dspark_request_duration_seconds"}


def test_a_meter_knows_of_a_request_only_while_it_lives(it: It) -> None:
    assert it.meters.live() == ()
    with it.meter.of(it.commits):
        assert it.meters.live() == (it.meter,)
        it.finish()
    assert it.meters.live() == ()
    assert isinstance(it.meters.begin(), RequestMeter)
