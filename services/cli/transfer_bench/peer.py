"""The receiving end: does what the measuring end asks over one connection at a time. Measures nothing.

Whoever reaches its port can make it hold memory and write there, so it is for the time of a measurement only.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable

from common.errors import ConfigError, InvalidRequest, ServingError
from common.rpc import transfer_stream
from common.rpc.server import RpcServer, build_server
from common.transfer.grant import WriteGrant
from services.cli.transfer_bench.endpoint import Endpoint
from services.cli.transfer_bench.protocol import (
    MAX_LINE_BYTES,
    Clear,
    Digest,
    Lines,
    Opening,
    Question,
    Receiver,
    receiver_to_json,
)
from services.cli.transfer_bench.raw_tcp import RawTcpReceiver

logger = logging.getLogger(__name__)

IDLE_S = 600.0
"""A measuring end that asks nothing for so long is taken to be gone."""
STOP_S = 4.0
"""What a running measurement gets to let its engines go."""


async def serve_peer(
    host: str, port: int, *, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Answer until `stop`; `ready` is told the address. Port 0 takes a free one."""
    running: dict[asyncio.Task[None] | None, Lines] = {}

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = Lines(reader, writer)
        try:
            if running:
                await lines.refuse("another measurement is running")
                return
            task = asyncio.current_task()
            running[task] = lines
            try:
                await _serve(host, lines)
            finally:
                del running[task]
        except (ConnectionError, TimeoutError) as error:
            logger.info("the measuring end is gone: %s", error)
        finally:
            lines.close()

    server = await asyncio.start_server(on_connection, host, port, limit=MAX_LINE_BYTES)
    ready(f"{host}:{server.sockets[0].getsockname()[1]}")
    await stop.wait()
    server.close()
    for lines in running.values():
        lines.close()
    if tasks := [task for task in running if task is not None]:
        await asyncio.wait(tasks, timeout=STOP_S)


async def _serve(host: str, lines: Lines) -> None:
    """One measurement, from its opening until its connection ends."""
    session: _Session | None = None
    try:
        while True:
            async with asyncio.timeout(IDLE_S):
                question = await lines.next_question()
            if question is None:
                return
            if isinstance(question, Opening) and session is None:
                session = await _Session.start(question, host)
                await lines.answer(receiver_to_json(session.receiver))
            elif session is None:
                raise ConfigError("a measurement begins with its opening")
            else:
                await lines.answer(await session.answer(question))
    except ServingError as error:
        await lines.refuse(error.message)
    finally:
        if session is not None:
            await session.close()


class _Session:
    """The memory, the engines and the servers of one measurement."""

    def __init__(
        self, endpoint: Endpoint, server: RpcServer, tcp: RawTcpReceiver, capability: bytes
    ) -> None:
        self._endpoint = endpoint
        self._server = server
        self._tcp = tcp
        self._tcp_run = asyncio.ensure_future(asyncio.to_thread(tcp.run))
        self._stops = [engine.receive() for engine in endpoint.engines.values()]
        self.receiver = Receiver(
            grpc_port=server.port,
            tcp_port=tcp.port,
            capability=capability,
            descriptors=tuple(engine.descriptor for engine in endpoint.engines.values()),
            missing=endpoint.missing,
        )

    @classmethod
    async def start(cls, opening: Opening, host: str) -> _Session:
        endpoint = Endpoint(opening, host=host)
        capability = secrets.token_bytes(16)
        stream = transfer_stream.handler(_authorize(endpoint, capability))
        server = build_server(
            host=host,
            port=0,
            service_names=(),
            register=lambda server: server.add_generic_rpc_handlers((stream,)),
        )
        await server.start()
        return cls(endpoint, server, RawTcpReceiver(host, endpoint.bytes), capability)

    async def answer(self, question: Question) -> object:
        if isinstance(question, Clear):
            await asyncio.to_thread(self._endpoint.bytes.fill, 0)
            return None
        if isinstance(question, Digest):
            ranges = question.pattern.ranges()
            return await asyncio.to_thread(self._endpoint.digest_destination, ranges)
        return time.process_time()

    async def close(self) -> None:
        for stop in self._stops:
            stop()
        self._tcp.close()
        await self._tcp_run
        await self._server.stop(0.0)
        await self._endpoint.close()


def _authorize(endpoint: Endpoint, secret: bytes) -> transfer_stream.Authorize:
    """Checked range by range, as a decode worker does."""
    memory = endpoint.memory
    pages = tuple(range(endpoint.num_pages))
    grant = WriteGrant(memory.layout, memory.placement(page_ids=pages, slot=0))

    def write(region: int, offset: int, payload: memoryview) -> None:
        grant.require(region, offset, len(payload))
        memory.write(region, offset, payload)

    def authorize(key: bytes, capability: bytes) -> transfer_stream.Write:
        if not hmac.compare_digest(capability, secret):
            raise InvalidRequest("this is not the measurement that is running")
        return write

    return authorize
