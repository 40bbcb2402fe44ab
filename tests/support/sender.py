"""A sender of hand-offs, by hand: it meets, negotiates and writes what it likes. Knows the wire; nothing of a prefill worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.kv_cache.layout import CacheLayout
from common.rpc import transfer_stream
from common.transfer import convert
from common.transfer.handoff import CacheContract, HandoffKey, HandoffOffer, HandoffResult
from common.transfer.manifest import manifest_of
from common.transfer.meeting import Introduction
from common.transfer.plan import live_rows
from common.types import Proposal, RequestContext
from tests.support.fake_engine import FINGERPRINT, FakeEngine
from tests.support.handoff_cluster import Cluster, a_context
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

LAYOUT = small_layout()


async def meet(
    it: Cluster,
    layout: CacheLayout = LAYOUT,
    *,
    fingerprint: str = FINGERPRINT,
    transfer_engines: tuple[str, ...] = ("grpc",),
) -> Any:
    """Introduce a sender of generation g1."""
    introduction = Introduction(
        generation="g1",
        address="prefill:1",
        contract=CacheContract(
            model_fingerprint=fingerprint, layout=layout, drafter_fingerprint="drafter"
        ),
        transfer_engines=transfer_engines,
    )
    return await it.handoff_stub.Meet(convert.introduction_to_pb(introduction), timeout=WAIT_S)


async def negotiated(
    it: Cluster, num_tokens: int = 130
) -> tuple[RequestContext, Any, HandoffKey, Any]:
    """A request whose sender may write: its context, reservation, key and terms."""
    await meet(it)
    context = a_context(num_tokens)
    reserved = await it.reserve(context)
    key = key_of(context, reserved)
    return context, reserved, key, await negotiate(it, key, reserved.capability, offer(num_tokens))


async def negotiate(it: Cluster, key: HandoffKey, capability: bytes, what: HandoffOffer) -> Any:
    generation = what.decode_generation or it.decode.identity.generation
    what = replace(what, decode_generation=generation)
    return await it.handoff_stub.Negotiate(
        convert.offer_to_pb(what, key, capability), timeout=WAIT_S
    )


async def write(it: Cluster, key: HandoffKey, capability: bytes, *messages: bytes) -> int:
    return await transfer_stream.send(
        it.decode_channel,
        iter(messages),
        peer="decode",
        key=convert.key_to_pb(key).SerializeToString(),
        capability=capability,
        timeout_s=WAIT_S,
    )


async def release(it: Cluster, context: RequestContext, reserved: Any) -> None:
    """Give a reservation back, as its router does."""
    stream = it.stream()
    await stream.abort(context, reserved.reservation_id)
    await stream.next("finished")


def key_of(context: RequestContext, reserved: Any, *, generation: str = "g1") -> HandoffKey:
    return HandoffKey(
        request_id=context.request_id,
        epoch=context.epoch,
        reservation_id=reserved.reservation_id,
        prefill_generation=generation,
    )


def offer(num_tokens: int, **changes: Any) -> HandoffOffer:
    """As by a sender that has met the worker; `negotiate` fills its generation in."""
    fields: dict[str, Any] = {
        "num_tokens": num_tokens,
        "decode_generation": "",
        "transfer_engine": "grpc",
    }
    return HandoffOffer(**(fields | changes))


def a_result(num_tokens: int, **changes: Any) -> HandoffResult:
    """Of a prompt of so many tokens; only its digests are made up."""
    memory = FakeEngine(LAYOUT).memory
    rows = live_rows(LAYOUT, num_tokens, has_drafter_state=True)
    fields: dict[str, Any] = {
        "manifest": manifest_of(LAYOUT, memory.regions, rows),
        "digests": (bytes(16),) * len(LAYOUT.regions),
        "first_token_id": 3,
        "first_logprob": None,
        "proposal": Proposal(),
        "has_drafter_state": True,
    }
    return HandoffResult(**(fields | changes))
