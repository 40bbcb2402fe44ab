"""Between a request and its client: order, pace and the end."""

from __future__ import annotations

import asyncio

from common.types import RequestId
from services.router.outlet import Outlet
from services.router.requests import Chunk


def chunk(text: str) -> Chunk:
    return Chunk(request_id=RequestId("r"), token_ids=(), text=text, logprobs=())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_chunks_come_in_order_and_end_with_the_close() -> None:
    outlet = Outlet()
    outlet.put(chunk("a"))
    outlet.put(chunk("b"))
    outlet.close()
    assert [c.text async for c in outlet] == ["a", "b"]


async def test_a_chunk_counts_as_taken_when_the_client_asks_for_the_next() -> None:
    outlet = Outlet()
    outlet.put(chunk("a"))
    taken = asyncio.create_task(outlet.taken())
    chunks = aiter(outlet)
    assert (await anext(chunks)).text == "a"
    await settled()
    assert not taken.done(), "the client still has its hands full"
    following = asyncio.ensure_future(anext(chunks))
    await settled()
    assert taken.done()
    outlet.put(chunk("b"))
    assert (await following).text == "b"


async def test_what_was_put_is_delivered_though_the_wait_was_cancelled() -> None:
    outlet = Outlet()
    outlet.put(chunk("a"))
    waiting = asyncio.create_task(outlet.taken())
    await settled()
    waiting.cancel()
    outlet.put(chunk("b"))
    outlet.close()
    assert [c.text async for c in outlet] == ["a", "b"]


async def test_a_close_while_the_client_waits_ends_it() -> None:
    outlet = Outlet()
    reading = asyncio.create_task(_texts(outlet))
    await settled()
    outlet.close()
    assert await reading == []


async def _texts(outlet: Outlet) -> list[str]:
    return [c.text async for c in outlet]
