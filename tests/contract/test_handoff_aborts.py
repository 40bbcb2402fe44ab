"""Hand-offs that are given up, at every phase and by everybody, fifty times each with every engine: all memory comes back,
and who uses it next finds only its own rows.

Nobody's time runs out here but where no one is left who could tell: what is freed was freed because it was said.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from common.errors import WorkerLost
from tests.support import engines
from tests.support.handoff_phases import (
    Bench,
    Phase,
    after_admit,
    before_admit,
    benched,
    mid_prefill,
    mid_transfer,
    mid_write,
    negotiating,
    queued,
    reserved,
)
from tests.support.mid_write import HOLDABLE

TIMES = 50

Who = Callable[[Bench], Awaitable[None]]
"""Gives the request up; returns when whoever is told has heard it, for otherwise its work could be done before."""


async def client(bench: Bench) -> None:
    """Its router ends both legs."""
    bench.cancel_prefill()
    await bench.abort_decode()
    await bench.prefill_hears()
    await bench.decode_hears()


async def client_unheard_by_decode(bench: Bench) -> None:
    bench.cancel_prefill()
    await bench.prefill_hears()


async def client_unheard_by_prefill(bench: Bench) -> None:
    await bench.abort_decode()
    await bench.decode_hears()


async def prefill(bench: Bench) -> None:
    assert bench.job is not None
    bench.job.cancel(WorkerLost("given up here"))
    await bench.prefill_hears()


async def decode(bench: Bench) -> None:
    bench.it.decode.end(bench.reservation, WorkerLost("given up here"))
    await bench.decode_hears()


EVERYBODY: tuple[Who, ...] = (
    client,
    client_unheard_by_decode,
    client_unheard_by_prefill,
    prefill,
    decode,
)
CASES: dict[Phase, tuple[Who, ...]] = {
    queued: EVERYBODY,
    reserved: (client, client_unheard_by_decode, decode),
    negotiating: EVERYBODY,
    mid_prefill: EVERYBODY,
    mid_transfer: EVERYBODY,
    mid_write: EVERYBODY,
    # Prefill is done with it.
    before_admit: (client, client_unheard_by_decode, decode),
    after_admit: (client, decode),
}
WITHOUT_PAGES: tuple[Phase, ...] = (queued, reserved)
NOBODY_TELLS_DECODE: set[tuple[Phase, Who]] = {
    # Prefill has not negotiated, or has done its part.
    (queued, client_unheard_by_decode),
    (queued, prefill),
    (reserved, client_unheard_by_decode),
    (before_admit, client_unheard_by_decode),
}
"""There, the reservation's own end is what frees it."""


def cases() -> Iterator[tuple[str, Phase]]:
    for phase in CASES:
        yield from ((engine, phase) for engine in engines_of(phase))


def engines_of(phase: Phase) -> tuple[str, ...]:
    if phase is mid_write:
        return tuple(name for name in HOLDABLE if name in (*engines.ALL, *engines.BY_TCP))
    # How NIXL's bytes travel makes a difference while they do.
    return (*engines.INSTALLED, *(engines.BY_TCP if phase is mid_prefill else ()))


def is_admitted(phase: Phase, who: Who, number: int) -> bool:
    """Routers admit before or after the state has come; what they have admitted never expires."""
    if phase is before_admit or (phase, who) in NOBODY_TELLS_DECODE:
        return False
    return phase is after_admit or number % 2 == 0


@pytest.mark.parametrize(("engine", "phase"), list(cases()))
async def test_memory_comes_back_within_a_second_and_the_next_requests_are_exact(
    engine: str, phase: Phase
) -> None:
    async with benched(engine) as bench:
        for who in CASES[phase]:
            print(f"{TIMES} times by {who.__name__}")  # the last of these is the one that failed
            for number in range(TIMES):
                await bench.begin(number, is_admitted=is_admitted(phase, who, number))
                async with phase(bench):
                    pages = set(bench.reservation.memory.block_table)
                    assert bool(pages) == (phase not in WITHOUT_PAGES)
                    await who(bench)
                if (phase, who) in NOBODY_TELLS_DECODE:
                    bench.expire()
                await bench.settle()
            source_pages = set[int]() if phase in WITHOUT_PAGES else bench.last_source_pages
            await bench.require_exact_in(source_pages, pages)
