"""All workers of a router: their channels, and a question to each of them every half second.

Knows addresses and states; never sees a request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc
import grpc.aio

from common.errors import NoReadyWorkers
from common.rpc.channel import open_channel
from common.rpc.status import error_of_call
from common.telemetry.metrics.router import RoutingMetrics
from dspark.v1 import worker_pb2
from services.router.config import RouterConfig
from services.router.decode_worker import DecodeWorker
from services.router.discovery import Discovery, Resolve
from services.router.introductions import Introductions
from services.router.policy import NOBODY, WorkerState, rank
from services.router.prefill_worker import PrefillWorker
from services.router.served_model import ServedModel, served_model
from services.router.worker import Worker
from services.router.worker_set import WorkerSet

logger = logging.getLogger(__name__)


class WorkerDirectory:
    """The workers there are. `watch` must run for states to be true; `on_change` hears of every change."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        metrics: RoutingMetrics,
        on_change: Callable[[], None],
        resolve: Resolve | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> None:
        """`resolve` asks another DNS than the system's; `interceptors` see every call to a worker."""
        self._config = config.workers
        self._on_change = on_change
        self._introductions = Introductions(on_change)
        self._fingerprint: str | None = None
        """Of the served model."""
        timeout_s = self._config.discovery_timeout_s
        connect = functools.partial(
            open_channel, max_message_bytes=config.max_message_bytes, interceptors=interceptors
        )
        self._prefill_set = WorkerSet(
            Discovery(config.prefill_addresses, resolve=resolve, timeout_s=timeout_s),
            create=lambda a: PrefillWorker(a, connect(a), metrics),
            watch=self._watch_prefill,
            on_change=self._workers_left,
        )
        self._decode_set = WorkerSet(
            Discovery(config.decode_addresses, resolve=resolve, timeout_s=timeout_s),
            create=lambda a: DecodeWorker(a, connect(a), metrics, on_change=on_change),
            watch=self._watch_decode,
            on_change=self._workers_left,
        )
        self.prefill = self._prefill_set.workers
        self.decode = self._decode_set.workers

    @property
    def is_ready(self) -> bool:
        """Whether a new request could be placed now."""
        try:
            self.check_ready()
        except NoReadyWorkers:
            return False
        return True

    def check_ready(self) -> None:
        """Raises NoReadyWorkers, which names the role, when a new request cannot be placed."""
        ready = [worker for worker in self.decode if worker.load().state is WorkerState.READY]
        if not ready:
            raise no_ready_workers("decode")
        if not any(worker.computes_prompts for worker in ready) and not self.ranked_prefill():
            raise no_ready_workers("prefill")

    def why_not_ready(self) -> str | None:
        """Why this router should be sent nothing, None when it may: besides workers that are ready it takes two that have
        met, which takes a write through their transfer engine, unless a decode worker computes prompts."""
        try:
            self.check_ready()
        except NoReadyWorkers as error:
            return error.message
        if any(decode.computes_prompts for decode in self.ranked_decode()):
            return None
        return self._introductions.why_none_met(self.ranked_prefill(), self.ranked_decode())

    def model(self) -> ServedModel:
        """The served model; its context is the smallest that a worker which serves it can hold.

        Raises NoReadyWorkers as long as no decode worker was heard of.
        """
        if self._fingerprint is None:
            raise no_ready_workers("decode")
        workers: list[Worker] = [*self.prefill, *self.decode]
        return served_model(self._fingerprint, [w.info for w in workers if w.info is not None])

    def transfer_details(self) -> dict[str, str]:
        """How state travels from every prefill worker, as they say, for people."""
        return {
            f"{prefill.address} {name}": value
            for prefill in self.prefill
            if prefill.info is not None
            for name, value in prefill.info.details.items()
            if name.startswith(("transfer_engine ", "drafter_state "))
        }

    def ranked_prefill(self, blame: Mapping[str, int] = NOBODY) -> list[PrefillWorker]:
        """Prefill workers that can be used, the one to try first in front."""
        by_address = {worker.address: worker for worker in self.prefill}
        return [by_address[address] for address in self._rank(self.prefill, blame)]

    def ranked_decode(
        self, blame: Mapping[str, int] = NOBODY, *, prefills: Sequence[PrefillWorker] = ()
    ) -> list[DecodeWorker]:
        """Decode workers that can be used, the one to try first in front; those last that none of `prefills` could meet."""
        by_address = {worker.address: worker for worker in self.decode}
        ranked = [by_address[address] for address in self._rank(self.decode, blame)]
        return sorted(ranked, key=lambda decode: self._is_out_of_reach(decode, prefills))

    def could_not_meet(self, prefill: PrefillWorker, decode: DecodeWorker) -> bool:
        """Whether state can hardly travel from one to the other: their last try to meet failed."""
        return self._introductions.has_failed(prefill, decode)

    def doubt(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        """A hand-off from one to the other failed: find out whether the next one would, before a request does."""
        self._introductions.doubt(prefill, decode)

    async def watch(self) -> None:
        """Keep all states true until cancelled, then close streams and channels."""
        try:
            async with asyncio.TaskGroup() as group:
                for workers in (self._prefill_set, self._decode_set):
                    group.create_task(workers.run(self._config.discovery_period_s))
        finally:
            await self._introductions.close()

    def _is_out_of_reach(self, decode: DecodeWorker, prefills: Sequence[PrefillWorker]) -> bool:
        if decode.computes_prompts or not prefills:
            return False
        return all(self.could_not_meet(prefill, decode) for prefill in prefills)

    def _rank(
        self, workers: list[PrefillWorker] | list[DecodeWorker], blame: Mapping[str, int]
    ) -> list[str]:
        if self._fingerprint is None:
            return []
        return rank(
            (worker.load() for worker in workers),
            model_fingerprint=self._fingerprint,
            blame=blame,
        )

    async def _watch_prefill(self, worker: PrefillWorker) -> None:
        while True:
            await self._poll(worker, worker.ask)
            await asyncio.sleep(self._config.poll_period_s)

    async def _watch_decode(self, worker: DecodeWorker) -> None:
        while True:
            worker.link_closed.clear()
            await self._poll(worker, worker.ask)
            if worker.state is WorkerState.UNREACHABLE:
                worker.link.drop()
            else:
                was_open = worker.link.is_open
                worker.link.ensure_open()
                if not was_open and worker.link.is_open:
                    self._on_change()
            await _sleep_unless(worker.link_closed, self._config.poll_period_s)

    async def _poll(
        self, worker: Worker, ask: Callable[[float], Awaitable[worker_pb2.WorkerInfo]]
    ) -> None:
        try:
            info = await self._answer(ask)
        except grpc.aio.AioRpcError as error:
            has_changed = worker.missed(error_of_call(error, peer=worker.address).message)
        else:
            has_changed = worker.heard(info)
            if has_changed:
                self._learn_model(worker)
        if has_changed:
            self._introductions.update(self.prefill, self.decode)
            self._on_change()

    async def _answer(
        self, ask: Callable[[float], Awaitable[worker_pb2.WorkerInfo]]
    ) -> worker_pb2.WorkerInfo:
        """Asked twice for half the timeout each: one hiccup, the worker's or our own, is no stall."""
        half_s = self._config.poll_timeout_s / 2
        try:
            return await ask(half_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return await ask(half_s)

    def _workers_left(self) -> None:
        self._introductions.update(self.prefill, self.decode)
        for decode in self.decode:
            if decode.info is not None:
                self._learn_model(decode)
        self._on_change()

    def _learn_model(self, worker: Worker) -> None:
        """The first decode worker says what is served; once every decode worker that agreed was replaced, the next one."""
        assert worker.info is not None, f"{worker.address} was heard of without saying anything"
        fingerprint = worker.info.model_fingerprint
        if fingerprint == self._fingerprint:
            return
        served = {
            decode.info.model_fingerprint for decode in self.decode if decode.info is not None
        }
        if worker.role == "decode" and self._fingerprint not in served:
            self._fingerprint = fingerprint
            logger.info("serving model %s, as %s says", fingerprint, worker.address)
        elif self._fingerprint is not None:
            logger.warning(
                "%s worker %s is not used: its model is %s",
                worker.role,
                worker.address,
                fingerprint,
            )


def no_ready_workers(role: str) -> NoReadyWorkers:
    return NoReadyWorkers(f"no {role} worker is ready", retry_after_s=1.0, metadata={"role": role})


async def _sleep_unless(event: asyncio.Event, period_s: float) -> None:
    """Wait for `event`, but no longer than `period_s`."""
    try:
        async with asyncio.timeout(period_s):
            await event.wait()
    except TimeoutError:
        return
