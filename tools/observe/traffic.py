"""Requests of every kind, for as long as is wanted. Knows the SDK; never sees a worker or a metric."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import dspark
from benchmarks.prompts import Prompt, load_prompts

MAX_TOKENS = 48
NUM_CLIENTS = 12
LONG_PROMPT_TOKENS = 1200
"""More than two steps of prefill, so that pages travel while the prompt is still being computed."""
ANSWER_S = 300.0
MAX_TRIES = 5
RETRY_S = 1.0
SAMPLINGS = (
    dspark.SamplingParams(temperature=0.0),
    dspark.SamplingParams(temperature=0.8, seed=7),
    dspark.SamplingParams(temperature=0.8, top_p=0.9),
)

Turn = Callable[[dspark.AsyncClient, int], Awaitable[str]]


async def drive(address: str, seconds: float) -> Counter[str]:
    """Keep several clients busy until the time is over and each has asked everything once; how requests ended, by kind.

    However slow the machine is, all kinds of requests were there, and the last answers have arrived.
    """
    ends = time.monotonic() + seconds
    endings: Counter[str] = Counter()
    numbers = itertools.count()
    async with dspark.AsyncClient(address, timeout=ANSWER_S) as client:

        async def client_loop(turns: Sequence[Turn]) -> None:
            for number_of_turn, turn in enumerate(itertools.cycle(turns)):
                if number_of_turn >= len(turns) and time.monotonic() >= ends:
                    return
                endings[await _patiently(turn, client, next(numbers))] += 1

        # Each client begins elsewhere in the cycle, so that all kinds run from the start.
        firsts = (client_number % len(TURNS) for client_number in range(NUM_CLIENTS))
        await asyncio.gather(*(client_loop(TURNS[first:] + TURNS[:first]) for first in firsts))
    return endings


async def _patiently(turn: Turn, client: dspark.AsyncClient, number: int) -> str:
    """A machine that has better things to do starves a worker now and then, which then counts as lost for a while."""
    for _ in range(MAX_TRIES - 1):
        with contextlib.suppress(dspark.UnavailableError, dspark.StreamInterruptedError):
            return await turn(client, number)
        await asyncio.sleep(RETRY_S)
    return await turn(client, number)


async def _answer(client: dspark.AsyncClient, number: int) -> str:
    prompt = _PROMPTS[number % len(_PROMPTS)]
    completion = await client.generate(
        prompt.content,
        sampling=SAMPLINGS[number % len(SAMPLINGS)],
        stop=dspark.StopParams(max_tokens=MAX_TOKENS),
    )
    return completion.finish_reason


async def _long_prompt(client: dspark.AsyncClient, number: int) -> str:
    token_ids = [5 + (number + index) % 200 for index in range(LONG_PROMPT_TOKENS)]
    completion = await client.generate(
        token_ids, stop=dspark.StopParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    )
    return completion.finish_reason


async def _leave(client: dspark.AsyncClient, number: int) -> str:
    """A client that goes away after its first tokens."""
    stop = dspark.StopParams(max_tokens=4 * MAX_TOKENS, ignore_eos=True)
    async with client.generate(f"def f{number}(x):", stop=stop, stream=True) as stream:
        async for _ in stream:
            return "left"
    return "ended before it could be left"


async def _too_long(client: dspark.AsyncClient, number: int) -> str:
    with contextlib.suppress(dspark.BadRequestError):
        await client.generate("x", stop=dspark.StopParams(max_tokens=10**7 + number))
        return "accepted what is too long"
    return "refused"


_PROMPTS: tuple[Prompt, ...] = load_prompts()
TURNS: tuple[Turn, ...] = (_answer, _long_prompt, _leave, _too_long)
