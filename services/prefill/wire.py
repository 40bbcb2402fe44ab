"""One hand-off's writes, and when they were under way. Knows ranges and the engine; not what the rows mean."""

from __future__ import annotations

from common.errors import DeadlinePassed, ServingError, TransferFailed, WorkerLost
from common.telemetry.tracing import part
from common.transfer.engine import TransferId, WriteTarget
from common.transfer.ranges import ByteRanges
from services.prefill.pairs import Pair
from services.prefill.sender import Sender
from services.prefill.spans import Span, Spans


class Wire:
    """Writes to one receiver, one at a time. The source stays in place until `send` has returned or `stop` returned True."""

    def __init__(self, sender: Sender, pair: Pair, target: WriteTarget) -> None:
        self.writes = Spans()
        """Those that arrived."""
        self._sender = sender
        self._pair = pair
        self._target = target
        self._transfer: TransferId | None = None

    async def send(self, ranges: ByteRanges) -> int:
        """Returns the bytes when all have arrived. Raises TransferFailed, and the pair is met anew."""
        if not ranges:
            return 0
        sender, engine, metrics = self._sender, self._pair.engine, self._sender.metrics
        num_bytes = ranges.num_bytes
        timeout_s = sender.config.write_timeout_s(num_bytes)
        with (
            part(
                "kv_transfer.send",
                {"dspark.bytes": num_bytes, "dspark.transfer_engine": engine.name},
            ),
            sender.link.writing(engine.name) as writing,
        ):
            began = sender.clock()
            self._transfer = engine.write(self._target, ranges)
            try:
                is_done = await engine.poll(self._transfer, timeout_s=timeout_s)
            except ServingError as error:
                # Failed is not stopped: `stop` finds out.
                if engine.is_one_sided or isinstance(error, WorkerLost | DeadlinePassed):
                    sender.pairs.distrust(self._pair)
                metrics.failures.labels(reason="write_failed").inc()
                raise
        if not is_done:
            sender.pairs.distrust(self._pair)
            metrics.failures.labels(reason="timeout").inc()
            raise TransferFailed(
                f"{num_bytes} bytes did not reach {self._target.address} in {timeout_s:.1f} s"
            )
        self._transfer = None
        self.writes.add(Span(began=began, ended=sender.clock(), num_bytes=num_bytes))
        sender.link.wrote(writing, num_bytes)
        return num_bytes

    async def stop(self, *, timeout_s: float) -> bool:
        """End a write that is under way; True when nothing reads the source or writes to the peer any more."""
        if self._transfer is not None:
            if not await self._pair.engine.cancel(self._transfer, timeout_s=timeout_s):
                return False
            self._transfer = None
        return True
