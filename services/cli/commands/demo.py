"""`dspark demo`: everything started on free ports, two real questions asked through the SDK, everything stopped."""

from __future__ import annotations

import asyncio

import dspark
from common.checkpoint.folder import model_name
from common.telemetry.logging import configure_logging
from services.cli.client import Stopwatch, client_failure, sampling_params, stop_params
from services.cli.commands.up import require_checkpoint
from services.cli.deployment import run_deployment
from services.cli.failures import EXIT_OK, EXIT_OTHER, Failure
from services.cli.settings import AllSettings
from services.cli.timeline import Timeline

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
)
MAX_TOKENS = 128


def run(settings: AllSettings) -> int:
    # The show is on standard output; a worker's ordinary lines would only be in its way.
    log = settings.log.model_copy(update={"level": "warning"})
    router = settings.router.model_copy(update={"port": 0})
    sampling = settings.sampling
    if sampling.max_tokens is None:
        sampling = sampling.model_copy(update={"max_tokens": MAX_TOKENS})
    settings = settings.model_copy(update={"router": router, "log": log, "sampling": sampling})
    configure_logging(level="info", format=settings.log.format, role="demo")
    require_checkpoint(settings)
    timeline = Timeline()
    answered = 0

    async def ask_all(address: str) -> None:
        nonlocal answered
        print(
            f"\n{model_name(settings.model)}: router, prefill and decode ready after {timeline.elapsed_s:.1f} s"
        )
        async with dspark.AsyncClient(address) as client:
            for question in QUESTIONS:
                await _ask(client, question, settings)
                answered += 1

    asyncio.run(run_deployment(settings, timeline, ask_all))
    if answered < len(QUESTIONS):
        raise Failure("stopped before the last answer", exit_code=EXIT_OTHER)
    print("\nstopped; `dspark up` keeps it running")
    return EXIT_OK


async def _ask(client: dspark.AsyncClient, question: str, settings: AllSettings) -> None:
    print(f"\n> {question}")
    stopwatch = Stopwatch()
    try:
        stream = client.chat(
            [dspark.ChatMessage(role="user", content=question)],
            sampling=sampling_params(settings.sampling),
            stop=stop_params(settings.sampling),
            timeout=settings.timeout_s,
            stream=True,
        )
        async with stream:
            async for event in stream:
                stopwatch.saw(len(event.token_ids))
                print(event.text, end="", flush=True)
    except dspark.DSparkError as error:
        raise client_failure(error) from error
    print(f"\n[{stopwatch.figures(stream.completion)}]")
