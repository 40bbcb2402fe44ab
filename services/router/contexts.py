"""The requests that live on this router. Knows ids and tasks; never sees a worker or a message."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from common.errors import Draining, DuplicateRequest
from common.types import RequestId
from services.router.commits import Commits
from services.router.leases import Lease
from services.router.replacement import Failures
from services.router.trace_stages import TraceStages

MAX_REMEMBERED = 4096
"""Ended requests whose epoch is still known; by then no message of theirs is on its way."""


class LiveRequest:
    """A request between its registration and its end."""

    def __init__(self, commits: Commits, task: asyncio.Task[None], stages: TraceStages) -> None:
        self.commits = commits
        self.stages = stages
        self.context = commits.context
        self.first_epoch = commits.context.epoch
        self.failures = Failures()
        self.lease: Lease | None = None
        """The newest state that a prefill worker keeps for it."""
        self.is_abort_requested = False
        self._task = task

    @property
    def request_id(self) -> RequestId:
        return self.context.request_id

    @property
    def num_replacements(self) -> int:
        return self.context.epoch - self.first_epoch

    def abort(self) -> bool:
        """End the request where it is; False when it has ended already."""
        if self.commits.finish is not None:
            return False
        if not self.is_abort_requested:
            self.is_abort_requested = True
            self._task.cancel()
        return True


class Contexts:
    """All live requests by id."""

    def __init__(self) -> None:
        self._live: dict[RequestId, LiveRequest] = {}
        self._last_epochs: OrderedDict[RequestId, int] = OrderedDict()
        self.is_draining = False
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._live)

    def check_open(self) -> None:
        """Raises Draining when new requests are refused."""
        if self.is_draining:
            raise Draining("this router is shutting down", retry_after_s=1.0)

    @contextlib.contextmanager
    def registered(
        self, commits: Commits, task: asyncio.Task[None], stages: TraceStages
    ) -> Iterator[LiveRequest]:
        """A live request until the block ends; `task` is cancelled when the request is aborted.

        An id that was used before begins in a new epoch, so that late messages of the former request are not taken
        for its own. Raises DuplicateRequest when the id lives already, Draining when new requests are refused.
        """
        self.check_open()
        request_id = commits.context.request_id
        if request_id in self._live:
            raise DuplicateRequest(
                f"a request with id {request_id!r} is running", metadata={"request_id": request_id}
            )
        commits.context.epoch = self._last_epochs.pop(request_id, -1) + 1
        live = LiveRequest(commits, task, stages)
        self._live[request_id] = live
        self._none_left.clear()
        try:
            yield live
        finally:
            del self._live[request_id]
            self._remember(request_id, live.context.epoch)
            if not self._live:
                self._none_left.set()

    def abort(self, request_id: str) -> bool:
        """End a request with what it has; False when no such request runs."""
        live = self._live.get(RequestId(request_id))
        return live is not None and live.abort()

    def refuse_new(self) -> None:
        """Take no more requests; those that run go on."""
        self.is_draining = True

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until the last one ends, or `timeout_s` has passed."""
        self.refuse_new()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()

    def _remember(self, request_id: RequestId, epoch: int) -> None:
        self._last_epochs[request_id] = epoch
        if len(self._last_epochs) > MAX_REMEMBERED:
            self._last_epochs.popitem(last=False)
